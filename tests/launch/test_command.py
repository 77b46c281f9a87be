"""`scripts/launch.py`: what it shows, writes and runs, and what it refuses, by the option's name."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from shardwright.errors import UserError
from shardwright.launch.launch_arguments import LaunchArguments
from shardwright.launch.launch_command import main
from shardwright.launch.targets import TARGETS
from tests.support.fork_server import run
from tests.support.launching import stand_in
from tests.support.paths import ROOT

JOBSET = ["jobset", "--topology", "v5p:2x2x4", "--image", "image:1"]
TRAIN = ["--", "--recipe", "mixtral_ep", "--output_dir", "gs://bucket/one"]
RECIPE = str(ROOT / "recipes" / "mixtral_ep.py")


def refused(words: list[str]) -> str:
    with pytest.raises(UserError) as error:
        main(words, None)
    return str(error.value)


def test_it_writes_the_files_shows_the_commands_and_starts_nothing(tmp_path):
    words = [*JOBSET, "--output", str(tmp_path / "files"), "--env", "A=1 HF_TOKEN=hf_x", *TRAIN, "--max_steps", "10"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = run(ROOT / "scripts" / "launch.py", *words, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kubectl apply --filename networkpolicy.yaml --filename jobset.yaml" in done.stdout
    assert "Nothing was started" in done.stdout
    assert "Note: HF_TOKEN of --env stands in these files as it is" in done.stdout
    manifest = yaml.safe_load((tmp_path / "files" / "jobset.yaml").read_text())
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    # a restart goes on by itself
    assert container["command"][2:] == [*TRAIN[1:], "--max_steps", "10", "--resume_from_checkpoint", "latest"]


def test_run_runs_the_commands_in_the_files_folder_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    stand_in(
        tmp_path / "bin",
        "gcloud",
        'echo "$4" >> ../called; [ "$4" = describe ] && echo ACTIVE; ls host.sh >> ../called',
    )
    words = ["tpu-vm", "--topology", "v5p:2x2x4", "--image", "i", "--zone", "z", "--output", str(tmp_path / "files")]
    assert main([*words, "--run", *TRAIN], None) == 0
    called = (tmp_path / "called").read_text().split()
    assert [word for word in called if word != "host.sh"] == ["create", "describe", "scp", "ssh"]


def test_a_command_that_fails_stops_those_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    stand_in(tmp_path / "bin", "gcloud", "echo x >> ../called; exit 3")
    words = ["tpu-vm", "--topology", "v5p:2x2x4", "--image", "i", "--zone", "z", "--output", str(tmp_path / "files")]
    error = refused([*words, "--run", *TRAIN])
    assert "gcloud compute tpus queued-resources create" in error
    assert "exit code 3" in error
    assert (tmp_path / "called").read_text() == "x\n"


def test_a_program_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refused([*JOBSET, "--run", "--output", str(tmp_path / "files"), *TRAIN])
    assert "kubectl installed and in PATH" in error


def test_files_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert f"--output {tmp_path / 'file'}" in refused([*JOBSET, "--output", str(tmp_path / "file"), *TRAIN])


REFUSED = {
    "no target": ([], "one of xpk, jobset, skypilot, tpu-vm, ray"),
    "a misspelt target": (["jobsett", *JOBSET[1:], *TRAIN], "did you mean 'jobset'?"),
    "no image": (["jobset", "--topology", "v5p:2x2x4", *TRAIN], "no --image"),
    "no cluster": (["xpk", *JOBSET[1:], *TRAIN], "no --cluster"),
    "no topology": (["jobset", "--image", "i", *TRAIN], "no --topology"),
    "a topology that is none": (["jobset", "--image", "i", "--topology", "v5p:3x3", *TRAIN], "no slice of that name"),
    "no slices": ([*JOBSET, "--slices", "0", *TRAIN], "--slices 0"),
    "an option of another target": ([*JOBSET, "--cluster", "c", *TRAIN], "--cluster"),
    "a queue without Kueue": (["ray", "--topology", "v5p:2x2x4", "--queue", "q", *TRAIN], "--queue"),
    "a name that no cluster takes": ([*JOBSET, "--name", "My_run", *TRAIN], "--name My_run"),
    "a mount that is none": ([*JOBSET, "--mount", "disk", *TRAIN], "--mount disk"),
    "a bucket on a TPU VM": (
        ["tpu-vm", *JOBSET[1:], "--zone", "z", "--mount", "gs://b:/mnt/b", *TRAIN],
        "a folder where each host has it mounted",
    ),
    "an environment that sets nothing": ([*JOBSET, "--env", "HF_HOME", *TRAIN], "'HF_HOME'"),
    "an open quote": ([*JOBSET, "--env", "A='", *TRAIN], "--env"),
    "a shape that its size does not tell": (
        ["tpu-vm", "--topology", "v5p:8x8x8", "--image", "i", "--zone", "z", *TRAIN],
        "slices of as many chips: 4x8x16",
    ),
    "slices of one host on GKE": (
        ["jobset", "--topology", "v6e:2x4", "--image", "i", "--slices", "2", *TRAIN],
        "jobset joins slices of several hosts alone",
    ),
    "several slices by SkyPilot": (["skypilot", *JOBSET[1:], "--slices", "2", *TRAIN], "xpk, jobset or tpu-vm"),
    "no options of train": (JOBSET, "no --output_dir"),
    "no output": ([*JOBSET, "--", "--recipe", "mixtral_ep"], "no --output_dir"),
    "an output in the container": ([*JOBSET, "--", "--output_dir", "/data/one"], "on the container's own disk"),
    "an output beside the mount": (
        [*JOBSET, "--mount", "disk:/mnt/disk", "--", "--output_dir", "/mnt/disk2/one"],
        "--output_dir /mnt/disk/my-run",
    ),
    "an output on a host": (["ray", "--topology", "v5p:2x2x4", "--", "--output_dir", "/tmp/one"], "each host has"),
    "an output relative to a host": (["ray", "--topology", "v5p:2x2x4", "--", "--output_dir", "one"], "each host has"),
    "an output in memory": ([*JOBSET, "--", "--output_dir", "memory://one"], "none of gs:// and s3://"),
    "a recipe that is none": ([*JOBSET, "--", "--recipe", "mixtrol", *TRAIN[3:]], "no recipe of that name"),
    "a recipe of this machine": ([*JOBSET, "--", "--recipe", RECIPE, *TRAIN[3:]], "instead: auto or another name"),
    "a dataset of this machine": ([*JOBSET, *TRAIN, "--dataset", "hub/set:0.5,/tmp:0.5"], "--dataset /tmp\n"),
    "a model that Ray is not sent": (
        ["ray", "--topology", "v5p:2x2x4", *TRAIN, "--model", str(ROOT / "docs")],
        f"--model {ROOT / 'docs'}\n",
    ),
    "a mesh that no slices take": ([*JOBSET, "--slices", "2", *TRAIN], "--mesh data=2,fsdp=4,expert=4"),
    "a mesh that the chips don't take": ([*JOBSET, *TRAIN, "--mesh", "fsdp=8,expert=4"], "on 16 devices"),
    "a value that train refuses": ([*JOBSET, *TRAIN, "--learning_rate", "-1"], "--learning_rate"),
    "a restart at one checkpoint": (
        [*JOBSET, *TRAIN, "--resume_from_checkpoint", "gs://bucket/one/checkpoint-3"],
        "--resume_from_checkpoint latest",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_written(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, message = REFUSED[case]
    assert message in refused(words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", TARGETS)
def test_no_option_becomes_a_line_of_its_own_in_any_target_s_files(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [field.name for field in fields(LaunchArguments) if "str" in str(field.type)]
    given = dict.fromkeys(texts, "a") | {"topology": "v5p:2x2x2", "mount": "gs://b:/mnt/b", "env": "A=b"}
    for name in texts if target == "jobset" else ["env"]:
        for end in "\n\r\x0b\x0c\x1c\x85\u2028\u2029\x1b":
            refused([target, *JOBSET[1:], f"--{name}", f"{given[name]}{end}B=c", *TRAIN])
            assert "a line break" in refused([target, *JOBSET[1:], *TRAIN, "--run_name", f"a{end}B=c"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*JOBSET, "--topolog", "x", *TRAIN], "no option --topolog; did you mean '--topology'?"),
        ([*JOBSET, *TRAIN, "--learning_rat", "1"], "no option --learning_rat; did you mean '--learning_rate'?"),
        ([*JOBSET, "stray", *TRAIN], "'stray' stands behind no option"),
    ],
)
def test_a_misspelt_option_on_either_side_ends_the_command_with_the_nearest(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words, None)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ([*JOBSET, "--mount", "d:/mnt/d"], "jobset.yaml"),
        (["tpu-vm", "--topology", "v6e:4x4", "--zone", "z", "--mount", "/mnt/d:/mnt/d"], "host.sh"),
    ],
    ids=["pods", "VMs"],
)
def test_a_recipe_that_lies_on_the_hosts_disk_alone_is_read_there(target, file, tmp_path):
    words = [*target, "--output", str(tmp_path), "--", "--recipe", "/mnt/d/mine.py", "--output_dir", "/mnt/d/one"]
    assert main(words, None) == 0
    assert "/mnt/d/mine.py" in (tmp_path / file).read_text()


def test_latest_is_not_asked_for_twice(tmp_path):
    assert main([*JOBSET, "--output", str(tmp_path), *TRAIN, "--resume_from_checkpoint", "latest"], None) == 0
    assert (tmp_path / "jobset.yaml").read_text().count("latest") == 1
