"""MTP layers: the loss of DeepSeek-V3's report and every gradient, beside plain layers of transformers on the CPU."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from shardwright.arguments.training import TrainingArguments
from shardwright.data.rows.batches import as_batch
from shardwright.errors import UserError
from shardwright.job import Job
from shardwright.layout.auto import auto_recipe
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.facts import facts_of
from shardwright.models.ops.labels import IGNORE
from shardwright.models.tiny import tiny_config
from shardwright.step.build import evaluation_step, place_model
from shardwright.step.train_step import TrainStep
from shardwright.weights.weight_sources import state_dict_weights
from shardwright.xla.device_mesh import build_mesh
from tests.step.test_packing import apart, packed
from tests.support.cases import Case, check_near, plain_model, randomise, small_config
from tests.support.jobs import job_of

WEIGHT = 0.3
FAMILIES = {
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    "glm4_moe": {"num_nextn_predict_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2},  # whose config says nothing of its one layer
}


def config_of(family: str) -> PretrainedConfig:
    if family == "glm4_moe":  # has no recipe of its own
        return tiny_config(family, vocab_size=256, num_hidden_layers=2, **FAMILIES[family])
    return small_config(load_recipe(f"{family}_ep"), **FAMILIES[family])


class Head(nn.Module):
    """MTP layer k of the report: h' = M [RMSNorm(Emb(t_{i+k})); RMSNorm(h_i)], then a decoder layer, and a norm."""

    def __init__(self, reference: PreTrainedModel, number: int) -> None:
        super().__init__()
        config, norm = copy.deepcopy(reference.config), type(reference.model.norm)
        config.num_hidden_layers = number + 1
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        width = config.hidden_size
        self.block = type(reference.model.layers[-1])(config, number)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.enorm, self.hnorm, self.norm = (norm(width, eps=config.rms_norm_eps) for _ in range(3))

    def forward(self, hidden, embeddings, rotary):
        length = hidden.shape[1]
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = torch.arange(length)[None]
        return self.norm(self.block(joined, position_embeddings=rotary(joined, positions), attention_mask=mask))


def heads_of(reference: PreTrainedModel, count: int) -> nn.ModuleList:
    depth = reference.config.num_hidden_layers
    torch.manual_seed(1)
    heads = nn.ModuleList(Head(reference, depth + k) for k in range(count))
    for name, parameter in heads.named_parameters():
        if parameter.dim() > 2 or "gate" in name:  # transformers leaves them unwritten
            nn.init.normal_(parameter, std=0.05)
    randomise(heads)
    return heads


def in_the_model(depth: int, named) -> dict[str, torch.Tensor]:
    """Values of the plain heads' state under the names that they have in our model."""
    found = {}
    for name, value in named:
        k, rest = name.split(".", 1)
        rest = "shared_head." + rest if rest.startswith("norm.") else rest.removeprefix("block.")
        found[f"model.layers.{depth + int(k)}.{rest}"] = value
    return found


