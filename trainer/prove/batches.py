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
    if job.args.goal.groups is not None:
        return _answers(job, tokens, generator)
    rows, places = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    ignored = places < 2 * (rows % (shape[1] // 3))
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(ignored, IGNORE)}
    if job.args.goal.teacher is not None:
        batch[job.args.goal.teacher] = _taught(job, shape, generator)
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


def _taught(job: Job, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """The ids of a random teacher's likeliest tokens, their log-shares and that of all others. [rows, S, 2K + 1]"""
    logps = (3 * torch.randn((*shape, job.config.vocab_size), generator=generator)).log_softmax(-1)
    ids = logps.topk(int(job.args.goal.numbers["teacher_top_k"])).indices
    return torch.cat([ids.float(), bucketed(logps, ids)], -1)


def bucketed(logps: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of ``ids`` [..., K], and of all else together, from those of every token [..., V]."""
    rest = logps.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logps.gather(-1, ids), rest], -1)


def _answers(job: Job, tokens: Tensor, generator: torch.Generator) -> Batch:
    """Answers behind their prompt, each a segment: pairs, or one by one; and what the starting weights said of them."""
    rows, length = tokens.shape
    goal = job.args.goal
    most, places = goal.groups or 1, len(goal.segments) or 2
    lengths = torch.zeros((rows, places * most), dtype=torch.int64)
    labels = tokens.clone()
    for row in range(rows):
        end = 0
        for record in range(most if row % 4 else 1):  # some rows have fewer
            prompt, *answers = torch.randint(2, 8, (1 + places,), generator=generator).tolist()
            if goal.segments:  # an answer is a good one or a bad one
                answers[(row + record) % 2] = 0
            if end + sum(prompt + answer for answer in answers if answer) > length:
                break
            asked = tokens[row, end : end + prompt].clone()
            for place, answer in enumerate(answers):
                if answer:
                    tokens[row, end : end + prompt] = asked
                    labels[row, end : end + prompt] = IGNORE
                    lengths[row, places * record + place] = prompt + answer
                    end += prompt + answer
        labels[row, end:] = IGNORE
    labels = labels.where(labels == IGNORE, tokens)
    behind = lengths.flip(1).cumsum(1).flip(1) == 0  # what is empty at the end ends beyond the row
    batch = {"input_ids": tokens, **_segments(lengths.masked_fill(behind, length + 1), length, labels)}
    said = {name: torch.randn((rows, *shape), generator=generator) * 3 - 20 for name, shape in goal.columns.items()}
    return batch | said


def apart(batch: Batch) -> Batch:
    """The segments of packed rows, each in a row of its own, padded on the right with 0, as the plain model takes them.

    With each one's number in its row, ``segment`` [N]; and of the further columns, which are of segments or of tokens,
    its own values.
    """
    length = batch["input_ids"].shape[1]
    found = [
        (row, int(i), batch["segment_ids"][row] == i)
        for row in range(len(batch["input_ids"]))
        for i in batch["segment_ids"][row].unique()
        if i > 0
    ]

    def padded(values: Tensor, filling: int = 0) -> Tensor:
        """Values [rows, S, ...] of tokens."""
        rows = values.new_full((len(found), length, *values.shape[2:]), filling)
        for new, (row, _, own) in zip(rows, found, strict=True):
            new[: int(own.sum())] = values[row, own]
        return rows

    rows = {
        "input_ids": padded(batch["input_ids"]),
        "labels": padded(batch["labels"], IGNORE),
        "attention_mask": padded(torch.ones_like(batch["input_ids"])),
        "segment": torch.tensor([number for _, number, _ in found]),
    }
    for name in batch.keys() - {"input_ids", "labels", "segment_ids", "position_ids"}:
        values = batch[name]
        of_tokens = values.dim() > 2
        rows[name] = padded(values) if of_tokens else torch.stack([values[row, i - 1] for row, i, _ in found])
    return rows
