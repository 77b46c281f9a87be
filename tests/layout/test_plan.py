"""The plan: layouts and bytes worked out by hand, every refusal, and every shipped recipe on the models it serves."""

import json
import math
import os
import re
import subprocess

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import Mesh
from shardwright.layout.partition import partition_spec
from shardwright.layout.placement import Replicate, Shard
from shardwright.layout.plan import make_plan
from shardwright.layout.recipe import Recipe
from shardwright.model.meta_model import load_config, meta_model
from tests.support.fork_server import run
from tests.support.paths import ROOT


class Layer(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8, bias=False)


class Small(nn.Module):
    """No transformers model: three layers, an embedding tied to the head, a scalar, another dtype."""

    def __init__(self, widths: tuple[int, ...] = (24, 24, 24), tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 8)
        self.layers = nn.ModuleList(Layer(width) for width in widths)
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        self.head = nn.Linear(8, 48, bias=False)
        if tied:
            self.head.weight = self.embed.weight


TABLE = {
    "embed.weight": {"fsdp": Shard(0), "tensor": Shard(0)},
    "layers.*.up.weight": {"tensor": Shard(0), "fsdp": Shard(1)},
    "layers.*.up.bias": {"tensor": Shard(0)},
    "layers.*.down.weight": {"tensor": Shard(1), "fsdp": Replicate()},
    "scale": {},
    "head.weight": {"tensor": Shard(0), "fsdp": Shard(0)},
}


def small_recipe(parameters=TABLE, mesh=None, **changed):
    return Recipe(mesh=mesh or Mesh(fsdp=-1, tensor=4), batch=("fsdp",), parameters=parameters, name="small", **changed)


def small_plan(parameters=TABLE, model=None, mesh=None, devices=8, **changed):
    with torch.device("meta"):
        model = model or Small()
    return make_plan(small_recipe(parameters, mesh, **changed), model, devices)


def refused(*arguments, **changed) -> UserError:
    with pytest.raises(UserError) as error:
        small_plan(*arguments, **changed)
    return error.value


def test_a_plan_says_what_one_device_holds_of_any_module():
    plan = small_plan()
    assert plan.mesh == {"fsdp": 2, "tensor": 4}
    assert (plan.devices, plan.batch_shards) == (8, 2)
    up = plan["layers.1.up.weight"]
    assert (up.pattern, up.shape, up.local_shape) == ("layers.*.up.weight", (24, 8), (6, 4))
    assert list(up.layout.items()) == [("fsdp", Shard(1)), ("tensor", Shard(0))]  # mesh order
    assert up.bytes_per_device == 6 * 4 * 4
    assert plan["layers.0.down.weight"].layout == {"tensor": Shard(1)}  # an explicit Replicate() shards nothing
    assert plan["scale"].bytes_per_device == 2


