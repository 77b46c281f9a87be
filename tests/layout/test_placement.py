"""`Shard` and `Replicate` of the public face are DTensor's, whichever of the two a recipe imports."""

import pickle
import subprocess
import sys

import pytest
import torch.distributed.tensor as dtensor

from shardwright import Mesh, Recipe, Replicate, Shard
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.partition import partition_spec


def test_placements_are_made_by_dtensor_itself():
    assert type(Shard(0)) is dtensor.Shard
    assert type(Replicate()) is dtensor.Replicate
    assert Shard(1) == Shard(dim=1) == dtensor.Shard(1) != Shard(0)
    assert pickle.loads(pickle.dumps(Shard(1))) == dtensor.Shard(1)
    with pytest.raises(TypeError):
        Shard()


def test_isinstance_accepts_what_it_accepts_of_dtensors_classes():
    for value in (dtensor.Shard(0), dtensor.Replicate(), dtensor.Partial(), 0, None, dtensor.Shard):
        assert isinstance(value, Shard) is isinstance(value, dtensor.Shard)
        assert isinstance(value, Replicate) is isinstance(value, dtensor.Replicate)
        assert isinstance(value, Shard | Replicate) is isinstance(value, dtensor.Shard | dtensor.Replicate)


def test_nothing_is_a_placement_before_torch_is_imported_and_asking_does_not_import_it():
    code = (
        "import sys\nfrom shardwright import Replicate, Shard\nassert not isinstance(0, Shard | Replicate)\n"
        "assert 'torch' not in sys.modules\nassert isinstance(Shard(0), Shard)\nassert 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["shardwright", "torch.distributed.tensor"])
def test_a_recipe_takes_placements_of_the_face_and_of_torch(tmp_path, module):
    (tmp_path / "mine.py").write_text(
        f"from {module} import Replicate, Shard\nfrom shardwright import Mesh, Recipe\n"
        "layout = {'a': Shard(0), 'b': Replicate()}\n"
        "recipe = Recipe(mesh=Mesh(a=-1, b=2), batch=('a',), parameters={'weight': layout})\n"
    )
    found = load_recipe(str(tmp_path / "mine.py"))
    assert found.parameters == {"weight": {"a": dtensor.Shard(0), "b": dtensor.Replicate()}}
    assert found.as_dict()["parameters"] == {"weight": {"a": "Shard(0)", "b": "Replicate()"}}
    assert partition_spec(found.parameters["weight"], 2, ("a", "b")) == ("a", None)


def test_one_recipe_may_mix_both():
    mixed = {"w": {"a": Shard(0)}, "v": {"a": dtensor.Shard(0)}}
    recipe = Recipe(mesh=Mesh(a=-1), batch=("a",), parameters=mixed)
    assert recipe.parameters["w"] == recipe.parameters["v"]
