"""Pushes a model folder to a repository of the hub."""

from pathlib import Path

from huggingface_hub import HfApi

from shardwright.errors import UserError, in_short


def push_folder(
    folder: Path, repo: str, message: str, *, token: str | None, private: bool, revision: str | None
) -> str:
    """Uploads ``folder`` as one commit to ``repo``, made if need be; returns the commit's address.

    ``repo`` is ``owner/name``, or a name of the token's owner; ``token`` that of `hf auth login` or HF_TOKEN if None.
    Raises UserError if the hub can't be reached, or refuses this token.
    """
    try:
        api = HfApi(token=token)
        name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, revision=revision))
    except Exception as error:  # of many types: offline, refused, no token, no such owner, a bad name
        text = in_short(error)
        raise UserError(
            asked=f"to push {folder} to {repo}",
            found=text.replace(token, "…") if token else text,
            why="the hub did not take it; the folder is whole, and stays where it is",
            instead="network, a token that may write (HF_TOKEN, or `hf auth login`), and a name such as owner/name; "
            f"then the same again, or `hf upload {repo} {folder}`",
        ) from error
