"""Batches of a proof: random tokens, of which some are not scored, unevenly over rows; packed where the run packs."""

import torch
from torch import Tensor

from shardwright.job import Job
from shardwright.models.ops.labels import IGNORE

Batch = dict[str, Tensor]
_FIRST, _BEYOND = 3, 200  # token ids: no special ones


def make_batches(job: Job, count: int) -> list[Batch]:
    """``count`` batches of tensors [rows, S] as a step of ``job`` takes them."""
    return [_batch(job, number) for number in range(count)]


def _batch(job: Job, number: int) -> Batch:
    generator, shape = torch.Generator().manual_seed(number), (job.rows, job.args.sequence_length)
    tokens = torch.randint(_FIRST, min(_BEYOND, job.config.vocab_size), shape, generator=generator)
    if job.args.entry.parts:
        return _pairs(job, tokens, generator)
    rows, places = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    ignored = places < 2 * (rows % (shape[1] // 3))
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(ignored, IGNORE)}
    if not job.args.isolate_documents:
        return batch
    lengths = torch.randint(2, shape[1] // 2, (shape[0], shape[1] // 2), generator=generator)
    return batch | _segments(lengths, shape[1], batch["labels"])


def _segments(lengths: Tensor, length: int, labels: Tensor) -> Batch:
    """Columns of segments of ``lengths`` [rows, segments]; the rest of a row is padding (segment 0)."""
    ends = lengths.cumsum(1)
    places = torch.arange(length).expand(len(lengths), length)
    number = (places[:, :, None] >= ends[:, None]).sum(-1)  # of ends that lie before a place
    starts = torch.cat([torch.zeros_like(ends[:, :1]), ends], 1)
    whole = (ends <= length).sum(1, keepdim=True)  # segments that end within the row
    real = number < whole
    positions = (places - starts.gather(1, number)).where(real, 0)
    return {
        "segment_ids": (number + 1).where(real, 0),
        "position_ids": positions,
        "labels": labels.where(real & (positions > 0), IGNORE),  # a segment's first token follows nothing
    }


def _pairs(job: Job, tokens: Tensor, generator: torch.Generator) -> Batch:
    """Pairs of answers behind their prompt, each a segment; and what the starting weights said of them."""
    rows, length = tokens.shape
    goal = job.args.goal
    most = goal.groups or 1
    lengths = torch.zeros((rows, 2 * most), dtype=torch.int64)
    labels = tokens.clone()
    for row in range(rows):
        end = 0
        for pair in range(most if row % 4 else 1):  # some rows have fewer
            prompt, *answers = torch.randint(2, 8, (3,), generator=generator).tolist()
            if end + 2 * prompt + sum(answers) > length:
                break
            tokens[row, end + prompt + answers[0] :][:prompt] = tokens[row, end : end + prompt]
            for side, answer in enumerate(answers):
                labels[row, end : end + prompt] = IGNORE
                lengths[row, 2 * pair + side] = prompt + answer
                end += prompt + answer
        labels[row, end:] = IGNORE
    labels = labels.where(labels == IGNORE, tokens)
    filled = torch.where(lengths > 0, lengths, length + 1)  # what is empty ends beyond the row
    batch = {"input_ids": tokens, **_segments(filled, length, labels)}
    said = {name: torch.randn((rows, *shape), generator=generator) * 3 - 20 for name, shape in goal.columns.items()}
    return batch | said


def apart(batch: Batch) -> Batch:
    """The segments of packed rows, each in a row of its own, padded on the right, as the plain model takes them."""
    found = []
    for tokens, labels, segments in zip(batch["input_ids"], batch["labels"], batch["segment_ids"], strict=True):
        found += [(tokens[segments == i], labels[segments == i]) for i in range(1, int(segments.max()) + 1)]
    shape = len(found), batch["input_ids"].shape[1]
    rows = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    rows["labels"] = torch.full(shape, IGNORE)
    for row, (tokens, labels) in enumerate(found):
        rows["input_ids"][row, : len(tokens)], rows["labels"][row, : len(tokens)] = tokens, labels
        rows["attention_mask"][row, : len(tokens)] = 1
    return rows