def test_two_axes_may_shard_one_dimension():
    assert small_plan()["embed.weight"].local_shape == (48 // 8, 8)


def test_a_tied_parameter_is_listed_and_counted_once():
    plan = small_plan()
    assert plan.aliases == {"head.weight": "embed.weight"}
    assert plan["head.weight"] is plan["embed.weight"]
    assert [p.name for p in plan.parameters].count("embed.weight") == 1
    assert "head.weight" not in {p.name for p in plan.parameters}


def test_totals_are_bytes_per_device_with_two_float32_moments():
    elements = 6 * 8 + 3 * (6 * 4 + 6 + 8 * 6)
    assert small_plan().totals == {
        "parameters_bytes": 4 * elements + 2,
        "gradients_bytes": 4 * elements + 2,
        "optimizer_bytes": 8 * (elements + 1),
    }


def test_the_json_form_has_names_shapes_layouts_and_totals():
    with torch.device("meta"):
        model = nn.Linear(4, 6)
    plan = small_plan({"weight": {"fsdp": Shard(0)}, "bias": {}}, model)
    assert json.loads(json.dumps(plan.as_json())) == {
        "mesh": {"fsdp": 2, "tensor": 4},
        "parameters": [
            {
                "name": "weight",
                "pattern": "weight",
                "shape": [6, 4],
                "layout": {"fsdp": "Shard(0)"},
                "local_shape": [3, 4],
                "bytes_per_device": 48,
            },
            {
                "name": "bias",
                "pattern": "bias",
                "shape": [6],
                "layout": {},
                "local_shape": [6],
                "bytes_per_device": 24,
            },
        ],
        "totals": {"parameters_bytes": 72, "gradients_bytes": 72, "optimizer_bytes": 144},
    }


def test_parameters_that_no_line_matches_are_listed_together_by_kind():
    table = {p: layout for p, layout in TABLE.items() if p not in ("layers.*.up.bias", "scale")}
    error = refused({**table, "layers.*.up.biass": {}})
    assert "layers.*.up.bias of shape [24], 3 of them" in error.found
    assert "scale of shape []" in error.found
    assert "'layers.*.up.biass'" in error.instead


def test_a_long_list_of_unmatched_parameters_names_each():
    with torch.device("meta"):
        model = nn.ParameterDict({f"p_{i}": nn.Parameter(torch.zeros(1)) for i in range(30)})
    error = refused({"p_0": {}}, model)
    assert error.found.count("p_") == 29
    assert error.instead.endswith('"p_[123456789]": {},\n           "p_[12][0123456789]": {}')


def test_a_line_that_matches_nothing_is_refused_unless_optional():
    error = refused({**TABLE, "layers.*.up.biases": {}})
    assert "'layers.*.up.biases'" in error.asked
    assert error.instead.startswith("no line 'layers.*.up.biases'; ")
    assert small_plan(optional={"layers.*.up.biases": {}}).totals == small_plan().totals


def test_a_parameter_that_two_lines_match_is_refused_with_both():
    assert "matches layers.*.up.weight and layers.2.*.weight" in refused({**TABLE, "layers.2.*.weight": {}}).found
    assert "matches scale and scal?" in refused(optional={"scal?": {}}).found


def test_tied_names_must_agree_in_layout():
    error = refused({**TABLE, "head.weight": {}})
    assert "head.weight as {}" in error.asked
    assert "embed.weight as {'fsdp': 'Shard(0)', 'tensor': 'Shard(0)'}" in error.found
    assert (
        "no line matches\n           head.weight"
        in refused({p: layout for p, layout in TABLE.items() if p != "head.weight"}).found
    )


def test_a_dimension_out_of_range_is_refused_and_a_scalar_only_replicates():
    error = refused({**TABLE, "layers.*.up.bias": {"tensor": Shard(1)}})
    assert "layers.0.up.bias: 'tensor': Shard(1)" in error.asked
    assert "[24]" in error.found
    assert '"tensor": Shard(0)' in error.instead
    assert "a scalar only replicates" in refused({**TABLE, "scale": {"tensor": Shard(0)}}).instead


def test_a_dimension_that_its_axes_do_not_divide_names_what_would():
    error = refused(mesh=Mesh(fsdp=2, tensor=5), devices=10)
    assert error.asked == "recipe small: dimension 0 of embed.weight over fsdp=2 × tensor=5"
    assert "layers.*.up.weight of shape [24, 8], 3 of them" in error.found
    assert error.why == "48 is not divisible by 10"
    assert error.instead.startswith("4 devices; or ") is False  # nor on fewer while tensor=5
    offered = '"embed.weight": {"fsdp": Shard(0)},\n           "head.weight": {"fsdp": Shard(0)}'
    assert error.instead.startswith(offered)  # the tied one with it
    bias = refused({**TABLE, "embed.weight": {}, "head.weight": {}}, mesh=Mesh(fsdp=2, tensor=16), devices=32)
    assert bias.asked.startswith("recipe small: dimension 0 of layers.0.up.weight over tensor=16")
    assert bias.instead.startswith("--mesh fsdp=4,tensor=8, or --mesh fsdp=8,tensor=4; or\n")


@pytest.mark.parametrize(
    ("embed", "offered"),
    [
        ({"tensor": Shard(1)}, True),  # 48 over tensor=16
        ({"tensor": Shard(1), "fsdp": Shard(0)}, False),  # 48 over fsdp=2 × tensor=16
    ],
)
def test_another_dimension_is_offered_only_if_it_would_divide(embed, offered):
    table = {**TABLE, "embed.weight": embed, "head.weight": embed}
    error = refused(table, mesh=Mesh(fsdp=2, tensor=16), devices=32)
    assert "dimension 1 of embed.weight" in error.asked
    assert ('"embed.weight": {"tensor": Shard(0)}' in error.instead) is offered


def test_an_activation_line_that_matches_no_module_is_refused():
    error = refused(activations={"layer.*": {}})
    assert "activations line 'layer.*'" in error.asked
    assert "did you mean 'layers.*'" in error.instead
    assert small_plan(activations={"layers.*": {"fsdp": Shard(0)}}).activations == {"layers.*": {"fsdp": Shard(0)}}


def test_stacking_puts_layers_in_front_and_moves_every_shard():
    plan = small_plan()
    stacked = plan.stacked("layers", ["*"], 3)
    assert [p.name for p in stacked.parameters] == [
        "scale",
        "embed.weight",
        "layers.*.up.weight",
        "layers.*.up.bias",
        "layers.*.down.weight",
    ]
    up = stacked["layers.*.up.weight"]
    assert (up.shape, up.local_shape) == ((3, 24, 8), (3, 6, 4))
    assert up.layout == {"fsdp": Shard(2), "tensor": Shard(1)}
    assert up.bytes_per_device == 3 * plan["layers.0.up.weight"].bytes_per_device
    assert stacked.totals == plan.totals
    assert stacked.aliases == plan.aliases


def tied_layers() -> Small:
    model = Small()
    model.layers[2].up.weight = model.layers[0].up.weight
    return model


BY_LAYER = {p: layout for p, layout in TABLE.items() if p != "layers.*.up.bias"}
BY_LAYER |= {"layers.0.up.bias": {"tensor": Shard(0)}, "layers.[12].up.bias": {}}


@pytest.mark.parametrize(
    ("table", "model", "message"),
    [
        (BY_LAYER, Small, "layers.0 and layers.1"),
        (TABLE, lambda: Small((24, 24, 48)), r"\[24, 8\] .* and \[48, 8\]"),
        (TABLE, tied_layers, "layers.2.up.weight is tied"),
    ],
)
def test_layers_that_differ_or_share_cannot_be_stacked(table, model, message):
    with torch.device("meta"):
        plan = small_plan(table, model())
    with pytest.raises(UserError, match=message) as error:
        plan.stacked("layers", ["*"], 3)
    assert "scan=False" in error.value.instead


def test_a_stack_may_hold_a_slice_of_the_layers():
    plan = small_plan()
    stacked = plan.stacked("layers", ["0:4:2"], 3)
    assert [p.name for p in stacked.parameters if p.name.endswith("up.weight")] == [
        "layers.0:4:2.up.weight",
        "layers.1.up.weight",
    ]
    assert stacked["layers.0:4:2.up.weight"].shape == (2, 24, 8)
    assert stacked.members("layers.0:4:2.up.weight") == ["layers.0.up.weight", "layers.2.up.weight"]
    assert stacked.totals == plan.totals


def test_stacking_more_layers_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"layers\.0 and layers\.3"):
        small_plan().stacked("layers", ["*"], 4)
    with pytest.raises(UserError, match="any parameter"):
        small_plan().stacked("blocks", ["*"], 1)


