"""The recipe ``auto``: it covers every family, agrees with the shipped ones, and makes files that read back alike."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import subprocess
import sys

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.job import Job
from shardwright.layout.auto import auto_recipe
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import mesh_factors
from shardwright.layout.patterns import shared_patterns
from shardwright.layout.plan import make_plan
from shardwright.layout.recipe import layout_text, matches
from shardwright.layout.recipe_source import recipe_source
from shardwright.model.meta_model import load_config, meta_model
from shardwright.models.experts.expert_families import experts_modules
from tests.support.paths import ROOT

RECIPES = ("mixtral_ep", "mixtral_ep_tp", "mixtral_fsdp", "llama_fsdp", "llama_tp")  # that it agrees with
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TENSOR = "fsdp=2,tensor=4"
BOTH = "fsdp=2,expert=2,tensor=2"

# model types whose default config makes no model → what it lacks; None: what is around a text model that is covered
DEFAULTS: dict[str, dict[str, object] | None] = {
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "gemma3n": None,
    "gemma4_assistant": None,
    "gemma4_unified_assistant": None,
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "ministral": {"head_dim": 128},
    "musicgen": None,
    "musicgen_melody": None,
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": None,
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 64,
    },
    "reformer": {"is_decoder": True},
}
KINDS = sorted(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if DEFAULTS.get(kind, {}) is not None)


def model_of(kind: str, **values):
    return meta_model(AutoConfig.for_model(kind, **values))


def made_for(model, mesh=None, devices=8):
    return auto_recipe(model, experts_modules(model), mesh, devices)


def layouts(recipe, model):
    """Parameter's kind → its layout, in words."""
    plan = make_plan(recipe, model, 8)
    found = [*((p.name, p.layout) for p in plan.parameters), *((a, plan[n].layout) for a, n in plan.aliases.items())]
    return {re.sub(r"\.\d+\.", ".*.", name): layout_text(layout) for name, layout in found}


def real_model(kind: str):
    """A family's default model, of few layers, without the values of its buffers."""
    for changes in ({"num_hidden_layers": 6}, {}):
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**changes, **(DEFAULTS.get(kind) or {})))
        except Exception as error:  # a list of kinds of layer that is longer, say: whatever a config's class raises
            failed = error
    raise failed


def experts_axes(model, plan):
    """The axes over which the plan spreads what the model's own plan calls its experts' weights."""
    spread = [
        re.escape(name).replace(r"\*", r"\d+") for name, style in model.ep_plan.items() if style == "grouped_gemm"
    ]
    weights = re.compile("|".join(spread) or "nothing")
    return {entry.axes_of(0) for entry in plan.parameters if weights.fullmatch(entry.name)}


@pytest.mark.parametrize("kind", KINDS)
def test_it_covers_every_family_and_leaves_a_device_little_more_than_its_share(kind):
    model = real_model(kind)
    experts = experts_modules(model)
    for mesh in (None, BOTH if experts else TENSOR):
        made = made_for(model, mesh)
        plan = make_plan(made.recipe, model, 8)  # each parameter matches one line, no line is idle, axes divide
        assert made.recipe.activations
        if experts and "expert" in plan.mesh:
            count = next(iter(model.get_submodule(experts[0]).parameters())).shape[0]
            assert experts_axes(model, plan) <= {("expert",) if count % plan.mesh["expert"] == 0 else ()}
        if mesh is None:
            held = sum(math.prod(entry.local_shape) for entry in plan.parameters)
            assert held < 1.1 / 8 * sum(parameter.numel() for parameter in model.parameters())


QWEN = {**SIZES, **HEADS}
AGREED = [
    *((name, None) for name in RECIPES),
    *((name, model_of("qwen2", **SIZES, num_attention_heads=4, num_key_value_heads=4)) for name in RECIPES[3:]),
    *((name, model_of("qwen3", **QWEN, tie_word_embeddings=True)) for name in RECIPES[3:]),
    *((name, model_of("llama", **QWEN, attention_bias=True, mlp_bias=True)) for name in RECIPES[3:]),
    *((name, model_of("qwen3_moe", **QWEN, **EXPERTS, attention_bias=True)) for name in RECIPES[:3]),
    ("llama_fsdp", "llama3_70b"),
    ("llama_tp", "llama3_70b"),
    *((name, "mixtral_8x7b") for name in RECIPES[:3]),
]


