"""A report of each tensor of a checkpoint, from its config and its files' headers alone."""

import math
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.files.hub_names import is_hub_name, pinned, split
from shardwright.model.meta_model import means_weights
from shardwright.weights.formats.format import DEQUANTIZED
from shardwright.weights.hub_files import repository_files, weight_files
from shardwright.weights.hub_read import HubWeights, open_hub_weights
from shardwright.weights.mtp import mtp_names
from shardwright.weights.names import dtype_name, first_names
from shardwright.weights.remote_file import RemoteFile
from shardwright.weights.torch_file import is_state_dict
from shardwright.weights.weight_files import SAFETENSORS

_AT_ONCE = 8  # files whose headers are fetched: as many as the hub's own client asks for together


@dataclass(frozen=True)
class TensorKind:
    """Tensors that one thing comes of."""

    what: str
    tensors: int
    bytes: int  # in the files
    names: str  # the first of them


def contents(asked: str, model: PreTrainedModel) -> tuple[list[TensorKind], UserError | None]:
    """The kinds of tensors by what they become in ``model`` (on meta), and the reason if the checkpoint is refused."""
    if not means_weights(asked, from_scratch=False):  # a config alone
        return [], None
    try:
        hub = HubWeights(asked, _remote(asked), model) if is_hub_name(asked) else open_hub_weights(asked, model)
    except UserError as error:
        return [], error
    return list(_rows(hub)), None


def _remote(asked: str) -> list[RemoteFile]:
    """The files of weights in a repository, of which index and headers are fetched; raises UserError as `fetched`."""
    repository, commit = split(pinned(asked))
    names = weight_files(asked, repository, commit, repository_files(f"{repository}@{commit}"))
    pickled = [name for name in names if is_state_dict(name)]
    if pickled:
        raise UserError(
            asked=f"to look into {asked} before it is fetched",
            found=f"its weights are {first_names(pickled)}",
            why="a state dict has no header that tells what is in it",
            instead="the repository fetched, and its folder",
        )
    files = [RemoteFile(repository, str(commit), name) for name in names if name.endswith(SAFETENSORS)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # large repositories have 163 and more, each two round trips away
        list(pool.map(lambda file: file.arrays, files))
    return files


def _rows(hub: HubWeights) -> Iterator[TensorKind]:
    published, config = hub.published, hub.model.config
    kinds: dict[str, list[str]] = defaultdict(list)
    ahead = mtp_names(hub.untrained, config)
    for name, array in hub.tensors.items():
        if name in hub.untrained:
            kind = "carried: multi-token prediction" if name in ahead else "carried: no part of the model"
        elif name in published.packed:
            kind = f"read: {published.packed[name].form.title}, dequantized to {dtype_name(DEQUANTIZED)}"
        else:
            kind = f"read: {dtype_name(array.dtype)}"
        kinds[kind].append(name)
    for kind, names in sorted(kinds.items(), reverse=True):
        arrays = [array for name in names for array in published.stored(name)]
        total = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
        yield TensorKind(kind, len(names), total, ", ".join(names[:2]) + (", …" if len(names) > 2 else ""))
    if published.unread:
        yield TensorKind("not read: scales of activations", len(published.unread), 0, first_names(published.unread))