def test_a_partition_spec_keeps_both_axes_of_a_dimension_in_mesh_order():
    axes = ("data", "fsdp", "tensor")
    assert partition_spec({"tensor": Shard(0), "fsdp": Shard(0)}, 2, axes) == (("fsdp", "tensor"), None)
    assert partition_spec({"tensor": Shard(1), "fsdp": Replicate()}, 3, axes) == (None, "tensor", None)
    assert partition_spec({}, 0, axes) == ()
    for layout in ({"fsdp": Shard(2)}, {"expert": Shard(0)}):
        with pytest.raises(UserError, match="cannot split dimension"):
            partition_spec(layout, 2, axes)


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 256, "intermediate_size": 128, "head_dim": 16}  # fmt: skip
DENSE = [
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "tie_word_embeddings": True},
    {"model_type": "mistral"},
]
SPARSE = [
    {"model_type": "mixtral", "num_local_experts": 4},
    {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64},
]


@pytest.mark.parametrize("name", ["llama_fsdp", "llama_tp", "mixtral_ep", "mixtral_ep_tp", "mixtral_fsdp"])
def test_each_shipped_recipe_plans_its_own_model_and_its_families_on_8_devices(name):
    recipe = load_recipe(name)
    own = meta_model(load_config(None, recipe))
    plan = make_plan(recipe, own, 8)
    assert plan.stacked("model.layers", ["*"], own.config.num_hidden_layers).totals == plan.totals
    for values in DENSE if name.startswith("llama") else SPARSE:
        plan = make_plan(recipe, meta_model(AutoConfig.for_model(**{**TINY, **values})), 8)
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if values.get("tie_word_embeddings") else {}
        assert plan.aliases == tied


