"""A model by its hub id: which of the repository's files are fetched, at which commit, and what is said if it fails."""

from __future__ import annotations

import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter
from rich.console import Console

from shardwright.data.tokenizer import open_tokenizer
from shardwright.errors import TransientError, UserError
from shardwright.files.arrays import whole
from shardwright.files.hub_names import pinned
from shardwright.hosts.hosts import Hosts
from shardwright.layout.auto import UNMADE
from shardwright.model.meta_model import load_config, meta_model
from shardwright.weights import hub_files
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.weight_files import INDEX
from tests.support.chats import byte_tokenizer
from tests.support.hub_models import config_of, save_theirs
from tests.support.model_hub import model_hub

ID = "someone/small"


@pytest.fixture
def hub(tmp_path):
    with model_hub(tmp_path / "cache") as found:
        yield found


@pytest.fixture
def folder(tmp_path):
    """A model in shards, with a second copy of its weights in other formats beside them."""
    made = tmp_path / "made"
    save_theirs(made, config_of("llama"), max_shard_size="300KB")
    for other in (
        "consolidated.safetensors",
        "pytorch_model.bin",
        "original/model.safetensors",
        "model-fp16.safetensors",
    ):
        (made / other).parent.mkdir(exist_ok=True)
        (made / other).write_bytes(b"other" * 1000)
    (made / "modeling_own.py").write_text("raise SystemExit('run')\n")
    return made


def renamed(folder, pattern):
    """Renames the shards as ``pattern`` says, from a number and their count."""
    index = json.loads((folder / INDEX).read_text())
    shards = sorted({*index["weight_map"].values()})
    new = {shard: pattern(i, len(shards)) for i, shard in enumerate(shards)}
    for shard in shards:
        (folder / shard).rename(folder / new[shard])
    index["weight_map"] = {name: new[shard] for name, shard in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    return [*new.values()]


def opened(name, console=None):
    return open_hub_weights(name, meta_model(load_config(name, UNMADE)), console)


PATTERNS = {
    "Qwen3.5": lambda i, n: f"model.safetensors-{i + 1:05}-of-{n:05}.safetensors",
    "Kimi-K2": lambda i, n: f"model-{i + 1}-of-{n}.safetensors",
    "gpt-oss, from 0": lambda i, n: f"model-{i:05}-of-{n - 1:05}.safetensors",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_files_fetched_are_those_that_the_index_names_whatever_they_are_called(hub, folder, pattern):
    shards, out = renamed(folder, PATTERNS[pattern]), io.StringIO()
    commit = hub.new(ID).commit(folder)
    weights = opened(ID, Console(file=out, width=300))
    theirs = save_theirs(folder / "again", config_of("llama"))
    for name in ("model.norm.weight", "model.layers.2.mlp.up_proj.weight"):
        assert torch.equal(whole(weights(name)), theirs.state_dict()[name])
    asked = {*hub.asked}
    assert asked == {*shards, INDEX, "config.json", "generation_config.json", "modeling_own.py"}
    assert len(hub.asked) == len(asked)  # none of them twice
    total = sum((folder / file).stat().st_size for file in asked - {INDEX, "config.json"})
    said = rf"fetch: +{len(asked) - 2} files \({total / 2**10:.1f} KiB\) of {ID}@{commit} into "
    assert re.match(said, out.getvalue())
    hub.asked.clear()
    opened(ID, Console(file=out))
    assert hub.asked == []


def test_a_repository_of_one_file_needs_no_index(hub, tmp_path):
    save_theirs(tmp_path / "made", config_of("llama"))
    hub.new(ID).commit(tmp_path / "made")
    assert hub_files.repository_files(ID)["model.safetensors"] == (tmp_path / "made/model.safetensors").stat().st_size
    assert hub.asked == []
    opened(ID)
    assert "model.safetensors" in hub.asked


def test_a_repository_without_weights_in_the_hubs_format_is_refused_before_any_is_fetched(hub, tmp_path):
    config_of("llama").save_pretrained(tmp_path / "made")
    (tmp_path / "made/consolidated.safetensors").write_bytes(bytes(5000))
    hub.new(ID).commit(tmp_path / "made")
    with pytest.raises(UserError, match=r"neither model.safetensors nor [\s\S]* consolidated.safetensors"):
        opened(ID)
    for name in ("manifest.json", "tensors.json"):  # a run's checkpoint
        (tmp_path / "made" / name).write_text("{}")
    with pytest.raises(UserError, match=r"export --checkpoint .*made --output FOLDER` writes"):
        opened(str(tmp_path / "made"))
    assert hub.asked == ["config.json"]


def test_a_download_that_breaks_off_keeps_its_whole_files_and_the_bar_counts_the_bytes(hub, folder, monkeypatch):
    shards, counted = renamed(folder, PATTERNS["Kimi-K2"]), []
    small = {file for file in shards if (folder / file).stat().st_size < 200_000}
    assert 0 < len(small) < len(shards)
    hub.new(ID).commit(folder)
    hub.limit = 200_000
    monkeypatch.setattr(hub_files, "_WORKERS", 1)
    with pytest.raises(UserError, match=r"the hub answers 403[^\n]*\n[^\n]*\n +instead: the same command again"):
        opened(ID)
    before, hub.limit = {*hub.asked}, 1 << 40
    hub.asked.clear()
    bar = hub_files._bar_class(counted.append)
    monkeypatch.setattr(hub_files, "_bar_class", lambda advance: bar)
    opened(ID)
    again = [file for file in hub.asked if file in shards]
    assert not {*again} & {*small} & before
    assert sum(counted) == sum((folder / file).stat().st_size for file in hub.asked)


def test_the_bar_counts_the_bytes_of_files_that_come_in_chunks_from_the_hub_s_own_store():
    """A transfer as the hub's client reports it: bytes on the disk, and fewer over the wire."""
    counted: list[int] = []
    with XetDownloadProgressReporter(
        reconstruction_desc="a file", total=100, log_level=30, tqdm_class=hub_files._bar_class(counted.append)
    ) as progress:
        for done in (40, 100):
            report = SimpleNamespace(
                total_bytes_completed=done, total_transfer_bytes_completed=done // 2, total_bytes=100
            )
            report.total_bytes_completion_rate = report.total_transfer_bytes_completion_rate = 1.0
            progress.update_progress(report)
    assert sum(counted) == 100


def test_hosts_that_share_a_disk_fetch_each_file_once_and_the_rule_is_said(hub, folder, monkeypatch):
    hub.new(ID).commit(folder)
    monkeypatch.setattr(hub_files, "hosts", lambda: Hosts(0, 4))
    said = [io.StringIO() for _ in range(3)]
    with ThreadPoolExecutor() as pool:  # as so many processes: the locks are the cache's own, files
        found = [*pool.map(lambda out: hub_files.fetched(ID, Console(file=out, width=300)), said)]
    assert {*found} == {found[0]}
    assert len(hub.asked) == len({*hub.asked}) > 4
    assert said[0].getvalue().endswith("; each of 4 hosts, or one for all on a disk that they share\n")


def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_fetched(hub, folder, monkeypatch):
    hub.new(ID).commit(folder)
    monkeypatch.setattr(hub_files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 200_000}))
    with pytest.raises(UserError, match=r"to fetch, and 195\.3 KiB free"):
        opened(ID)
    assert {*hub.asked} == {"config.json", INDEX}