def plain_losses(
    reference: PreTrainedModel, heads: nn.ModuleList, batch, **router
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the next token, and the mean over depths of the report's losses of further ones."""
    ids, labels = batch["input_ids"], batch["labels"]
    hidden = reference.model(ids, attention_mask=batch["attention_mask"]).last_hidden_state
    scored, losses = (labels[:, 1:] != IGNORE).sum(), []
    for k, head in enumerate(heads, start=1):
        hidden = head(hidden[:, :-1], reference.model.embed_tokens(ids[:, k:]), reference.model.rotary_emb)
        logits = reference.lm_head(hidden[:, :-1]).flatten(0, 1)
        losses.append(
            F.cross_entropy(logits, labels[:, k + 1 :].flatten(), ignore_index=IGNORE, reduction="sum") / scored
        )
    return reference(**batch, use_cache=False, **router).loss, torch.stack(losses).mean()


def make(family: str, compute: str, accumulation: int, mesh_of: str | None) -> tuple[Case, nn.ModuleList]:
    config = config_of(family)
    reference = plain_model(config)
    heads = heads_of(reference, FAMILIES[family].get("num_nextn_predict_layers", 1))
    facts = facts_of(config, True)
    made = family == "glm4_moe"
    recipe = auto_recipe(facts.model, facts.experts, None, 8).recipe if made else load_recipe(f"{family}_ep")
    options = {"train_mtp": True, "mtp_loss_weight": WEIGHT, "gradient_accumulation_steps": accumulation}
    recipe = recipe if mesh_of is None else recipe.with_mesh(mesh_of)
    job = job_of(recipe.with_compute(compute), config, **options)
    mesh, depth = build_mesh(job.recipe.mesh), config.num_hidden_layers
    assert dict(job.plan.mesh)["expert"] > 1
    assert (job.plan.sequence is None) == (mesh_of is None)
    weights = {**reference.state_dict(), **in_the_model(depth, heads.state_dict().items())}
    placed = place_model(job, mesh, state_dict_weights({name: values.clone() for name, values in weights.items()}))
    return Case(job.recipe, config, reference, job.stored, TrainStep(placed), evaluation_step(placed), mesh), heads


@pytest.mark.parametrize(
    ("family", "compute", "accumulation", "mesh"),
    [
        ("deepseek_v3", "scan=True,remat=full", 1, "fsdp=-1,expert=2,sequence=2"),  # rows in pieces on two devices
        ("glm4_moe", "scan=False,remat=none", 2, None),
        ("qwen3_next", "scan=False,remat=none", 1, None),
    ],
)
def test_rows_have_the_losses_and_gradients_of_their_documents_by_plain_layers(family, compute, accumulation, mesh):
    case, heads = make(family, compute, accumulation, mesh)
    # the linear attention of Qwen3-Next keeps no documents apart, so that each has a row to itself
    columns = packed(16, packing=family != "qwen3_next")
    assert family == "qwen3_next" or columns["segment_ids"].max() > 2
    found, gradients = case.first_step(as_batch(columns))
    router = {"output_router_logits": True} if case.recipe.compute.router_loss else {}
    loss, further = plain_losses(case.reference, heads, apart(columns), **router)
    (loss + WEIGHT * further).backward()
    torch.nn.utils.clip_grad_norm_([*case.reference.parameters(), *heads.parameters()], 1.0)
    expected = {name: p.grad for name, p in case.reference.named_parameters() if p.grad is not None}
    own = ((name, p.grad) for name, p in heads.named_parameters() if p.grad is not None)
    expected |= in_the_model(case.config.num_hidden_layers, own)
    assert found == pytest.approx((loss + WEIGHT * further).item(), rel=1e-5)
    assert case.step.read_metrics().logged["mtp_loss"] == pytest.approx(further.item(), rel=1e-5)
    check_near(gradients, expected)


@torch.no_grad()
def test_the_plain_layers_give_what_transformers_own_mtp_model_gives():
    reference = plain_model(config_of("glm4_moe"))
    heads, theirs = heads_of(reference, 1), MtpModel(reference, 1).eval()
    theirs.config._attn_implementation = theirs.config._experts_implementation = "eager"
    renamed = {".block.": ".mtp_block.", ".norm.": ".post_norm."}
    state = {n: v for name, v in heads.state_dict().items() for n in [name]}
    for ours, other in renamed.items():
        state = {re.sub(f"^0{re.escape(ours)}", f"0{other}", name): value for name, value in state.items()}
    theirs.layers.load_state_dict(state)
    ids, hidden = torch.arange(8)[None], torch.randn(1, 8, reference.config.hidden_size)
    given = theirs.forward_layer(0, hidden, torch.arange(8)[None], None, input_ids=ids)
    found = heads[0](hidden, reference.model.embed_tokens(ids), reference.model.rotary_emb)
    assert torch.allclose(found, given, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"train_mtp": True, "lora_r": 4}, "--lora_r 4"),
        ({"train_mtp": True, "objective": "dpo"}, "DPO, which learns"),
        ({"mtp_loss_weight": 0.3}, "no --train_mtp"),
        ({"train_mtp": True, "mtp_loss_weight": 0.0}, "0.0"),
        ({"train_mtp": True, "recipe": "llama_fsdp"}, "a family whose MTP layers are not known here"),
    ],
    ids=["an adapter", "pairs", "a weight of nothing", "no weight", "a family without any"],
)
def test_what_mtp_layers_can_not_be_trained_with_is_refused(options, found):
    with pytest.raises(UserError, match=re.escape(found)):
        Job.resolve(TrainingArguments(**{"recipe": "deepseek_v3_ep", **options}), lambda: 8)
