"""Ten shapes of real tokenizers through a run's whole life: their files come out as they went in, byte for byte."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig

from shardwright.arguments.training import TrainingArguments
from shardwright.data.audit_arguments import AuditArguments
from shardwright.data.audit_command import run_audit
from shardwright.data.tokenizer import open_tokenizer
from shardwright.errors import UserError
from shardwright.hosts.output_streams import exit_code
from shardwright.run import train
from shardwright.scripts import export as export_script
from tests.support.chats import chats, write_records
from tests.support.lives import TINY
from tests.support.tokenizers import SHAPES

BESIDE = ("config.json", "generation_config.json", "model.safetensors")  # an export's own


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {name: path.read_bytes() for path in paths if (name := path.relative_to(folder).as_posix()) not in BESIDE}


@pytest.fixture(params=SHAPES)
def repository(request, tmp_path) -> Path:
    """A model's folder with a config and the files of a tokenizer."""
    LlamaConfig(**TINY).save_pretrained(tmp_path / "base")
    SHAPES[request.param](tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.slow
def test_a_tokenizer_s_files_come_out_of_audit_run_resume_and_export_as_they_went_in(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    given = files_in(repository)
    options = {
        "recipe": "llama_fsdp",
        "model": str(repository),
        "from_scratch": True,
        "dataset": str(write_records(tmp_path / "chats.jsonl", chats(30, longest=8))),
        "sequence_length": 256,
        "compute": "scan=False,remat=none",
        "output_dir": str(tmp_path / "out"),
        "save_steps": 1,
    }
    said = io.StringIO()
    assert run_audit(TrainingArguments(**options), AuditArguments(), Console(file=said)) == 0, said.getvalue()
    train(TrainingArguments(**options, max_steps=1))
    resumed = train(TrainingArguments(**options, max_steps=2, resume_from_checkpoint="latest"))
    assert resumed.state.global_step == 2
    arguments = ["--checkpoint", str(tmp_path / "out/checkpoint-2"), "--output", str(tmp_path / "exported")]
    monkeypatch.setattr("sys.argv", ["export.py", *arguments])
    assert exit_code(export_script.main) == 0
    own = {name: data for name, data in given.items() if not name.startswith(("processor_", "preprocessor_"))}
    assert files_in(tmp_path / "out/checkpoint-2/tokenizer") == own
    for folder in (tmp_path / "out/model", tmp_path / "exported"):
        assert files_in(folder) == given
        opened, tokenizer = (AutoTokenizer.from_pretrained(each) for each in (folder, repository))
        assert opened.chat_template == tokenizer.chat_template
        assert opened("Hello\n<end> you").input_ids == tokenizer("Hello\n<end> you").input_ids


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="the package reads such a file")
def test_a_sentencepiece_model_alone_is_refused_by_the_package_that_it_needs(tmp_path):
    SHAPES["sentencepiece"](tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="sentencepiece"):
        open_tokenizer(str(tmp_path))
