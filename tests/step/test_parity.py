"""The heart: a sharded step gives the numbers of the plain transformers model, eager, unsharded, dropless, on CPU."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from transformers import (
    DeepseekV2Config,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from shardwright import Compute, Mesh, Recipe, Shard
from shardwright.errors import UserError
from shardwright.layout.auto import auto_recipe
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.meta_model import meta_model
from shardwright.models.experts import dropless_rows
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.ops import jax_call
from shardwright.models.ops.jax_call import lowering_for
from shardwright.step.build import place_model
from shardwright.step.train_step import TrainStep
from shardwright.weights.weight_sources import state_dict_weights
from shardwright.xla.chips import CHIPS, FLAGS
from shardwright.xla.device_mesh import AbstractMesh
from tests.support.cases import (
    LENGTH,
    PLAIN_LAYERS,
    RECIPES,
    ROWS,
    SMALL,
    after_steps,
    check_step,
    make_batch,
    make_case,
    one_layer,
    relative,
)
from tests.support.entered import entered
from tests.support.jobs import job_of

TEN = ("llama_fsdp", "mixtral_ep")  # a dense recipe and one of experts: a later step runs the graph of the first
QWEN2 = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
}


def check_gradients(case, tolerance=1e-5, rows=ROWS):
    """The loss and the gradients equal the plain model's."""
    batch = make_batch(case.config, rows=rows)
    check_step(case.gradients(batch), case.reference_gradients(batch), tolerance)


def entered_for_tpu(case, batch):
    """The functions that are entered while the case's step is lowered for 8 chips of v5p, in the same dtype."""
    recipe, chip = case.recipe.with_compute("dtype=float32"), CHIPS["v5p"]
    flags = " ".join(f"{name}={value}" for name, value in FLAGS[chip.name].items())
    with lowering_for("tpu", flags), entered() as found:
        job = job_of(recipe, case.config, sequence_length=LENGTH)
        mesh = AbstractMesh(job.plan.mesh, chip)
        step = TrainStep(place_model(job, mesh, state_dict_weights(job.model.state_dict())))
        step.trace(batch, step=1, learning_rate=1.0)
    mesh.placed.clear()  # tensors without data, which a sync of all that is lazy would compute
    del step
    gc.collect()
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_gradients_and_adamw_steps_equal_the_plain_model_in_the_code_that_a_tpu_runs(recipe):
    with entered() as here:
        case = make_case(recipe)
        rows = 2 * case.plan.batch_shards  # few: unoptimised code on two cores takes long for each
        batch = make_batch(case.config, rows=rows)
        found = case.first_step(batch)
    check_step(found, case.clipped_reference_gradients(batch))
    steps = 10 if recipe in TEN else 2  # of the others tests/parity.py takes ten too
    worst, name = after_steps(case, steps, taken=1, rows=rows)
    assert worst < 1e-4, f"{name} is off by {worst} after {steps} steps"
    for_tpu = entered_for_tpu(case, batch)
    assert here.common == for_tpu.common
    assert here.kernels == for_tpu.kernels


@pytest.mark.parametrize(
    "compute",
    [
        {"scan": True, "remat": "none"},
        {"scan": False, "remat": "none"},
        {"scan": False, "remat": "full"},
        {"scan": False, "remat": "save_matmuls"},
        {"scan": False, "remat": 0.4},
        {"experts": "dense", "scan": False, "remat": "none"},
    ],
    ids=lambda compute: " ".join(f"{k}={v}" for k, v in compute.items()),
)
def test_scan_remat_and_experts_change_no_number(compute):
    config = one_layer("mixtral_ep", num_hidden_layers=2 if compute["scan"] else 1)
    check_gradients(make_case("mixtral_ep", config, **compute))


@pytest.mark.parametrize("mesh", ["fsdp=1,expert=8", "fsdp=4,expert=2", "fsdp=8,expert=1", "data=2,fsdp=2,expert=2"])
def test_meshes_that_differ_only_in_factors_agree(mesh):
    check_gradients(make_case("mixtral_ep", one_layer("mixtral_ep"), mesh=mesh, **PLAIN_LAYERS))


