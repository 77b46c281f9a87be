"""A trained adapter in PEFT's format, for serving, and merged: whoever loads it computes the loss that was trained."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.peft_config import CONFIG, WEIGHTS, read_config
from shardwright.scripts.measure import adapters
from shardwright.weights.adapter_weights import check_adapter, files_of, merge_factors, weights_of
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.hub_write import export
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.peft_files import prove, save_adapter
from shardwright.weights.peft_read import open_adapter
from shardwright.weights.weight_sources import state_dict_weights
from tests.support.adapters import make_adapted
from tests.support.cases import make_batch, one_layer, plain_model, reference_loss
from tests.support.hub_models import save_theirs
from tests.support.jobs import job_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21.2
    # it looks for fused weights among modules, and honours them all the same
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:lora with eva initialization used with low_cpu_mem_usage=False:UserWarning"),
]
# of scripts/measure/adapters.py's cases those that have most in them
TABLE = [
    "rank_pattern, alpha_pattern",
    "trainable_token_indices",
    "trainable_token_indices, a tied head",
    "init_lora_weights eva",
    "use_dora, pissa, use_rslora",
    "Llama-4's experts",
    "GPT-OSS's recipe",
    "experts of transformers 4 (gate_proj, …)",
    "dense layers beside experts",
    "unsloth's expression, a VLM",
]


@pytest.fixture(scope="module")
def trained():
    """Two steps of a small Mixtral with experts of their own: (what was adapted, its factors, batch, its loss)."""
    adapted = make_adapted("mixtral_ep")
    case = adapted.case
    for step in (1, 2):
        case.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-2)
    factors = LiveWeights(case.model, case.plan, case.mesh, case.step.parameters)
    batch = make_batch(case.config)
    return adapted, factors, batch, case.evaluation([batch]).loss


def loss_of(model, batch):
    with torch.no_grad():
        return reference_loss(model.eval(), batch, router_loss=False).item()


@pytest.mark.parametrize("form", ["peft", "per_expert"])
def test_peft_loads_it_onto_the_plain_model_with_the_same_loss(trained, tmp_path, form):
    adapted, factors, batch, loss = trained
    files = replace(files_of(adapted.job), per_expert=form == "per_expert")
    save_adapter(Folder(str(tmp_path)), files, factors, None, Console(quiet=True))
    names = load_file(tmp_path / WEIGHTS).keys()
    expected = {
        "peft": "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight",
        "per_expert": "base_model.model.model.layers.1.block_sparse_moe.experts.7.w3.lora_B.weight",
    }
    assert expected[form] in names
    plain = plain_model(adapted.case.config)
    before = loss_of(plain, batch)
    found = loss_of(PeftModel.from_pretrained(plain, tmp_path), batch)
    assert found == pytest.approx(loss, rel=1e-5)
    assert abs(found - before) > 1e-3


def test_merged_it_is_a_plain_model_folder_with_the_same_loss(trained, tmp_path):
    adapted, factors, batch, loss = trained
    job = adapted.job
    source = merge_factors(state_dict_weights(adapted.base), factors, job.lora, job.model)
    export(str(tmp_path), copy.deepcopy(job.model), source)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", experts_implementation="eager")
    assert loss_of(model, batch) == pytest.approx(loss, rel=1e-5)


def test_an_adapter_names_a_base_only_if_that_ones_weights_lie_under_it(tmp_path):
    (tmp_path / "config.json").touch()
    for model, random, named in (("a/b", False, "a/b"), ("a/b", True, None), (f"{tmp_path}/config.json", False, None)):
        options = {"model": model, "from_scratch": random, "lora_r": 2}
        job = job_of("llama_fsdp", one_layer("llama_fsdp"), **options)
        for config in (files_of(job).config(), job.as_texts()["adapter_config.json"]):
            assert config["base_model_name_or_path"] == named


def test_what_was_saved_is_read_back_bit_for_bit_and_a_change_is_seen(trained, tmp_path):
    adapted, factors, _, _ = trained
    job, folder, files = adapted.job, Folder(str(tmp_path)), files_of(adapted.job)
    save_adapter(folder, files, factors, None, Console(quiet=True))
    assert read_config(folder, job.facts.part) == job.lora
    found = open_adapter(folder, job.lora, job.model, {})
    for name, shape in adapted.shapes.items():
        assert torch.equal(found(name), factors(name)[tuple(slice(0, size) for size in shape)]), name
    tensors = load_file(tmp_path / WEIGHTS)
    key = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    # as if experts and ranks were the other way round
    turned = tensors[key].unflatten(1, (4, 8)).transpose(1, 2).flatten(1).contiguous()
    save_file({**tensors, key: turned}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=r"read back and merged, \S+0.mlp.experts.down_proj is another"):
        prove(folder, files, factors)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda t: t.popitem(), "is missing"),
        (lambda t: t.update({"base_model.model.x.lora_A.weight": torch.zeros(1)}), "x.lora_A.weight is left over"),
        (lambda t: t.update({max(t): torch.zeros(3, 3)}), r"of shape \[3, 3\], where"),
        (lambda t: t[max(t)].fill_(float("nan")), "no finite numbers"),
    ],
    ids=["missing", "more", "shape", "nan"],
)
def test_an_adapter_that_does_not_fit_is_refused_before_the_data_is_read(tmp_path, change, found):
    folder, job = Folder(str(tmp_path)), job_of("mixtral_ep", lora_r=2)
    shapes = job.adapted.state_dict()
    save_adapter(folder, files_of(job), lambda name: torch.ones(shapes[name].shape), None, Console(quiet=True))
    going_on = job_of("mixtral_ep", adapter=str(tmp_path))
    assert going_on.lora == job.lora
    check_adapter(going_on)
    tensors = {name: t.clone() for name, t in load_file(tmp_path / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=found):
        check_adapter(going_on)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True, "target_parameters": ["experts.down_proj"]}, "use_dora True, and model.layers.0.mlp.exp"),
        ({"lora_dropout": 0.1, "target_parameters": ["experts.down_proj"]}, "lora_dropout 0.1, and model.layers.0.mlp"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern '8'"),
        ({"target_modules": ["w1"]}, "target_modules has w1, one of w1 and w3"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "pissa", "r": 9999}, "rank 9999 and init_lora_weights pissa"),
        ({"trainable_token_indices": [1, -2]}, "trainable_token_indices .1, -2."),
        ({"r": "16"}, "r '16'"),
        ({"target_modules": ["nothing"], "target_parameters": None}, "none of its targets is a weight"),
        ({"target_modules": "("}, "adapter_config.json: error"),
    ],
    ids=str,
)
def test_a_config_of_another_kind_of_adapter_is_refused(tmp_path, values, found):
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / CONFIG).write_text(json.dumps(plain | values))
    with pytest.raises(UserError, match=found.replace("(", r"\(")):
        job_of("mixtral_ep", adapter=str(tmp_path))


@pytest.mark.parametrize("name", TABLE)
def test_pefts_adapter_is_read_and_written_with_pefts_logits(name):
    there, back, moved = adapters.measured(*adapters.CASES[name])
    assert there < adapters.TOLERANCE  # each by itself: max() may drop a NaN
    assert back < adapters.TOLERANCE
    assert moved > 0.01


@pytest.mark.parametrize(
    ("tied", "fields"),
    [
        (False, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        (
            False,
            {"trainable_token_indices": {"embed_tokens": [64, *range(57, 64), 56], "lm_head": list(range(56, 65))}},
        ),
        (True, {"trainable_token_indices": list(range(50, 65))}),
        (False, {"trainable_token_indices": list(range(50, 65))}),
    ],
    ids=["whole", "rows", "tied rows", "a head that no file has"],
)
def test_tokens_that_were_added_for_an_adapter_are_the_models(tmp_path, tied, fields):
    """PEFT's own way: the model gets nine tokens more, the adapter trains and saves them, and both are loaded so."""
    sizes = {"vocab_size": 56, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied)
    base, folder, again = (str(tmp_path / name) for name in ("base", "adapter", "again"))
    save_theirs(tmp_path / "base", config)

    def more_tokens():
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(65, mean_resizing=False)
        return model

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **fields)
    saved = get_peft_model(more_tokens(), config)
    for name, parameter in saved.named_parameters():
        if parameter.requires_grad and "lora" not in name:
            parameter.data += torch.randn_like(parameter)
    saved.save_pretrained(folder)
    ids = torch.arange(65).reshape(5, 13)
    theirs = saved(input_ids=ids).logits
    args = TrainingArguments(recipe="auto", model=base, adapter=folder, sequence_length=32)
    job = Job.resolve(args, lambda: 8)
    assert job.config.vocab_size == 65
    if not tied and fields.get("trainable_token_indices") == list(range(50, 65)):
        with pytest.raises(
            UserError, match=r"of another shape: lm_head.weight \[56, 16\] where the config says \[65, 16\]"
        ):
            open_hub_weights(base, job.facts.whole, rows=job.rows_needed)
        return
    hub = open_hub_weights(base, job.facts.whole, rows=job.rows_needed)
    source = weights_of(job, hub, None)
    export(tmp_path / "merged", copy.deepcopy(job.model), merge_factors(source, source, job.lora, job.model))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(ids).logits, theirs, rtol=1e-5, atol=1e-5)
    save_adapter(Folder(again), files_of(job), source, None, Console(quiet=True))
    assert torch.equal(PeftModel.from_pretrained(more_tokens(), again)(ids).logits, theirs)


