"""The main job from its command line: what it writes, what it prints, how it ends, what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.data.corpus import DataOptions, load_corpus
from tests.support.fork_server import Forked
from tests.support.lives import TINY, write_sums
from tests.support.logs import entries, logged
from tests.support.paths import ROOT
from tests.support.training import SMALL, environment, train


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """A small dataset of its own."""
    folder = tmp_path_factory.mktemp("text")
    write_sums(folder, 40)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, text_folder):
    """One run of 10 steps: (its output directory, the finished process)."""
    output = tmp_path_factory.mktemp("runs") / "out"
    done = train(
        *("--recipe", "mixtral_ep", "--dataset", text_folder, "--output_dir", output, "--max_steps", 10, *SMALL)
    )
    assert done.returncode == 0, done.stderr
    return output, done


def test_a_run_says_its_devices_and_logs_only_on_logging_steps(run):
    output, done = run
    assert "8 virtual CPU devices" in done.stdout
    assert "fsdp=2 × expert=4" in done.stdout
    assert "proof:   none for this recipe, model and these options" in done.stdout
    lines = entries(output, "loss")
    assert [entry["step"] for entry in lines] == [5, 10]
    keys = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "compiles"}
    keys |= {"expert_load_max", "expert_load_entropy", "expert_load_max/layer_3"}
    assert all(keys <= entry.keys() for entry in lines)
    assert not any("dropped_fraction" in entry for entry in lines), "a shipped recipe drops no token"
    assert len({entry["compiles"] for entry in lines}) == 1  # all of them before step 5


def test_a_run_writes_state_recipe_arguments_plan_curve_and_model(run):
    output, done = run
    written = {"run.yaml", "trainer_state.json", "recipe.json", "training_args.json", "plan.json"}
    written |= {"loss_curve.svg", "model"}
    assert written | {"expert_load.json", "expert_load.svg"} <= {path.name for path in output.iterdir()}
    assert json.loads((output / "recipe.json").read_text())["mesh"]["axes"] == {"fsdp": -1, "expert": 4}
    arguments = json.loads((output / "training_args.json").read_text())
    assert arguments["max_steps"] == 10
    (again,) = parse([TrainingArguments], ["--config", str(output / "run.yaml")], None)
    assert again.as_dict() == arguments
    for name in ("loss_curve.svg", "expert_load.svg"):
        assert (output / name).read_bytes().startswith(b"<svg")
    assert "busiest expert" in done.stdout
    before, after = logged(output, "eval_loss")
    assert after < before
    assert f"{before:.4f}" in done.stdout
    assert f"{after:.4f}" in done.stdout


def test_the_model_folder_loads_on_plain_cpu_with_the_same_held_out_loss(run, text_folder):
    output, _ = run
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    corpus = load_corpus(DataOptions(str(text_folder), sequence_length=64), tokenizer, len(tokenizer))
    rows = torch.tensor(corpus.heldout.dataset["input_ids"][:])
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    assert loss == pytest.approx(logged(output, "eval_loss")[-1], rel=1e-4)


def test_a_trained_folder_is_a_model_to_go_on_from(run, text_folder, tmp_path):
    output, _ = run
    arguments = ["--recipe", "mixtral_fsdp", "--model", output / "model", "--dataset", text_folder, "--max_steps", 2]
    done = train(*arguments, "--output_dir", tmp_path / "next", *SMALL)
    assert done.returncode == 0, done.stderr
    first, _ = logged(tmp_path / "next", "eval_loss")
    assert first == pytest.approx(logged(output, "eval_loss")[-1], rel=1e-4)


@pytest.fixture
def tiny(tmp_path_factory, text_folder) -> list[object]:
    """Arguments of runs of which how they end is told, whatever the model: of one layer, that is not scanned."""
    config = tmp_path_factory.mktemp("tiny") / "config.json"
    config.write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    model = ["--model", config, "--compute", "scan=False,remat=none"]
    return ["--recipe", "llama_fsdp", "--dataset", text_folder, *model, "--max_eval_rows", 10]


def test_ctrl_c_ends_cleanly_with_what_was_learned_saved(tiny, tmp_path):
    words = [ROOT / "scripts" / "train.py", *tiny, "--output_dir", tmp_path, "--max_steps", 100_000, *SMALL]
    with Forked(*words, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "lr " in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=300) == 130
    assert "interrupted after step" in rest
    assert "Traceback" not in rest
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert 5 <= state["global_step"] < 100_000
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "llama"


def test_a_loss_that_is_not_finite_stops_the_run_names_the_step_and_keeps_finite_weights(tiny, tmp_path):
    ruin = ["--max_steps", 20, "--learning_rate", "1e30", "--max_grad_norm", 0]
    done = train(*tiny, "--output_dir", tmp_path, *SMALL, *ruin)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "not finite" in done.stderr
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert f"step {state['global_step'] + 1} of 20" in done.stderr
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict().values()
    assert all(w.isfinite().all() for w in weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "mixtral_epp"], "did you mean 'mixtral_ep'?"),
        (["--recipe", "llama_fsdp", "--model", "CONFIG:bert"], "built as an encoder"),
        (["--recipe", "llama_fsdp", "--model", "CONFIG:mixtral"], "has experts, such as"),
        (["--recipe", "mixtral_ep", "--mesh", "fsdp=3,expert=4"], "Mesh(fsdp=3, expert=4) on 8 devices"),
        (["--recipe", "mixtral_ep", "--mesh", "fsdp=1,expret=8"], "'expret' is not one of them"),
        (["--recipe", "mixtral_ep", "--max_steps", "0"], "--max_steps 100"),
        (["--recipe", "mixtral_ep", "--learning_rate", "-1"], "--learning_rate -1"),
        (["--recipe", "mixtral_ep", "--lr_scheduler_type", "cosin"], "did you mean 'cosine'?"),
        (["--recipe", "mixtral_ep", "--dataset", "./nowhere.txt"], "no such"),
        (["--recipe", "mixtral_ep", "--dataset", "EMPTY"], "empty"),
    ],
    ids=lambda value: " ".join(value[2:] or value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_exit_code_2_and_writes_nothing(arguments, message, tmp_path, capsys, monkeypatch):
    from shardwright.hosts.output_streams import exit_code
    from shardwright.scripts import train as script

    for kind in ("bert", "mixtral"):
        (tmp_path / f"{kind}.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "empty.txt").touch()
    places = {"CONFIG:bert": "bert.json", "CONFIG:mixtral": "mixtral.json", "EMPTY": "empty.txt"}
    filled = [str(tmp_path / places[a]) if a in places else a for a in arguments]
    monkeypatch.setattr(sys, "argv", ["train.py", *filled, "--output_dir", str(tmp_path / "runs" / "out")])
    assert exit_code(script.main) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("error:") == 1
    assert "page:" not in shown.out
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_holds_something_is_not_written_into(tmp_path, capsys, monkeypatch):
    from shardwright.hosts.output_streams import exit_code
    from shardwright.scripts import train as script

    (tmp_path / "precious").write_text("work")
    monkeypatch.setattr(sys, "argv", ["train.py", "--recipe", "mixtral_ep", "--output_dir", str(tmp_path)])
    assert exit_code(script.main) == 2
    assert "--overwrite_output_dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_an_option_that_does_not_exist_is_refused_with_the_nearest(capsys, monkeypatch):
    from shardwright.scripts import train as script

    monkeypatch.setattr(sys, "argv", ["train.py", "--recipe", "mixtral_ep", "--max_step", "3"])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    assert "did you mean '--max_steps'" in capsys.readouterr().err