@pytest.mark.parametrize(("name", "model"), AGREED, ids=lambda value: str(getattr(value, "base_model_prefix", value)))
def test_it_and_the_shipped_recipes_agree_line_by_line(name, model):
    shipped = load_recipe(name)
    if not isinstance(model, torch.nn.Module):
        model = meta_model(load_config(model and str(ROOT / f"docs/configs/{model}.json"), shipped))
    made = made_for(model, mesh_factors(shipped.mesh.axes)).recipe
    assert layouts(made, model) == layouts(shipped, model)
    assert (made.mesh, made.batch, dict(made.activations)) == (shipped.mesh, shipped.batch, dict(shipped.activations))
    assert made.compute == shipped.compute


def test_it_makes_the_shipped_meshes_where_none_is_asked_for():
    for name in ("mixtral_ep", "llama_fsdp"):
        shipped = load_recipe(name)
        assert made_for(meta_model(load_config(None, shipped))).recipe.mesh == shipped.mesh


def test_structure_says_what_the_plan_leaves_out():
    """No plan at all, weights as [in, out], one square attention."""
    model = model_of("gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64)
    assert not model.tp_plan.keys() - {"lm_head"}
    assert layouts(made_for(model, "fsdp=1,tensor=8").recipe, model) == {
        "transformer.wte.weight": {"tensor": "Shard(0)"},
        "transformer.wpe.weight": {"tensor": "Shard(0)"},
        "transformer.h.*.ln_1.weight": {},
        "transformer.h.*.ln_1.bias": {},
        "transformer.h.*.attn.c_attn.weight": {"tensor": "Shard(1)"},
        "transformer.h.*.attn.c_attn.bias": {"tensor": "Shard(0)"},
        "transformer.h.*.attn.c_proj.weight": {"tensor": "Shard(0)"},
        "transformer.h.*.attn.c_proj.bias": {},
        "transformer.h.*.ln_2.weight": {},
        "transformer.h.*.ln_2.bias": {},
        "transformer.h.*.mlp.c_fc.weight": {"tensor": "Shard(1)"},
        "transformer.h.*.mlp.c_fc.bias": {"tensor": "Shard(0)"},
        "transformer.h.*.mlp.c_proj.weight": {"tensor": "Shard(0)"},
        "transformer.h.*.mlp.c_proj.bias": {},
        "transformer.ln_f.weight": {},
        "transformer.ln_f.bias": {},
        "lm_head.weight": {"tensor": "Shard(0)"},
    }


def test_latent_attention_is_cut_by_heads_and_not_by_its_low_rank():
    model = real_model("deepseek_v3")
    found = layouts(made_for(model, "fsdp=2,expert=2,tensor=2").recipe, model)
    attention = {name.split(".")[4]: cut for name, cut in found.items() if "self_attn" in name and "_proj" in name}
    assert attention == {
        "q_a_proj": {"fsdp": "Shard(1)", "expert": "Shard(1)"},
        "q_b_proj": {"tensor": "Shard(0)", "fsdp": "Shard(1)", "expert": "Shard(1)"},
        "kv_a_proj_with_mqa": {"fsdp": "Shard(1)", "expert": "Shard(1)"},
        "kv_b_proj": {"tensor": "Shard(0)", "fsdp": "Shard(1)", "expert": "Shard(1)"},
        "o_proj": {"tensor": "Shard(1)", "fsdp": "Shard(0)", "expert": "Shard(0)"},
    }


def test_experts_that_lie_the_other_way_round_are_cut_by_their_own_width_biases_too():
    """GPT-OSS's weights are [experts, in, out]; its width and its experts' are the same, and no plan says more."""
    model = real_model("gpt_oss")
    found = layouts(made_for(model, BOTH).recipe, model)
    experts = {name.split(".")[-1]: cut for name, cut in found.items() if ".experts." in name}
    assert experts == {
        "gate_up_proj": {"expert": "Shard(0)", "tensor": "Shard(2)", "fsdp": "Shard(1)"},
        "gate_up_proj_bias": {"expert": "Shard(0)", "tensor": "Shard(1)"},
        "down_proj": {"expert": "Shard(0)", "tensor": "Shard(1)", "fsdp": "Shard(2)"},
        "down_proj_bias": {"expert": "Shard(0)"},
    }
    assert found["model.layers.*.self_attn.sinks"] == {}
    # no projection of a pair, nor small: of 128 experts
    assert found["model.layers.*.mlp.router.weight"] == {"fsdp": "Shard(1)", "expert": "Shard(1)"}


def test_what_an_axis_does_not_divide_is_cut_elsewhere_or_left_whole_and_said():
    values = {**SIZES, "vocab_size": 257, "intermediate_size": 90}
    model = model_of("llama", **values, num_attention_heads=4, num_key_value_heads=2)
    made = made_for(model, TENSOR)
    found = layouts(made.recipe, model)
    assert found["lm_head.weight"] == {"fsdp": "Shard(1)"}
    assert found["model.layers.*.mlp.down_proj.weight"] == {"fsdp": "Shard(1)"}
    assert made.undivided["lm_head.weight"] == "257 is not divisible by tensor=4 or fsdp=2"
    assert made.undivided["model.layers.*.mlp.down_proj.weight"] == "90 is not divisible by tensor=4"
    assert made_for(model, "fsdp=-1", None).undivided == {}  # before the devices are counted all is taken to fit


def test_experts_that_their_axis_does_not_divide_are_not_spread_over_it():
    model = model_of("qwen3_moe", **QWEN, **{**EXPERTS, "num_experts": 6})
    made = made_for(model, "fsdp=2,expert=4")
    assert experts_axes(model, make_plan(made.recipe, model, 8)) == {()}
    assert "6 is not divisible by expert=4" in made.undivided["model.layers.*.mlp.experts.*_proj"]
    assert made_for(model).recipe.mesh.axes == made_for(model, devices=6).recipe.mesh.axes == {"fsdp": -1, "expert": 2}
    assert made_for(model, devices=3).recipe.mesh.axes == {"fsdp": -1}


@pytest.mark.parametrize(
    ("kind", "mesh", "message"),
    [
        ("llama", "fsdp=2,expert=4", "a model without experts"),
        ("llama", "fsdp=2,tesor=4", "--mesh fsdp=2,tensor=4"),
        ("llama", "fsdp=2,tensor", "each of them needs one whole number"),
        ("llama", "fsdp=3,tensor=4", "its sizes multiply to 12"),
        ("llama", "", "an axis ''"),
    ],
)
def test_a_mesh_that_it_has_no_use_for_is_refused(kind, mesh, message):
    with pytest.raises(UserError, match=re.escape(message)):
        made_for(model_of(kind, **QWEN), mesh)


def test_its_axes_keep_their_order_and_those_of_one_device_are_left_out():
    made = made_for(model_of("llama", **QWEN), "tensor=2,expert=1,data=2,fsdp=-1").recipe
    assert list(made.mesh.axes.items()) == [("data", 2), ("fsdp", -1), ("tensor", 2)]
    assert made.batch == ("data", "fsdp")
    assert not any("data" in layout for layout in made.parameters.values())
    assert made_for(model_of("llama", **QWEN), "fsdp=1", 1).recipe.mesh.axes == {"fsdp": 1}


def test_a_pattern_matches_the_names_of_its_line_and_no_other():
    """On random names: letters, words and numbers in every place."""
    draw = random.Random(0)
    words = ["q_proj", "k_proj", "o_proj", "norm", "q_norm", "pre_norm", "*", "weight", "bias", "a", "b"]
    for _ in range(200):
        names = {".".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 12))}
        lines = {name: draw.choice("xy") for name in sorted(names)}
        found = shared_patterns(lines)
        for name, line in lines.items():
            for number in ("0", "17"):
                hits = [pattern for pattern in found if matches(pattern, name.replace("*", number))]
                assert [found[pattern] for pattern in hits] == [line], (lines, found)
        assert len(found) <= len(lines)


