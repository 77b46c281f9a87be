"""Options of training a LoRA adapter."""

from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError
from shardwright.models.adapters.packings import PACKINGS

SAME = "same"  # packed as the checkpoint is published
BASE_DTYPES = ["float32", "bfloat16", *PACKINGS, SAME]
_UNSAID = {"lora_alpha": None, "lora_target": "all-linear", "use_rslora": False}  # the defaults of an adapter's options


@dataclass
class AdapterArguments(Checked):
    """The adapter, and the frozen weights under it."""

    lora_r: int | None = option(
        None, "Train LoRA factors of this rank beside frozen weights, and nothing else. Default: train all weights."
    )
    lora_alpha: float | None = option(None, "What the factors add is scaled by alpha / r. Default: twice --lora_r.")
    lora_target: str = option(
        "all-linear",
        "Which weights get factors: all-linear (linear layers but the head, and the experts' fused weights), or names "
        "such as q_proj,v_proj,experts.gate_up_proj.",
    )
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead: rank-stabilised LoRA.")
    adapter: str | None = option(
        None, "Start from the LoRA adapter in this folder, as PEFT saves one, which says rank, scale and targets."
    )
    adapter_format: str = option(
        "peft",
        "How an adapter is written: as PEFT reads it onto this model (peft), or with each expert's weights by "
        "themselves, under the hub's names, as serving engines read it (per_expert).",
    )
    base_dtype: str = option(
        "bfloat16",
        "What the frozen weights under an adapter are stored in: bfloat16, float32, or linear layers and experts in "
        "fewer bits and all else in bfloat16: int8, fp8 (blocks of 128 × 128), fp8_rows, mxfp4 (4.25 bits a weight), "
        "nf4 (4.5); same: as the checkpoint is published, where that is one of these.",
    )

    def check_adapter(self) -> None:
        self.check_path("adapter")
        self.choose("base_dtype", BASE_DTYPES)
        self.at_least(1, "it is the rank of two factors", "lora_r", instead=16)
        self.check("lora_alpha", self.lora_alpha is None or self.lora_alpha > 0, "it is a scale", 32)
        self.choose("adapter_format", ["peft", "per_expert"])
        if self.base_dtype != "bfloat16" and not self.has_adapter:
            raise UserError(
                asked=f"--base_dtype {self.base_dtype}",
                found="no --lora_r and no --adapter",
                why="without an adapter all weights are trained, and lie in --weight_dtype",
                instead=f"--lora_r 16 --base_dtype {self.base_dtype}, or no --base_dtype",
            )
        said = [name for name, default in _UNSAID.items() if getattr(self, name) != default]
        if self.adapter is not None and self.lora_r is not None:
            said = ["lora_r", *said]
        if said and (self.lora_r is None or self.adapter is not None):
            raise UserError(
                asked=f"--{said[0]} {getattr(self, said[0])}",
                found=f"--adapter {self.adapter}" if self.adapter else "no --lora_r",
                why="an adapter says itself what it is" if self.adapter else "without a rank all weights are trained",
                instead=f"no --{said[0]}" if self.adapter else f"--lora_r 16 --{said[0]} {getattr(self, said[0])}",
            )

    @property
    def has_adapter(self) -> bool:
        return self.lora_r is not None or self.adapter is not None
