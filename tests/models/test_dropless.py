"""Dropless experts on XLA, equal to transformers' own eager loop on the CPU, for any routing and layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from shardwright.models.adapters.lora import A, B
from shardwright.models.experts import dropless_rows, exchange, grouped_matmul
from shardwright.models.experts.dropless import Dropless
from shardwright.models.ops import tpu_kernels
from shardwright.models.ops.jax_call import jax, lowering_for
from shardwright.models.ops.kernel_cost import Tiles, buffer_bytes
from shardwright.xla.chips import CHIPS

T, H, I, E, K = 128, 16, 32, 8, 2


def make_experts(family):
    torch.manual_seed(0)
    if family == "mixtral":
        experts = MixtralExperts(MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E))
    else:  # transposed weights, biases, interleaved gate and up
        experts = GptOssExperts(GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    experts.config._experts_implementation = "eager"
    return experts


def routing(kind, tokens=T):
    """Top-2 indices [tokens, K] and normalised weights."""
    logits = torch.randn(tokens, E, generator=torch.Generator().manual_seed(1))
    if kind == "skewed":
        logits[:, 0] += 2.0
    if kind == "all to one pair":
        logits[:, 5], logits[:, 1] = 9.0, 8.0
    if kind == "a device's last tokens to one pair":
        logits[tokens // 16 : tokens // 8, 2:4] += 9.0
    if kind == "all to one device":
        logits[:, 2:4] += 9.0
    weights, index = logits.softmax(-1).topk(K, -1)
    return index, (weights / weights.sum(-1, keepdim=True)).detach()


def outputs_and_gradients(function, experts, index, weights, place):
    """The output and the gradients of hidden, routing weights and parameters, by name, on the CPU."""
    shape = (len(index), H)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    direction = place("direction", torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    leaves = {"hidden": x, "router": weights, **{n: p.detach() for n, p in experts.named_parameters()}}
    leaves = {name: place(name, t.clone()).requires_grad_() for name, t in leaves.items()}
    parameters = {name: t for name, t in leaves.items() if name not in ("hidden", "router")}
    # semi-private: torch/nn/utils/stateless.py, torch 2.9
    with torch.nn.utils.stateless._reparametrize_module(experts, parameters):
        y = function(experts, leaves["hidden"], place("index", index), leaves["router"])
        found = torch.autograd.grad((y * direction).sum(), list(leaves.values()))
    torch_xla.sync()
    return {"output": y.cpu(), **{name: g.cpu() for name, g in zip(leaves, found, strict=True)}}


def check(kernel, family, kind, mesh=None, tokens=T, run=None):
    """Assert that the kernel's numbers, or those of ``run`` in its place, are those of the family's eager experts."""
    experts, (index, weights) = make_experts(family), routing(kind, tokens)
    expected = outputs_and_gradients(lambda module, *args: module(*args), experts, index, weights, lambda n, t: t)

    def place(name, t):
        t = t.to("xla")
        if mesh is not None:
            split = (kernel.batch_axes, *[None] * (t.dim() - 1))
            xs.mark_sharding(t, mesh, kernel.weight_specs.get(name, split if len(t) == tokens else (None,) * t.dim()))
        return t

    for name, ours in outputs_and_gradients(run or kernel, experts, index, weights, place).items():
        worst = ((ours - expected[name]).norm() / expected[name].norm()).item()
        assert worst < 1e-5, f"{name} is off by {worst}"


def bound(sizes, batch, specs, experts=(), order=None, **options):
    """A kernel over a mesh with axes of ``sizes``, and the mesh."""
    mesh = xs.Mesh(list(order or range(8)), tuple(sizes.values()), tuple(sizes))
    return Dropless(tuple(sizes.items()), batch, experts, specs, order, **options), mesh


KINDS = ("balanced", "skewed", "all to one pair")
FSDP = {"gate_up_proj": (None, None, "fsdp"), "down_proj": (None, None, "fsdp")}
BIASES = {"gate_up_proj_bias": ("expert", None), "down_proj_bias": (None, None)}
EXPERT = {"gate_up_proj": ("expert", None, "fsdp"), "down_proj": ("expert", None, "fsdp")}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_device_gives_the_eager_models_numbers_for_any_routing(family, kind):
    check(Dropless(), family, kind)


@pytest.mark.parametrize("rows", [160, 48], ids=["two chunks of two blocks", "chunks that tokens don't fill"])
def test_blocks_of_rows_and_chunks_of_tokens_change_no_number(rows):
    check(Dropless(buffer_bytes=rows * H * 4), "gpt_oss", "skewed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "keep", [{}, {"keep": True}, {"keep": True, "keep_all": True}], ids=["computed again", "kept", "weights too"]
)
def test_weights_gathered_over_fsdp(kind, keep):
    kernel, mesh = bound({"fsdp": 8}, ("fsdp",), FSDP, **keep)
    check(kernel, "mixtral", kind, mesh)


@pytest.mark.parametrize(
    ("sizes", "family", "specs", "expert"),
    [({"fsdp": 8}, "mixtral", FSDP, ()), ({"fsdp": 4, "expert": 2}, "gpt_oss", EXPERT | BIASES, ("expert",))],
    ids=["all axes", "all but the experts' own"],
)
def test_weights_gathered_ring_by_ring(sizes, family, specs, expert):
    kernel, mesh = bound(sizes, tuple(sizes), specs, expert, keep=True)
    cut = kernel.in_rings(2)
    assert [n for _, n in cut.axes] == [2, 2, 2]
    assert set(expert) <= {axis for axis, _ in cut.axes}
    check(kernel, family, "skewed", mesh, run=cut)


def test_what_the_first_projection_gives_can_be_kept_where_there_are_biases():
    check(Dropless(keep=True), "gpt_oss", "skewed")


def test_what_the_first_projection_gives_can_be_kept_of_several_blocks():
    check(Dropless(buffer_bytes=160 * H * 4, keep=True), "mixtral", "skewed")


def test_experts_can_be_kept_where_one_device_alone_is_along_their_axis():
    kernel, mesh = bound({"fsdp": 8, "expert": 1}, ("fsdp", "expert"), EXPERT | BIASES, ("expert",), keep=True)
    check(kernel, "gpt_oss", "skewed", mesh)


def test_weights_of_experts_that_are_spread_can_be_gathered_too():
    kernel, mesh = bound({"fsdp": 2, "expert": 4}, ("fsdp", "expert"), EXPERT | BIASES)
    check(kernel, "gpt_oss", "skewed", mesh)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_exchanged_over_the_expert_axis(family, kind):
    kernel, mesh = bound({"fsdp": 2, "expert": 4}, ("fsdp", "expert"), EXPERT | BIASES, ("expert",))
    check(kernel, family, kind, mesh)


def test_devices_in_another_order_give_the_same_numbers():
    order = (3, 1, 4, 0, 5, 7, 2, 6)
    kernel, mesh = bound({"fsdp": 2, "expert": 4}, ("fsdp", "expert"), EXPERT, ("expert",), order)
    check(kernel, "mixtral", "skewed", mesh)


def test_tokens_are_split_over_an_axis_that_splits_no_batch_and_small_chunks_cross_the_expert_axis():
    specs = {"gate_up_proj": ("expert", "tensor", None), "down_proj": ("expert", None, "tensor")}
    kernel, mesh = bound({"tensor": 2, "expert": 4}, ("expert",), specs, ("expert",), buffer_bytes=48 * H * 4)
    check(kernel, "mixtral", "skewed", mesh)


# by how many devices share the experts: as many choices as devices, or fewer; one round, or several that overlap
BY_NEED = {
    "fsdp=2 x expert=4": ({"fsdp": 2, "expert": 4}, 1),
    "fsdp=2 x expert=4, rounds": ({"fsdp": 2, "expert": 4}, 4),
    "fsdp=4 x expert=2, rounds": ({"fsdp": 4, "expert": 2}, 2),
    "fsdp=1 x expert=8, rounds": ({"fsdp": 1, "expert": 8}, 3),
}


@pytest.mark.parametrize("kind", [*KINDS, "a device's last tokens to one pair", "all to one device"])
@pytest.mark.parametrize("mesh", BY_NEED)
def test_tokens_cross_by_need_for_any_routing(mesh, kind):
    check_crossing(*BY_NEED[mesh], kind)


@pytest.mark.parametrize("kind", [*KINDS, "a device's last tokens to one pair", "all to one device"])
@pytest.mark.parametrize("mesh", ["fsdp=2 x expert=4", "fsdp=2 x expert=4, rounds"])
@pytest.mark.parametrize("every", [False, True], ids=["", "weights too"])
def test_what_spread_experts_keep_changes_no_number(mesh, kind, every):
    check_crossing(*BY_NEED[mesh], kind, keep=True, keep_all=every)


def check_crossing(sizes, rounds, kind, **keep):
    tokens, shards = 2048, sizes["expert"]
    most = tokens // 8 * shards // rounds  # tokens that a device holds in a round
    planned = exchange.plan(tokens // 8, K, shards, E // shards, most, overlaps=False)
    assert planned.slots is not None
    assert planned.rounds >= rounds
    options = {"buffer_bytes": most * K * H * 4, **keep}
    kernel, mesh = bound(sizes, ("fsdp", "expert"), EXPERT | BIASES, ("expert",), **options)
    check(kernel, "gpt_oss", kind, mesh, tokens)


@pytest.mark.parametrize("pairs", [False, True], ids=["of tokens", "of pairs"])
def test_windows_end_where_the_slots_do_and_all_devices_run_the_rounds_of_the_one_that_needs_most(pairs):
    jnp, axes = jax.numpy, ("expert",)
    index = np.zeros((4, 100, 1), "int32")  # devices 0 and 1 want device 0 alone, 2 and 3 all in turn
    index[2:] = np.arange(100)[:, None] % 4
    planned = exchange.ExchangePlan(rounds=2, window=50, slots=20, rows=80)
    if pairs:  # each token wants its device twice: room for 40 pairs ends a window as 20 slots do
        index, planned = index.repeat(2, 2), exchange.ExchangePlan(rounds=2, window=50, slots=50, rows=200, pairs=40)

    def run(index_Tk):
        tensors = (jnp.zeros((100, 8)), index_Tk, jnp.zeros(index_Tk.shape))
        found = exchange._ByNeed(tensors, jnp.zeros(1, "int32"), planned, axes, axes)
        return jnp.stack([found.rounds(jnp.int32(0)), found.stop(jnp.int32(0)), found.stop(jnp.int32(90))])

    rounds, first, last = jax.vmap(run, axis_name="expert")(jnp.asarray(index)).T.tolist()
    assert (rounds, first, last) == ([5] * 4, [20, 20, 50, 50], [100] * 4)


@pytest.mark.parametrize(
    ("overlaps", "given", "expected"),
    [
        (True, (49152, 2, 4, 2), (8, 2848)),  # Mixtral-8x7B over 4: a device gets 2,848 of another's 6,144 tokens
        (True, (4096, 8, 16, 16), (4, 480)),  # DeepSeek-V3 over 16
        (True, (4096, 4, 4, 32), (2, 1488)),  # GPT-OSS-120B over 4: a tile of rows for each expert
        (True, (4096, 8, 2, 64), (2, None)),  # of 8 choices over 2 devices nearly all need both
        (True, (4096, 8, 1, 128), (1, None)),
        (False, (8192, 2, 4, 2), (1, 3768)),
        (True, (16, 2, 4, 2), (1, None)),  # too few tokens to foresee how many a device gets
    ],
    ids=str,
)
def test_the_form_that_sends_less_in_as_many_rounds_as_pay(overlaps, given, expected):
    planned = exchange.plan(*given, most=10**6, overlaps=overlaps)
    assert (planned.rounds, planned.slots) == expected
    assert planned.rounds * planned.window == given[0]


# of experts that are planned for, not computed
SHAPE = {"activation": None, "names": (), "out_first": True, "lora_scales": (0.0, 0.0), "trained": (), "specs": ()}
SHAPE |= {"widths": (0, 0), "unpacking": ()}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("tokens", [24576, 4096])
def test_blocks_hold_a_balanced_routing_of_experts_that_are_spread_and_an_eighth_more(tokens, blocks):
    rows, row_bytes = tokens * K // 8, 57344  # of a round of Mixtral-8x7B's gate and up, on v5p
    spread = {"axes": ("fsdp", "expert"), "expert_axes": ("expert",), "expert_shards": 4}
    buffer = {"buffer_bytes": 2 * rows * row_bytes // blocks, "flops_a_byte": CHIPS["v5p"].flops_a_byte}
    with lowering_for("tpu", "xla_tpu_enable_async_all_to_all=true"):
        planned = dropless_rows.ExpertShards(**SHAPE, **spread, **buffer).plan(tokens, K, 2, 1, row_bytes)
    assert planned.crossing.window * 8 == tokens
    assert planned.block == math.ceil(rows * 9 // 8 / (blocks * planned.tile.rows)) * planned.tile.rows


@pytest.mark.parametrize(("chip", "sequences", "at_once"), [("v6e", 8, True), ("v6e", 16, False), ("v5p", 8, False)])
def test_a_chip_that_waits_for_bytes_has_more_rows_in_a_block(chip, sequences, at_once):
    tokens, row_bytes, flops_a_byte = sequences * 4096, 57344, CHIPS[chip].flops_a_byte  # of Mixtral-8x7B, gathered
    whole = {"axes": ("fsdp", "inner"), "expert_axes": (), "expert_shards": 1}
    bound = {"buffer_bytes": buffer_bytes(flops_a_byte), "flops_a_byte": flops_a_byte}
    planned = dropless_rows.ExpertShards(**SHAPE, **whole, **bound).plan(tokens, K, 8, 8192, row_bytes)
    assert planned.at_once == at_once


@pytest.mark.parametrize(
    ("chip", "sequences", "rounds"),
    [("v6e", 2, 1), ("v6e", 8, 1), ("v6e", 16, 2), ("v5p", 2, 1), ("v5p", 4, 1), ("v5p", 8, 8)],
)
def test_tokens_cross_in_one_round_where_its_rows_fit_into_one_block(chip, sequences, rounds):
    spread = {"axes": ("fsdp", "expert"), "expert_axes": ("expert",), "expert_shards": 4}
    flops_a_byte = CHIPS[chip].flops_a_byte
    local = dropless_rows.ExpertShards(
        **SHAPE, **spread, flops_a_byte=flops_a_byte, buffer_bytes=buffer_bytes(flops_a_byte)
    )
    with lowering_for("tpu", "xla_tpu_enable_async_all_to_all=true"):
        planned = local.plan(sequences * 4096, K, 2, 8192, 57344)  # Mixtral-8x7B over 4
    assert (planned.crossing.rounds, planned.at_once) == (rounds, rounds == 1)
    assert planned.block >= planned.crossing.window * K


def test_one_planned_round_has_room_in_one_block_for_what_a_pair_of_devices_may_send():
    spread = {"axes": ("fsdp", "expert"), "expert_axes": ("expert",), "expert_shards": 4}
    fast = {"buffer_bytes": 2**32, "flops_a_byte": CHIPS["v6e"].flops_a_byte}
    planned = dropless_rows.ExpertShards(**SHAPE, **spread, **fast).plan(8192, K, 2, 8192, 57344)
    assert planned.at_once
    assert (
        planned.crossing.pairs == 4352
    )  # of a balanced routing it is 4,096, and its slots are 5 % more than that needs
    assert planned.block == 4 * 4352
    # of few tokens a random routing may send a device much more than its part, and one has room for it
    assert exchange.random_pairs(256, K, 4) == 384
    assert exchange.random_pairs(4, 8, 4) == 32


def test_tokens_cross_two_axes_by_need():
    specs = dict.fromkeys(("gate_up_proj", "down_proj"), (("expert", "inner"), None, "fsdp"))
    sizes = {"fsdp": 2, "expert": 2, "inner": 2}
    kernel, mesh = bound(sizes, tuple(sizes), specs, ("expert", "inner"))
    check(kernel, "mixtral", "skewed", mesh, tokens=1024)


def test_no_factor_goes_into_a_product_with_its_rank_as_the_last_dimension():
    """A TPU keeps the last dimension in tiles of 128 columns: a rank of 16 would take eight times the memory."""
    factors = {
        "down_proj" + A: (4, 16, 256),
        "down_proj" + B: (4, 512, 16),
    }  # [experts, rank, in], [experts, out, rank]
    given = {**SHAPE, "names": tuple(factors), "unpacking": (None, None), "specs": (((), (), ()),) * 2}
    shards = dropless_rows.ExpertShards(
        **given, axes=(), expert_axes=(), expert_shards=1, buffer_bytes=1, flops_a_byte=0
    )
    for number, (name, shape) in enumerate(factors.items()):
        factor = jax.numpy.zeros(shape)
        assert shards.whole(number, factor).shape[-1] > 16, name
        assert shards.contract_last(number) == name.endswith(A), "[experts, out, in], or else [experts, in, out]"


def test_windows_that_tokens_do_not_fill():
    assert exchange.plan(97, 2, 4, 2, most=10, overlaps=False) == exchange.ExchangePlan(33, 3, None, 12)


def _grouped_products(rows, gmm=(1024, 1024), tgmm=(512, 1024)):
    """The products of 256 rows: 4 groups, one of them empty, some ending within a tile, and 56 rows behind the last."""
    random = np.random.default_rng(0)
    x, y, w, into = (
        jax.numpy.asarray(random.standard_normal(shape), "float32")
        for shape in ((256, 128), (256, 256), (4, 256, 128), (4, 256, 128))
    )
    sizes, tile = jax.numpy.asarray([70, 0, 100, 30]), Tiles(rows, gmm, tgmm)
    yield grouped_matmul.multiply(x, w, sizes, tile, contract_last=True)[:200]
    yield grouped_matmul.multiply(y, w, sizes, tile, contract_last=False)[:200]
    parts = jax.numpy.zeros((256, 128))
    for first in (jax.numpy.int32(0), jax.numpy.int32(2)):
        part = grouped_matmul.Part(first, parts)
        parts = grouped_matmul.multiply(y, w[first : first + 2], sizes, tile, part, contract_last=False)
    yield parts[:200]
    yield grouped_matmul.outer(y, x, sizes, tile, into)


# all widths at once, and several tiles of each
@pytest.mark.parametrize("widths", [{}, {"gmm": (128, 256), "tgmm": (128, 128)}], ids=["whole", "in tiles"])
def test_the_tpus_kernels_give_the_plain_operations_numbers(widths, monkeypatch):
    plain = list(_grouped_products(64))
    np.testing.assert_array_equal(plain[1], plain[2], "groups' products, two at a time")
    monkeypatch.setattr(tpu_kernels, "INTERPRETED", True)
    monkeypatch.setattr(grouped_matmul, "kernels", lambda: tpu_kernels)
    for ours, theirs in zip(_grouped_products(128, **widths), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_what_it_cannot_do_is_refused_with_the_reason():
    experts, (index, weights) = make_experts("mixtral"), routing("balanced")
    x = torch.zeros(T, H)
    with pytest.raises(ValueError, match="on cpu"):
        Dropless()(experts, x, index, weights)
    with pytest.raises(ValueError, match="127 tokens over 8 devices"):
        Dropless((("fsdp", 8),), ("fsdp",))(experts, x[1:], index[1:], weights[1:])
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="norm after an expert"):
        Dropless()(experts, x, index, weights)
