"""Records of every shape become samples, and the loss is on the answers alone, their stop token included."""

from __future__ import annotations

import json
import math
from collections import Counter
from cProfile import Profile
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples.samples import Encoder, Sample, SampleOptions
from shardwright.errors import UserError
from shardwright.objectives.sft import SHAPES
from tests.support.chats import (
    CHAT,
    CHATML,
    ENDLESS,
    LLAMA,
    MARKED,
    MIXTRAL,
    PARTING,
    REASONING,
    byte_tokenizer,
    scored_text,
)

SHAPE = {shape.name: shape for shape in SHAPES}
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama": (LLAMA, "<|eot|>"),
    "mixtral": (MIXTRAL, "</s>"),
    "marked": (MARKED, "<|im_end|>"),
}


def raising(number: int, bad: BadRecord) -> None:
    raise bad


def encode(
    record: dict[str, Any],
    template: str | None = CHATML,
    eos: str = "<|im_end|>",
    typed: bool = True,
    **options: Any,
) -> Any:
    """(tokenizer, sample, tally) of a record of the shape that its columns say; of several, the last sample."""
    shape = next(shape for shape in SHAPES if all(name in record for name in shape.required))
    tokenizer, tally = byte_tokenizer(template, eos), Counter[str]()
    encoder = Encoder(tokenizer, shape, tally, raising, SampleOptions(**options))
    document = shape.document(record, typed)
    *_, (_, (sample,)) = encoder([document])
    return tokenizer, sample, tally


def answers(record: dict[str, Any], *args: Any, **options: Any) -> list[str]:
    tokenizer, sample, _ = encode(record, *args, **options)
    return scored_text(tokenizer, sample)


# ---- chats ----


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_turn_of_the_assistant_is_trained_with_its_stop_token_and_nothing_else(kind: str) -> None:
    template, stop = TEMPLATES[kind]
    tokenizer, sample, tally = encode({"messages": CHAT}, template, stop)
    words = [text.removesuffix(stop) for text in scored_text(tokenizer, sample)]
    assert [word.split()[-1] for word in words] == ["two", "three"]
    assert all(text.endswith(stop) for text in scored_text(tokenizer, sample))
    assert tokenizer.decode(sample.tokens) == tokenizer.apply_chat_template(CHAT, tokenize=False), "all earlier turns"
    assert (tally["turns"], tally["turns without stop"]) == (2, 0)


def test_a_stop_token_of_the_models_generation_config_counts_as_one() -> None:
    tokenizer = byte_tokenizer(LLAMA, "<end>")
    stops = frozenset(tokenizer.convert_tokens_to_ids(["<|eot|>"]))
    assert answers({"messages": CHAT}, LLAMA, "<end>", stops=stops) == ["two<|eot|>", "three<|eot|>"]


def test_a_letter_that_another_tokenizers_config_calls_a_stop_token_ends_no_turn() -> None:
    letter = frozenset(byte_tokenizer()("w", add_special_tokens=False)["input_ids"])
    assert answers({"messages": CHAT}, stops=letter) == ["two<|im_end|>", "three<|im_end|>"]
    assert answers({"messages": CHAT}, ENDLESS, stops=letter) == ["two\n", "three\n"]


def test_turns_that_a_template_leaves_without_a_stop_token_are_counted() -> None:
    _, _, tally = encode({"messages": CHAT}, ENDLESS)
    assert (tally["turns"], tally["turns without stop"]) == (2, 2)


@pytest.mark.parametrize(("template", "before"), [(REASONING, "<think>\n\n</think>\n\n"), (PARTING, "")])
def test_a_turn_that_is_written_otherwise_once_the_chat_goes_on_is_a_sample_of_its_own(
    template: str, before: str
) -> None:
    tally, tokenizer = Counter[str](), byte_tokenizer(template, "<|im_end|>")
    groups = Encoder(tokenizer, SHAPES[0], tally, raising, SampleOptions())([json.dumps({"messages": CHAT})])
    for i, (number, (sample,)) in enumerate(groups):
        asked = tokenizer.apply_chat_template(CHAT[: 2 * i + 1], tokenize=False, add_generation_prompt=True)
        answer = f"{before}{CHAT[2 * i + 1]['content']}<|im_end|>"
        assert number == 0
        assert tokenizer.decode(sample.tokens) == f"{asked}{answer}\n", "as a server asks for it"
        assert scored_text(tokenizer, sample) == [answer]
    assert (len(groups), tally["turns"], tally["turns alone"]) == (2, 2, 1 if before else 2)