# ---- revisions ----


def test_config_weights_and_tokenizer_are_of_the_same_revision(hub, tmp_path):
    repository, made = hub.new(ID), tmp_path / "made"
    first = save_theirs(made, config_of("llama"), seed=1)
    byte_tokenizer().save_pretrained(made)
    old = repository.commit(made, "v1", "refs/pr/3")
    save_theirs(made, config_of("llama", num_hidden_layers=2), seed=2)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(made)
    new = repository.commit(made)
    assert pinned(ID) == f"{ID}@{new}"
    assert pinned(str(made)) == str(made)
    for revision in ("v1", "refs/pr/3", old):
        name = f"{ID}@{revision}"
        assert pinned(name) == f"{ID}@{old}"
        assert load_config(name, UNMADE).num_hidden_layers == 3
        assert torch.equal(whole(opened(name)("model.norm.weight")), first.model.norm.weight)
        assert "<new>" not in open_tokenizer(name).get_vocab()
    assert load_config(ID, UNMADE).num_hidden_layers == 2
    assert "<new>" in open_tokenizer(ID).get_vocab()


def test_what_was_fetched_is_opened_without_network_at_the_commit_that_the_cache_knows(hub, folder, monkeypatch):
    commit = hub.new(ID).commit(folder)
    theirs = whole(opened(ID)("model.norm.weight"))
    for name, value in {"HF_HUB_OFFLINE": True, "ENDPOINT": "http://127.0.0.1:9"}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    hub.asked.clear()
    for name in (ID, f"{ID}@main", f"{ID}@{commit}"):
        assert pinned(name) == f"{ID}@{commit}"
        assert torch.equal(whole(opened(name)("model.norm.weight")), theirs)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE=1"):
        pinned(f"{ID}@other")


# ---- what the hub refuses ----

REFUSALS = {
    "gated": (
        "someone/gated",
        "is gated: .* accepted its terms",
        r"accept them at \S+/gated, and set HF_TOKEN",
    ),
    "absent": ("someone/absent", "no repository someone/absent, or it is private", "HF_TOKEN"),
    "no revision": (f"{ID}@v9", "no revision 'v9'", "a branch, a tag or a commit"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_of_the_hub_is_one_line_with_what_to_do(hub, folder, kind):
    name, found, instead = REFUSALS[kind]
    hub.new(ID).commit(folder)
    hub.refused |= {"someone/gated": "gated"}
    for ask in (pinned, lambda name: load_config(name, UNMADE), open_tokenizer):
        with pytest.raises(UserError, match=f"{found}[^\n]*\n[^\n]*\n +instead: [^\n]*{instead}") as told:
            ask(name)
        assert str(told.value).count("\n") == 3
        assert not isinstance(told.value, TransientError)


def test_a_hub_that_is_not_reached_may_be_reached_by_the_next_attempt(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TransientError, match=r"127.0.0.1:9 can't be reached[^\n]*\n[^\n]*\n +instead: network"):
        load_config(ID, UNMADE)
