"""What a share of a layer's values keeps: those first that take most FLOPs a byte, and only what the backward uses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import register_flop_formula

from shardwright.models.layers.graph import LayerGraph
from shardwright.models.layers.remat import Keep, partitioner
from shardwright.models.ops import scopes

ROWS, WIDTH = 32, 8


@torch.library.custom_op("test_remat::two", mutates_args=())
def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.exp(), x.sum(1)


@two.register_fake
def _(x):
    return torch.empty_like(x), x.new_empty(len(x))


def keep_result(ctx, inputs, output):
    ctx.save_for_backward(output[0])


two.register_autograd(lambda ctx, a, b: a * ctx.saved_tensors[0] + b[:, None], setup_context=keep_result)
register_flop_formula(torch.ops.test_remat.two)(lambda x, **_: x[0] * x[1])


def layer(flat: list[torch.Tensor]) -> list[torch.Tensor]:
    """Three products: of a wide input, of a narrow one, and a last one whose value no gradient uses."""
    x, wide, narrow, out = flat
    with scopes.scope("layer.wide"):
        values = x @ wide
    with scopes.scope("layer.narrow"):
        more = torch.tanh(values[:, :WIDTH]) @ narrow
    with scopes.scope("layer.out"):
        return [(torch.tanh(values) * more.sum()) @ out]


def graph(keep: Keep) -> LayerGraph:
    torch.manual_seed(0)
    shapes = [(ROWS, 16 * WIDTH), (16 * WIDTH, 4 * WIDTH), (WIDTH, 2 * WIDTH), (4 * WIDTH, WIDTH)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with scopes.tracing():
        return LayerGraph(layer, inputs, keep)


def products(module: torch.fx.GraphModule) -> int:
    return sum(node.target == torch.ops.aten.mm.default for node in module.graph.nodes)


@pytest.mark.parametrize(
    ("share", "kept"),
    [(0, []), (0.4, ["layer.narrow"]), (0.7, ["layer.wide"]), (1, ["layer.wide", "layer.narrow"])],
)
def test_a_share_keeps_what_takes_most_flops_a_byte_and_fits(share, kept):
    made = graph(Keep(share))
    assert [value.module for value in made.values if value.kept] == kept
    assert [value.module for value in made.values] == ["layer.wide", "layer.narrow"]
    # a gradient of each of three products takes two; of the last one's inputs none is computed again by a product
    assert products(made._forward) == 3
    assert products(made._backward) == 6 + 2 - len(kept)


def test_without_gradients_a_layer_has_a_forward_alone_which_keeps_nothing():
    with torch.no_grad():
        made = graph(Keep(1))
    assert products(made._forward) == 3
    assert (made._backward, made.saved, made.values) == (None, 0, ())


@pytest.mark.parametrize("share", [0, 1])
def test_an_operation_with_several_results_is_not_run_again_where_they_are_kept(share):
    def both(flat):
        exponents, sums = torch.ops.test_remat.two(torch.tanh(flat[0]))
        return [exponents * sums[:, None]]

    with scopes.tracing():
        made = LayerGraph(both, [torch.randn(ROWS, WIDTH, requires_grad=True)], Keep(share))
    again = sum(node.target == torch.ops.test_remat.two.default for node in made._backward.graph.nodes)
    assert again == 1 - share


def test_a_value_says_what_it_takes_and_what_it_saves():
    wide, narrow = graph(Keep(1)).values
    assert (wide.shape, narrow.shape) == ((ROWS, 4 * WIDTH), (ROWS, 2 * WIDTH))
    assert (wide.kind, wide.bytes, wide.flops) == ("mm", 4 * ROWS * 4 * WIDTH, 2 * ROWS * 16 * WIDTH * 4 * WIDTH)
    assert (narrow.bytes, narrow.flops) == (4 * ROWS * 2 * WIDTH, 2 * ROWS * WIDTH * 2 * WIDTH)


def test_each_policy_has_its_own_partitioner():
    assert isinstance(partitioner(0.5), Keep)
    assert partitioner("auto") is partitioner("full")  # until a share is found
    with pytest.raises(KeyError):
        partitioner("half")