@pytest.mark.parametrize("recipe", ["llama_fsdp", "mixtral_ep"])
def test_gradients_summed_by_reduce_scatters_as_on_a_v4_or_v5e_equal_the_plain_model(recipe, monkeypatch):
    for module in (jax_call, dropless_rows):
        monkeypatch.setattr(module, "exchanges_beside", lambda: False)
    check_gradients(make_case(recipe))


@pytest.mark.parametrize("beside", [False, True], ids=["collectives alone", "as on the sparse cores"])
@pytest.mark.parametrize("remat", ["none", 1.0])
def test_what_dropless_experts_keep_for_the_backward_changes_no_number(remat, beside, monkeypatch):
    for flag in ("exchanges_beside", "gathers_beside"):
        monkeypatch.setattr(jax_call, flag, lambda: beside)
        monkeypatch.setattr(dropless_rows, flag, lambda: beside)
    mesh = "fsdp=8,inner=1"
    check_gradients(make_case("mixtral_fsdp", one_layer("mixtral_fsdp"), mesh=mesh, experts="dropless", remat=remat))


def test_the_auxiliary_loss_has_its_value_and_gradients_in_the_graph():
    config = one_layer("mixtral_ep")
    case = make_case("mixtral_ep", config, **PLAIN_LAYERS)
    without = make_case("mixtral_ep", config, router_loss=False, **PLAIN_LAYERS)
    batch = make_batch(case.config)
    (loss, gradients), (plain_loss, plain) = case.gradients(batch), without.gradients(batch)
    output = case.reference(**batch, output_router_logits=True, attention_mask=batch["input_ids"] * 0 + 1)
    assert loss - plain_loss == pytest.approx(case.config.router_aux_loss_coef * output.aux_loss.item(), rel=1e-3)
    router = "model.layers.0.mlp.gate.weight"
    assert relative({router: gradients[router]}, {router: plain[router]})[0] > 1e-3


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_qwen2_with_its_biases_under_llama_tp(tied):
    check_gradients(
        make_case("llama_tp", Qwen2Config(**QWEN2, num_key_value_heads=4, tie_word_embeddings=tied), **PLAIN_LAYERS)
    )


def test_qwen3_moe_with_its_query_and_key_norms_under_mixtral_ep():
    config = Qwen3MoeConfig(
        **QWEN2, num_key_value_heads=4, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2
    )
    check_gradients(make_case("mixtral_ep", config, **PLAIN_LAYERS))


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (
            Qwen3MoeConfig(
                **QWEN2,
                num_key_value_heads=4,
                head_dim=16,
                moe_intermediate_size=32,
                num_experts=6,
                num_experts_per_tok=2,
            ),
            "fsdp=2,expert=2,tensor=2",
        ),
        (GemmaConfig(**QWEN2, num_key_value_heads=1, head_dim=16), "fsdp=2,tensor=4"),
    ],
    ids=["qwen3_moe", "gemma"],
)
def test_a_recipe_made_from_the_model_itself(config, mesh):
    model = meta_model(config)
    recipe = auto_recipe(model, experts_modules(model), mesh, 8).recipe
    config.num_local_experts = getattr(config, "num_experts", None)
    check_gradients(make_case(recipe, config, **PLAIN_LAYERS))


def test_tied_llama_under_llama_fsdp_with_the_output_of_the_whole_decoder_laid_out():
    recipe = replace(load_recipe("llama_fsdp"), activations={"model": {"fsdp": Shard(0)}})  # a dictionary of outputs
    check_gradients(make_case(recipe, one_layer("llama_fsdp", tie_word_embeddings=True), **PLAIN_LAYERS))


def test_an_activation_that_its_layout_can_not_have_is_refused_with_its_line():
    recipe = replace(load_recipe("llama_fsdp"), activations={"model.norm": {"fsdp": Shard(3)}})
    case = make_case(recipe, one_layer("llama_fsdp"), **PLAIN_LAYERS)
    with pytest.raises(UserError, match=r"(?s)'model\.norm'.*a tensor of 3 dimensions"):
        case.gradients(make_batch(case.config))