@pytest.fixture(scope="module")
def large():
    """Real sizes, on meta, built once."""
    qwen = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}  # fmt: skip
    recipe = load_recipe("llama_fsdp")
    return {
        "mixtral_8x7b": meta_model(load_config(str(ROOT / "docs/configs/mixtral_8x7b.json"), recipe)),
        "llama3_70b": meta_model(load_config(str(ROOT / "docs/configs/llama3_70b.json"), recipe)),
        "qwen2_7b": meta_model(AutoConfig.for_model(**qwen)),
    }


@pytest.mark.parametrize(
    ("name", "model", "billions"),
    [
        ("mixtral_ep", "mixtral_8x7b", 46.7),
        ("mixtral_ep_tp", "mixtral_8x7b", 46.7),
        ("mixtral_fsdp", "mixtral_8x7b", 46.7),
        ("llama_fsdp", "llama3_70b", 70.6),
        ("llama_tp", "llama3_70b", 70.6),
        ("llama_fsdp", "qwen2_7b", 7.6),
        ("llama_tp", "qwen2_7b", 7.6),
    ],
)
def test_each_shipped_recipe_spreads_a_real_model_over_64_devices(large, name, model, billions):
    plan = make_plan(load_recipe(name), large[model], 64)
    assert sum(math.prod(p.shape) for p in plan.parameters) == pytest.approx(billions * 1e9, rel=0.01)
    assert plan.totals["parameters_bytes"] == pytest.approx(4 * billions * 1e9 / 64, rel=0.02)


@pytest.mark.parametrize(
    ("name", "model", "billions"),
    [
        ("deepseek_v3_ep", "deepseek_v3", 671.0),
        ("gemma3_fsdp", "gemma3_27b", 27.0),
        ("gpt_oss_ep", "gpt_oss_120b", 116.8),
        ("llama4_ep", "llama4_scout", 107.8),
        ("qwen3_moe_ep", "glm_4_5", 352.8),
        ("qwen3_moe_ep", "qwen3_235b_a22b", 235.1),
        ("qwen3_next_ep", "qwen3_next_80b_a3b", 79.7),
    ],
)
def test_each_familys_recipe_spreads_its_real_model_over_64_devices(name, model, billions):
    recipe = load_recipe(name)
    assert make_plan(recipe, meta_model(load_config(None, recipe)), 8).devices == 8  # its own small one
    real = meta_model(load_config(str(ROOT / f"docs/configs/{model}.json"), recipe))
    plan = make_plan(recipe, real, 64)
    assert sum(math.prod(p.shape) for p in plan.parameters) == pytest.approx(billions * 1e9, rel=0.001)
    assert plan.totals["parameters_bytes"] == pytest.approx(4 * billions * 1e9 / 64, rel=0.02)


