"""A chat template that never ends, or takes all memory, is refused before the run renders with it."""

from __future__ import annotations

import pytest

from shardwright.data.samples import template_trial
from shardwright.data.samples.chat import Chat
from shardwright.data.samples.template import Template
from shardwright.errors import UserError
from tests.support.chats import byte_tokenizer

THRICE = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
LOOP = THRICE + "{% endfor %}" * 3
ENDLESS = {
    "a loop": LOOP,
    "a loop where an answer is asked for": f"{{% if add_generation_prompt %}}{LOOP}{{% endif %}}",
    "a text that doubles": "{% set n = namespace(t='x' * 1024) %}"
    "{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
}
CHAT = Chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_does_not_end_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = template_trial._PROGRAM.replace("(20, 20)", "(3, 3)").replace(str(4 << 30), str(1 << 30))
    monkeypatch.setattr(template_trial, "_PROGRAM", small)
    with pytest.raises(UserError, match="may never end"):
        Template(byte_tokenizer(ENDLESS[case]), frozenset()).text(CHAT, 2)


def test_a_template_is_tried_once_and_what_it_refuses_itself_is_told_as_before() -> None:
    template = "{{ messages[0].content }}{{ raise_exception('no tools') if tools }}"
    rendering = Template(byte_tokenizer(template), frozenset())
    assert rendering.text(CHAT, 2) == "hi"
    assert template in template_trial._tried
    with pytest.raises(Exception, match="no tools"):
        rendering.text(Chat(CHAT.messages, [{"type": "function"}]), 2)
