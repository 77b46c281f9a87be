"""Checkpoints of format 1: those in `old_format/` were written by the version before format 2, on two devices.

`expected.json` has what that version read of them, what it exported, and the losses of its run that went on from them.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata

from shardwright.checkpoint import format_1, manifest
from shardwright.checkpoint.lineage import whole_steps
from shardwright.checkpoint.read import RunCheckpoint, open_checked
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.files.safetensors_file import bytes_of
from shardwright.scripts import export
from tests.support.checkpoints import quiet
from tests.support.lives import Lives, write_sums
from tests.support.logs import logged

OLD = Path(__file__).parent / "old_format"
EXPECTED = json.loads((OLD / "expected.json").read_text())
LORA = {"full": [], "lora": ["--lora_r", 2, "--lora_alpha", 4, "--lora_target", "q_proj,v_proj"]}
EXPORTED = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}
kinds = pytest.mark.parametrize("kind", EXPECTED)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    state = xxhash.xxh3_64()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(bytes_of(tensors[name]))
    return state.hexdigest()


def opened(kind: str) -> RunCheckpoint:
    return open_checked(Folder(OLD / kind / "checkpoint-3"), quiet())


def read_all(found: RunCheckpoint) -> dict[str, torch.Tensor]:
    arrays = {name: found(name) for name in found._tensors.names()}
    return {name: array[tuple(slice(0, size) for size in array.shape)] for name, array in arrays.items()}


@kinds
def test_every_tensor_is_read_bit_for_bit_and_in_slices(kind):
    found = opened(kind)
    tensors = read_all(found)
    assert (len(tensors), digest(tensors)) == (EXPECTED[kind]["tensors"], EXPECTED[kind]["of the checkpoint"])
    for name, values in tensors.items():
        half = tuple(slice(size // 2, size) for size in values.shape)
        assert torch.equal(found(name)[half], values[half])


@kinds
def test_the_weights_are_exported_as_the_version_that_wrote_them_did(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_bytes((OLD / "config.json").read_bytes())  # its --model, a path from here
    command = ["export.py", "--checkpoint", str(OLD / kind / "checkpoint-3"), "--output", "out"]
    monkeypatch.setattr(sys, "argv", command)
    export.main()
    assert digest(load_file(tmp_path / "out" / EXPORTED[kind])) == EXPECTED[kind]["of its export"]


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_losses_and_saves_in_todays_format(tmp_path):
    write_sums(tmp_path / "text", 10)
    common = ["--recipe", "llama_fsdp", "--model", OLD / "config.json", "--dataset", tmp_path / "text"]
    common += ["--compute", "scan=True", "--sequence_length", 32, "--warmup_steps", 2, "--max_steps", 6]
    common += ["--save_steps", 3, "--logging_steps", 1, "--learning_rate", 1e-3, "--save_total_limit", 1]
    with Lives(2) as lives:
        for kind, lora in LORA.items():
            output, log = tmp_path / kind, tmp_path / f"{kind}.log"
            shutil.copytree(OLD / kind, output)
            more = ["--output_dir", output, "--resume_from_checkpoint", "latest"]
            assert lives.run(log, *common, *lora, *more) == 0, log.read_text()
            # another processor sums in another order
            assert logged(output, "loss") == pytest.approx(EXPECTED[kind]["losses"], rel=1e-6)
            assert whole_steps(Folder(output)) == [6]
            assert manifest.format_of(manifest.read_manifest(Folder(output / "checkpoint-6"))) == 2


def copied(folder: Path, changed: Mapping[str, bytes], kind: str = "full") -> RunCheckpoint:
    """The old checkpoint, in ``folder``, with other contents of some files, opened."""
    shutil.copytree(OLD / kind / "checkpoint-3", folder, dirs_exist_ok=True)
    files = manifest.read_manifest(Folder(folder))
    for name, data in changed.items():
        (folder / name).write_bytes(data)
        files[name] = manifest.checksum(data)
    manifest.write_manifest(Folder(folder), files)
    return open_checked(Folder(folder), quiet())


def test_what_the_first_ones_lack_is_added(tmp_path):
    def without(name: str, *keys: str, **more: Any) -> bytes:
        content = json.loads((OLD / "full" / "checkpoint-3" / name).read_text())
        return json.dumps({key: value for key, value in content.items() if key not in keys} | more).encode()

    copied(tmp_path / "checkpoint-2", {})
    found = copied(
        tmp_path / "checkpoint-3",
        {
            "host.json": without("host.json", "lineage", "asked_batch"),
            "training_args.json": without("training_args.json", "optim"),
            "trainer_state.json": without("trainer_state.json", best_model_checkpoint="/moved/since/checkpoint-2"),
        },
    )
    assert found.ancestors == {2: manifest.mark(Folder(tmp_path / "checkpoint-2"))}
    assert found.host["asked_batch"] == [1, 1]
    assert found.best_for(Folder(tmp_path)) == "checkpoint-2"
    found.check_optimizer("adamw")
    with pytest.raises(UserError, match="the state of adamw"):
        found.check_optimizer("lion")


def listing() -> Metadata:
    return pickle.loads((OLD / "full" / "checkpoint-3" / ".metadata").read_bytes())


# ---- malice ----


class _MakesAFolder:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def _place(**changes: Any) -> Any:
    def change(metadata: Metadata) -> None:
        for name, value in changes.items():
            setattr(list(metadata.storage_data.values())[-1], name, value)

    return change


def _larger(metadata: Metadata) -> None:
    next(iter(metadata.state_dict_metadata.values())).size = torch.Size((10**9, 10**9))


def _code(metadata: Metadata) -> None:
    metadata.state_dict_metadata["evil"] = _MakesAFolder()


def _replaces_a_method(metadata: Metadata) -> None:
    metadata.state_dict_metadata["evil"] = (Metadata, {"__init__": 1})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_place(relative_path="/etc/passwd"), "a piece lies in '/etc/passwd'"),
        (_place(offset=10**18), "overlap, or leave out bytes"),
        (_place(length=1), "has 1 bytes"),
        (_place(offset=0), "overlap, or leave out bytes"),
        (_larger, "do not tile its shape"),
        (_code, "is no list of tensors"),
        (_replaces_a_method, "is no list of tensors"),
    ],
)
def test_a_list_that_does_not_go_with_the_files_is_refused_and_runs_nothing(tmp_path, monkeypatch, change, found):
    monkeypatch.chdir(tmp_path)
    metadata, before = listing(), Metadata.__init__
    change(metadata)
    with pytest.raises(UserError, match=found):
        read_all(copied(tmp_path / "checkpoint-3", {".metadata": pickle.dumps(metadata)}))
    assert not Path("pwned").exists()
    assert Metadata.__init__ is before


@pytest.mark.parametrize(
    "code",
    ["4e72ffffff7f2e", "8d00000000000000102e", "9500000000000000102e", "8e00000000000000102e", "8bffffff7f2e"],
    ids=["memo", "text", "frame", "bytes", "number"],
)
def test_a_pickle_that_claims_to_be_huge_is_refused_by_what_is_there(code):
    """The reader in C makes room for what is claimed: 64 GiB for the memo's."""
    tracemalloc.start()
    with pytest.raises((EOFError, AttributeError, LookupError)):
        format_1._index(bytes.fromhex("8004" + code))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_record_that_holds_no_values_where_they_belong_is_refused(tmp_path):
    data = (OLD / "full" / "checkpoint-3" / "__0_0.distcp").read_bytes()
    with pytest.raises(UserError, match=r"__0_0\.distcp can't be read \(ValueError: no tensor where the list says"):
        read_all(copied(tmp_path, {"__0_0.distcp": data.replace(b"archive/data/0", b"archive/data/1")}))
