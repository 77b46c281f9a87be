"""Adapters in PEFT's format: writing and proving their files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# semi-private: transformers/core_model_loading.py, transformers 5.23
from shardwright.errors import UserError, a_type, command
from shardwright.files.arrays import whole
from shardwright.files.folder import Folder, as_json
from shardwright.hosts.hosts import hosts
from shardwright.model.adapted_weights import adapted_shapes
from shardwright.model.peft_config import CONFIG, WEIGHTS, as_config
from shardwright.models.adapters.lora import A, B, Lora, M, T
from shardwright.report.bars import byte_bar
from shardwright.report.lines import say
from shardwright.weights.hub_write import write_files
from shardwright.weights.lazy_tensors import Lazy
from shardwright.weights.peft_layout import PREFIX, TAILS, as_peft, hub_parts, peft_keys, unstarted
from shardwright.weights.peft_read import read_tensors
from shardwright.weights.serving_engines import engine_notes
from shardwright.weights.tokenizer_files import tokenizer_files
from shardwright.weights.weight_sources import Source

_PROBES = 4  # columns that a saved adapter is tried on


@dataclass(frozen=True)
class AdapterFiles:
    """The format of an adapter's files; raises UserError if ``per_expert``, and experts are fused on the hub too."""

    lora: Lora
    model: PreTrainedModel  # transformers' own, on meta, whose weights are adapted; perhaps a part of `whole`
    whole: PreTrainedModel  # loads the adapter
    names: Mapping[str, str]  # those of `model` → those of `whole`
    base: str | None  # hub id or folder of the weights of `whole`, for PEFT to find; None: unknown
    # under the names of the hub's weights, each expert by itself, for serving engines; PEFT loads it onto Mixtral and
    # Qwen2-MoE alone
    per_expert: bool = False

    @property
    def plain(self) -> Lora:
        """The adapter as it is written: beside the weights as they are, whatever its factors began as."""
        return self.lora.unstarted

    def config(self) -> dict[str, Any]:
        """The content of `adapter_config.json`."""
        values = as_config(self.plain, self.whole, self.base, self.names)
        if self.per_expert:
            modules = {stem.rpartition(".")[2] for target in self.lora.targets for stem in self._stems(target)}
            values |= {"target_modules": sorted(modules), "target_parameters": None}
        return values

    def tensors(self, factors: Source) -> dict[str, Lazy]:
        """Name in the file → values; nothing is read yet."""
        factors, keys = unstarted(factors, self.lora), peft_keys(self.plain, self.model, self.names)
        if not self.per_expert:
            return {key: as_peft(key, name, Lazy.of(factors(name))) for name, key in keys.items()}
        self._check_engines()
        found: dict[str, Lazy] = {}
        for target in self.plain.targets:
            a, b = (Lazy.of(factors(target + suffix)) for suffix in (A, B))
            pieces = self._split(target, b)
            each = len(pieces) // (b.shape[0] if len(b.shape) == 3 else 1)  # gate and up have one A
            same = self._split(target, torch.cat([a] * each, dim=-2) if each > 1 else a)  # type: ignore[list-item]
            for tail, values in zip((TAILS[A], TAILS[B]), (same, pieces), strict=True):
                found |= {PREFIX + name.removesuffix(".weight") + tail: lazy for name, lazy in values.items()}
        return found

    def actions(self, found: Mapping[str, torch.Tensor], probe: torch.Tensor, target: str) -> dict[str, torch.Tensor]:
        """Name → the product of a file's factors with the columns ``probe`` [in, n], as a loader computes it."""
        scale = self.plain.scale(target)
        if self.per_expert:
            got = {}
            for stem in self._stems(target):
                a, b = (found[PREFIX + stem + TAILS[suffix]].double() for suffix in (A, B))
                got[f"{stem}.weight"] = scale * (b @ (a @ probe))
            return got
        keys = peft_keys(self.plain, self.model, self.names)
        a, b = (found[key].double() for key in sorted(keys[target + suffix] for suffix in (A, B)))
        r = self.plain.rank(target)
        count = a.shape[0] // r
        pairs = [(b[:, e::count], a[e * r : (e + 1) * r]) for e in range(count)]
        if keys[target + A].endswith(TAILS[B]):
            pairs = [(own_a.T, own_b.T) for own_b, own_a in pairs]
        added = [scale * (left @ (right @ probe)) for left, right in pairs]
        return {target: torch.stack(added) if len(adapted_shapes(self.model)[target]) == 3 else added[0]}

    def expected(self, action: torch.Tensor, target: str) -> dict[str, torch.Tensor]:
        """The product of the run's own factors, ``action`` [.., out, n], under the names of :meth:`actions`."""
        if not self.per_expert:
            return {target: action}
        return {name: lazy.read() for name, lazy in self._split(target, Lazy.of(action)).items()}

    def _stems(self, target: str) -> list[str]:
        """The hub's names of the parts of ``target``, without their ``.weight``."""
        narrow = torch.empty(*adapted_shapes(self.model)[target][:-1], 1, device="meta")
        return [name.removesuffix(".weight") for name in self._split(target, Lazy.of(narrow))]

    def _split(self, target: str, tensor: Any) -> dict[str, Lazy]:
        """The hub's name → its part of ``tensor``, a stand-in for the weight ``target``."""
        try:
            found = hub_parts(self.whole, self.names.get(target, target), tensor)
        except Exception as error:  # of torch's and of transformers' kinds: the tensor is narrower than the weight
            raise self._fused(target, f"{type(error).__name__}: {error}") from error
        if len(tensor.shape) == 3 and len(found) % tensor.shape[0] | (len(found) < tensor.shape[0]):
            raise self._fused(target, "all experts in one tensor")
        return found

    def _check_engines(self) -> None:
        """Raises UserError for what serving engines would read as something else, or not at all."""
        given: dict[str, object] = {"ranks that differ": self.plain.ranks, "alphas that differ": self.plain.alphas}
        given |= {"DoRA": self.plain.dora, "modules_to_save": self.plain.whole}
        given["trainable_token_indices"] = self.plain.tokens
        if more := [name for name, value in given.items() if value]:
            raise UserError(
                asked="--adapter_format per_expert",
                found=f"an adapter with {more[0]}",
                why="serving engines read one rank and one alpha from its config, and factors alone",
                instead="--adapter_format peft; or a merged model (export.py --merge)",
            )

    def _fused(self, target: str, found: str) -> UserError:
        return UserError(
            asked="--adapter_format per_expert",
            found=f"{target} of {a_type(self.model)}, on the hub: {found}",
            why="its experts have no weights by themselves there",
            instead="--adapter_format peft",
        )


