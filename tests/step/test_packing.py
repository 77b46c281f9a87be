"""A packed batch has the loss and every gradient of its samples run apart by the plain model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.packing import Columns
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.layout.auto import auto_recipe
from shardwright.model.meta_model import meta_model
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.sft import SHAPES
from tests.models.test_families_attention import config_of
from tests.support.cases import LENGTH, PLAIN_LAYERS, ROWS, Case, backward, check_step, make_case, one_layer
from tests.support.chats import byte_tokenizer

GIVEN = SHAPES[-1]


def packed(count: int, packing: bool) -> Columns:
    """Rows of samples of 2 to 16 random tokens, of which the first are not scored; in some rows is padding."""
    rng, tokenizer = np.random.default_rng(0), byte_tokenizer()
    tokenizer.pad_token = "a"
    documents = []
    for _ in range(400):
        tokens = rng.integers(0, 256, rng.integers(2, rng.choice([6, LENGTH + 1]))).tolist()
        first = int(rng.integers(0, len(tokens)))
        documents.append(str(GIVEN.document({"input_ids": tokens, "labels": [IGNORE] * first + tokens[first:]})))
    columns = SamplePacker(tokenizer, GIVEN, LENGTH, SampleOptions(packing=packing)).rows(documents)
    # of all kinds, the last too, where samples leave room
    chosen = np.linspace(0, len(columns["input_ids"]) - 1, count).astype(int)
    return {name: values[chosen] for name, values in columns.items()}


def apart(columns: Columns) -> dict[str, torch.Tensor]:
    """The samples of packed rows, each in a row of its own, padded on the right."""
    found = []
    for tokens, labels, segments in zip(*(columns[n] for n in ("input_ids", "labels", "segment_ids")), strict=True):
        found += [(tokens[segments == i], labels[segments == i]) for i in range(1, segments.max() + 1)]
    shape = len(found), columns["input_ids"].shape[1]
    batch = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORE)
    for row, (tokens, labels) in enumerate(found):
        for name, values in {"input_ids": tokens, "labels": labels, "attention_mask": np.ones_like(tokens)}.items():
            batch[name][row, : len(tokens)] = torch.from_numpy(values.astype(np.int64))
    return batch


def check(case: Case, columns: Columns) -> None:
    found = case.gradients(as_batch(columns))
    router = {"output_router_logits": True} if case.recipe.compute.router_loss else {}
    expected = case.reference(**apart(columns), **router, use_cache=False).loss
    check_step(found, backward(expected, case.reference))


@pytest.mark.parametrize(
    ("recipe", "compute"),
    [
        ("llama_fsdp", {}),
        ("mixtral_ep", {"experts": "capacity"}),
        ("mixtral_ep", {}),
        ("gpt_oss_ep", {}),  # of two layers, for it has two kinds
    ],
    ids=["full attention", "router loss, capacity", "router loss, dropless", "sinks and windows"],
)
def test_a_packed_batch_has_the_loss_and_gradients_of_its_samples_apart(recipe: str, compute: dict[str, str]) -> None:
    columns = packed(ROWS, packing=True)
    assert columns["segment_ids"].max() > 2
    assert (columns["segment_ids"] == 0).any()
    config = one_layer(recipe, num_hidden_layers=2 if recipe == "gpt_oss_ep" else 1)
    check(make_case(recipe, config, **PLAIN_LAYERS, **compute), columns)


@pytest.mark.parametrize("case", ["an indexer", "soft caps"])
def test_attention_of_other_kinds_keeps_samples_apart_too(case: str) -> None:
    config, name = config_of(case)
    config.vocab_size = 256
    model = meta_model(config)
    made = auto_recipe(model, experts_modules(model), None, 8).recipe
    found = make_case(made, config, **PLAIN_LAYERS)
    assert found.evaluation.loss.model.config._attn_implementation == name
    check(found, packed(ROWS, packing=True))


def test_padded_rows_of_one_sample_each_have_them_too() -> None:
    check(make_case("mixtral_ep", one_layer("mixtral_ep"), **PLAIN_LAYERS), packed(ROWS, packing=False))


def test_rows_cut_to_what_their_samples_need_have_them_too() -> None:
    """``--packing false``: the batch of short samples is half as long, and its padding is gone."""
    columns = packed(8 * ROWS, packing=False)
    short = np.flatnonzero((columns["segment_ids"] > 0).sum(1) <= LENGTH // 2)[:ROWS]
    case = make_case("mixtral_ep", one_layer("mixtral_ep"), **PLAIN_LAYERS)
    check(case, {name: values[short, : LENGTH // 2] for name, values in columns.items()})
