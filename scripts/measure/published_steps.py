"""The efficiencies of the estimate beside published step times, half of them held out: a table, in a minute.

python scripts/measure/published_steps.py

Each row is a step of MaxText as its recipe states it: model, batch, chips, what its backward computes again. Nothing is
compiled, so it can't be our step: FLOPs, bytes and collectives are counted from the shapes, attention and grouped
products by the code that counts a compiled step's, and each takes the part of the chip's peak that compile.py takes
(shardwright.compile.hlo.efficiency). The rows marked `fit`, every second of a chip, are those that chose the middles of
these ranges. The errors of the others were seen while the counting was written, so they are no blind test of it; one
that was found afterwards is marked `blind`.
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

os.environ["USE_TORCH_XLA"] = "0"

from transformers import AutoConfig

from shardwright.arguments.command_line import Parser
from shardwright.compile.hlo.efficiency import Reached, Which
from shardwright.compile.report.estimate import Estimate, estimate, ranged
from shardwright.hosts.output_streams import exit_code
from shardwright.model.facts import ModelFacts, attended_pairs, facts_of, layer_kinds
from shardwright.models.ops.kernel_cost import Heads, Tiles, attention_work, gmm_work, tgmm_work
from shardwright.scripts.measure.tables import markdown
from shardwright.scripts.measure.tpu_tables import ROOT
from shardwright.xla.chips import CHIPS, Chip

# A whole chip, both of its devices: docs.cloud.google.com/tpu/docs/tpu7x
_TPU7X = Chip("tpu7x", "", None, 2307e12, 0, 7380e9, 6, 100e9, 12.5e9, 1.75e9, (16, 16, 16), 256)
PEAKS = {**CHIPS, "tpu7x": _TPU7X}
# Part of the peak that dense products reach, low, middle and high: on v5p from the compiler's cycles for 8,192³ to
# those in Llama-2-70B; on v6e from those in Llama-3.1-8B with 96 MiB of VMEM (docs/records/tpu/step_times.md) to the
# 90 % published for 8,192³; on tpu7x 77 to 83 % published.
_PRODUCTS = {"v5p": (0.90, 0.95, 0.97), "v6e": (0.75, 0.80, 0.90), "tpu7x": (0.77, 0.80, 0.83)}
# times that element-wise work reads or writes a token's hidden numbers in a layer, and a choice's row in its expert,
# with a step's recomputation: of the same record's compiled steps, Llama-2-70B's and Mixtral-8x7B's on v5p
_LAYER_PASSES, _EXPERT_PASSES = 75, 22
_STATE_BYTES = 30  # that the optimizer moves of a weight: float32 weights, two moments, gradient
_UNHIDDEN = 0.15  # part of the gathers and scatters of weights that nothing runs beside, of the same steps
# The same of MaxText's own module, where experts are grouped and collectives are not on the sparse cores: its shard_map
# has each expert whole over the axis that splits the batch, so gradients are all-reduced, in 8 bytes a number for 6,
# and 311 of 372 GiB are exposed (Mixtral-8x7B, 36 sequences, docs/records/tpu/maxtext.md).
_GROUPED_UNHIDDEN, _GROUPED_BYTES = 311 / 372, 8
_TILE = 256  # rows of a tile of grouped products
_MESSAGE = 100e6  # bytes that a chip sends in a gather of a layer
_SMALL, _MIXED = (1024, 1024), (1024, 2048)  # blocks of attention
_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Step:
    """A step whose rate was published, and what its recipe says of it."""

    model: str  # a file of docs/configs
    changes: Mapping[str, Any]
    chip: str
    chips: int
    rows: int  # sequences of a chip
    length: int
    rate: float  # tokens/s of a chip
    source: str
    again: str = "layers"  # what is computed again: whole layers less `kept`, or the two first products of the MLP
    kept: tuple[str, ...] = ()  # products
    attention_kept: bool = False
    last_again: bool = False  # the layer's last product is computed again: its gradient needs the result
    head_again: bool = False
    fused: bool = False  # attention's backward is one kernel, with five products for our two kernels' seven
    blocks: tuple[int, int] = (2048, 2048)  # of attention, forward and backward
    capacity: float | None = None
    expert: int = 1  # chips over which the experts of a layer are spread
    tensor: int = 1
    tile: int = _TILE  # rows of a tile of grouped products; MaxText's own is 512, later recipes say theirs
    sparse_cores: bool = False  # collectives run on them
    blind: bool = False  # published or found when the count was as it is


_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
_8X22B = {"hidden_size": 6144, "num_hidden_layers": 56, "num_attention_heads": 48, "intermediate_size": 16384}
_MAVERICK = {"num_local_experts": 128, "interleave_moe_layer_step": 2}
_GEMMA12 = {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16}
_GEMMA12 |= {"num_key_value_heads": 8, "head_dim": 256}
_TIERS, _V5P, _V6E = "MaxText docs, tiering", "tpu-recipes, v5p", "tpu-recipes, trillium"
_IRONWOOD = "tpu-recipes, ironwood"
_HALF = "yangwhale/tpu-recipes, v5p"
STEPS: dict[str, Step] = {
    "Mixtral-8x7B, dropless": Step("mixtral_8x7b", {}, "v5p", 128, 36, 4096, 2909, _TIERS, last_again=True, tile=512),
    "Llama-2-70B": Step("llama3_70b", {"vocab_size": 32000}, "v5p", 512, 4, 4096, 692, _TIERS, again="mlp"),
    "Llama-4-Scout": Step("llama4_scout", {}, "v5p", 128, 8, 8192, 2070, _V5P, last_again=True, tile=512),
    "Llama-4-Maverick": Step(
        "llama4_scout", _MAVERICK, "v5p", 128, 4, 8192, 1322, _V5P, kept=_QKVO, last_again=True, tensor=4,
        tile=512,
    ),
    "DeepSeek-V3": Step(
        "deepseek_v3", {}, "v5p", 512, 6, 8192, 542.1, _V5P, kept=("o_proj",), last_again=True,
        tile=512, sparse_cores=True,
    ),
    "Llama-3.1-405B": Step(
        "llama3_70b", _405B, "v5p", 512, 2, 8192, 125, _V5P, attention_kept=True, head_again=True
    ),
    "Mixtral-8x7B, capacity 1.25": Step(
        "mixtral_8x7b", {}, "v6e", 256, 12, 4096, 3899, _TIERS, kept=_QKVO, capacity=1.25
    ),
    "Mixtral-8x22B, capacity 1.25, experts spread over 4": Step(
        "mixtral_8x7b", _8X22B, "v6e", 256, 8, 4096, 1326, _TIERS, kept=_QKVO, capacity=1.25, expert=4
    ),
    "Llama-3.1-8B": Step("llama3_8b", {}, "v6e", 8, 3, 8192, 7138.89, _V6E, kept=_QKVO, fused=True),
    "Gemma-3-12B": Step(
        "gemma3_27b", _GEMMA12, "v6e", 256, 1, 32768, 4477.8, _V6E, last_again=True, head_again=True, blocks=_SMALL
    ),
    "DeepSeek-V3, tpu7x": Step(
        "deepseek_v3", {}, "tpu7x", 128, 16, 4096, 2425.75, _IRONWOOD, sparse_cores=True, last_again=True, fused=True
    ),
    "Qwen3-235B": Step(
        "qwen3_235b_a22b", {}, "tpu7x", 256, 32, 4096, 4245.89, _IRONWOOD, last_again=True, fused=True,
        blocks=_MIXED, sparse_cores=True,
    ),
    "gpt-oss-120b": Step(
        "gpt_oss_120b", {}, "tpu7x", 64, 20, 8192, 10975.31, _IRONWOOD, sparse_cores=True, fused=True, blocks=_MIXED
    ),
    "Llama-3.1-70B": Step(
        "llama3_70b", {}, "tpu7x", 64, 4, 8192, 2686.98, _IRONWOOD, kept=_QKVO[:3], attention_kept=True, fused=True
    ),
    "Llama-3.1-405B, tpu7x": Step(
        "llama3_70b", _405B, "tpu7x", 256, 6, 8192, 499.77, _IRONWOOD, kept=("k_proj", "v_proj"), head_again=True,
        fused=True,
    ),
    "DeepSeek-V3, fewer chips": Step(
        "deepseek_v3", {}, "v5p", 256, 4, 8192, 477.1, _HALF, kept=("o_proj",), last_again=True, tile=512,
        sparse_cores=True, blind=True,
    ),
}  # fmt: skip


def is_fit(name: str) -> bool:
    """Every second row of a chip, from its first, of those that were there when the parts were chosen."""
    same = [other for other, step in STEPS.items() if step.chip == STEPS[name].chip and not step.blind]
    return name in same[::2]


def facts_for(step: Step) -> ModelFacts:
    config = json.loads((ROOT / "docs" / "configs" / f"{step.model}.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    return facts_of(AutoConfig.for_model(**{**config, **step.changes}))


def numbers_of(facts: ModelFacts) -> dict[str, int]:
    """Numbers of the weights by the last word of their module's name; `experts` of all experts."""
    found: dict[str, int] = {}
    for name, parameter in facts.model.named_parameters():
        module = name.rpartition(".")[0]
        if parameter.dim() > 1:
            key = "experts" if module in facts.experts else module.rpartition(".")[2]
            found[key] = found.get(key, 0) + parameter.numel()
    if facts.config.get_text_config().tie_word_embeddings:
        found["lm_head"] = found["embed_tokens"]
    return found


