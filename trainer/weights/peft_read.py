"""Adapters in PEFT's format, read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from safetensors.torch import load
from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.files.arrays import Array, Slices, shaped_like
from shardwright.files.folder import Folder
from shardwright.model.peft_config import CONFIG, WEIGHTS
from shardwright.models.adapters.lora import A, B, Lora
from shardwright.weights.names import first_lines
from shardwright.weights.peft_layout import PREFIX, TAILS, as_peft, factor_shapes, from_peft, hub_parts, peft_keys
from shardwright.weights.weight_sources import Source

_BEFORE = ".token_adapter.base_layer"  # an embedding as it is without trained rows
# what PEFT saves once more of an embedding that was given more rows, and does not read
_IDLE = (".modules_to_save.weight", ".original_module.weight", ".token_adapter.trainable_tokens_delta")


@dataclass(frozen=True)
class OpenAdapter:
    """The factors of an adapter, and what it trained whole: a `Source`. The host holds them.

    ``embeddings``: copies of the model's own embedding and head, which PEFT saves beside factors of them.
    """

    tensors: Mapping[str, torch.Tensor]
    embeddings: Mapping[str, torch.Tensor]
    folder: Folder
    rows: Mapping[str, Sequence[int]]  # of an embedding, those that the adapter has itself

    def __call__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def checked(self, base: Source) -> Source:
        """``base`` where it has the embeddings that the adapter was saved with; raises UserError where it has not."""

        def source(name: str) -> Array:
            values = base(name)
            if name not in self.embeddings:
                return values
            ours = self.embeddings[name]

            def read(where: Slices) -> torch.Tensor:
                part = values[where]
                first, theirs = where[0].start, ours[where].to(part.dtype)
                own = [row - first for row in self.rows.get(name, ()) if first <= row < where[0].stop]
                at = torch.tensor(own, dtype=torch.int64)
                if not torch.equal(part, theirs.index_copy(0, at, part[at])):
                    raise UserError(
                        asked=f"the adapter in {self.folder}",
                        found=f"{name} in it, with other values than the model's",
                        why="PEFT saves it as it was under the adapter, and takes it for the model's own",
                        instead="the model that the adapter was trained on; or an adapter that names the module in "
                        "modules_to_save",
                    )
                return part

            return shaped_like(values, read)

        return source


def open_adapter(
    folder: Folder,
    lora: Lora,
    model: PreTrainedModel,
    names: Mapping[str, str],
    whole: PreTrainedModel | None = None,
) -> OpenAdapter:
    """The adapter in ``folder``, in PEFT's format; ``lora`` is from its config, the rest as `AdapterFiles` has it.

    Raises UserError if there is no such file, or factors are missing, left over, of another shape or not finite.
    """
    found, shapes = read_tensors(folder), factor_shapes(lora, model)
    keys, copies = peft_keys(lora, model, names), _copies(model, names)
    idle = {key.removesuffix(".weight") + tail for key in copies for tail in _IDLE} - {*keys.values()}
    found = {key: values for key, values in found.items() if key not in idle}
    for target in lora.targets:
        if keys[target + A] not in found:
            found |= _joined(found, target, keys, shapes, whole or model, names)
    own = {key: copies[key] for key in found if key in copies and copies[key] not in keys}
    wrong = [f"{key} is missing" for key in keys.values() if key not in found]
    wrong += [f"{key} is left over" for key in found if key not in {*keys.values(), *own}]
    wanted = {key: as_peft(key, name, torch.empty(shapes[name], device="meta")).shape for name, key in keys.items()}
    wanted |= {key: model.get_parameter(name).shape for key, name in own.items()}
    for key in (key for key in wanted if key in found):
        if found[key].shape != wanted[key]:
            wrong.append(f"{key} of shape {list(found[key].shape)}, where {list(wanted[key])} is needed")
        elif not found[key].is_floating_point() or not bool(torch.isfinite(found[key]).all()):
            wrong.append(f"{key} has values that are no finite numbers")
    if wrong:
        raise UserError(
            asked=f"the adapter in {folder}",
            found=first_lines(wrong),
            why=f"its factors are not those that its {CONFIG} describes for this model",
            instead="the adapter as PEFT saved it, and the model that it was trained on; "
            "one written with --adapter_format peft",
        )
    tensors = {name: from_peft(key, name, found[key], shapes[name]) for name, key in keys.items()}
    return OpenAdapter(tensors, {name: found[key] for key, name in own.items()}, folder, dict(lora.tokens))


def _copies(model: PreTrainedModel, names: Mapping[str, str]) -> dict[str, str]:
    """Key → parameter of the copies of the model's embedding and head that PEFT may have saved."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if any(module is end for end in ends):
            for key, _ in module.named_parameters():
                stem = PREFIX + names.get(f"{name}.{key}", f"{name}.{key}").removesuffix(f".{key}")
                found |= {f"{stem}{kind}.{key}": f"{name}.{key}" for kind in ("", ".base_layer", _BEFORE)}
    return found


