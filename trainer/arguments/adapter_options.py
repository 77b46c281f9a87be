"""Options of training a LoRA adapter."""

import re
from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, check_choice, option
from shardwright.errors import UserError

SAME = "same"  # packed as the checkpoint is published
# the words of `shardwright.models.adapters.packings.registry`, which imports torch: --help need not wait for it
PACKED = ["int8", "fp8", "fp8_rows", "int4", "int4_zeros", "mxfp4", "nf4", "nvfp4"]
BASE_DTYPES = ["float32", "bfloat16", *PACKED, SAME]
INITS = ["true", "gaussian", "pissa", "olora"]
# which changes A's start alone, so that PEFT can make it and a run go on from it
EVA = "initialize_lora_eva_weights(model, batches), then save_pretrained(folder)"
# what a new adapter is, and one in a folder says itself
_OF_NEW = (
    *("lora_alpha", "rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform", "lora_target"),
    *("use_rslora", "lora_dropout", "use_dora", "init_lora_weights", "modules_to_save", "trainable_token_indices"),
)
_NITER = re.compile(r"pissa_niter_[1-9]\d?")
# option → the form of each of its words, what others are, and an example
_FORMS = {
    "rank_pattern": (r"[^=,]+=[1-9]\d{0,5}", "no NAME=NUMBER", "q_proj=8"),
    "alpha_pattern": (r"[^=,]+=\d{1,9}(\.\d+)?", "no NAME=NUMBER", "q_proj=8"),
    "layers_to_transform": (r"\d{1,5}(:\d{1,5})?", "no numbers of layers", "0,8:16"),
    "trainable_token_indices": (r"([^=,]+=)?\d{1,8}(:\d{1,8})?", "no numbers of tokens", "5,9:12"),
}


@dataclass
class AdapterArguments(Checked):
    """The adapter, and the frozen weights under it."""

    lora_r: int | None = option(
        None,
        "Train LoRA factors of this rank beside frozen weights, and nothing else. Default: train all weights.",
    )
    lora_alpha: float | None = option(None, "What the factors add is scaled by alpha / r. Default: twice --lora_r.")
    lora_target: str = option(
        "all-linear",
        "Which weights get factors: all-linear (linear layers but the head, and the experts' fused weights), or names "
        "such as q_proj,v_proj,experts.gate_up_proj, or a regular expression for whole names.",
    )
    exclude_modules: str | None = option(None, "Leave out --lora_target's modules of these names, or expression.")
    layers_to_transform: str | None = option(
        None, "Adapt weights of these layers alone: numbers, and ranges without their end, such as `0,8:16`."
    )
    rank_pattern: str | None = option(None, "Other ranks by ends of names: `q_proj=8,layers.0.self_attn.v_proj=32`.")
    alpha_pattern: str | None = option(None, "Other alphas by ends of names, likewise.")
    lora_dropout: float = option(0.0, "Drop inputs of the factors with this probability, in training. Linear layers.")
    use_dora: bool = option(False, "Train each row's length by itself, too: DoRA. Linear layers.")
    init_lora_weights: str = option(
        "true",
        "How the factors begin: `true` (A uniform, B zero), `gaussian`, or as parts of the weight: `pissa`, "
        "`pissa_niter_4` (approximate, sooner done) or `olora`. Linear layers.",
    )
    modules_to_save: str | None = option(
        None, "Train modules of these names whole, and save them with the adapter: `embed_tokens,lm_head`."
    )
    trainable_token_indices: str | None = option(
        None,
        "Train these rows of the embedding by themselves: numbers of tokens, and ranges without their end, `5,9:12`; "
        "of a head that is not tied to it too: `9:12,lm_head=9:12`.",
    )
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead: rank-stabilised LoRA.")
    adapter: str | None = option(
        None, "Start from the LoRA adapter in this folder, as PEFT saves one, which says rank, scale and targets."
    )
    adapter_format: str = option(
        "peft",
        "How an adapter is written: as PEFT reads it onto this model (peft), or with each expert's weights by "
        "themselves, under the hub's names, as serving engines read it (per_expert).",
        choices=("peft", "per_expert"),
    )
    base_dtype: str = option(
        "bfloat16",
        "What the frozen weights under an adapter are stored in: bfloat16, float32, or linear layers and experts in "
        "fewer bits and all else in bfloat16: int8, fp8 (blocks of 128 × 128), fp8_rows, int4 (4.5 bits a weight), "
        "int4_zeros (5), mxfp4 (4.25), nf4 (4.5), nvfp4 (6); same: as the checkpoint is published, where that is one "
        "of these.",
        choices=BASE_DTYPES,
    )

    def check_adapter(self) -> None:
        self.check_path("adapter")
        self.at_least(1, "it is the rank of two factors", "lora_r", instead=16)
        self.check("lora_alpha", self.lora_alpha is None or self.lora_alpha > 0, "it is a scale", 32)
        self.check("lora_dropout", 0 <= self.lora_dropout < 1, "it is a probability", 0.05)
        why, start = "its factors come from the training data, in a pass before it", self.init_lora_weights
        self.check("init_lora_weights", start != "eva", why, f"pissa; or --adapter with a folder of PEFT's: {EVA}")
        self.check("init_lora_weights", start not in ("corda", "lora_ga"), why, "pissa")
        if not _NITER.fullmatch(start):
            check_choice("init_lora_weights", start, INITS)
        for name, (form, other, example) in _FORMS.items():
            text = getattr(self, name)
            good = text is None or all(re.fullmatch(form, word.strip()) for word in text.split(","))
            self.check(name, good, other, example)
        if self.base_dtype != "bfloat16" and not self.has_adapter:
            raise UserError(
                asked=f"--base_dtype {self.base_dtype}",
                found="no --lora_r and no --adapter",
                why="without an adapter all weights are trained, and lie in --weight_dtype",
                instead=f"--lora_r 16 --base_dtype {self.base_dtype}, or no --base_dtype",
            )
        said = [name for name in _OF_NEW if getattr(self, name) != getattr(AdapterArguments, name)]
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
