"""Adapters that PEFT saved, read and written again: PEFT's logits beside those of the weights merged here.

python scripts/measure/adapters.py                   every case, and a table
python scripts/measure/adapters.py --only dora       those whose name has the word

Each case is a small model and fields of `LoraConfig`. PEFT saves its adapter, with random factors. "read" is the
largest difference of its logits from those of the model that `export.py --merge` would make of it; "written" that of
PEFT's logits with the adapter as a run writes it. "moved" is what the adapter changes of the logits at all.
"""

import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from shardwright.arguments.command_line import Parser
from shardwright.files.arrays import whole as read
from shardwright.files.folder import Folder
from shardwright.model.facts import ModelFacts, facts_of
from shardwright.model.peft_config import CONFIG, WEIGHTS, read_config
from shardwright.models.adapters.lora import A0, B0
from shardwright.models.tiny import tiny_config
from shardwright.weights.adapter_weights import merge_factors, seeded_factors
from shardwright.weights.peft_files import AdapterFiles, save_adapter
from shardwright.weights.peft_layout import hub_parts
from shardwright.weights.peft_read import open_adapter
from shardwright.weights.weight_sources import Source, part_and_rest, part_of, state_dict_weights

Fields = dict[str, Any]
TOLERANCE = 1e-5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# the expression that unsloth's get_peft_regex makes for a language model's layers alone
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))"
)
VL = "qwen2_5_vl"
# name → family, and fields of LoraConfig beside r and lora_alpha
CASES: dict[str, tuple[str, Fields]] = {
    "plain": ("llama", {"target_modules": ATTENTION}),
    "use_rslora": ("llama", {"target_modules": ATTENTION, "use_rslora": True}),
    "lora_dropout": ("llama", {"target_modules": ATTENTION, "lora_dropout": 0.1}),
    "rank_pattern, alpha_pattern": (
        "llama",
        {"target_modules": ATTENTION, "rank_pattern": {r"layers\.1\..*q_proj": 5}, "alpha_pattern": {"v_proj": 3}},
    ),
    "exclude_modules": ("llama", {"target_modules": "all-linear", "exclude_modules": r".*\.0\.mlp\..*"}),
    "layers_to_transform": ("llama", {"target_modules": ATTENTION, "layers_to_transform": [1]}),
    "modules_to_save": ("llama", {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "trainable_token_indices": (
        "llama",
        {"target_modules": ATTENTION, "trainable_token_indices": {"embed_tokens": [9, 3, 5], "lm_head": [5, 31]}},
    ),
    "trainable_token_indices, a tied head": (
        "llama, tied",
        {"target_modules": ATTENTION, "trainable_token_indices": [9, 3, 5]},
    ),
    "lm_head as a target": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "use_dora": ("llama", {"target_modules": [*ATTENTION, "down_proj"], "use_dora": True}),
    "init_lora_weights pissa": ("llama", {"target_modules": ATTENTION, "init_lora_weights": "pissa"}),
    "init_lora_weights olora": ("llama", {"target_modules": ATTENTION, "init_lora_weights": "olora"}),
    "init_lora_weights eva": ("llama", {"target_modules": ATTENTION, "init_lora_weights": "eva"}),
    "use_dora, pissa, use_rslora": (
        "llama",
        {"target_modules": ATTENTION, "use_dora": True, "init_lora_weights": "pissa", "use_rslora": True},
    ),
    "target_parameters": ("mixtral", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "Llama-4's experts": ("llama4_text", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "GPT-OSS's recipe": (
        "gpt_oss",
        {"target_modules": "all-linear", "target_parameters": [f"1.mlp.{name}" for name in EXPERTS]},
    ),
    "experts of transformers 4 (w1, w2, w3)": ("mixtral", {"target_modules": [*ATTENTION, "w1", "w2", "w3"]}),
    "experts of transformers 4 (gate_proj, …)": (
        "qwen3_moe",
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
    ),
    "dense layers beside experts": (
        "deepseek_v3",
        {"target_modules": ["o_proj"], "target_parameters": [*EXPERTS, "gate_proj.weight"]},
    ),
    "unsloth's expression, a VLM": (VL, {"target_modules": UNSLOTH}),
    "exclude_modules, a VLM": (VL, {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ".*visual.*"}),
}


def _config(family: str) -> transformers.PretrainedConfig:
    if family != VL:
        family, _, tied = family.partition(", ")
        return tiny_config(family, **({"tie_word_embeddings": bool(tied)} if family == "llama" else {}))
    sizes = {"hidden_size": 16, "intermediate_size": 24}
    text: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, **sizes}
    text |= {"vocab_size": 64, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    vision = {"depth": 2, "num_heads": 2, "out_hidden_size": 16, "fullatt_block_indexes": [1], **sizes}
    marks = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    places: dict[str, Any] = {name: 60 + number for number, name in enumerate(marks)}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **places)


def model_of(facts: ModelFacts, weights: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The whole model of ``facts`` with ``weights``, on the CPU."""
    torch.manual_seed(0)
    model: PreTrainedModel = type(facts.whole)(facts.config)
    if weights:
        model.load_state_dict(weights)
    return model.eval()


def _logits(model: Any) -> torch.Tensor:
    ids = torch.arange(32).reshape(2, 16) % 60
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def _saved_by_peft(folder: Path, facts: ModelFacts, weights: Mapping[str, torch.Tensor], fields: Fields) -> None:
    """Writes the adapter of ``fields`` as PEFT saves it; of experts that once were linear layers, as it then did."""
    from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights

    eva = fields.get("init_lora_weights") == "eva"
    config = LoraConfig(r=2, lora_alpha=3, **fields, eva_config=EvaConfig() if eva else None)
    model = get_peft_model(model_of(facts, weights), config)
    if eva:
        ids = torch.arange(60).reshape(4, 15)
        batches = [{"input_ids": ids + n, "attention_mask": torch.ones_like(ids)} for n in range(4)]
        initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    model.save_pretrained(str(folder))
    torch.manual_seed(1)
    tensors = load_file(folder / WEIGHTS)
    own = {name: t for name, t in tensors.items() if "lora_" in name or "trainable_tokens" in name}
    tensors |= {name: t + 0.1 * torch.randn_like(t) for name, t in own.items()}
    if not fields.get("target_parameters") and any("experts" in name for name in tensors):
        tensors = {name: t for name, t in tensors.items() if "experts" not in name}
        values = json.loads((folder / CONFIG).read_text())
        plain = {"target_modules": fields["target_modules"], "target_parameters": None, "rank_pattern": {}}
        (folder / CONFIG).write_text(json.dumps(values | plain | {"alpha_pattern": {}}))
        tensors |= _each_expert(facts)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)


def _each_expert(facts: ModelFacts) -> dict[str, torch.Tensor]:
    """Random factors of rank 2 of each expert's projections, under the hub's names."""
    found = {}
    for owner in facts.experts:
        for key, weight in facts.model.get_submodule(owner).named_parameters():
            for name, part in hub_parts(facts.whole, f"{owner}.{key}", torch.empty(weight.shape)).items():
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                found[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(2, part.shape[1])
                found[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(part.shape[0], 2)
    return found


def _merged(facts: ModelFacts, weights: Mapping[str, torch.Tensor], source: Source) -> PreTrainedModel:
    everything = part_and_rest(source, state_dict_weights(weights), facts.names_in_whole)
    first: dict[nn.Parameter, str] = {}  # a tied weight's other names have its values
    own = model_of(facts, weights).named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(parameter, name) for name, parameter in own}
    return model_of(facts, {**weights, **{name: read(everything(each)) for name, each in names.items()}})


def measured(family: str, fields: Fields) -> tuple[float, float, float]:
    """(read, written, moved) of a case, as the module says."""
    from peft import PeftModel

    facts = facts_of(_config(family))
    model, names = facts.model, facts.names_in_whole
    weights = {name: t.clone() for name, t in model_of(facts, {}).state_dict().items()}
    base = part_of(state_dict_weights(weights), names)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        _saved_by_peft(Path(one), facts, weights, fields)
        before = _logits(model_of(facts, weights))
        theirs = _logits(PeftModel.from_pretrained(model_of(facts, weights), one))
        lora = read_config(Folder(one), facts.part)
        opened = open_adapter(Folder(one), lora, model, names, facts.whole)
        begun = seeded_factors(facts.adapted(lora), lora, 0, base)
        factors: Source = lambda name: (begun if name.endswith((A0, B0)) else opened)(name)  # noqa: E731
        ours = _logits(_merged(facts, weights, merge_factors(opened.checked(base), factors, lora, model)))
        files = AdapterFiles(lora, model, facts.whole, names, None)
        save_adapter(Folder(two), files, factors, None, Console(quiet=True))
        again = _logits(PeftModel.from_pretrained(model_of(facts, weights), two))
    worst = [(found - theirs).abs().max().item() for found in (ours, again, before)]
    return worst[0], worst[1], worst[2]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="a word of the cases' names")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    table = Table("LoraConfig's field", "family", "read", "written", "moved")
    for name, (family, fields) in CASES.items():
        if only in name:
            table.add_row(name, family, *(f"{value:.0e}" for value in measured(family, fields)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
