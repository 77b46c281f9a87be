"""Texts continued on 8 devices: greedy is transformers' own generation on the CPU, and a seed gives the same again."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3NextConfig

from shardwright.data.rows.rows import StoredRows
from shardwright.errors import UserError
from shardwright.evaluation.completions import show_completions
from shardwright.evaluation.decoders import CachedDecoder, RowDecoder, build_generator
from shardwright.evaluation.generate import GenerationShape, Generator, Sampling, can_cache, check_positions, choose
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import Mesh
from shardwright.model.facts import facts_of
from shardwright.step.build import place_model
from shardwright.weights.place import place_parameters
from shardwright.weights.weight_sources import state_dict_weights
from shardwright.xla.device_mesh import build_mesh
from tests.support.adapters import make_adapted
from tests.support.cases import plain_model
from tests.support.jobs import job_of
from tests.support.tasks import MOE, TINY, byte_tokenizer

PROMPTS = [[5, 6, 7], [10, 11, 12, 13, 14, 15, 16], [200], [40, 3, 40, 3, 40]]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2
SHAPE = GenerationShape(rows=8, prompt=8, new=12)


def on_mesh(recipe_name, config):
    """The plain model on the CPU, and placed on 8 devices with the same weights."""
    torch.manual_seed(0)
    plain = plain_model(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    recipe = load_recipe(recipe_name)
    job = job_of(recipe, config)
    placed = place_model(job, build_mesh(recipe.mesh), state_dict_weights(plain.state_dict()))
    return plain, placed


def their_greedy(model, prompt, new):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=ids, **options)[0, len(prompt) :].tolist()


def test_of_tokens_sorted_by_their_share_the_first_that_reach_top_p_are_drawn_from():
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.1]]).log().expand(5, 4)
    uniform = torch.tensor([0.0, 0.6, 0.63, 0.99, 0.999999])
    assert choose(logits, Sampling(1.0, 0.7), uniform).tolist() == [1, 1, 2, 2, 2]  # 0.5 and 0.3 of 0.8
    assert choose(logits, Sampling(1.0, 0.4), uniform).tolist() == [1] * 5
    assert choose(logits, Sampling(0.01, 1.0), uniform).tolist() == [1] * 5  # a low temperature is nearly greedy
    assert choose(logits, Sampling(0.0), uniform).tolist() == [1] * 5


def test_which_models_take_a_cache_of_one_shape_is_asked_of_transformers():
    with torch.device("meta"):
        made = {c.model_type: AutoModelForCausalLM.from_config(c) for c in (LlamaConfig(**TINY), Qwen3NextConfig())}
    assert {kind: can_cache(model) for kind, model in made.items()} == {"llama": True, "qwen3_next": False}


def test_two_texts_are_gone_on_with_where_a_batch_has_one_row():
    recipe = replace(load_recipe("llama_tp"), mesh=Mesh(fsdp=1, tensor=8))
    config = LlamaConfig(**TINY | {"num_hidden_layers": 1})
    job = job_of(recipe, config, sample_tokens=3, per_device_train_batch_size=1)
    assert (job.row_shards, job.evaluation_rows) == (1, 1)
    placed = place_model(job, build_mesh(recipe.mesh), state_dict_weights(plain_model(config).state_dict()))
    rows = StoredRows(Dataset.from_dict({"input_ids": [list(range(100, 132)), list(range(140, 172))]}))
    console, tokenizer = Console(file=io.StringIO(), width=200), byte_tokenizer()
    show_completions(placed, tokenizer, rows, console)
    lines = console.file.getvalue().splitlines()
    assert [line.partition('"')[0].strip() for line in lines] == ["sample:", "→", "sample:", "→"]


@pytest.mark.slow
def test_greedy_is_transformers_own_generation_token_for_token_with_experts_and_a_window():
    plain, placed = on_mesh("mixtral_ep", MixtralConfig(**MOE | {"sliding_window": 6}))
    generator = build_generator(placed, SHAPE, Sampling())
    expected = [their_greedy(plain, prompt, SHAPE.new) for prompt in PROMPTS]
    assert generator(PROMPTS, stops=()) == expected
    stop = expected[1][4]
    cut = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in expected]
    assert generator(PROMPTS, stops={stop}) == cut != expected
    assert isinstance(generator.decoder, CachedDecoder)
    assert generator.compiles == 2


@pytest.mark.slow
def test_a_dense_model_too_with_a_cache_and_without_with_the_weights_as_they_are_then():
    plain, placed = on_mesh("llama_tp", LlamaConfig(**TINY))
    cached = build_generator(placed, SHAPE, Sampling())
    by_rows = Generator(RowDecoder(placed, SHAPE, Sampling()), SHAPE)
    before = [their_greedy(plain, prompt, SHAPE.new) for prompt in PROMPTS]
    assert cached(PROMPTS, stops=()) == by_rows(PROMPTS, stops=()) == before
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.flip(0))
    source = state_dict_weights(plain.state_dict())
    placed.parameters.update(place_parameters(placed.model, placed.job.stored, placed.mesh, source))
    after = [their_greedy(plain, prompt, SHAPE.new) for prompt in PROMPTS]
    assert cached(PROMPTS, stops=()) == by_rows(PROMPTS, stops=()) == after != before
    assert (cached.compiles, by_rows.compiles) == (2, 1)

    sampled = build_generator(placed, SHAPE, Sampling(1.0, 0.9))
    drawn = sampled(PROMPTS, stops=(), seed=3)
    assert drawn == sampled(PROMPTS, stops=(), seed=3)
    assert drawn != sampled(PROMPTS, stops=(), seed=4)
    assert drawn != after


@pytest.mark.slow
def test_a_model_whose_rows_are_split_too_with_a_cache_and_without():
    plain, placed = on_mesh("llama_cp", LlamaConfig(**TINY))
    shape = GenerationShape(rows=8, prompt=8, new=4)  # each token takes the pieces once around the ring
    cached = build_generator(placed, shape, Sampling())
    by_rows = Generator(RowDecoder(placed, shape, Sampling()), shape)
    expected = [their_greedy(plain, prompt, shape.new) for prompt in PROMPTS]
    assert cached(PROMPTS, stops=()) == by_rows(PROMPTS, stops=()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["float32", "int8"])
def test_an_adapted_model_is_pefts_own(base_dtype):
    adapted = make_adapted("llama_tp", options={"base_dtype": base_dtype})
    vocabulary = adapted.job.config.vocab_size
    prompts = [[token % vocabulary for token in prompt] for prompt in PROMPTS]
    generator = build_generator(adapted.case.evaluation.placed, SHAPE, Sampling())
    expected = [their_greedy(adapted.peft, prompt, SHAPE.new) for prompt in prompts]
    assert generator(prompts, stops=()) == expected
    with adapted.peft.disable_adapter():
        assert [their_greedy(adapted.peft, prompt, SHAPE.new) for prompt in prompts] != expected


def test_more_positions_than_a_table_has_are_refused():
    facts = facts_of(GPT2Config(n_positions=16, n_layer=1))
    check_positions(facts, 16)
    with pytest.raises(UserError, match="has 16 positions"):
        check_positions(facts, 17)
