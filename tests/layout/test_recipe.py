"""Recipes: what loads, what is refused when one is written, and by which message."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.tensor import Partial

import shardwright.recipes
from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import Mesh
from shardwright.layout.placement import Replicate, Shard
from shardwright.layout.recipe import Compute, Recipe, matches
from tests.support.paths import ROOT

SHIPPED = [
    "deepseek_v3_ep",
    "gemma3_fsdp",
    "gpt_oss_ep",
    "llama4_ep",
    "llama_cp",
    "llama_fsdp",
    "llama_tp",
    "mixtral_ep",
    "mixtral_ep_tp",
    "mixtral_fsdp",
    "qwen3_moe_ep",
    "qwen3_next_ep",
]
OWN = """
from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1),
    batch=("fsdp",),
    parameters={"weight": {"fsdp": Shard(0)}},
)
"""


def recipe(**changed):
    values = {"mesh": Mesh(fsdp=-1, expert=4), "batch": ("fsdp",), "parameters": {"w": {"fsdp": Shard(0)}}}
    return Recipe(**{**values, **changed})


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_recipe_loads_by_name_and_documents_its_command(name):
    found = load_recipe(name)
    assert found.name == name
    text = (Path(shardwright.recipes.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    assert f"python scripts/train.py --recipe {name}\n" in text
    assert all(f"\n{part}:" in text for part in ("command", "hardware", "memory", "expected"))


def test_a_recipe_of_ones_own_loads_by_path_and_is_named_after_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8-sig")  # with a byte order mark, as Windows' editors save it
    found = load_recipe(str(tmp_path / "mine.py"))
    assert (found.name, found.batch, found.parameters["weight"]) == ("mine", ("fsdp",), {"fsdp": Shard(0)})


@pytest.mark.parametrize(
    ("name", "program", "meant"),
    [
        ("mixtral_pe", "mine.py", "did you mean 'mixtral_ep'? "),
        ("nosuch", "mine.py", 'output_dir="nosuch", if it is the folder to write into; or '),
        ("nosuch", "shardwright train", ""),
        ("nosuch", str(ROOT / "scripts/train.py"), ""),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_the_list(name, program, meant, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(UserError) as error:
        load_recipe(name)
    assert error.value.instead == f"{meant}one of: auto, {', '.join(SHIPPED)}; or the path of a .py file"


@pytest.mark.parametrize(
    ("text", "asked", "found"),
    [
        ("x = 1\n", "recipe file", "no variable named recipe"),
        ("recipe = {}\n", "recipe file", "recipe is a dict"),
        ("\nrecipe = (\n", "line 2", "SyntaxError"),
        ("\n\nimport nothing_of_that_name\n", "line 3", "ModuleNotFoundError"),
        ("import sys\nsys.exit(1)\n", "line 2", "SystemExit"),
        (OWN.replace('"fsdp": Shard(0)', '"fsdp": Shard(0), "fsdp": Shard(1)'), "line 7: 'fsdp' twice", "line 7"),
        (OWN.replace("}},", '}, "weight": {}},'), "line 7: 'weight' twice", "line 7"),
        (OWN.replace('{"fsdp": Shard', '{"fdsp": Shard'), "line 4: parameters line 'weight': axis 'fdsp'", "fsdp"),
    ],
)
def test_a_file_that_gives_no_recipe_is_named_with_its_line(tmp_path, text, asked, found):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_recipe(str(path))
    assert str(path) in error.value.asked
    assert asked in error.value.asked
    assert found in error.value.found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import os\nfrom trainer import Mesh, Recipe\n", 2),
        ("from trainer.layout.mesh import Mesh\n", 1),
        ("from trainer import *\n", 1),
        ("\nimport trainer\nrecipe = trainer.Recipe()\n", 2),
        ("import trainer.layout.recipe as words\nrecipe = words.Recipe()\n", 1),
        ("from trainer.data import load_corpus\n", 1),
    ],
)
@pytest.mark.parametrize("importable", [False, True])
def test_a_file_that_imports_the_packages_old_name_is_told_the_new_one(tmp_path, monkeypatch, text, line, importable):
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.delitem(sys.modules, "trainer", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "trainer").exists()])
    if importable and re.search("Mesh|Recipe", text):
        (tmp_path / "trainer.py").write_text("class Recipe: ...\nMesh = Recipe\n")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        load_recipe(str(tmp_path / "mine.py"))
    assert error.value.asked == f"recipe file {tmp_path / 'mine.py'}, line {line}"
    assert error.value.instead == "from shardwright import Compute, Mesh, Recipe, Replicate, Shard"


def test_a_module_called_trainer_of_ones_own_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text("AXIS = 'fsdp'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trainer", raising=False)
    (tmp_path / "mine.py").write_text("import trainer\nfrom trainer import AXIS\nassert trainer.AXIS\n" + OWN)
    assert load_recipe(str(tmp_path / "mine.py")).batch == ("fsdp",)
    monkeypatch.delitem(sys.modules, "trainer", raising=False)


def test_a_path_without_a_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="no file"):
        load_recipe(str(tmp_path / "none.py"))


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(OWN)
    assert load_recipe("~/mine.py").name == "mine"


@pytest.mark.parametrize("line", ["from lines_of_mine import TABLE", "from .lines_of_mine import TABLE"])
def test_a_recipe_that_imports_a_file_beside_it_is_told_that_it_is_one_file(tmp_path, line):
    (tmp_path / "lines_of_mine.py").write_text("TABLE = {}\n")
    (tmp_path / "mine.py").write_text(f"{line}\n{OWN}")
    with pytest.raises(UserError, match=r"line 1(.|\n)*a recipe is one file"):
        load_recipe(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parameters": {"w": {"experts": Shard(0)}}}, "did you mean 'expert'"),
        ({"parameters": {"w": {"fsdp": 0}}}, r'"fsdp": Shard\(0\)'),
        ({"parameters": {"w": {"fsdp": Partial()}}}, r"Shard\(dim\), counted from 0 at the front, or Replicate"),
        ({"parameters": {"w": {"fsdp": Shard(-1)}}}, "a negative dimension"),
        ({"parameters": {"w": Shard(0)}}, "a layout says on which axes"),
        ({"parameters": [("w", {})]}, "parameters is a Mapping"),
        ({"optional": {"w": {}}}, "in parameters and in optional"),
        ({"activations": {"m": {"tensor": Shard(0)}}}, "axis 'tensor'"),
        ({"batch": "fsdp"}, "needs the comma"),
        ({"batch": ("fsdp", "data")}, "axis 'data'"),
        ({"batch": ("fsdp", "fsdp")}, "an axis named twice"),
        ({"mesh": {"fsdp": 8}}, "mesh is a Mesh"),
        ({"model": {"hidden_size": 8}}, "model_type"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_as_it_is_written(changed, message):
    with pytest.raises(UserError, match=message):
        recipe(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "bf16"}, "did you mean 'bfloat16'"),
        ({"experts": "capacities"}, "did you mean 'capacity'"),
        ({"attention": "portable"}, "'shardwright', its name now; one of"),
        ({"attention": "flash"}, "one of 'shardwright', 'eager', 'sdpa'"),
        ({"remat": "fulll"}, "did you mean 'full'"),
        ({"remat": 1.5}, "or a share from 0 to 1"),
        ({"remat": True}, "or a share from 0 to 1"),
        ({"capacity_factor": 0}, "capacity_factor=1.25"),
        ({"capacity_factor": "1.25"}, "not a positive number"),
        ({"scan": "yes"}, "scan=True or scan=False"),
    ],
)
def test_a_compute_policy_that_does_not_exist_is_refused_with_the_nearest(changed, message):
    with pytest.raises(UserError, match=message):
        Compute(**changed)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.layers.*.mlp.gate.weight", "model.layers.11.mlp.gate.weight", True),
        ("model.*.weight", "model.layers.0.weight", False),  # a star never crosses a dot
        ("model.*", "model", False),
        ("*.[qkv]_proj.weight", "self_attn.k_proj.weight", True),
        ("*.[qkv]_proj.weight", "self_attn.o_proj.weight", False),
        ("*.*layernorm.weight", "0.input_layernorm.weight", True),
        ("*.*layernorm.weight", "0.input_LayerNorm.weight", False),
    ],
)
def test_patterns_match_segment_by_segment(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_another_mesh_keeps_the_recipes_axes_their_order_and_dcn_factors():
    mesh = recipe(mesh=Mesh(fsdp=-1, expert=4, dcn={"fsdp": 2})).with_mesh("expert=2, fsdp=-1").mesh
    assert mesh == Mesh(fsdp=-1, expert=2, dcn={"fsdp": 2})
    assert list(mesh.axes) == ["fsdp", "expert"]


def test_any_recipe_takes_an_axis_that_splits_rows():
    layouts = {"activations": {"w": {"fsdp": Shard(0)}}, "optional": {"v": {"expert": Shard(1)}}}
    found = recipe(**layouts).with_mesh("fsdp=2,sequence=2,expert=1")
    assert list(found.mesh.axes.items()) == [("fsdp", 2), ("expert", 1), ("sequence", 2)]
    assert found.activations == {"w": {"fsdp": Shard(0), "sequence": Shard(1)}}
    assert found.parameters == {"w": {"fsdp": Shard(0), "sequence": Shard(0)}}
    assert (found.optional, found.batch) == (layouts["optional"], ("fsdp",))


def test_any_recipe_takes_an_axis_of_copies_outermost_and_beside_one_that_splits_rows():
    written = recipe(activations={"w": {"fsdp": Shard(0)}}, mesh=Mesh(fsdp=-1, expert=4, dcn={"fsdp": 2}))
    found = written.with_mesh("fsdp=-1,expert=2,data=4")
    assert list(found.mesh.axes.items()) == [("data", 4), ("fsdp", -1), ("expert", 2)]
    assert found.mesh.dcn == {"data": 1, "fsdp": 2, "expert": 1}
    assert found.batch == ("data", *written.batch)
    assert found.activations == {"w": {"data": Shard(0), "fsdp": Shard(0)}}
    assert (found.parameters, found.optional) == (written.parameters, written.optional)
    both = written.with_mesh("data=2,fsdp=2,sequence=2,expert=1")
    assert list(both.mesh.axes) == ["data", "fsdp", "expert", "sequence"]
    assert both.activations == {"w": {"data": Shard(0), "fsdp": Shard(0), "sequence": Shard(1)}}
    assert both.parameters == {"w": {"fsdp": Shard(0), "sequence": Shard(0)}}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("fsdp=2", "fsdp=2,expert=4"),
        ("fsdp=2,experts=8", "fsdp=2,expert=8"),
        ("fsdp=2,expert=2,tensor=2", "fsdp=4,expert=2"),
        ("fsdp=two,expert=4", "fsdp=-1,expert=4"),
        ("", "fsdp=-1,expert=4"),
        ("fsdp=2,expert=4,fsdp=1", "fsdp=1,expert=4"),
        ("fsdp=2,expert=²", "fsdp=-1,expert=4"),
    ],
)
def test_another_mesh_with_other_axes_is_refused_with_what_was_meant(text, meant):
    with pytest.raises(UserError) as refused:
        recipe().with_mesh(text)
    assert refused.value.instead.partition(";")[0] == f"--mesh {meant}"


def test_the_effective_recipe_reads_back_from_json():
    found = recipe(
        optional={"b": {"fsdp": Replicate()}},
        activations={"m": {}},
        compute=Compute(dtype="bfloat16", scan=False),
        model={"model_type": "llama"},
    )
    read = json.loads(json.dumps(found.as_dict()))
    compute = read.pop("compute")
    assert read == {
        "name": "",
        "mesh": {"axes": {"fsdp": -1, "expert": 4}, "dcn": {"fsdp": 1, "expert": 1}},
        "batch": ["fsdp"],
        "parameters": {"w": {"fsdp": "Shard(0)"}},
        "optional": {"b": {"fsdp": "Replicate()"}},
        "activations": {"m": {}},
        "model": {"model_type": "llama"},
    }
    assert Compute(**compute) == found.compute


def test_recipes_and_plans_need_no_torch_xla():
    code = (
        "import sys, torch\nfrom shardwright import Mesh, Recipe, Shard\n"
        "from shardwright.layout.load_recipe import load_recipe\nfrom shardwright.layout.plan import make_plan\n"
        "r = Recipe(mesh=Mesh(a=-1), batch=('a',), parameters={'weight': {'a': Shard(0)}, 'bias': {}})\n"
        "assert make_plan(r, torch.nn.Linear(4, 8, device='meta'), 4)['weight'].local_shape == (2, 4)\n"
        "assert load_recipe('mixtral_ep')\n"
        "assert not any(name.startswith(('torch_xla', 'transformers')) for name in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
