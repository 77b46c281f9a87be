"""Tensors of a checkpoint as published, read as plain weights: dequantized a slice at a time, where they are quantized.

The tensors' names and dtypes tell the format of each weight, since one checkpoint may have several; the config's
quantization_config tells what they can't: the size of a block, the order of packed codes.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from shardwright.files.arrays import Array
from shardwright.weights.formats import fp8
from shardwright.weights.formats.format import DEQUANTIZED, Format, Parts, Settings

_CODES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}
_LISTED = 4  # names in a message
# the first that holds a weight's tensors is its format
FORMATS: tuple[Format, ...] = (fp8.BLOCKS, fp8.ROWS, fp8.SCALE, *fp8.FUSED)


@dataclass(frozen=True)
class PackedWeight:
    """A weight in a published format."""

    form: Format
    stem: str  # the name without its end
    parts: Parts  # end of the name -> tensor; those that the format reads

    @property
    def name(self) -> str:
        """The plain weight's name."""
        return self.stem + self.form.plain


@dataclass(frozen=True)
class Published:
    """A checkpoint's tensors, with plain weights in the place of packed ones."""

    tensors: Mapping[str, Array]  # by the names that an unquantized checkpoint would have
    packed: Mapping[str, PackedWeight]  # by those names: the weights that are dequantized
    unread: frozenset[str]  # names in the files of scales that serve inference alone

    def stored(self, name: str) -> list[Array]:
        """The tensors in the files that the weight ``name`` is read from."""
        return list(self.packed[name].parts.values()) if name in self.packed else [self.tensors[name]]

    @property
    def said(self) -> str:
        """The formats, for a run's first lines: "MXFP4 (48 tensors), dequantized to bfloat16"."""
        titles = Counter(weight.form.title for weight in self.packed.values())
        listed = ", ".join(f"{title} ({count:,} tensors)" for title, count in titles.items())
        return listed and f"{listed}, dequantized to {str(DEQUANTIZED).removeprefix('torch.')}"


def plain(tensors: Mapping[str, Array], settings: Settings | None) -> Published:
    """``tensors`` by the files' names, dequantized; ``settings``: the config's quantization_config.

    Raises ValueError, which names the tensors, where the parts of a weight are missing or do not go together.
    """
    found = _packed(tensors)
    used = {weight.stem + tail for weight in found.values() for tail in weight.parts}
    unread = {
        weight.stem + tail for weight in found.values() for tail in weight.form.unread if weight.stem + tail in tensors
    }
    _check_left(tensors, used | unread)
    values = {name: array for name, array in tensors.items() if name not in used | unread}
    for name, weight in found.items():
        if name in values:
            raise ValueError(f"{name} is there twice: plain, and in {weight.form.title}")
        try:
            values[name] = weight.form.decode(weight.parts, settings or {})
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:  # settings are the user's too
            raise ValueError(f"{name} in {weight.form.title}: {error}") from error
    return Published(values, found, frozenset(unread))


def quantization_settings(config: PretrainedConfig) -> Settings:
    """The quantization_config of ``config`` or of its text part as plain values; {} if it has none."""
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if settings:
            return settings if isinstance(settings, Mapping) else dict(settings.to_dict())
    return {}


def _packed(tensors: Mapping[str, Array]) -> dict[str, PackedWeight]:
    """Plain name -> the packed weight of it."""
    found: dict[str, PackedWeight] = {}
    by_main = defaultdict(list)
    for form in FORMATS:
        by_main[form.main].append(form)
    for main, forms in by_main.items():
        for name in tensors:
            stem = name.removesuffix(main)
            if stem == name:
                continue
            for form in forms:
                parts = {tail: tensors[stem + tail] for tail in (main, *form.scales) if stem + tail in tensors}
                if len(parts) == 1 + len(form.scales) and form.holds(parts):
                    found.setdefault(stem + form.plain, PackedWeight(form, stem, parts))
                    break
    return found


def _check_left(tensors: Mapping[str, Array], used: set[str]) -> None:
    """Raises ValueError for codes without a scale: as plain numbers they would be other weights."""
    left = [name for name, array in tensors.items() if name not in used and array.dtype in _CODES]
    if left:
        raise ValueError(f"{len(left)} tensors of codes without their scales: {', '.join(left[:_LISTED])}")