def test_embeddings_that_peft_saved_beside_the_adapter_must_be_the_models(tmp_path):
    folder, job = Folder(str(tmp_path)), job_of("llama_fsdp", lora_r=2, lora_target="lm_head")
    shapes = job.adapted.state_dict()
    save_adapter(folder, files_of(job), lambda name: torch.ones(shapes[name].shape), None, Console(quiet=True))
    head = torch.ones(job.model.lm_head.weight.shape)
    key = "base_model.model.lm_head.base_layer.weight"
    save_file({**load_file(tmp_path / WEIGHTS), key: head}, tmp_path / WEIGHTS)
    opened = open_adapter(folder, job.lora, job.model, {})
    everything = tuple(slice(0, size) for size in head.shape)
    assert torch.equal(opened.checked(lambda _: head)("lm_head.weight")[everything], head)
    with pytest.raises(UserError, match=r"lm_head.weight in it, with other values than the model's"):
        opened.checked(lambda _: 2 * head)("lm_head.weight")[everything]


@pytest.mark.parametrize(
    "options", [{"rank_pattern": "v_proj=3"}, {"use_dora": True}, {"modules_to_save": "lm_head"}], ids=str
)
def test_what_serving_engines_would_not_read_is_not_written_for_them(options):
    with pytest.raises(UserError, match=r"per_expert\n.*an adapter with (ranks that differ|DoRA|modules_to_save)"):
        check_adapter(job_of("llama_fsdp", lora_r=2, adapter_format="per_expert", **options))


def test_experts_that_the_hub_keeps_fused_can_not_be_written_one_by_one():
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256, "head_dim": 16}
    config = GptOssConfig(**small, num_local_experts=4, num_attention_heads=4, num_key_value_heads=4)
    job = job_of(load_recipe("gpt_oss_ep"), config, lora_r=2, adapter_format="per_expert")
    with pytest.raises(UserError, match=r"experts.gate_up_proj of a GptOssForCausalLM, on the hub"):
        check_adapter(job)


def test_experts_that_peft_would_take_the_wrong_way_round_are_refused():
    with pytest.raises(UserError, match=r"nothing tells PEFT there which dimension is the input's"):
        check_adapter(job_of("llama4_ep", lora_r=2, lora_target="experts.down_proj"))
    check_adapter(job_of("llama4_ep", lora_r=2, lora_target="q_proj,shared_expert.up_proj"))
