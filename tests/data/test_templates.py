"""Every template that trl ships trains each kind of chat on what trl's training templates mark, or names the template.

The table is that of `scripts/measure/templates.py`, which also finds templates of a later trl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.data.chat_template import template_names, with_chat_template
from shardwright.data.samples import template_trial
from shardwright.errors import UserError
from shardwright.scripts.measure import templates as table
from tests.support.chats import CHATML, LLAMA, byte_tokenizer

# cells that are neither the labels of trl's template nor a refusal: (template, cases) -> verdict
REASONED = ("<think> twice", "reasoning twice")
MORE = {
    "deepseek_r1_distill": ("reasoning", "reasoning twice", "reasoning alone"),  # trl's leaves out that key
    "deepseekv3": ("<think>", "<think> twice", "reasoning", "reasoning twice", "reasoning alone"),
    "diffusion_gemma": ("reasoning twice",),
    "gptoss": ("reasoning twice", "tools, words"),
    **dict.fromkeys(["glm4moe", *(f"nemotron_3_{n}" for n in ("5_lightning", "nano", "super", "ultra"))], REASONED),
}
# GPT-OSS's <|return|>, which trl has as the <|end|> of a finished turn; Gemma's <|tool_response>, which ends a call
STOP = {
    "gptoss": ("two turns", "<think> twice"),
    "diffusion_gemma": ("tools, null", "tools, empty", "calls", "ends in a call"),
}
DIFFERS = {"diffusion_gemma": ("tools, words",)}  # it writes these words behind the tool's result, as a turn of its own
KNOWN = {(name, case): kind for kind, found in (("more", MORE), ("stop", STOP), ("differs", DIFFERS))
         for name, cases in found.items() for case in cases}  # fmt: skip


class Everything(set[str]):
    def __contains__(self, text: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these templates ends; to try it in a process of its own takes a second."""
    monkeypatch.setattr(template_trial, "_tried", Everything())


@pytest.mark.parametrize("name", table.names())
def test_a_template_trains_what_trls_own_marks_or_is_named(name: str) -> None:
    trained = 0
    for case in table.CASES:
        found = table.ours(name, case)
        kind = table.verdict(found, table.trls(name, case)).rstrip(" 0123456789")
        expected = KNOWN.get((name, case), "=")
        assert kind in {expected, *(("no marks", "trl: no", "no", "refused") if expected == "=" else ())}, case
        assert found.samples or "the chat template of " in found.why, case
        trained += bool(found.samples)
    assert trained >= 8, "the rest is what it has no words for"


def test_reasoning_that_later_turns_leave_out_is_trained_in_samples_of_its_own_or_the_last_turn_alone() -> None:
    for case in REASONED:
        every = table.ours("qwen3", case)
        assert every.samples == 2
        assert ["</think>" in text for text in every.texts] == [True, True]
        assert "</think>" not in every.behind[1], "as the model sees the first turn when it answers again"
        last = table.ours("qwen3", case, train_on="last")
        assert (last.samples, last.texts, last.behind) == (1, every.texts[1:], every.behind[1:])


def test_chatml_makes_a_chat_model_of_a_base_model_and_ends_its_generations(tmp_path: Path) -> None:
    base = byte_tokenizer(None, "</s>")
    made = with_chat_template(base, "chatml")
    assert (base.chat_template, base.eos_token) == (None, "</s>")
    assert (made.eos_token, len(made)) == ("<|im_end|>", len(base))
    chat: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    assert made.apply_chat_template(chat, tokenize=False) == text
    made.save_pretrained(tmp_path)
    opened = type(made).from_pretrained(tmp_path)
    assert (opened.eos_token, opened.apply_chat_template(chat, tokenize=False)) == ("<|im_end|>", text)


def test_where_the_vocabulary_has_no_such_words_a_turn_ends_with_the_end_of_text_token(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<|go|>{{ m.role }}: {{ m.content }}<|halt|>\n{% endfor %}")
    made = with_chat_template(byte_tokenizer(None, "</s>"), str(file))
    assert made.eos_token == "</s>"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert made.apply_chat_template(chat, tokenize=False) == "<|go|>user: hi</s>\n<|go|>assistant: ho</s>\n"


def test_a_name_is_one_of_a_tokenizers_own_templates_and_a_folder_gives_its_tokenizers(tmp_path: Path) -> None:
    several = byte_tokenizer(None)
    several.chat_template = {"default": LLAMA, "tool_use": CHATML}
    assert (made := with_chat_template(several, "tool_use")).chat_template == CHATML
    assert made.eos_token == "<|im_end|>"
    several.save_pretrained(tmp_path / "several")
    byte_tokenizer(None).save_pretrained(tmp_path / "none")
    shipped = with_chat_template(byte_tokenizer(None), "qwen2_5")  # by trl
    assert "You are Qwen" in shipped.chat_template
    assert shipped.eos_token == "<|im_end|>"
    assert with_chat_template(byte_tokenizer(None), str(tmp_path / "several")).chat_template == LLAMA
    with pytest.raises(UserError, match="no chat template") as refused:
        with_chat_template(several, str(tmp_path / "none"))
    assert refused.value.instead.endswith("a name: chatml, default, tool_use")


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, "FileNotFound"), ("{% for", "TemplateSyntaxError"), ("a", "leaves"), (CHATML * 9, "File name too long")],
)
def test_a_template_that_is_none_is_refused_with_the_names_that_there_are(
    tmp_path: Path, text: str | None, found: str
) -> None:
    file = tmp_path / "mine.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as refused:
        with_chat_template(byte_tokenizer(None), str(file) if "long" not in found else str(text))
    assert found in refused.value.found
    assert all(name in refused.value.instead for name in template_names())
