"""The five lessons that the field paid for, each a test by its name; and what placement refuses."""

from __future__ import annotations

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch import nn

from shardwright.errors import UserError
from shardwright.layout.mesh import Mesh
from shardwright.layout.partition import partition_spec
from shardwright.layout.placement import Replicate, Shard
from shardwright.layout.plan import make_plan
from shardwright.layout.recipe import Recipe
from shardwright.xla import sharding
from shardwright.xla.batch import batch_spec, place_batch
from shardwright.xla.device_mesh import build_mesh

BATCH = ("fsdp", "tensor")


@pytest.fixture(scope="module")
def mesh():
    return build_mesh(Mesh(fsdp=2, tensor=4))


def text(tensor):
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def test_place_after_moving_is_one_call_and_misuse_names_the_parameter_and_its_device(mesh):
    placed = sharding.place("w", torch.arange(16.0).reshape(4, 4), mesh, ("tensor", None))
    assert placed.device.type == "xla"
    assert text(placed) == "{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    assert torch.equal(placed.cpu(), torch.arange(16.0).reshape(4, 4))
    with pytest.raises(UserError, match=r"place model\.norm\.weight[\s\S]*device meta"):
        sharding.place("model.norm.weight", torch.empty(4, device="meta"), mesh, (None,))
    with pytest.raises(UserError, match=r"model\.norm\.weight[\s\S]*on device cpu, not on XLA"):
        sharding.check_placed({"model.norm.weight": torch.ones(4)}, mesh, {"model.norm.weight": (None,)})


def test_placements_by_hand_not_parallelize_module_give_the_megatron_pair_with_biases(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    recipe = Recipe(
        mesh=Mesh(fsdp=2, tensor=4),
        batch=("fsdp",),
        parameters={
            "0.weight": {"tensor": Shard(0)},
            "0.bias": {"tensor": Shard(0)},
            "2.weight": {"tensor": Shard(1)},
            "2.bias": {"tensor": Replicate()},
        },
    )
    plan = make_plan(recipe, model, 8)
    x = torch.randn(4, 8)
    model(x).square().mean().backward()
    placed = {}
    for entry in plan.parameters:
        spec = partition_spec(entry.layout, len(entry.shape), tuple(plan.mesh))
        value = model.get_parameter(entry.name).detach()
        placed[entry.name] = sharding.place(entry.name, value, mesh, spec).requires_grad_()
    inputs = place_batch({"x": x}, mesh, ("fsdp",))["x"]
    loss = torch.func.functional_call(model, placed, (inputs,)).square().mean()
    gradients = torch.autograd.grad(loss, list(placed.values()))
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert torch.allclose(gradient.cpu(), parameter.grad, atol=1e-6), name


def test_two_axes_on_one_dimension_both_shard_it(mesh):
    # torch_xla's own convert_to_xla_partition_spec forgets the first of the two
    spec = partition_spec({"fsdp": Shard(0), "tensor": Shard(0)}, 2, ("fsdp", "tensor"))
    assert text(sharding.place("w", torch.zeros(16, 3), mesh, spec)) == "{devices=[8,1]0,1,2,3,4,5,6,7}"


def test_batches_of_mixed_rank_are_all_laid_out_by_their_own_rank(mesh):
    batch = {
        "input_ids": torch.zeros(8, 5, dtype=torch.int64),
        "weights": torch.zeros(8),
        "images": torch.zeros(8, 3, 4, 4),
        "scale": torch.tensor(2.0),
    }
    placed = place_batch(batch, mesh, BATCH)
    specs = {name: batch_spec(t.dim(), BATCH) for name, t in batch.items()}
    sharding.check_placed(placed, mesh, specs)
    assert [text(placed[name]) for name in batch] == [
        "{devices=[8,1]0,1,2,3,4,5,6,7}",
        "{devices=[8]0,1,2,3,4,5,6,7}",
        "{devices=[8,1,1,1]0,1,2,3,4,5,6,7}",
        "{replicated}",
    ]


def test_a_batch_that_arrived_otherwise_than_planned_is_refused(mesh):
    replicated = sharding.place("input_ids", torch.zeros(8, 5), mesh, (None, None))
    with pytest.raises(UserError, match=r"input_ids laid out as[\s\S]*has it as \{replicated\}"):
        sharding.check_placed({"input_ids": replicated}, mesh, {"input_ids": (BATCH, None)})


def test_gradient_sharding_is_out_of_place_and_reaches_the_gradient(mesh):
    x = sharding.place("x", torch.ones(8, 4), mesh, (None, None)).requires_grad_()
    y = sharding.constrain(x, mesh, (BATCH, None))
    assert y is not x
    assert text(x) == "{replicated}"
    (gradient,) = torch.autograd.grad((y * 3).sum(), x)
    assert text(gradient) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    assert torch.equal(gradient.cpu(), torch.full((8, 4), 3.0))
    assert text(x) == "{replicated}"


def test_gradient_sharding_is_one_opaque_op_for_aotautograd(mesh):
    from functorch.compile import aot_function, make_boxed_func

    graphs = []

    def record(graph, inputs):
        graphs.append(str(graph.graph))
        return make_boxed_func(graph)

    x = torch.ones(8, 4, device="xla", requires_grad=True)
    aot_function(lambda t: sharding.constrain(t * 2, mesh, (BATCH, None)), fw_compiler=record, bw_compiler=record)(
        x
    ).sum().backward()
    assert len(graphs) == 2
    assert all("shardwright.constrain" in graph for graph in graphs)


def test_the_mesh_is_a_design_decision_its_first_axis_is_outermost(mesh):
    first = sharding.place("w", torch.arange(8.0), mesh, ("fsdp",))
    last = sharding.place("w", torch.arange(8.0), mesh, ("tensor",))
    # `fsdp`, named first, splits into neighbours-of-four; `tensor`, named last, runs over adjacent devices
    assert text(first) == "{devices=[2,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    assert text(last) == "{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"


def test_a_spec_of_another_rank_is_refused(mesh):
    with pytest.raises(UserError, match="write a spec of 2 entries"):
        sharding.place("w", torch.zeros(8, 8), mesh, (BATCH,))


def test_a_placed_tensor_comes_back_whole_without_a_compile(mesh):
    value = torch.arange(16.0 * 8).reshape(16, 8)
    compiles = (met.metric_data("CompileTime") or (0,))[0]
    for spec in [(None, None), ("fsdp", None), (BATCH, None), ("tensor", "fsdp")]:
        assert torch.equal(sharding.fetch(sharding.place("w", value, mesh, spec)), value)
    assert torch.equal(sharding.fetch(sharding.place("b", value[0], mesh, ("tensor",))), value[0])
    assert (met.metric_data("CompileTime") or (0,))[0] == compiles
