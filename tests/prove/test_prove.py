"""A proof: its small model, refusals, checks of a layout, and the certificate, which a run of the same kind finds."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, MixtralConfig

from shardwright import Mesh, Recipe, Shard
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.hlo.text import parse
from shardwright.errors import UserError
from shardwright.files.cache import cache_path
from shardwright.inputs import RunInputs
from shardwright.job import Job
from shardwright.models.tiny import shrunk
from shardwright.objectives import OBJECTIVES
from shardwright.optimizers import OPTIMIZERS
from shardwright.prove import certificate, layouts
from shardwright.prove.batches import apart, make_batches
from shardwright.prove.formulas import FORMULAS
from shardwright.prove.prove_command import NOT_PROVED, certify, prove, run_job
from shardwright.prove.reference_optimizers import REFEREES
from shardwright.prove.small_job import check_provable, small_job, small_mesh
from shardwright.prove.trajectory import COARSE, Difference, Trajectory, differences, judged
from shardwright.run import _for_samples
from shardwright.scripts.measure.tables import largest
from tests.support.cases import relative
from tests.support.jobs import job_of
from tests.support.paths import ROOT

CONFIGS, REAL = ROOT / "docs" / "configs", ROOT / "tests" / "real"
TWICE = """HloModule step

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %first = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
  %same = f32[8]{0} copy(%first)
  ROOT %second = f32[8]{0} all-reduce(%same), replica_groups=GROUPS, to_apply=%add
}
"""


def test_a_nan_in_any_tensor_is_the_largest_difference() -> None:
    one = torch.ones(2)
    assert relative({"first": one, "last": one * torch.nan}, {"first": one, "last": one}) == (float("inf"), "last")
    assert largest([1e-3, float("nan"), 2e-3]) == float("inf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))


def resolved(recipe: str = "mixtral_ep", devices: int = 8, config: Any = None, **options: Any) -> Job:
    return Job.resolve(TrainingArguments(recipe=recipe, **options), lambda: devices, config=config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_30b_a3b", {"head_dim": 32, "num_key_value_heads": 2}),  # heads wider than the model
        ("llama3_8b", {"head_dim": 16, "tie_word_embeddings": False}),
        ("gemma3_27b", {"num_hidden_layers": 12, "sliding_window": 8, "tie_word_embeddings": True}),
        ("deepseek_v3", {"first_k_dense_replace": 1, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}),
        ("kimi_linear_48b_a3b", {"linear_num_heads": 4, "linear_head_dim": 32}),  # its config says them twice
    ],
)
def test_a_shrunk_model_keeps_what_is_special_to_it(name: str, expected: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    small = shrunk(config)
    assert {key: getattr(small, key) for key in expected} == expected
    assert getattr(small, "rope_parameters", None) == getattr(config, "rope_parameters", None)  # Kimi Linear has none
    assert small.vocab_size == 256


def test_a_head_of_keys_for_each_query_or_for_all_stays_so() -> None:
    sizes = {"num_attention_heads": 32, "hidden_size": 4096}
    kept = [shrunk(MixtralConfig(num_key_value_heads=count, **sizes)).num_key_value_heads for count in (32, 8, 1)]
    assert kept == [4, 2, 1]
    assert shrunk(DeepseekV3Config()).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("name", "shared", "own"),
    [
        ("gemma_4_26b_a4b", 0, {5: {"head_dim": 64, "num_key_value_heads": 1}}),
        ("gemma_4_e2b", 5, {4: {"head_dim": 64}}),
    ],
)
def test_layers_with_widths_of_their_own_keep_them_and_some_share_their_keys(
    name: str, shared: int, own: dict[int, dict[str, int]]
) -> None:
    config = AutoConfig.from_pretrained(REAL / f"{name}.json").get_text_config()
    small = shrunk(config)
    layers = small.per_layer_config
    assert small.num_kv_shared_layers == shared
    for number, values in own.items():
        assert {key: getattr(layers[number], key) for key in values} == values
        assert layers[number - 1].head_dim == 32
    with torch.device("meta"):
        assert len(AutoModelForCausalLM.from_config(small).model.layers) == len(layers)


def test_text_without_a_class_of_its_own_is_refused() -> None:
    config = AutoConfig.from_pretrained(REAL / "qwen3_vl_30b_a3b.json")
    config.text_config.num_hidden_layers, config.vision_config.depth = 2, 1
    with pytest.raises(UserError, match="it can't be proved: the plain model here is one of text alone") as refused:
        small_job(resolved("auto", config=config, mesh="fsdp=8"))
    assert refused.value.code == 2


def test_an_axis_that_splits_goes_on_splitting() -> None:
    assert small_mesh({"fsdp": 32, "expert": 8}) == {"fsdp": 2, "expert": 4}
    assert small_mesh({"data": 4, "fsdp": 8, "tensor": 1}) == {"data": 2, "fsdp": 4, "tensor": 1}
    assert small_mesh({"fsdp": 6}) == {"fsdp": 4}


def test_a_small_job_is_the_runs_own_but_for_its_sizes() -> None:
    run = resolved(config=MixtralConfig(num_hidden_layers=4), devices=64, weight_decay=0.1, lora_r=16)
    small = small_job(run)
    assert small.job.recipe.parameters == run.recipe.parameters
    assert small.job.args.weight_decay == 0.1
    assert small.job.plan.mesh == {"fsdp": 2, "expert": 4}
    assert ("rank", "16", "4") in small.smaller
    assert ("hidden_size", "4096", "64") in small.smaller


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "dpo", "loss_type": "hinge"},
        {"router_balance_coef": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"lora_r": 4, "base_dtype": "nf4"},
    ],
    ids=str,
)
def test_what_has_no_referee_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="it can't be proved") as refused:
        check_provable(TrainingArguments(recipe="mixtral_ep", **options))
    assert refused.value.code == 2


def test_batches_of_pairs_have_answers_behind_the_same_prompt() -> None:
    (batch,) = make_batches(small_job(resolved("llama_fsdp", objective="dpo")).job, 1)
    starts = (batch["position_ids"] == 0) & (batch["segment_ids"] > 0)
    for row in range(len(starts)):
        chosen, rejected = (batch["input_ids"][row][batch["segment_ids"][row] == n].tolist() for n in (1, 2))
        assert chosen[:2] == rejected[:2]
        assert all(batch["labels"][row][starts[row]] == -100)


def test_every_optimizer_and_objective_that_is_offered_has_its_reference() -> None:
    assert REFEREES.keys() == OPTIMIZERS.keys()
    assert FORMULAS.keys() == OBJECTIVES.keys()


def test_batches_of_answers_one_by_one_have_good_bad_and_mismatched_ones() -> None:
    (batch,) = make_batches(small_job(resolved("llama_fsdp", objective="kto")).job, 1)
    rows = apart(batch)
    good, bad, mismatched = (((rows["segment"] - 1) % 3 == place).sum() for place in range(3))
    assert good + bad == mismatched
    assert 0 < good < mismatched
    assert rows["reference"].unique().numel() == len(rows["segment"])
    answers, others = rows["input_ids"][0::2], rows["input_ids"][1::2]
    assert torch.equal(answers[:, :2], others[:, :2])  # the same prompt


def test_a_weight_that_an_axis_could_cut_is_named_and_one_that_is_cut_is_not() -> None:
    recipe = Recipe(
        mesh=Mesh(fsdp=-1, tensor=2),
        batch=("fsdp",),
        parameters={},
        optional={".".join("*" * depth): {"tensor": Shard(0)} for depth in range(2, 7)},
    )
    config = AutoConfig.for_model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    found = list(layouts.plan_findings(job_of(recipe, config).plan))
    assert any("along fsdp" in text and "[4096, 11008]" in text for text in found)
    assert list(layouts.plan_findings(resolved("llama_fsdp").plan)) == []


def test_a_sum_of_what_is_summed_already_is_named() -> None:
    def found(groups: str) -> list[str]:
        return list(layouts.summed_twice(parse(TWICE.replace("GROUPS", groups)), {"fsdp": 2, "tensor": 2}))

    assert found("{{0,2},{1,3}}") == []  # along another axis
    (text,) = found("{{0,1},{2,3}}")
    assert "second" in text
    assert "first" in text
    assert len(found("{{0,1,2,3}}")) == 1


def test_a_certificate_is_found_by_runs_of_the_same_recipe_options_and_kind_of_model() -> None:
    run = resolved()
    assert "none for this recipe" in str(certificate.said_of(run))
    content = {"proved": True, "date": "2026-01-01", "versions": {}}
    path, page = certificate.write(certificate.subject_of(run), content, "<p>")
    assert json.loads(path.read_text()) == content
    assert certificate.said_of(run) == f"proved on 2026-01-01 ({page})"
    alike = resolved(max_steps=7, learning_rate=1e-3, compute="remat=0.5", devices=64)
    assert certificate.said_of(alike) == certificate.said_of(run)
    for other in ({"weight_decay": 0.1}, {"compute": "experts=capacity"}, {"mesh": "fsdp=4,expert=2"}, {"lora_r": 4}):
        assert "none" in str(certificate.said_of(resolved(**other))), other
    wide = MixtralConfig(
        num_hidden_layers=2, hidden_size=128, head_dim=64, num_attention_heads=4, num_key_value_heads=2
    )
    assert "none" in str(certificate.said_of(resolved(config=wide)))
    for asked in (TrainingArguments(recipe="mixtral_ep", **options) for options in ({}, {"packing": False})):
        trained = _for_samples(Job.resolve(asked, lambda: 8), RunInputs())
        assert certificate.subject_of(run_job(asked, 8)) == certificate.subject_of(trained), "a run finds its proof"
    adapted = [certificate.subject_of(resolved(lora_r=4, lora_alpha=alpha)) for alpha in (None, 8, 16)]
    assert (adapted[0] == adapted[1], adapted[0] == adapted[2]) == (True, False), "8 is its default"
    assert "none" in str(certificate.said_of(resolved(devices=4))), "its proof is on a mesh whose fsdp axis is 1"
    certificate.write(certificate.subject_of(run), {**content, "versions": {"torch": "2.0"}}, "")
    assert "torch 2.9" in str(certificate.said_of(run))
    certificate.write(certificate.subject_of(run), {**content, "proved": False}, "")
    assert str(certificate.said_of(run)).startswith("NOT proved on 2026-01-01")
    shutil.rmtree(path.parent)
    path.parent.touch()  # a disk that refuses
    with pytest.raises(UserError, match=f"write {path.parent}"):
        certificate.write(certificate.subject_of(run), content, "")


@pytest.mark.parametrize(
    ("entries", "gradient", "good"),
    [(1, 1.6e-8, True), (1, 0.0, False), (1, 4e-3, False), (2, 1.6e-8, False)],
    ids=["no direction", "no gradient at all", "a gradient", "more than a few"],
)
def test_an_entry_that_rounding_alone_moves_tells_nothing_and_any_other_does(
    entries: int, gradient: float, good: bool
) -> None:
    """AdamW's first step moves an entry by g / (|g| + 1e-8), so by rounding's direction where g is no more."""

    def trajectory(moved: float) -> Trajectory:
        gradients, change = torch.full((64,), 4e-3), torch.full((64,), 1e-3)
        gradients[:entries], change[:entries] = gradient, moved
        return Trajectory([1.0], [1.0], {"norm.weight": gradients}, {"norm.weight": change})

    plain = trajectory(1e-3)
    (found,) = (each for each in judged(trajectory(1.1e-3), plain, lambda: plain) if each.quantity == "weight")
    assert found.good == good
    assert ("but for 1 of 64 entries" in found.name) == good


@pytest.mark.parametrize(("ours", "good"), [(0.7, True), (1.4, True), (2.2, False)])
def test_a_gradient_that_the_plain_model_itself_loses_in_bfloat16_may_be_about_as_far_and_no_farther(
    ours: float, good: bool
) -> None:
    """The plain model's gradients of Qwen3-Next's decays, four numbers, are off by 1.4."""

    def trajectory(off: float) -> Trajectory:
        return Trajectory([1.0], gradients={"layers.0.A_log": torch.full((4,), 1 + off)})

    plain, rounded = trajectory(0.0), trajectory(1.4)
    (found,) = (each for each in differences(trajectory(ours), plain, rounded, COARSE) if each.quantity == "gradient")
    assert (found.good, found.allowed) == (good, pytest.approx(2.1))
    assert differences(trajectory(0.7), plain, trajectory(0.3), COARSE)[-1].allowed == 0.5


@pytest.mark.parametrize("off", [2e-5, float("inf")], ids=["one gradient off", "one missing"])
def test_a_proof_that_finds_a_fault_exits_with_3_and_a_run_then_says_not_proved(off: float) -> None:
    run, out = resolved(), Console(file=io.StringIO(), width=200)
    small, good = small_job(run), Difference("loss", "step 1", 1e-7, 1e-5)
    assert certify(small, [good], [], [], 1.0, out) == 0
    assert str(certificate.said_of(run)).startswith("proved on ")
    bad = Difference("gradient", "model.norm.weight", off, 1e-5)
    less = Difference("gradient", "lm_head.weight", 1.5e-5, 1e-5)
    assert certify(small, [good, less, bad], [], [], 1.0, out) == NOT_PROVED == 3
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert said.index("off: gradient of model.norm.weight") < said.index("off: gradient of lm_head.weight")
    assert f"off: gradient of model.norm.weight: {off:.1e}, where rounding explains 1e-05" in said
    assert "not proved: 2 of 3 comparisons" in said
    assert str(certificate.said_of(run)).startswith("NOT proved on ")
    (page,) = (cache_path() / certificate.FOLDER).glob("*.html")
    assert "Off by more than rounding" in page.read_text()


@pytest.mark.slow
def test_an_adapter_on_packed_samples_is_proved_beside_peft_and_the_page_says_so() -> None:
    args = TrainingArguments(
        recipe="llama_fsdp",
        lora_r=8,
        isolate_documents=True,
        gradient_accumulation_steps=2,
        compute="scan=False,remat=none,dtype=float32",
    )
    out = Console(file=io.StringIO(), width=200)
    assert prove(args, 8, out) == 0
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert "proved: " in said
    run = Job.resolve(args, lambda: 8)
    assert str(certificate.said_of(run)).startswith("proved on ")
    (page,) = (cache_path() / certificate.FOLDER).glob("*.html")
    text = page.read_text()
    assert "PEFT 0.21.2" in text
    assert "self_attn.q_proj.weight_lora_A" in text
    assert "<link" not in text
    content = json.loads(page.with_suffix(".json").read_text())
    assert content["compared"]["gradient"]["count"] == 3 * 7 * 2  # layers, weights, factors
    assert content["compared"]["gradient"]["worst"] < 1e-5
