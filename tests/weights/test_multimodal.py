"""Multimodal checkpoints: the text part trains as in the whole model, and every other parameter comes out as it was."""

from __future__ import annotations

import json

import pytest
import torch
import torch_xla
from rich.console import Console
from transformers import AutoModelForImageTextToText, BlipConfig

from shardwright import Compute, Mesh, Recipe
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.model import attention_probe, facts
from shardwright.model.attention_probe import text_part_differs
from shardwright.model.meta_model import meta_model, names_in_whole, text_in_whole, whole_model
from shardwright.prove.sharded import unstacked
from shardwright.run import train
from shardwright.step.build import place_model
from shardwright.step.train_step import TrainStep
from shardwright.weights import hub_read
from shardwright.weights.hub_write import export
from shardwright.weights.weight_sources import part_and_rest, part_of, seeded_init, state_dict_weights
from shardwright.xla.batch import place_batch
from shardwright.xla.device_mesh import build_mesh
from tests.support.cases import LENGTH, PLAIN_LAYERS, ROWS, backward, check_step
from tests.support.chats import byte_tokenizer
from tests.support.hub_models import tensors_in
from tests.support.jobs import job_of
from tests.support.lives import write_text
from tests.support.multimodal import FAMILIES, IMAGE_TOKEN, config_of, plain, save

ANY = {".".join("*" * depth): {} for depth in range(2, 9)}
COMPUTE = {"llama4": {"experts": "dense"}}
RECIPE = """
from shardwright import Compute, Mesh, Recipe
anything = {".".join("*" * depth): {} for depth in range(2, 9)}
compute = Compute(dtype="float32", scan=False, remat="none")
recipe = Recipe(mesh=Mesh(fsdp=-1), batch=("fsdp",), parameters={}, optional=anything, compute=compute)
"""


def recipe_of(family):
    if family == "llava":  # its text part is a llama, under llama's names
        return load_recipe("llama_fsdp").with_compute("scan=False,remat=none")
    compute = Compute(dtype="float32", router_loss=False, **PLAIN_LAYERS, **COMPUTE.get(family, {}))
    return Recipe(mesh=Mesh(fsdp=-1), batch=("fsdp",), parameters={}, optional=ANY, compute=compute, name="any")


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_of_the_text_equal_the_whole_plain_model_s(family):
    config = config_of(family)
    whole, job = plain(config), job_of(recipe_of(family), config)
    mesh = build_mesh(job.recipe.mesh)
    step = TrainStep(place_model(job, mesh, part_of(state_dict_weights(whole.state_dict()), job.facts.names_in_whole)))
    ids = torch.randint(1, IMAGE_TOKEN, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = place_batch({"input_ids": ids.unsqueeze(1), "labels": ids.unsqueeze(1)}, mesh, job.recipe.batch)
    loss, found, _ = step.loss_and_gradients(inputs, step.random_keys(1))
    torch_xla.sync()
    expected = whole(input_ids=ids, labels=ids, use_cache=False).loss
    theirs = backward(expected, whole)
    gradients = {job.facts.names_in_whole[name]: gradient for name, gradient in unstacked(job.stored, found)}
    assert len(theirs[1]) > 20
    check_step((loss.item(), gradients), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_holds_the_trained_text_and_every_other_tensor_bit_for_bit(tmp_path, family):
    config = config_of(family)
    save(plain(config), tmp_path / "base")
    part, whole = meta_model(config), whole_model(config)
    base, names = hub_read.open_hub_weights(str(tmp_path / "base"), whole), names_in_whole(part, whole)
    trained = seeded_init(part, 7)  # other values, in float32
    export(tmp_path / "out", whole, part_and_rest(trained, base, names))
    before, after = tensors_in(tmp_path / "base"), tensors_in(tmp_path / "out")
    assert before.keys() == after.keys()
    kept = {name for name in before if after[name].dtype == torch.bfloat16}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert any("vision" in name or "visual" in name for name in kept)
    loaded, missing = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not missing["missing_keys"] | missing["unexpected_keys"]
    state = loaded.state_dict()
    assert all(torch.equal(state[names[name]], trained(name)) for name, _ in part.named_parameters())
    assert len(kept) == len(state) - len(set(names.values()))
    assert state[next(iter(names.values()))].dtype == torch.float32


def test_a_run_trains_the_text_and_leaves_the_whole_model_and_so_does_the_export_of_its_checkpoint(
    tmp_path, monkeypatch
):
    from shardwright.scripts import export as script

    save(plain(config_of("llava")), tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "any.py").write_text(RECIPE)
    write_text(tmp_path)
    args = TrainingArguments(
        recipe=str(tmp_path / "any.py"),
        model=str(tmp_path / "base"),
        dataset=str(tmp_path / "text"),
        output_dir=str(tmp_path / "run"),
        sequence_length=16,
        max_steps=1,
        learning_rate=0.01,
        warmup_steps=0,
        eval_strategy="no",
        eval_on_start=False,
    )
    train(args, Console(quiet=True))
    monkeypatch.setattr(
        "sys.argv", ["export.py", "--checkpoint", str(tmp_path / "run/checkpoint-1"), "--output", str(tmp_path / "out")]
    )
    assert script.main() is None
    before, run, out = (tensors_in(tmp_path / folder) for folder in ("base", "run/model", "out"))
    assert all(torch.equal(run[name], out[name]) for name in before)
    trained = {name for name in before if name.startswith("language_model.")}  # as llava has them on the hub
    assert 20 < len(trained) < len(before)
    for name, tensor in before.items():
        assert (name in trained) != torch.equal(tensor, run[name].to(tensor.dtype)), name
    for folder in (tmp_path / "run/model", tmp_path / "out"):
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlavaForConditionalGeneration"]
        assert (folder / "preprocessor_config.json").read_text() == (
            tmp_path / "base" / "preprocessor_config.json"
        ).read_text()


def test_a_text_part_that_computes_something_else_is_found_and_a_family_without_one_is_refused_by_name(monkeypatch):
    config = config_of("gemma3")
    assert text_part_differs(facts.facts_of(config)) is None
    monkeypatch.setattr(facts, "_known", {})
    monkeypatch.setattr(attention_probe, "text_in_whole", lambda config: _capped(text_in_whole(config)))
    assert "from the whole model's" in text_part_differs(facts.facts_of(config))
    with pytest.raises(UserError, match=r"of type 'gemma3', of which Gemma3ForCausalLM is the text part"):
        job_of(recipe_of("gemma3"), config)
    with pytest.raises(UserError, match="BlipForConditionalGeneration names no text decoder and head of its own"):
        meta_model(BlipConfig())


def _capped(whole):
    """A whole model that does to its logits what its text part does not."""
    whole.get_output_embeddings().register_forward_hook(lambda module, args, output: output.tanh())
    return whole
