"""Tasks of lm-evaluation-harness over a model on 8 devices: the scores of the harness's own model on the CPU."""

from __future__ import annotations

import json
import string
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, MixtralConfig

from shardwright.errors import UserError
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.evaluation.score_step import row_scores
from shardwright.models.ops.labels import IGNORE
from tests.support.tasks import MOE, byte_tokenizer, save_tiny, write_tasks

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[eval]'")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from shardwright.evaluation import evaluation_command
from shardwright.evaluation.lm import LM, bucket
from shardwright.evaluation.open_model import open_model

TASKS = ["sums", "prose"]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluation")
    save_tiny(MixtralConfig(**MOE), root / "model")
    write_tasks(root / "tasks")
    return root


def options(here, **more):
    given = {"model": here / "model", "recipe": "mixtral_ep", "tasks": ",".join(TASKS), "include_path": here / "tasks"}
    return EvaluationArguments(**{name: str(value) for name, value in given.items()} | more)


@pytest.fixture(scope="module")
def ours(here):
    return LM(*open_model(options(here), Console(quiet=True)))


def theirs(here, model, tasks=TASKS):
    manager = TaskManager(include_path=str(here / "tasks"), include_defaults=False)
    lm = HFLM(pretrained=model, tokenizer=byte_tokenizer(), device="cpu", batch_size=4, max_length=192)
    return lm, simple_evaluate(lm, tasks=tasks, task_manager=manager, num_fewshot=2, bootstrap_iters=0)


def scores(results):
    return {(task, name): value for task, found in results["results"].items() for name, value in found.items()
            if isinstance(value, float) and "_stderr" not in name}  # fmt: skip


def test_a_rows_score_is_the_log_probability_of_its_targets_and_whether_argmax_gives_them():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7)
    logits[2, 1, 4] = logits[2, 1, 2] = 9.0  # two highest: argmax takes the first
    targets = torch.full((3, 5), IGNORE)
    targets[0, 1:3] = torch.tensor([2, 3])
    targets[1, 4], targets[2, 1] = logits[1, 4].argmax(), 4
    found = row_scores(logits, targets)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(found[0, 0], expected[0, 1, 2] + expected[0, 2, 3])
    torch.testing.assert_close(found[1, 0], expected[1, 4].max())
    assert found[:, 1].tolist() == [0.0, 1.0, 0.0]


def test_rows_have_few_lengths():
    assert [bucket(tokens, 192) for tokens in (1, 64, 65, 128, 129, 192)] == [64, 64, 128, 128, 192, 192]


@pytest.mark.slow
def test_scores_are_those_of_the_harness_own_model(here, ours):
    manager = TaskManager(include_path=str(here / "tasks"), include_defaults=False)
    found = simple_evaluate(ours, tasks=TASKS, task_manager=manager, num_fewshot=2, bootstrap_iters=0)
    _, expected = theirs(here, AutoModelForCausalLM.from_pretrained(here / "model"))
    assert len(scores(found)) == 4
    assert scores(found) == pytest.approx(scores(expected), rel=1e-4)
    assert sorted(ours.score.guards) == [(8, 128), (8, 192), (24, 64)]
    assert ours.score.compiles == 3


@pytest.mark.slow
def test_likelihoods_and_greedy_hits_are_those_of_the_harness_own_model(here, ours):
    model = AutoModelForCausalLM.from_pretrained(here / "model")
    lm = HFLM(pretrained=model, tokenizer=byte_tokenizer(), device="cpu", batch_size=4, max_length=192)
    start, letter = greedy_pair(model)
    pairs = [("", "abc"), ("Two and two", " are four"), ("x" * 300, "yz"), ("a", "b"), ("a ", "b")]
    pairs += [(start, letter), (start, letter.swapcase())]
    requests = [SimpleNamespace(args=pair) for pair in pairs]
    found, expected = ours.loglikelihood(requests), lm.loglikelihood(requests, disable_tqdm=True)
    assert [hit for _, hit in expected[-2:]] == [True, False]
    for (value, hit), (their_value, their_hit) in zip(found, expected, strict=True):
        assert value == pytest.approx(their_value, rel=1e-4)
        assert hit == their_hit


def greedy_pair(model):
    """A text, and the letter that greedy decoding puts behind it."""
    tokenizer = byte_tokenizer()
    for start in string.ascii_letters:
        ids = tokenizer(start, return_tensors="pt").input_ids
        following = tokenizer.decode(model(ids).logits[0, -1].argmax())
        if following in string.ascii_letters:
            return start, following
    raise AssertionError("no letter follows a letter")