def test_dynamic_rope_within_its_positions_equals_the_plain_model():
    scaled = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    config = one_layer("llama_fsdp", max_position_embeddings=256, rope_parameters=scaled)
    check_gradients(make_case("llama_fsdp", config, **PLAIN_LAYERS))


def test_bfloat16_compute_keeps_float32_weights_and_comes_close():
    case = make_case("mixtral_ep", one_layer("mixtral_ep"), dtype="bfloat16", **PLAIN_LAYERS)
    batch = make_batch(case.config)
    loss, gradients = case.gradients(batch)
    expected_loss, expected = case.reference_gradients(batch)
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    name = "lm_head.weight"
    assert relative({name: gradients[name]}, {name: expected[name]})[0] < 0.05
    assert {str(p.dtype) for p in case.step.parameters.values()} == {"torch.float32"}


def test_heads_that_the_tensor_axis_does_not_divide_equal_the_plain_model():
    sizes = {**SMALL, "hidden_size": 96, "num_hidden_layers": 1}
    case = make_case("llama_tp", LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2), **PLAIN_LAYERS)
    assert case.plan.mesh["tensor"] == 4
    check_gradients(case)


def test_a_decoder_whose_config_says_is_decoder_false_equals_the_plain_model():
    """Its layers are scanned, with biases, partial rotation and a residual that runs beside."""
    layers = "gpt_neox.layers.*"
    recipe = Recipe(
        mesh=Mesh(fsdp=-1),
        batch=("fsdp",),
        parameters={
            f"{layers}.attention.query_key_value.weight": {"fsdp": Shard(0)},
            f"{layers}.mlp.dense_*.weight": {"fsdp": Shard(1)},
        },
        optional={".".join(["*"] * depth): {} for depth in (2, 3)}
        | {f"{layers}.*layernorm.*": {}, f"{layers}.attention.dense.weight": {}, f"{layers}.*.*.bias": {}},
        compute=Compute(remat="full", dtype="float32"),
        name="any",
    )
    config = GPTNeoXConfig(**SMALL, num_attention_heads=4, max_position_embeddings=64)
    assert config.is_decoder is False
    case = make_case(recipe, config)
    batch = make_batch(config)
    check_step(case.first_step(batch), case.clipped_reference_gradients(batch))
    worst, name = after_steps(case, 3, taken=1)
    assert worst < 1e-4, f"{name} is off by {worst} after 3 steps"


def test_devices_that_wait_in_many_collectives_at_once_have_threads_enough():
    """On 8 threads XLA aborts this step; of shorter rows it would run one operation after another."""
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2}
    config = DeepseekV2Config(
        **(SMALL | latent | experts | {"num_hidden_layers": 4}), num_attention_heads=4, first_k_dense_replace=1
    )
    config.num_local_experts = config.n_routed_experts
    model = meta_model(config)
    case = make_case(auto_recipe(model, experts_modules(model), "fsdp=2,expert=4", 8).recipe, config)
    batch = {name: values.reshape(8, 128) for name, values in make_batch(config, rows=64).items()}
    check_step(case.first_step(batch), case.clipped_reference_gradients(batch))


@pytest.mark.parametrize("scan", [True, False])
def test_complex_position_embeddings_reach_scanned_and_rematerialised_layers_whole(scan):
    """The loss hardly tells: without their imaginary part it is off by 3e-7, and the attention's gradients by half."""
    recipe = Recipe(
        mesh=Mesh(fsdp=-1),
        batch=("fsdp",),
        parameters={},
        optional={".".join("*" * depth): {} for depth in range(2, 8)},
        compute=Compute(scan=scan, remat="full", experts="dense", router_loss=False, dtype="float32"),
        name="any",
    )
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    config = DeepseekV2Config(
        **(SMALL | latent | experts), num_attention_heads=4, first_k_dense_replace=0, topk_method="greedy", head_dim=8
    )
    config.num_hidden_layers = 2 if scan else 1
    case = make_case(recipe, config)
    check_gradients(case)
    case.evaluation([make_batch(config)])  # one compile, or it raises: nothing of them falls back to the host
