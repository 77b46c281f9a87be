"""Rows split over the axis ``sequence``: any recipe's step gives the plain model's numbers, packed rows too."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import LlamaConfig

from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from tests.support.cases import LENGTH, PLAIN_LAYERS, SMALL, check_step, make_batch, make_case, one_layer, small_config
from tests.support.jobs import job_of


def rows_of(case):
    """Two a shard and micro-batch: kernels pad a piece to 128 tokens, and code without optimisation takes long."""
    return 2 * case.plan.batch_shards * case.step.accumulation


def check_gradients(case, batch=None, expected=None):
    batch = make_batch(case.config, rows=rows_of(case)) if batch is None else batch
    check_step(case.gradients(batch), case.reference_gradients(batch) if expected is None else expected)


@pytest.mark.parametrize(
    ("recipe", "mesh", "layers", "options"),
    [
        ("mixtral_ep", "fsdp=2,expert=2,sequence=2", 1, {"experts": "capacity"} | PLAIN_LAYERS),
        ("mixtral_ep", "fsdp=1,expert=2,sequence=4", 1, PLAIN_LAYERS),
        ("gpt_oss_ep", "fsdp=1,expert=4,sequence=2", 2, PLAIN_LAYERS),  # one of each kind
        ("llama_cp", "fsdp=2,sequence=4", 2, {"accumulation": 2, "remat": "offload"}),
    ],
    ids=["capacity", "dropless", "windows and sinks", "micro-batches"],
)
def test_loss_and_gradients_equal_the_plain_model(recipe, mesh, layers, options):
    check_gradients(make_case(recipe, one_layer(recipe, num_hidden_layers=layers), mesh=mesh, **options))


@pytest.fixture
def case():
    return make_case("llama_cp", one_layer("llama_cp"), **PLAIN_LAYERS)


def test_rows_of_a_length_that_pieces_do_not_divide_equal_the_plain_model(case):
    batch = {name: t[:, : LENGTH - 3].contiguous() for name, t in make_batch(case.config, rows=rows_of(case)).items()}
    check_gradients(case, batch)


def packed(config, rows):
    """Rows of three documents and padding; and the same documents a row each, none of them in pieces."""
    batch = make_batch(config, rows=rows)
    lengths = (7, 3, 4)
    segments = torch.zeros(rows, LENGTH, dtype=torch.long)
    positions = torch.zeros_like(segments)
    labels, apart = batch["labels"].clone(), []
    start = 0
    for number, length in enumerate(lengths):
        where = slice(start, start + length)
        segments[:, where], positions[:, where], labels[:, start] = number + 1, torch.arange(length), -100
        apart.append({"input_ids": batch["input_ids"][:, where], "labels": labels[:, where]})
        start += length
    labels[:, start:] = -100
    return {
        "input_ids": batch["input_ids"],
        "labels": labels,
        "segment_ids": segments,
        "position_ids": positions,
    }, apart


def test_packed_documents_equal_each_in_a_row_of_its_own(case):
    batch, apart = packed(case.config, rows_of(case))
    tokens = (batch["labels"][:, 1:] != -100).sum()
    case.reference.zero_grad()
    loss = sum(case.reference(**part, use_cache=False, num_items_in_batch=tokens).loss for part in apart)
    loss.backward()
    expected = {name: p.grad for name, p in case.reference.named_parameters()}
    check_gradients(case, batch, (loss.item(), expected))


def test_an_evaluation_measures_tokens_in_a_rows_own_order(case):
    batch = make_batch(case.config, rows=rows_of(case))
    found, ids, _ = case.evaluation.predict([batch])
    in_chunks = case.evaluation([batch])  # without logits
    with torch.no_grad():
        output = case.reference(**batch, use_cache=False)
    assert found.loss == pytest.approx(output.loss.item(), rel=1e-5)
    assert in_chunks.loss == pytest.approx(output.loss.item(), rel=1e-5)
    scored = batch["labels"][:, 1:] != -100
    hits = (output.logits.argmax(-1)[:, :-1] == batch["labels"][:, 1:])[scored]
    assert in_chunks.means["accuracy"] == found.means["accuracy"] == pytest.approx(hits.float().mean().item())
    assert (torch.from_numpy(ids) == output.logits.argmax(-1)).float().mean() > 0.999


@pytest.mark.parametrize(
    ("recipe", "config", "word"),
    [
        ("llama_cp", LlamaConfig(**SMALL, num_attention_heads=4, attention_dropout=0.1), "attention_dropout=0.1"),
        ("qwen3_next_ep", None, "tried small"),
    ],
)
def test_a_model_that_mixes_tokens_in_another_way_is_refused(recipe, config, word):
    recipe = load_recipe(recipe)
    if "sequence" not in recipe.mesh.axes:
        recipe = recipe.with_mesh(",".join([*(f"{axis}=1" for axis in recipe.mesh.axes), "sequence=8"]))
    with pytest.raises(UserError, match=re.escape(word)):
        job_of(recipe, config or small_config(recipe))