@pytest.mark.slow
def test_an_adapter_is_measured_on_top_of_its_model_and_the_table_is_the_harness_own(here, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(here / "model")
    torch.manual_seed(1)
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    given = options(here, adapter=str(tmp_path / "adapter"), tasks="prose", output_path=str(tmp_path / "r.json"))
    found = evaluation_command.run(given, console := Console(record=True, width=200))
    _, expected = theirs(here, adapted, ["prose"])
    assert scores(found) == pytest.approx(scores(expected), rel=1e-4)
    _, without = theirs(here, AutoModelForCausalLM.from_pretrained(here / "model"), ["prose"])
    assert scores(found) != pytest.approx(scores(without), rel=1e-3)
    assert scores(json.loads((tmp_path / "r.json").read_text())) == scores(found)
    assert make_table(found).splitlines()[2] in console.export_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks": "sumz"}, "knows no task, group or tag of that name"),
        ({"include_path": "/nowhere"}, "no such folder"),
        ({"output_path": "/nowhere/r.json"}, "no folder that can be written"),
        ({"output_path": "~"}, "a folder\n"),
        ({"max_length": 4000, "tasks": "broken"}, "can't be read"),
        ({"apply_chat_template": True}, "no chat template"),
        ({"tasks": "sums,answers"}, "num_beams"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_a_weight_is_read(here, wrong, said):
    (here / "tasks" / "broken.yaml").write_text(
        "task: broken\ndataset_path: json\ndataset_kwargs:\n  data_files: /no\n"
    )
    sums = (here / "tasks" / "sums.yaml").read_text().replace("sums\n", "answers\n").split("metric_list")[0]
    (here / "tasks" / "answers.yaml").write_text(
        sums.replace("multiple_choice", "generate_until") + "generation_kwargs:\n  num_beams: 2\n  until: ['.']\n"
    )
    (here / "bare").mkdir(exist_ok=True)
    for path in (here / "model").glob("*.json"):  # and no weights
        (here / "bare" / path.name).write_bytes(path.read_bytes())
    wrong = {"model": str(here / "bare"), **wrong}
    with pytest.raises(UserError) as refused:
        evaluation_command.run(options(here, **wrong), Console(quiet=True))
    assert said in str(refused.value)


def test_a_folder_without_weights_is_refused(here, tmp_path):
    for path in (here / "model").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    console = Console(record=True, width=200)
    with pytest.raises(UserError, match="the weights are not there"):
        open_model(options(here, model=str(tmp_path), max_length=193), console)
    assert "rows of 193 tokens, and the model's config has 192 positions" in console.export_text()


@pytest.mark.parametrize("named", [{}, {"base_model_name_or_path": "some/model", "revision": 2}], ids=str)
def test_an_adapter_that_names_no_model_or_no_revision_of_it_is_refused_before_another_is_taken(here, tmp_path, named):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **named}))
    with pytest.raises(UserError, match=f"revision={named.get('revision')!r}"):
        open_model(options(here, model=str(tmp_path)), Console(quiet=True))


@pytest.mark.slow
def test_generated_texts_are_those_of_the_harness_own_model(here, ours):
    model = AutoModelForCausalLM.from_pretrained(here / "model")
    lm = HFLM(pretrained=model, tokenizer=byte_tokenizer(), device="cpu", batch_size=4, max_length=192)
    options = {"max_gen_toks": 12, "do_sample": False, "until": ["\n\n"]}
    texts = ["One", "Two and two are", "x" * 300]
    whole = lm.generate_until([SimpleNamespace(args=(text, options)) for text in texts], disable_tqdm=True)
    word = next(letter for text in whole for letter in text[1:] if letter in string.ascii_letters)
    options["until"] = ["\n\n", word]
    requests = [SimpleNamespace(args=(text, options)) for text in texts]
    expected = lm.generate_until(requests, disable_tqdm=True)
    assert expected != whole
    assert ours.generate_until(requests) == expected
    assert len(set(whole)) == 3
    # a chat model's turn ends with another token than its tokenizer's: the generation config names both
    ends = [byte_tokenizer().eos_token_id, *byte_tokenizer().encode(word)]
    model.generation_config.eos_token_id, options["until"] = ends, ["\n\n"]
    model.generation_config.save_pretrained(here / "model")
    assert [text.removesuffix(word) for text in lm.generate_until(requests, disable_tqdm=True)] == expected
    assert ours.generate_until(requests) == expected
    with pytest.raises(UserError, match="num_beams"):
        ours.generate_until([SimpleNamespace(args=("One", options | {"num_beams": 2}))])