@pytest.mark.parametrize("role", ["self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_llama_tp_splits_first_projections_with_their_bias(role):
    table = {**load_recipe("llama_tp").parameters, **load_recipe("llama_tp").optional}
    assert table[f"model.layers.*.{role}.weight"]["tensor"] == Shard(0)
    assert table[f"model.layers.*.{role}.bias"]["tensor"] == Shard(0)


@pytest.mark.parametrize("role", ["self_attn.o_proj", "mlp.down_proj"])
def test_llama_tp_splits_second_projections_and_replicates_their_bias(role):
    table = {**load_recipe("llama_tp").parameters, **load_recipe("llama_tp").optional}
    assert table[f"model.layers.*.{role}.weight"]["tensor"] == Shard(1)
    assert table[f"model.layers.*.{role}.bias"] == {"tensor": Replicate()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "t5"}', "without a causal-LM head"),
        ('{"model_type": "bert"}', "built as an encoder"),
        ('{"model_type": "llamaa"}', "'llamaa' is unknown to transformers"),
        ("{", "no transformers config can be read"),
        ('{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}', "not a multiple of"),
        (None, "no file"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(tmp_path, content, message):
    recipe = load_recipe("llama_fsdp")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        meta_model(load_config(str(tmp_path), recipe))


def test_weights_are_planned_in_float32_whatever_the_config_states(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "llama", "dtype": "bfloat16"}))
    model = meta_model(load_config(str(tmp_path), load_recipe("llama_fsdp")))
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "meta")}


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(ROOT / "scripts/plan.py", *arguments, env={**os.environ, "COLUMNS": "160"})


def test_the_command_prints_mixtral_8x7b_at_64_devices_as_json():
    config = str(ROOT / "docs/configs/mixtral_8x7b.json")
    result = script("--recipe", "mixtral_ep", "--model", config, "--devices", "64", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["mesh"] == {"fsdp": 16, "expert": 4}
    down = next(p for p in found["parameters"] if p["name"] == "model.layers.31.mlp.experts.down_proj")
    assert down["layout"] == {"fsdp": "Shard(2)", "expert": "Shard(0)"}
    assert down["local_shape"] == [2, 4096, 896]


def test_the_command_prints_a_table_with_brackets_as_written_and_totals():
    result = script("--recipe", "llama_tp", "--mesh", "fsdp=4,tensor=2")
    lines = result.stdout.splitlines()
    assert lines[0] == "mesh: fsdp=4 × tensor=2 = 8 devices"
    row = next(line.split() for line in lines if line.startswith("model.layers.*.self_attn.[qkv]_proj.weight"))
    assert row[1:] == ["4", "128×128", "fsdp:", "Shard(1)", "64×32", "32.00", "KiB"]
    assert lines[-1] == "the global batch must be divisible by 4 (fsdp=4)"


def test_the_command_ends_with_code_2_and_one_message_for_bad_input():
    result = script("--recipe", "mixtral_ep", "--devices", "12", "--mesh", "fsdp=3,expert=3")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: Mesh(fsdp=3, expert=3) on 12 devices")
    assert "Traceback" not in result.stderr


def test_the_guides_recipe_goes_from_its_first_message_to_its_table(tmp_path):
    guide = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    config, empty, table = (part.partition("\n```")[0] for part in re.split(r"```(?:json|python)\n", guide)[1:4])
    (tmp_path / "tiny_qwen3.json").write_text(config)
    (tmp_path / "mine.py").write_text(empty)
    recipe = load_recipe(str(tmp_path / "mine.py"))
    model = meta_model(load_config(str(tmp_path / "tiny_qwen3.json"), recipe))
    with pytest.raises(UserError) as error:
        make_plan(recipe, model, 8)
    assert f"error: {error.value}\n" in guide
    (tmp_path / "mine.py").write_text(empty.replace("    parameters={},", table))
    plan = make_plan(load_recipe(str(tmp_path / "mine.py")), model, 8)
    rows = [line.split() for line in guide.partition("pattern   ")[2].split("\n\n")[0].splitlines()[1:]]
    assert {row[0] for row in rows} == {p.pattern for p in plan.parameters}
    assert sum(int(row[1]) for row in rows) == len(plan.parameters)