def test_a_template_whose_beginnings_part_and_hide_where_a_turn_begins_is_refused_with_the_place() -> None:
    hidden = PARTING.replace("<|im_start|>assistant", "<|im_start|>robot")
    with pytest.raises(BadRecord, match=r"as far as message 2 .* they part behind '', at '1 mes.* and '2 mes"):
        encode({"messages": CHAT}, hidden)


def test_what_a_template_itself_refuses_is_told_in_its_words() -> None:
    with pytest.raises(BadRecord, match="roles must alternate"):
        encode({"messages": CHAT[1:]}, MIXTRAL, "</s>")


def test_of_several_templates_that_of_the_name_default_is_taken_and_one_for_tools_with_them() -> None:
    named = {"default": CHATML, "tool_use": "{{ tools[0].function.name }}" + CHATML}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    plain, with_tools = (
        encode({"messages": CHAT, **more}, named)[1].tokens.tolist() for more in ({}, {"tools": [tool]})
    )
    assert plain == encode({"messages": CHAT}, CHATML)[1].tokens.tolist()
    assert with_tools == [*byte_tokenizer()("add").input_ids, *plain]
    with pytest.raises(BadRecord, match="multiple chat templates with no default"):
        encode({"messages": CHAT}, {"tool_use": CHATML})


def test_chats_without_a_template_are_refused() -> None:
    with pytest.raises(UserError, match="no chat template"):
        encode({"messages": CHAT}, None)


def test_a_first_turn_that_answers_nothing_is_not_trained() -> None:
    assert answers({"messages": [{"role": "assistant", "content": "hello"}, *CHAT]}) == [
        "two<|im_end|>",
        "three<|im_end|>",
    ]


def test_conversations_have_the_samples_of_their_messages() -> None:
    turns = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT]
    _, expected, _ = encode({"messages": [{"role": "system", "content": "sum"}, *CHAT]})
    said = [{"role": "system", "content": "sum"}]
    for record in ({"conversations": turns}, {"messages": CHAT}, {"messages": [*said, *CHAT]}):
        _, found, _ = encode({**record, "system": "sum"})
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.labels.tolist() == expected.labels.tolist()


def test_tools_and_calls_reach_the_template_without_the_nulls_that_arrow_adds() -> None:
    template = "{{ tools | tojson }}\n" + CHATML.replace(
        "{{ m.content }}", "{{ m.tool_calls | tojson if m.tool_calls else m.content }}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "one and one?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "content": "two", "tool_calls": None},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": None}}]
    tokenizer, sample, _ = encode({"messages": messages, "tools": json.dumps(tools)}, template)
    first, second = scored_text(tokenizer, sample)
    assert json.loads(first.removesuffix("<|im_end|>")) == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert second == "two<|im_end|>"
    assert "null" not in tokenizer.decode(sample.tokens).replace(json.dumps(tools), "")


@pytest.mark.parametrize(
    ("written", "content", "expected"),
    [
        ("{{ m.content if m.content is defined else 'no word' }}", {"content": None}, "no word"),
        ("{{ m.content if m.content is defined else 'no word' }}", {}, "no word"),
        ("{{ m.content if m.content is defined else 'no word' }}", {"content": ""}, ""),
        ("{{ '' + m.content }}", {"content": None}, ""),  # DeepSeek-V3's, which fails without content
    ],
)
def test_calls_without_content_are_written_as_the_template_writes_them(written, content, expected) -> None:
    template = CHATML.replace("{{ m.content }}", written + "{{ m.tool_calls | tojson if m.tool_calls }}")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    found = answers({"messages": [CHAT[0], {"role": "assistant", **content, "tool_calls": [call]}]}, template)
    assert found == [f"{expected}{json.dumps([call])}<|im_end|>"]


# ---- other shapes ----


def test_the_loss_is_on_the_completion_and_the_end_of_text() -> None:
    record = {"prompt": "one and one? ", "completion": "two"}
    tokenizer, sample, tally = encode(record, None, "<end>")
    assert scored_text(tokenizer, sample) == ["two<end>"]
    assert tokenizer.decode(sample.tokens) == "one and one? two<end>"
    assert answers(record, None, "<end>", train_on_prompt=True) == ["one and one? two<end>"]
    assert not tally["merged"]


