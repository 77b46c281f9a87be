"""Published trainings for which there is no objective here: how they are known, why, and what to use instead."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardwright.arguments.known_flags.entry import MISSING, word
from shardwright.arguments.known_flags.of_trl import RL
from shardwright.arguments.known_flags.translate import Outcome
from shardwright.errors import UserError

_STUDENT = (
    "there the student writes answers as it trains, and here nothing is generated while a run trains",
    "--objective distill --teacher MODEL on answers given (docs/distillation.md)",
)
_STEPS = ("a reward is learned for a whole answer, not for its steps", "--objective reward on pairs of answers")
_IN_ORDER = ("each token is learned from those before it", "the same texts as --dataset, and a causal model")
_TASKS = ("models are causal language models", "the task as chats, or prompts with completions (docs/data.md)")
# words in the name of a script, a job or a file → why and instead
_NAMES: dict[str, tuple[str, str]] = {
    each: reason
    for names, reason in {
        "grpo rloo ppo xpo gspo dapo papo gmpo online_dpo nash_md nashmd openenv": RL,
        "gkd minillm distillation sdft sdpo": _STUDENT,
        "prm stepwise_reward": _STEPS,
        "mlm plm dlm fim": _IN_ORDER,
        "glue xnli run_qa run_ner run_swag run_classification run_translation run_summarization run_seq": _TASKS,
        "run_image run_audio run_speech run_wav run_clip run_mae run_mim run_object run_instance run_semantic": _TASKS,
    }.items()
    for each in names.split()
}
_ARGUMENTS = {"process_reward_model": _STEPS, **dict.fromkeys(("num_generations", "reward_funcs"), RL)}
_CHOICES = ("rl", "stage")  # arguments whose value is the objective
# words in the name of a program's job that is no training
_NO_TRAINING = {
    *("api", "chat", "env", "eval", "evaluate", "export", "fetch", "inference", "lm", "merge", "preprocess", "vllm"),
    *("webchat", "webui"),
}


def in_words(text: str) -> list[str]:
    """The words in the name of a script, a job or a file."""
    return re.split(r"[^a-z]+", text.lower())


def trains(job: str) -> bool:
    """Whether a program's ``job`` is a training at all."""
    return not _NO_TRAINING.intersection(in_words(job))


def check_name(text: str) -> None:
    """Refuse a script, a job or a file that by its name trains what is no objective here."""
    spelt = f"_{'_'.join(in_words(text))}_"
    for each, reason in _NAMES.items():
        if f"_{each}_" in spelt:
            raise _refused(text, *reason)


def check_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Refuse a command one of whose arguments asks for what is no objective here."""
    for each in outcomes:
        if each.name in _CHOICES and each.kind == MISSING:
            raise _refused(f"{each.name}: {word(each.value)}", *each.said.split("; instead: "))
        if each.name in _ARGUMENTS and word(each.value).lower() not in ("", "none", "false"):
            raise _refused(f"{each.name}: {word(each.value)}", *_ARGUMENTS[each.name])


def _refused(found: str, why: str, instead: str) -> UserError:
    return UserError(asked="to port a training", found=found, why=why, instead=instead)