def _joined(
    found: dict[str, torch.Tensor],
    target: str,
    keys: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    whole: PreTrainedModel,
    names: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """The factors of the fused experts ``target`` from those of each expert by itself, which ``found`` loses.

    Weights that are one here have their ranks side by side: A = [A1; A2], and B = [[B1, 0], [0, B2]] (PEFT's own
    rule). Empty where ``found`` does not have them all.
    """
    count, rows = shapes[target + B][0], shapes[target + B][-2]
    if len(shapes[target + B]) != 3:
        return {}
    place = torch.arange(count * rows, dtype=torch.float64).reshape(count, rows, 1)  # each row says where it belongs
    try:
        parts = hub_parts(whole, names.get(target, target), place)
    except Exception:  # of torch's and of transformers' kinds: the hub keeps these experts otherwise
        return {}
    stems = {PREFIX + name.removesuffix(".weight"): part.flatten().long() for name, part in parts.items()}
    if any(f"{stem}{tail}" not in found for stem in stems for tail in (TAILS[A], TAILS[B])):
        return {}
    a = torch.zeros(shapes[target + A], dtype=found[next(iter(stems)) + TAILS[A]].dtype)
    b = torch.zeros(shapes[target + B], dtype=a.dtype)
    used = [0] * count  # ranks of each expert
    try:
        for stem, at in sorted(stems.items(), key=lambda item: int(item[1][0])):
            own_a, own_b, expert = found[stem + TAILS[A]], found[stem + TAILS[B]], int(at[0]) // rows
            ranks = slice(used[expert], used[expert] + len(own_a))
            a[expert, ranks] = own_a
            b[expert, at % rows, ranks] = own_b
            used[expert] = ranks.stop
    except (RuntimeError, IndexError):  # shapes that are no such factors'
        return {}
    for stem in stems:
        del found[stem + TAILS[A]], found[stem + TAILS[B]]
    return {keys[name]: as_peft(keys[name], name, factor) for name, factor in ((target + A, a), (target + B, b))}


def read_tensors(folder: Folder) -> dict[str, torch.Tensor]:
    """The tensors of the adapter in ``folder``, on the host; raises UserError if they can't be read."""
    try:
        if folder.remote:
            return load(folder.read(WEIGHTS))
        with safe_open(f"{folder}/{WEIGHTS}", framework="pt") as opened:
            return {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except UserError:
        raise
    except Exception as error:  # safetensors', the system's, and torch's for shapes that it can't hold
        raise UserError(
            asked=f"the adapter in {folder}",
            found=f"{WEIGHTS}: {type(error).__name__}: {str(error)[:300]}",
            why="its weights can't be read",
            instead=f"a folder with {CONFIG} and {WEIGHTS}, as PEFT saves one",
        ) from error