def test_a_token_that_joins_prompt_and_completion_is_scored_and_counted() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["? t"])
    tally = Counter[str]()
    encoder = Encoder(tokenizer, SHAPE["prompt/completion"], tally, raising, SampleOptions())
    ((_, (sample,)),) = encoder([json.dumps({"prompt": "one? ", "completion": "two"})])
    assert scored_text(tokenizer, sample) == ["? two<end>"]
    assert tally["merged"] == 1


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_of_messages_as_prompt_and_completion_the_completions_turns_are_trained(template: str) -> None:
    assert answers({"prompt": CHAT[:3], "completion": CHAT[3:]}, template) == ["three<|im_end|>"]
    assert answers({"prompt": CHAT[:1], "completion": CHAT[1:]}, template) == ["two<|im_end|>", "three<|im_end|>"]


def test_an_instruction_is_asked_by_the_chat_template_or_in_plain_words() -> None:
    record = {"instruction": "Add.", "input": "1 1", "output": "2"}
    tokenizer, sample, _ = encode(record)
    assert scored_text(tokenizer, sample) == ["2<|im_end|>"]
    assert "user\nAdd.\n\n1 1<|im_end|>" in tokenizer.decode(sample.tokens)
    tokenizer, sample, _ = encode({"instruction": "Add.", "output": "2"}, None, "<end>")
    assert scored_text(tokenizer, sample) == ["2<end>"]
    assert "Add." in tokenizer.decode(sample.tokens)
    assert "Input" not in tokenizer.decode(sample.tokens)


def test_given_tokens_and_labels_are_taken_as_they_are() -> None:
    _, sample, _ = encode({"input_ids": [5, 6, 7], "labels": [-100, 9, 7]})
    assert (sample.tokens.tolist(), sample.labels.tolist(), sample.scored) == ([5, 6, 7], [-100, 9, 7], 2)
    _, sample, _ = encode({"input_ids": [5, 6, 7]})
    assert sample.labels.tolist() == [5, 6, 7]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages: nothing"),
    "no JSON": ({"messages": "hello"}, "messages: a string that is no JSON"),
    "a message that is a string": ({"messages": ["hello"]}, "message 1 is a str"),
    "no role": ({"messages": [{"content": "hello"}]}, "message 1 has no role"),
    "an empty turn": (
        {"messages": [CHAT[0], {"role": "assistant", "content": " "}]},
        r"message 2 \(assistant\) is empty",
    ),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part that is no text"),
    "a number": ({"messages": [{"role": "user", "content": 7}]}, "an int, not text"),
    "no completion": ({"prompt": "one", "completion": None}, "completion: nothing"),
    "a string and no string": ({"prompt": "one", "completion": math.nan}, "completion: a float behind a prompt"),
    "a string and messages": ({"prompt": "one", "completion": CHAT[1:2]}, "completion: messages behind a prompt"),
    "an instruction that is none": ({"instruction": "Add.", "output": 2}, "output: an int, not text"),
    "labels too few": ({"input_ids": [1, 2], "labels": [1]}, "labels: 1 labels of 2 tokens"),
    "tokens too high": ({"input_ids": [1, 20000]}, "input_ids: token 20000, and the tokenizer has"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_record_that_no_sample_can_be_made_of_is_named_by_column(case: str) -> None:
    record, found = BAD[case]
    with pytest.raises(BadRecord, match=found):
        encode(record)


def test_a_token_behind_a_hole_of_the_vocabulary_is_one_of_the_tokenizers() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "</s>": 1, "b": 9}, unk_token="a")), eos_token="</s>"
    )
    encoder = Encoder(tokenizer, SHAPE["input_ids"], Counter(), raising, SampleOptions())
    ((_, (sample,)),) = encoder([json.dumps({"input_ids": [0, 9, 1]})])
    assert sample.tokens.tolist() == [0, 9, 1]


def test_tokens_and_masks_of_ones_own_are_not_walked_one_by_one() -> None:
    tokenizer = byte_tokenizer(CHATML)
    encoder = Encoder(tokenizer, SHAPE["input_ids"], Counter(), raising, SampleOptions())

    def calls(count: int) -> int:
        record, profile = {"input_ids": [5] * count, "labels": [5] * count, "assistant_masks": [1] * count}, Profile()
        ((_, (sample,)),) = profile.runcall(lambda: encoder([str(SHAPE["input_ids"].document(record))]))
        assert sample.scored == count - 1
        return sum(each.callcount for each in profile.getstats())

    calls(10)  # what is asked of the tokenizer once
    assert calls(20_000) < calls(10) + 100


def test_a_sample_counts_the_targets_that_it_has() -> None:
    _, sample, _ = encode({"input_ids": [5, 6], "labels": [5, -100]})
    assert isinstance(sample, Sample)
    assert sample.scored == 0, "nothing stands before a first token"