class Shapes:
    """The seconds of a chip's step by cause (hlo.timeline.CAUSES), from shapes alone."""

    def __init__(self, step: Step, facts: ModelFacts) -> None:
        self.step, self.facts, self.chip = step, facts, PEAKS[step.chip]
        self.text, self.numbers = facts.config.get_text_config(), numbers_of(facts)
        self.tokens, self.hidden = step.rows * step.length, self.text.hidden_size
        self.chosen, self.experts = facts.routing or (0, 1)
        self.moe = len(facts.experts)  # layers
        self.width = self.numbers.get("experts", 0) // max(3 * self.moe * self.experts * self.hidden, 1)
        self.repeated = 1.0 if step.last_again else 2 / 3  # of an expert's three products

    def seconds(self, reached: Reached) -> dict[str, float]:
        forward, backward = self._attention(reached)
        found = {
            "products": self._products(reached.which),
            "grouped": self._grouped(reached) if self.moe and not self.step.capacity else 0.0,
            "attention_forward": forward,
            "attention_backward": backward,
            "rest": self._moved() / (self.chip.hbm_bandwidth * reached("hbm")),
        }
        return {**found, "ici": self._waiting(sum(found.values()), reached)}

    @property
    def _exposed(self) -> bool:
        return bool(self.moe) and not (self.step.capacity or self.step.sparse_cores)

    def _products(self, which: Which) -> float:
        step, dense = self.step, {n: k for n, k in self.numbers.items() if n not in ("experts", "embed_tokens")}
        if step.again == "mlp":
            again = dense["gate_proj"] + dense["up_proj"]
        else:
            last = () if step.last_again and not self.moe else ("down_proj",)
            again = sum(n for name, n in dense.items() if name not in ("lm_head", *step.kept, *last))
        again += dense["lm_head"] if step.head_again else 0
        multiply_adds = self.tokens * (3.0 * sum(dense.values()) + again)
        if step.capacity:
            rows = self.tokens * self.chosen * step.capacity
            multiply_adds += rows * 3 * self.hidden * self.width * self.moe * (3 + self.repeated)
        part = _PRODUCTS[step.chip][("low", "middle", "high").index(which)]
        return 2 * multiply_adds / (self.chip.flops * part)

    def _grouped(self, reached: Reached) -> float:
        # a chip of a tensor group has all tokens of the group, and a part of each expert's width
        tile, rows, width = self.step.tile, self.tokens * self.chosen * self.step.tensor, self.width // self.step.tensor
        most = Tiles(tile, (self.hidden, width), (self.hidden, width))
        visits = -(-rows // tile) + self.experts - 1
        forward = gmm_work(rows, self.hidden, width, self.experts, visits, 2, most).flops
        gradient = tgmm_work(rows, self.hidden, width, self.experts, visits, 2, 4, most).flops
        runs = 3 * forward * (2 + self.repeated) / reached("gmm", tile) + 3 * gradient / reached("tgmm", tile)
        return self.moe * runs / self.chip.flops

    def _attention(self, reached: Reached) -> tuple[float, float]:
        text, step, (ahead, back) = self.text, self.step, self.step.blocks
        head = getattr(text, "head_dim", None) or self.hidden // text.num_attention_heads
        key, value = (getattr(text, name, None) or head for name in ("qk_head_dim", "v_head_dim"))
        heads = Heads(text.num_attention_heads * step.rows, step.length, key, value, 2)
        forward = backward = 0.0
        for kind in layer_kinds(text):
            if not attended_pairs(text, kind, step.length):
                continue
            window = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
            seen = min(getattr(text, window) if window else step.length, step.length)
            ahead_reach, back_reach = (min(-(-(seen - 1) // b), step.length // b - 1) for b in (ahead, back))
            work = attention_work("forward", heads, ahead, ahead_reach)
            forward += work.flops / work.filled(self.chip.mxu)
            dkv, dq = (attention_work(phase, heads, back, back_reach).flops for phase in ("dkv", "dq"))
            both = dkv * (3 * key + 2 * value) / (2 * key + 2 * value) if step.fused else dkv + dq
            backward += both / work.filled(self.chip.mxu)
        runs = 1 if step.attention_kept else 2
        rates = (reached(f"attention_{phase}", step.length) * self.chip.flops for phase in ("forward", "backward"))
        first, second = rates
        return runs * forward / first, backward / second

    def _moved(self) -> float:
        rows = self.chosen * (self.step.capacity or 1)
        layers = self.text.num_hidden_layers * _LAYER_PASSES * self.hidden
        experts = self.moe * _EXPERT_PASSES * rows * (self.hidden * self.step.tensor + self.width)
        return 2 * self.tokens * (layers + experts) + _STATE_BYTES * sum(self.numbers.values()) / self.step.chips

    def _waiting(self, computed: float, reached: Reached) -> float:
        """Weights are gathered twice and their gradients scattered, over all links; what they leave waits."""
        step, chip = self.step, self.chip
        experts = self.numbers.get("experts", 0) / step.expert
        grouped = experts if self._exposed else 0
        dense = sum(self.numbers.values()) - self.numbers.get("experts", 0) + experts - grouped
        sent, shown = 6 * dense / step.tensor, _GROUPED_BYTES * grouped / step.tensor
        if step.expert > 1:  # tokens go and come back, in the forward, again, and twice in the backward
            crossing = self.tokens * self.chosen * (step.capacity or 1) * self.hidden * 2 * (1 - 1 / step.expert)
            sent += 8 * self.moe * crossing
        # a tensor axis has one dimension of the torus for itself
        links = chip.ici_bandwidth * (1 - 1 / len(chip.pod) if step.tensor > 1 else 1) * reached("ici", _MESSAGE)
        hidden = sent * (1 - _UNHIDDEN) + shown * (1 - _GROUPED_UNHIDDEN)
        waiting = max(0.0, hidden / links - 0.9 * computed) + (sent + shown - hidden) / links
        if step.tensor > 1:  # ten gathers and scatters of its group's tokens a layer, along one closed ring, unhidden
            sent = 10 * self.text.num_hidden_layers * 2 * self.tokens * self.hidden * (step.tensor - 1)
            waiting += sent / (2 * chip.link_bandwidth * reached("ici", _MESSAGE))
        return waiting


def estimated(step: Step, facts: ModelFacts) -> Estimate:
    """The step's estimate for one chip, as compile.py's of a compiled step."""
    shapes = Shapes(step, facts)
    ends: tuple[Which, ...] = ("low", "middle", "high")
    seconds: dict[str, dict[str, float]] = {end: shapes.seconds(Reached(step.chip, end)) for end in ends}
    flops = facts.training_flops(step.rows, step.length)
    return estimate(seconds, PEAKS[step.chip], float(step.rows * step.length), flops, {})


def rows() -> Iterator[tuple[str, float, Estimate]]:
    """(name, published seconds, estimate) of each step."""
    for name, step in STEPS.items():
        yield name, step.rows * step.length / step.rate, estimated(step, facts_for(step))


def main() -> int:
    Parser(__doc__).parse_args()
    lines: list[list[str]] = []
    errors: dict[str, list[float]] = {"fit": [], "held out": []}
    for name, published, found in rows():
        step, kind, error = STEPS[name], "fit" if is_fit(name) else "held out", found.seconds / published - 1
        errors[kind].append(abs(error))
        kind += ", blind" if step.blind else ""
        inside = "yes" if found.fastest <= published <= found.slowest else "no"
        ends = ranged(found.seconds, (found.fastest, found.slowest), ".1f")
        what = f"{name}, {step.rows} × {step.length:,}, {step.chips} {step.chip}"
        lines.append([what, kind, f"{published:.1f}", ends, f"{error:+.1%}", inside, step.source])
    print(markdown(["", "", "published, s", "estimated", "error", "in the range", "source"], lines))
    for kind, found_errors in errors.items():
        print(f"\n{kind}: median error {statistics.median(found_errors):.1%}, largest {max(found_errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