def save_adapter(
    folder: Folder, files: AdapterFiles, factors: Source, tokenizer: PreTrainedTokenizerBase | None, console: Console
) -> None:
    """Writes the adapter, its config last, and says what serving engines would not read of it.

    Raises UserError if it can't be written, or reads back another than was trained.
    """
    tensors = files.tensors(factors)
    total = sum(lazy.like.nbytes for lazy in tensors.values())
    with byte_bar(console, "writing the adapter", total) as advance:
        write_files(folder, {WEIGHTS: list(tensors)}, tensors, advance)
    if tokenizer is not None:
        folder.write_each(tokenizer_files(tokenizer, config=b"{}"))  # no model's config lies beside an adapter
    folder.write(CONFIG, as_json(files.config()))
    hosts().once(lambda: None)  # by now the first host has written them
    prove(folder, files, factors)
    for note in engine_notes(files.lora, files.model, files.whole, per_expert=files.per_expert):
        say(console, f"note: {note}")


def prove(folder: Folder, files: AdapterFiles, factors: Source) -> None:
    """Raises UserError unless the adapter in ``folder``, merged by its format's own rule, equals ``factors``.

    Products with random columns are compared, so no merged weight is ever held.
    """
    found, shapes, factors = read_tensors(folder), adapted_shapes(files.model), unstarted(factors, files.lora)
    keys = peft_keys(files.plain, files.model, files.names)
    exact = [name for name in keys if name.endswith((M, T)) or name in files.plain.whole]
    changed = [name for name in exact if not torch.equal(found[keys[name]], whole(factors(name)))]
    generator = torch.Generator().manual_seed(0)
    for target in files.plain.targets:
        probe = torch.randn(shapes[target][-1], _PROBES, generator=generator, dtype=torch.float64)
        a, b = (whole(factors(target + suffix)).double() for suffix in (A, B))
        expected = files.expected(files.plain.scale(target) * (b @ (a @ probe)), target)
        got = files.actions(found, probe, target)
        if got.keys() != expected.keys() or any(not _equal(got[name], expected[name]) for name in expected):
            changed.append(target)
    if changed:
        raise UserError(
            asked=f"an adapter in {folder}",
            found=f"read back and merged, {changed[0]} is another weight than the one that was trained",
            why="whoever loads it would run another model",
            instead=f"its checkpoint, which is whole: {command('export')} writes it again",
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:  # to the rounding of float64 sums
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)
