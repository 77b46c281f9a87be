"""LoRA gives PEFT's numbers: loss, every factor's gradient, and the factors after steps; the base is left alone."""

from __future__ import annotations

import pytest
import torch

from shardwright.checkpoint.trained_model import TrainedModel
from shardwright.layout.placement import Shard
from shardwright.models.adapters.lora import A0, B0, base_of, own_parameters
from tests.support.adapters import make_adapted
from tests.support.cases import PLAIN_LAYERS, check_near, check_step, make_batch, relative
from tests.support.jobs import job_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21.2
    # it looks for fused weights among modules, and honours them all the same
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


def check_gradients(adapted):
    batch = make_batch(adapted.case.config)
    check_step(adapted.case.gradients(batch), adapted.reference_gradients(batch))


@pytest.mark.parametrize(
    ("recipe", "accumulation", "options"), [("llama_tp", 2, {}), ("mixtral_ep", 1, {"use_rslora": True})], ids=str
)
def test_loss_gradients_and_adamw_steps_equal_pefts(recipe, accumulation, options):
    adapted = make_adapted(recipe, accumulation=accumulation, options=options)
    batch = make_batch(adapted.case.config)
    check_step(adapted.case.first_step(batch, 1e-3), adapted.clipped_reference_gradients(batch))
    adapted.train_both(4, learning_rate=1e-3, taken=1)
    after = adapted.case.parameters()
    ours = {name: values for name, values in after.items() if base_of(name) is not None}
    check_near(ours, adapted.in_our_form({k: p.detach() for k, p in adapted.theirs.items()}), 1e-4)
    assert relative(ours, adapted.start)[0] > 1e-3
    assert all(torch.equal(values, adapted.base[name]) for name, values in after.items() if name not in ours)


@pytest.mark.parametrize(
    ("recipe", "layers", "options"),
    [
        ("mixtral_ep_tp", 1, {}),
        (
            "mixtral_fsdp",
            2,
            {
                "lora_target": "q_proj,experts.gate_up_proj,experts.down_proj",
                "rank_pattern": "layers.1.mlp.experts.down_proj=2",
                "alpha_pattern": "gate_up_proj=3.5",
            },
        ),
        ("gpt_oss_ep", 1, {}),  # weights stored the other way round, and biases
    ],
    ids=str,
)
def test_dropless_experts_give_pefts_loss_and_gradients(recipe, layers, options):
    changes = {"num_hidden_layers": layers}
    check_gradients(make_adapted(recipe, options=options, changes=changes, experts="dropless", **PLAIN_LAYERS))


@pytest.mark.parametrize(
    ("recipe", "options", "changes", "compute"),
    [
        (  # dropout, in layers that differ, and weights that are trained whole
            "llama_tp",
            {
                "lora_dropout": 0.3,
                "rank_pattern": "layers.1.self_attn.q_proj=6,v_proj=2",
                "modules_to_save": "lm_head,embed_tokens,norm",
            },
            {},
            PLAIN_LAYERS,
        ),
        (
            "llama_fsdp",
            {
                "use_dora": True,
                "lora_dropout": 0.2,
                "init_lora_weights": "olora",
                "use_rslora": True,
                "trainable_token_indices": "30:40,7,lm_head=7:9",
            },
            {},
            {},
        ),
        (  # a loop over layers without factors, and rows of a head that is the embedding
            "llama_tp",
            {
                "init_lora_weights": "pissa",
                "layers_to_transform": "2:4",
                "exclude_modules": "v_proj",
                "trainable_token_indices": "30:40,7",
            },
            {"num_hidden_layers": 4, "tie_word_embeddings": True},
            {},
        ),
    ],
    ids=["dropout", "dora", "pissa"],
)
def test_what_peft_has_beside_plain_lora_gives_pefts_loss_and_gradients(recipe, options, changes, compute):
    adapted = make_adapted(recipe, options=options, changes=changes, **compute)
    check_gradients(adapted)
    if adapted.job.lora.start:  # what the factors began as goes into checkpoints, though nothing trains it
        saved = dict(adapted.case.model.named_parameters())
        kept = TrainedModel(adapted.job, adapted.case.model, None, {}, None, None, None).saved(saved).keys()
        names = {member for name in kept for member in adapted.job.stored.members(name)}
        assert names == own_parameters(adapted.job.adapted).keys()
        assert {name for name in names if name.endswith((A0, B0))} <= adapted.job.unused[0]


def test_the_frozen_model_has_neither_gradient_nor_moments_and_lies_in_bfloat16():
    job = job_of("mixtral_ep", lora_r=4)
    factors = [entry for entry in job.stored.parameters if base_of(entry.name) is not None]
    others = [entry for entry in job.stored.parameters if base_of(entry.name) is None]
    assert {entry.dtype for entry in others} == {torch.bfloat16}
    assert {entry.dtype for entry in factors} == {torch.float32}
    assert {entry.name for entry in others} == job.untrained
    size = sum(entry.bytes_per_device for entry in factors)
    assert job.plan.totals == {
        "parameters_bytes": size + sum(entry.bytes_per_device for entry in others),
        "gradients_bytes": size,
        "optimizer_bytes": 2 * size,
    }


def test_factors_get_their_layout_from_the_line_of_their_weight():
    plan = job_of("mixtral_ep_tp", lora_r=4).plan

    def layout(name):
        entry = plan[f"model.layers.0.{name}"]
        return {axis: placement.dim for axis, placement in entry.layout.items()}, entry.local_shape

    # the line: tensor splits the outputs, fsdp and expert store the inputs
    assert plan["model.layers.0.self_attn.q_proj.weight"].layout == {
        "fsdp": Shard(1),
        "expert": Shard(1),
        "tensor": Shard(0),
    }
    assert layout("self_attn.q_proj.weight_lora_A") == ({"fsdp": 1, "expert": 1}, (4, 32))
    assert layout("self_attn.q_proj.weight_lora_B") == ({"fsdp": 0, "expert": 0, "tensor": 0}, (16, 4))
    assert layout("mlp.experts.down_proj_lora_A") == ({"fsdp": 2, "expert": 0, "tensor": 2}, (4, 4, 64))
    assert layout("mlp.experts.down_proj_lora_B") == ({"fsdp": 1, "expert": 0}, (4, 64, 4))
