"""Records' words about themselves are obeyed, refused by name, or named; and how records may be written down."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Image, IterableDataset

from shardwright.data.audit import Audit, audit
from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.errors import UserError
from shardwright.objectives.pairs import PAIRS
from tests.data.test_samples import answers, encode
from tests.data.test_unread import TEMPLATES
from tests.support.chats import CHAT, CHATML, MARKED, byte_tokenizer, chats, scored_text, write_records

TOKENIZER = byte_tokenizer(CHATML, "<|im_end|>")
ASKED, ANSWER = {"role": "user", "content": "Bern?"}, {"role": "assistant", "content": "It rains."}
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"


def weighed(**keys: Any) -> dict[str, Any]:
    return {"messages": [CHAT[0], {**CHAT[1], **keys}, *CHAT[2:]]}


def audited(path: Path, *records: dict[str, Any], template: str = CHATML, **options: Any) -> Audit:
    options = {"sequence_length": 512, "isolate_documents": True, **options}
    tokenizer = byte_tokenizer(template, "<|im_end|>")
    return audit(DataOptions(str(write_records(path / "x.jsonl", records)), **options), tokenizer)


def loaded(folder: Path, dataset: Any, **options: Any) -> Corpus:
    options = {"sequence_length": 64, "isolate_documents": True, "heldout_fraction": 0.2, **options}
    return load_corpus(DataOptions(dataset, **options), TOKENIZER, 300, folder / "cache")


# ---- turns and tokens that are not to be scored ----


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
@pytest.mark.parametrize("key", ["weight", "train"])
@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_a_turn_of_weight_zero_is_not_scored_and_counted(template: str, key: str, train_on_prompt: bool) -> None:
    tokenizer, sample, tally = encode(weighed(**{key: 0}), template, train_on_prompt=train_on_prompt)
    assert (tally["silent turns"], tally["turns"]) == (1, 1)
    said = "".join(scored_text(tokenizer, sample))
    assert ("two" in said, "three<|im_end|>" in said, "one" in said) == (False, True, train_on_prompt)
    for weight in (1.0, None):  # as a table has the turns of a column in which others have one
        assert answers(weighed(**{key: weight}), template) == ["two<|im_end|>", "three<|im_end|>"]


def test_a_weight_that_is_neither_is_refused_and_one_of_what_is_no_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"message 2 has weight 0\.5"):
        encode(weighed(weight=0.5))
    found = audited(tmp_path, {"messages": [{**CHAT[0], "weight": 1}, *CHAT[1:]]})
    assert found.wrong["lost"].places == [("x.jsonl, row 1", "messages.weight (int)")]


@pytest.mark.parametrize(
    ("masks", "tokens", "scored"),
    [
        ({"attention_mask": [1, 1, 1, 1, 0, 0]}, [5, 6, 7, 8], [0, 1, 2, 3]),
        ({"attention_mask": [0, 0, 1, 1, 1, 1]}, [7, 8, 2, 2], [0, 1, 2, 3]),
        ({"completion_mask": [0, 0, 1, 1, 0, 0]}, [5, 6, 7, 8, 2, 2], [2, 3]),
        ({"assistant_masks": [0, 1, 0, 1, 0, 0]}, [5, 6, 7, 8, 2, 2], [1, 3]),
        ({"completion_mask": [0, 1, 1, 1, 0, 1], "attention_mask": [1, 1, 1, 0, 0, 0]}, [5, 6, 7], [1, 2]),
    ],
)
def test_masks_beside_tokens_say_what_is_scored(masks: dict[str, Any], tokens: list[int], scored: list[int]) -> None:
    _, sample, _ = encode({"input_ids": [5, 6, 7, 8, 2, 2], **masks})
    assert sample.tokens.tolist() == tokens
    assert [i for i, label in enumerate(sample.labels) if label != -100] == scored


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({"attention_mask": [1, 0, 1]}, "a 0 between tokens"),
        ({"attention_mask": [0, 0, 0]}, "no token that is seen"),
        ({"completion_mask": [0, 1]}, "a 0 or a 1 for each of 3 tokens"),
        ({"assistant_masks": [0, 1, 2]}, "a 0 or a 1 for each of 3 tokens"),
    ],
)
def test_a_mask_that_is_none_is_refused_by_name(masks: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(masks))}.*{words}"):
        encode({"input_ids": [5, 6, 7], **masks})


# ---- columns ----


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "A fruit?", "completion": " A stone.", "label": False}, "column label: False: a record of KTO's"),
        ({"prompt": [ASKED], "completion": [ANSWER], "label": True}, "column label: True: a record of KTO's"),
        ({"messages": CHAT, "kto_tag": True}, "column kto_tag: True"),
        ({"prompt": "<image>\nWhat is this?", "completion": "A cat.", "image": "cat.png"}, "column image: a str for"),
        ({"messages": CHAT, "images": ["cat.png"]}, "column images: a list for the model to see"),
        ({"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}, "column chat_template_kwargs: tokenize"),
        ({"messages": CHAT, "chat_template_kwargs": "no JSON"}, "column chat_template_kwargs: a str, not an object"),
        ({"conversations": [{"from": "human", "value": "a"}], "system": 5}, "column system: an int, not text"),
        (
            {"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"},
            "column system: another text than its",
        ),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "column history: something other than pairs"),
    ],
)
def test_a_column_that_would_make_another_sample_is_refused_by_name(
    record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"row 1, " + words):
        loaded(tmp_path, str(write_records(tmp_path / "x.jsonl", [record] * 2)))


@pytest.mark.parametrize("streaming", [False, True])
def test_pictures_of_a_dataset_are_refused_or_named_and_none_is_decoded(tmp_path: Path, streaming: bool) -> None:
    broken = [{"bytes": b"no picture", "path": None}] * 60
    for name in ("image", "photo"):
        records = Dataset.from_dict({"prompt": ["a"] * 60, "completion": [f"{i}" for i in range(60)], name: broken})
        dataset = records.cast_column(name, Image())
        dataset = dataset.to_iterable_dataset() if streaming else dataset
        if name == "photo":
            notes = loaded(tmp_path, dataset, streaming=streaming).notes
            assert any(re.search(r"not read: photo \(.*, \d+\)", note) for note in notes), notes
        else:
            with pytest.raises(UserError, match=r"the column image \(Image\)"):
                loaded(tmp_path, dataset, streaming=streaming)


def test_earlier_turns_of_an_instruction_are_seen_and_not_scored() -> None:
    record = {"instruction": "And its capital?", "output": "Bern.", "history": [["Name a country.", "Switzerland."]]}
    tokenizer, sample, _ = encode(record)
    assert scored_text(tokenizer, sample) == ["Bern.<|im_end|>"]
    assert "Switzerland." in tokenizer.decode(sample.tokens)
    with pytest.raises(ValueError, match="no chat template to write them"):
        encode(record, None, "<end>")


def test_a_records_own_values_reach_the_template() -> None:
    template = "{{ mood }}: " + CHATML
    tokenizer, sample, _ = encode({"messages": CHAT, "chat_template_kwargs": json.dumps({"mood": "merry"})}, template)
    assert tokenizer.decode(sample.tokens).startswith("merry: ")


SOURCES = ["stored", "streamed", "dataset", "iterable", "mixture"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["chats", "texts"])
def test_columns_and_keys_that_are_not_read_are_named_with_their_number(tmp_path: Path, source: str, kind: str) -> None:
    records = [{"messages": [ASKED, {**ANSWER, "content": f"{i} " * 9, "mood": "gay"}]} for i in range(60)]
    if kind == "texts":
        records = [{"text": f"{i} " * 40} for i in range(60)]
    records = [{**record, "score": i, "history": "Be brief."} for i, record in enumerate(records)]
    path = str(write_records(tmp_path / "x.jsonl", records))
    dataset: Any = path if source in ("stored", "streamed") else f"{path}:1,{path}:1"
    if source in ("dataset", "iterable"):
        dataset = Dataset.from_list(records)
        dataset = dataset.to_iterable_dataset() if source == "iterable" else dataset
    corpus = loaded(tmp_path, dataset, streaming=source in ("streamed", "iterable"))
    notes = "\n".join(corpus.notes)
    some = "60" if source not in ("streamed", "iterable") else r"\d+"
    assert len(re.findall(rf"warning: not read, though it says what to learn: history \(\w+, {some}\)", notes)) == (
        2 if source == "mixture" else 1
    ), notes
    assert re.search(r"not read: (messages\.mood \(str, \d+\); )?score \(int\d*, ", notes)
    assert ("messages.mood" in notes) == (kind == "chats")
    if source == "stored":
        again = loaded(tmp_path, dataset)
        assert again.notes == corpus.notes, "of the cache too"


def test_the_audit_fails_where_a_lost_field_changes_what_is_trained_and_names_the_others(tmp_path: Path) -> None:
    thought = {"messages": [ASKED, {**ANSWER, "reasoning_content": "I looked."}]}
    found = audited(tmp_path, thought, {"messages": [ASKED, ANSWER], "source": "a book"})
    assert found.wrong["lost"].places == [("x.jsonl, row 1", "messages.reasoning_content (str)")]
    ((column, words),) = found.findings["not read"].places
    assert (column, words.partition(" of ")[0]) == ("column source (str)", "in 1 records")
    assert not audited(tmp_path, thought, template=TEMPLATES["qwen3"]).wrong
    assert not audited(tmp_path, {"text": "a " * 99, "label": 1}).wrong
    assert list(audited(tmp_path, {"text": "a " * 99, "image": "x.png"}).wrong) == ["lost"]
    ranked = {"prompt": "one and one?", "chosen": " two", "rejected": " three", "margin": 0.5}  # a reward model's
    assert "lost" in audited(tmp_path, ranked, reads=[PAIRS]).wrong


# ---- how records are written down ----


def test_contents_in_parts_are_joined_for_a_template_of_strings_and_made_for_one_of_parts() -> None:
    parts = [{**m, "content": [{"type": "text", "text": m["content"][:2]}, {"text": m["content"][2:]}]} for m in CHAT]
    for template in (CHATML, TEMPLATES["smolvlm"], TEMPLATES["qwen2_5_vl"], TEMPLATES["gptoss_training"]):
        (_, plain, _), (_, joined, _) = (encode({"messages": each}, template) for each in (CHAT, parts))
        assert joined.tokens.tolist() == plain.tokens.tolist()
        assert joined.labels.tolist() == plain.labels.tolist()
    tokenizer, sample, _ = encode({"messages": CHAT}, TEMPLATES["smolvlm"])
    assert "three" in tokenizer.decode(sample.tokens)


def calling(arguments: Any, content: str | None = None) -> dict[str, Any]:
    call = {"id": "c12345678", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], "refusal": None}


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_1", "glm4moe", "deepseekv3_training"])
def test_calls_are_rendered_as_transformers_does_whether_arguments_are_objects_or_strings(template: str) -> None:
    messages = [
        ASKED,
        calling({"town": "Bern", "day": None}),
        {"role": "tool", "name": "weather", "content": "rain"},
        ANSWER,
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"day": {"default": None}}}}]
    tokenizer, sample, _ = encode({"messages": messages, "tools": tools}, TEMPLATES[template], typed=False)
    messages[1]["content"] = ""
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert tokenizer.decode(sample.tokens) == whole
    assert "null" in whole
    messages[1] = calling('{"town":"Bern","day":null}')
    _, again, _ = encode({"messages": messages, "tools": tools}, TEMPLATES[template], typed=False)
    assert again.tokens.tolist() == sample.tokens.tolist()


def test_nulls_within_arguments_that_arrow_may_have_made_are_left_out_and_counted(tmp_path: Path) -> None:
    chats = [{"messages": [ASKED, calling({key: "x"}), ANSWER]} for key in ("town", "day")] * 30
    template = CHATML.replace("{{ m.content }}", "{{ m.tool_calls | tojson if m.tool_calls else m.content }}")
    tokenizer = byte_tokenizer(template, "<|im_end|>")
    options = DataOptions(Dataset.from_list(chats), 512, isolate_documents=True, heldout_fraction=0.2)
    corpus = load_corpus(options, tokenizer, 300, tmp_path / "cache")
    assert "null" not in tokenizer.decode(corpus.train.dataset[0]["input_ids"])
    assert any("not read: nulls within tools or arguments (NoneType, 60)" in note for note in corpus.notes), (
        corpus.notes
    )


def test_a_template_that_takes_arguments_as_strings_alone_gets_them_so() -> None:
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content + (m.tool_calls[0].function.arguments if m.tool_calls else '') }}"
    )
    for arguments in ({"town": "Bern"}, '{"town": "Bern"}'):
        assert answers({"messages": [ASKED, calling(arguments)]}, template) == ['{"town": "Bern"}<|im_end|>']


def test_an_answer_of_reasoning_alone_is_no_empty_one() -> None:
    messages = [ASKED, {"role": "assistant", "content": "", "reasoning_content": "I say nothing."}]
    (said,) = answers({"messages": messages}, TEMPLATES["qwen3"])
    assert "I say nothing." in said


def test_pairs_without_a_prompt_have_their_common_beginning_as_trl_cuts_it(tmp_path: Path) -> None:
    import trl

    both = [("hello", "go away"), ("hello", "hello you"), ("no no", "no  it is"), ("I see", "I saw")]
    asked = "\n\nHuman: hi\n\nAssistant: "
    texts = [{"chosen": asked + chosen, "rejected": asked + rejected} for chosen, rejected in both]
    turns = [[ASKED, {"role": "assistant", "content": text}, *CHAT] for text in "ab"]
    talks = [{"chosen": turns[0], "rejected": turns[1]}, {"chosen": turns[0], "rejected": turns[0][:2]}]
    packer = SamplePacker(TOKENIZER, PAIRS, 1024, SampleOptions(groups=8))
    for whole in (texts, talks):
        columns = [
            packer.rows([str(PAIRS.document(record)) for record in records])
            for records in (whole, [*map(trl.extract_prompt, whole)])
        ]
        assert all((values == columns[1][name]).all() for name, values in columns[0].items())
    for chosen, rejected, words in (("a", "b", "no common beginning"), ("A: b", "A: b", "no answer that differs")):
        path = str(write_records(tmp_path / "bad.jsonl", [{"chosen": chosen, "rejected": rejected}]))
        with pytest.raises(UserError, match=words):
            loaded(tmp_path, path, samples=SampleOptions(groups=4), reads=(PAIRS,))


# ---- texts ----


def test_texts_that_a_template_wrote_are_refused_unless_it_is_said_what_names_of_tokens_are(tmp_path: Path) -> None:
    path = str(write_records(tmp_path / "x.jsonl", [{"text": f"{i}{RENDERED}"} for i in range(60)]))
    for streaming in (False, True):
        with pytest.raises(UserError, match=r"hold the name of a special token, such as '<\|im_") as refused:
            loaded(tmp_path, path, streaming=streaming)
        assert "--split_special_tokens false" in refused.value.instead
        assert "--split_special_tokens true" in refused.value.instead
    with pytest.raises(UserError, match="hold the name of a special token"):
        audit(DataOptions(path, 64, isolate_documents=True), TOKENIZER)
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    for packing in (True, False):
        for split in (True, False):
            samples = SampleOptions(split_special_tokens=split, packing=packing)
            rows = loaded(tmp_path, path, samples=samples).train.dataset[:]["input_ids"]
            assert any(start in row for row in rows) == (not split)
            assert TOKENIZER.decode(rows[0]).count("<|im_start|>user\nhi<|im_end|>") >= 1


@pytest.mark.parametrize("packing", [True, False])
def test_a_few_texts_that_hold_the_name_of_a_special_token_are_counted(tmp_path: Path, packing: bool) -> None:
    records = [{"text": f"{i} " * 40 + (RENDERED if i % 6 == 0 else "")} for i in range(60)]
    path = str(write_records(tmp_path / "x.jsonl", records))
    corpus = loaded(tmp_path, path, samples=SampleOptions(packing=packing))
    assert any("spelt as letters: 10" in note for note in corpus.notes)
    found = audit(DataOptions(path, 64, isolate_documents=True, samples=SampleOptions(packing=packing)), TOKENIZER)
    assert [words for _, words in found.findings["special name"].places] == ["in 10 texts"]


def test_a_single_text_is_trained_on_and_evaluated_on_which_is_said(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", [{"text": "The same line, to be learned by heart."}] * 64)
    corpus = loaded(tmp_path, str(path))
    assert len(corpus.train) == len(corpus.heldout) > 10
    assert corpus.notes[-1] == "the only text there is: it is trained on and evaluated on"


# ---- formats of datasets ----


def test_a_datasets_format_changes_no_row(tmp_path: Path) -> None:
    records = Dataset.from_list([{**chat, "score": i} for i, chat in enumerate(chats(60))])
    plain = loaded(tmp_path, records, sequence_length=1024)
    for made in (records.with_format("torch"), records.with_format("numpy", columns=["messages"])):
        corpus = loaded(tmp_path, made, sequence_length=1024)
        assert corpus.train.dataset[:] == plain.train.dataset[:]
        assert any("score (" in note for note in corpus.notes) == (len(made.format["columns"]) == 2)
    tokens = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 9)
    stream: IterableDataset = tokens.to_iterable_dataset().with_format("torch")
    rows = [
        loaded(tmp_path, each, streaming=True).heldout.dataset[:] for each in (stream, tokens.to_iterable_dataset())
    ]
    assert rows[0] == rows[1]
    with pytest.raises(UserError, match="with_transform"):
        loaded(tmp_path, records.with_transform(lambda batch: batch))
    assert Counter(note for note in plain.notes if "score (" in note).total() == 1


def test_records_that_max_samples_leaves_out_are_not_read_nor_counted(tmp_path: Path) -> None:
    records = [{"text": f"the story of number {i}", "source": "a book"} for i in range(200)]
    corpus = loaded(tmp_path, str(write_records(tmp_path / "x.jsonl", records)), max_samples=60)
    assert "not read: source (str, 60)" in corpus.notes
