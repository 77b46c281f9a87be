"""The teacher of a run: its own job on the student's devices, checked before anything is read or placed."""

import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint import manifest
from shardwright.data.tokenizer import check_vocabulary, open_tokenizer
from shardwright.errors import UserError, command
from shardwright.files.hub_names import ADAPTER_CONFIG, holds_tokenizer, is_hub_name
from shardwright.job import Job
from shardwright.layout.auto import AUTO
from shardwright.layout.mesh import SEQUENCE
from shardwright.model.meta_model import means_weights, model_path

VALUES_FORMAT = 1  # part of the name of kept values: raise it when they change meaning
# the student's options that the teacher's pass shares
_SHARED = (
    *("objective", "sequence_length", "isolate_documents", "packing", "per_device_train_batch_size"),
    *("beta", "temperature", "teacher_top_k", "seed"),
)


def teacher_of(student: Job, tokenizer: PreTrainedTokenizerBase | None) -> Job | None:
    """The job of ``--teacher``, of which a run asks weights and a tokenizer; None: there is none.

    Raises UserError as :func:`teacher_job`, or if it is no model with weights, or its tokenizer is not the student's,
    which is ``tokenizer``.
    """
    if student.args.teacher is None:
        return None
    job = teacher_job(student)
    if not means_weights(str(job.args.model), False):
        raise _refused(student.args.teacher, "a config alone", "random weights teach nothing", "a folder with weights")
    _check_tokenizer(student.args.teacher, str(job.args.model), vocabulary_of(student, job), tokenizer)
    return job


def teacher_job(student: Job) -> Job:
    """The job of ``--teacher``, whose recipe is made for it; it computes in the student's dtype.

    Raises UserError if it can't run on these devices, or the vocabularies have too few tokens.
    """
    args = student.args
    there = Path(model_path(os.path.expanduser(str(args.teacher))))
    saved, adapter = (there / manifest.MANIFEST).is_file(), (there / ADAPTER_CONFIG).is_file()
    if saved or (adapter and not (there / "config.json").is_file()):
        raise _refused(
            str(args.teacher),
            f"{'an adapter' if adapter else 'a run'}'s {'checkpoint' if saved else 'folder'}",
            "a teacher is a whole model in the hub's format",
            f"--teacher FOLDER, once `{command('export')} --checkpoint CHECKPOINT --output FOLDER"
            f"{' --merge' * adapter}` has written it"
            + "; or model.merge_and_unload().save_pretrained(FOLDER), of an adapter that PEFT made"
            * (not saved),
        )
    dtype, parts = student.recipe.compute.dtype, student.plan.sequence
    found = TrainingArguments(
        model=model_path(os.path.expanduser(str(args.teacher))),
        recipe=AUTO,
        mesh=None if parts is None else f"fsdp=-1,{SEQUENCE}={student.plan.mesh[parts]}",
        bf16=None if dtype is None else dtype == "bfloat16",
        # nothing is added to frozen weights, so what they are rounded to before use may be stored
        weight_dtype="bfloat16" if dtype == "bfloat16" else args.weight_dtype,
        **{option: getattr(args, option) for option in _SHARED},
    )
    try:
        job = Job.resolve(found, lambda: student.devices)
        words = vocabulary_of(student, job)
    except UserError as error:
        raise error.retold(asked=f"--teacher {args.teacher}: {error.asked}") from None
    if (top := int(args.goal.numbers["teacher_top_k"])) > words:
        raise UserError(
            asked=f"--teacher_top_k {top}",
            found=f"a vocabulary of {words} tokens that teacher and student share",
            why="it counts tokens of it",
            instead=f"--teacher_top_k {words}, which is all of them",
        )
    return job


def vocabulary_of(student: Job, teacher: Job) -> int:
    """The tokens that both models know: rows by which one embedding is longer are padding, whatever they say."""
    return min(job.config.get_text_config().vocab_size for job in (student, teacher))


def _check_tokenizer(asked: str, name: str, words: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is None:
        raise _refused(
            asked,
            "a tokenizer that is to be trained on the dataset",
            "the teacher knows the tokens of its own alone",
            f"--tokenizer {asked}, and a student of its vocabulary",
        )
    if not is_hub_name(name) and not name.endswith(".gguf") and not holds_tokenizer(Path(name)):
        check_vocabulary(tokenizer, words)  # nothing more can be told
        return
    try:
        theirs, ours = open_tokenizer(name).get_vocab(), tokenizer.get_vocab()
    except UserError as error:
        if "--tokenizer" not in error.instead:
            raise
        with_one = "a --teacher whose repository, folder or file holds its tokenizer; --tokenizer is the student's"
        instead = f"{with_one}; or its safetensors in a folder without one, to go by numbers alone"
        raise error.retold(instead=instead) from None
    differs = [(number, token) for token, number in ours.items() if theirs.get(token) != number]
    if differs:
        number, token = min(differs)
        has = f"token {theirs[token]}" if token in theirs else "none"
        raise _refused(
            asked,
            f"{len(differs)} of {len(ours)} tokens of the student's tokenizer are others in the teacher's: the first, "
            f"{token!r}, is token {number}, and of the teacher {has}",
            "what it says of its tokens is learned as said of the student's",
            "a teacher and a student with one tokenizer, as of one family",
        )
    check_vocabulary(tokenizer, words)


def _refused(asked: str, found: str, why: str, instead: str) -> UserError:
    return UserError(asked=f"--teacher {asked}", found=found, why=why, instead=instead)


def identity_of(model: str) -> list[object]:
    """The name of a model with what tells its weights: a repository's commit, or sizes and times of local files."""
    path = Path(model)
    if is_hub_name(model):
        return [model]
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    return [str(path.resolve()), *([f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files)]
