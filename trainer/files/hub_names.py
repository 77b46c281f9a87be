"""A repository of the hub by its name, ``id`` or ``id@revision``, and what its client's errors mean to a user."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors

from shardwright.errors import TransientError, UserError, in_short

# what repositories call a tokenizer's files, beside the names that a tokenizer's own class knows
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model*", "*piece*.model", "*.tiktoken", "chat_template.*"),
    "additional_chat_templates/*.jinja",
)
ADAPTER_CONFIG = "adapter_config.json"  # of a folder with an adapter in PEFT's format
ADAPTERS_MODEL = f"the model that {ADAPTER_CONFIG} names, and --adapter with this folder"
_NAME = re.compile(r"(?P<id>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>\S+))?")


def split(name: str) -> tuple[str, str | None]:
    """``id@revision`` → both. A plain id, and whatever lies on this machine, has no revision."""
    found = None if os.path.exists(name) else _NAME.fullmatch(name)
    return (found["id"], found["revision"]) if found else (name, None)


def is_hub_name(name: str) -> bool:
    """Whether ``name`` can only be a repository's: nothing of that name lies here, and it does not look like a path."""
    return not os.path.exists(name) and _NAME.fullmatch(name) is not None and not name.endswith((".json", ".gguf"))


def holds_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has a file of a tokenizer under any of the names that repositories give them."""
    return any(True for name in TOKENIZER_FILES for _ in folder.glob(name))


def pinned(name: str, asked: str | None = None) -> str:
    """``id@commit`` of a repository, whose revision by default is ``main``; other names as they are.

    Without network it is the commit that the hub's cache knows. Raises UserError if there is no such repository or
    revision, or it can't be told.
    """
    if not is_hub_name(name):
        return name
    repository, revision = split(name)
    try:
        return f"{repository}@{HfApi().resolve_revision(repository, revision=revision).resolved}"
    except Exception as error:  # the hub client raises many kinds
        raise hub_error(asked or f"model {name}", name, error) from error


def hub_error(asked: str, name: str, error: BaseException) -> UserError:
    """``error``, which the hub's client or transformers raised for ``name``, in a user's words."""
    repository, revision = split(name)
    found, instead, passing = _meaning(repository, revision, error)
    return (TransientError if passing else UserError)(
        asked=asked, found=found, why="the hub did not give what is needed of it", instead=instead
    )


def _meaning(repository: str, revision: str | None, error: BaseException) -> tuple[str, str, bool]:
    """Finding, remedy, and whether it may pass by itself."""
    folder = "or a folder that holds it"
    chain = [*_causes(error)]

    def of(*kinds: type[BaseException]) -> Any:
        return next((each for each in chain if isinstance(each, kinds)), None)

    if of(errors.GatedRepoError):
        terms = f"accept them at {constants.ENDPOINT}/{repository}, and set HF_TOKEN (or `hf auth login`)"
        return f"{repository} is gated: the hub gives it to those who have accepted its terms", terms, False
    if of(errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision!r}", "a branch, a tag or a commit that it has", False
    if of(errors.RepositoryNotFoundError):
        private = "its name as the hub has it (owner/name), HF_TOKEN for a private one; "
        return f"there is no repository {repository}, or it is private", private + folder, False
    if of(errors.OfflineModeIsEnabled) or (constants.HF_HUB_OFFLINE and of(errors.LocalEntryNotFoundError)):
        where = f"it is not in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE=1 looks only there"
        return where, f"once without HF_HUB_OFFLINE; {folder}", False
    if (entry := of(errors.RemoteEntryNotFoundError)) is not None:
        return f"{repository} has no such file: {_line(entry)}", "a repository in the hub's format", False
    if (reply := of(errors.HfHubHTTPError)) is not None:
        status = getattr(reply.response, "status_code", 0)
        again = f"the same command again, which goes on where it stopped; {folder}"
        return f"the hub answers {status}: {_line(reply)}", again, status >= 500 or status == 429
    # its base in the library that the client's version uses (httpx or httpx2): no connection, no answer in time
    if (lost := of(errors.HTTPError, errors.RevisionResolutionError)) is not None:
        away = f"{constants.ENDPOINT} can't be reached ({_line(lost)}), and not all is in {constants.HF_HUB_CACHE}"
        return away, f"network, and the same command again, which goes on where it stopped; {folder}", True
    return in_short(error)[:400] if isinstance(error, Exception) else str(error), f"another name, {folder}", False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
