"""The tokens that end a generation: from the config, and from the files beside it where there are any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, GenerationConfig

from shardwright.arguments.training import TrainingArguments
from shardwright.data.from_arguments import stop_tokens

CONFIG = AutoConfig.for_model("llama", eos_token_id=7)


def test_a_folders_generation_config_names_further_ones(tmp_path: Path) -> None:
    GenerationConfig(eos_token_id=[5, 7]).save_pretrained(tmp_path)
    assert stop_tokens(TrainingArguments("any", model=str(tmp_path)), CONFIG) == {5, 7}


def test_a_config_alone_has_no_files_beside_it_to_ask_the_hub_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    monkeypatch.setattr(GenerationConfig, "from_pretrained", lambda *_, **__: pytest.fail("the hub was asked"))
    assert stop_tokens(TrainingArguments("any", model=str(tmp_path / "config.json")), CONFIG) == {7}