def test_names_are_shared_as_a_person_would_write_them():
    lines = dict.fromkeys(["a.*.q_proj.weight", "a.*.k_proj.weight", "a.*.v_proj.weight"], 1)
    lines |= {"a.*.o_proj.weight": 2, "a.*.input_layernorm.weight": 0, "a.*.post_attention_layernorm.weight": 0}
    lines |= {"a.*.fc.weight": 1, "a.*.fc.bias": 1, "norm.weight": 0}
    assert shared_patterns(lines) == {
        "a.*.[qkv]_proj.weight": 1,
        "a.*.o_proj.weight": 2,
        "a.*.*_layernorm.weight": 0,
        "a.*.fc.*": 1,
        "norm.weight": 0,
    }


def test_a_written_recipe_reads_back_to_the_same_plan_and_is_formatted(tmp_path):
    kinds = ("gpt_oss", "deepseek_v3", "gemma3_text", "gpt2", "qwen3_next", "falcon_h1", "jamba", "gemma4_text")
    for kind in kinds:
        model = real_model(kind)
        made = made_for(model, BOTH if experts_modules(model) else TENSOR)
        path = tmp_path / f"{kind}.py"
        path.write_text(recipe_source(made, 'A "test" of \\ and """:\n\ncommand:   none\n'), encoding="utf-8")
        read = load_recipe(str(path))
        assert make_plan(read, model, 8) == make_plan(made.recipe, model, 8)
        assert list(read.parameters) == list(made.recipe.parameters)
        assert (read.mesh, read.compute) == (made.recipe.mesh, made.recipe.compute)
        said = [*made.notes.values(), *made.undivided.values()]
        assert all(text in path.read_text(encoding="utf-8") for text in said)
    for check in (["format", "--check"], ["check", "--select", "E,F,I"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_job_takes_it_with_its_overrides_and_refuses_it_without_a_model(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3_moe", **QWEN, **EXPERTS}))
    options = {"recipe": "auto", "compute": "experts=dropless,scan=False", "bf16": True}
    job = Job.resolve(TrainingArguments(**options, model=str(config), mesh="fsdp=2,expert=4"), lambda: 8)
    assert (job.recipe.name, job.plan.mesh) == ("auto", {"fsdp": 2, "expert": 4})
    assert (job.recipe.compute.experts, job.recipe.compute.dtype) == ("dropless", "bfloat16")
    assert job.plan["model.layers.0.mlp.experts.down_proj"].axes_of(0) == ("expert",)
    with pytest.raises(UserError, match=r"recipe auto without a model(.|\n)*--model with a hub id"):
        Job.resolve(TrainingArguments(**options), lambda: 8)


def test_the_guide_shows_the_file_that_is_written():
    guide = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    model = meta_model(AutoConfig.from_pretrained(ROOT / "docs/configs/qwen3_30b_a3b.json"))
    source = recipe_source(made_for(model, "fsdp=2,expert=4"), "")
    assert f"{source.partition(chr(34) * 6)[2].strip()}\n```" in guide


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys):
    """scripts/plan.py with these words, in this process: what it prints, and what it says beside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USE_TORCH_XLA", "0")  # which it sets itself: to be undone
    spec = importlib.util.spec_from_file_location("plan", ROOT / "scripts/plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*words: str):
        monkeypatch.setattr(sys, "argv", ["plan.py", "--model", "config.json", "--json", *words])
        module.main()
        return capsys.readouterr()

    return run


def test_the_command_writes_a_recipe_says_how_to_use_it_and_never_writes_over_a_file(plan, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **QWEN}))
    first = plan("--recipe", "auto", "--mesh", TENSOR, "--write", "mine.py")
    use = "shardwright train --recipe mine.py --model config.json"
    assert f"written to mine.py; train with it:\n  {use}\n" in first.err
    text = (tmp_path / "mine.py").read_text(encoding="utf-8")
    assert use in text
    assert "fsdp=2 × tensor=4" in text
    assert json.loads(plan("--recipe", "mine.py").out) == json.loads(first.out)
    for words, message in (
        (("--recipe", "auto", "--write", "mine.py"), "a file that is there already"),
        (("--recipe", "auto", "--write", "absent/mine.py"), "no folder absent"),
        (("--recipe", "auto", "--write", "/proc/mine.py"), "can't be written"),
        (("--recipe", "auto", "--write", "mine"), "does not end in .py"),
        (("--recipe", "llama_tp", "--write", "other.py"), "a recipe that is a file already"),
    ):
        with pytest.raises(UserError, match=message):
            plan(*words)
    assert (tmp_path / "mine.py").read_text(encoding="utf-8") == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "mine.py"]
