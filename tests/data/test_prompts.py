"""Prompts of a file, as a person writes them, and what is refused."""

from __future__ import annotations

import pytest

from shardwright.data.samples.prompts import prompt_tokens, read_prompts
from shardwright.errors import UserError
from tests.support.tasks import byte_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[a]' if add_generation_prompt }}"
HELLO = [{"role": "user", "content": "Hello"}]


def test_a_line_is_a_prompt_unless_the_first_is_json(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('Once upon\n\n{"prompt": "x"}\n')
    assert read_prompts(str(file)) == ["Once upon", '{"prompt": "x"}']
    file.write_text(
        '{"prompt": "Once"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n'
        '{"prompt": [{"role": "user", "content": "Hello"}]}'
    )
    assert read_prompts(str(file)) == ["Once", HELLO, HELLO]
    file.write_text('{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}\n')
    assert read_prompts(str(file)) == [HELLO], "the answer is what is asked for"
    file.write_bytes('\ufeff{"prompt": "On\u2028ce"}\r\n{"prompt": "\x85"}'.encode())
    assert read_prompts(str(file)) == ["On\u2028ce", "\x85"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 lines with text"),
        (b'{"prompt": "x"}\nOnce', "line 2 is no JSON"),
        (b'{"text": "x"}', "line 1 has neither"),
        (b'{"messages": ["x"]}', "line 1 has neither"),
        (b"caf\xe9", "UnicodeDecodeError"),
        (b"x\n" * 1001, "1001 lines"),
        (None, "no such file"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(UserError, match="--sample_prompts") as refused:
        read_prompts(str(tmp_path / "prompts"))
    assert said in str(refused.value)


def test_a_conversation_goes_through_its_template_with_the_answers_beginning():
    tokenizer = byte_tokenizer()
    with pytest.raises(UserError, match="no chat template"):
        prompt_tokens(HELLO, tokenizer)
    tokenizer.chat_template = TEMPLATE
    text, tokens = prompt_tokens(HELLO, tokenizer)
    assert text == tokenizer.decode(tokens) == "[user]Hello[a]"
    assert prompt_tokens("Hi", tokenizer) == ("Hi", tokenizer("Hi").input_ids)
