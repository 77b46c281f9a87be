"""Fine-tuning beside trl's trainers: the loss of each of 20 steps, on the same samples in the same order.

python scripts/measure/trl_parity.py                     every case, and a table
python scripts/measure/trl_parity.py --only dpo,lora     those whose name has all of these words

Ours is `scripts/train.py`'s own run on 8 virtual devices; trl's (1.16, `pip install --no-deps trl==1.16.0`) is a plain
CPU process. Both start from the same weights, and with LoRA from the factors that PEFT drew. Each of our batches is
taken apart into its samples, which trl gets as one batch of padded rows. So where ours are packed, trl's are not: its
own packing needs attention of variable length, which the CPU has not. Unpacked is our --packing false: batches of rows
of 32, 64 or 128 tokens.

Where a loss is so steep that float32's own rounding, enlarged step by step, passes the limit (forward_kl's score has
an exponential of the log-ratio), trl runs a second time in float64: the row is held to twice the distance of trl's own
two runs, which it prints.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from rich.console import Console
from rich.table import Table

from shardwright import TrainingArguments, train
from shardwright.arguments.command_line import Parser
from shardwright.data.rows.batches import TrainingBatches
from shardwright.scripts.measure import trl_plain
from shardwright.scripts.measure.tables import largest

STEPS, LENGTH, TOLERANCE = 20, 128, 1e-4
# values beside the loss that are compared, where trl logs them
MARGINS = ("rewards/margins", "kl", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")
Case = Mapping[str, Any]
Samples = list[dict[str, Any]]
Steps = Sequence[Mapping[str, Any]]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 128, "vocab_size": 264, "max_position_embeddings": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "router_aux_loss_coef": 0.02},
}
RECIPES: dict[str, dict[str, Any]] = {
    "llama": {"recipe": "llama_fsdp"},
    "mixtral": {"recipe": "mixtral_ep", "compute": "experts=dropless"},
}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA = {
    "llama": {"target_modules": [*LINEAR, "gate_proj", "up_proj", "down_proj"]},
    "mixtral": {"target_modules": LINEAR, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}
# options of both sides, under transformers' names
OPTIONS: dict[str, Any] = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 4}
OPTIONS |= {"weight_decay": 0.01, "adam_beta2": 0.99, "adam_epsilon": 1e-8, "max_grad_norm": 1.0}
OURS: dict[str, Any] = {"sequence_length": LENGTH, "logging_steps": 1, "save_strategy": "no", "eval_on_start": False}
OURS |= {"max_eval_rows": 8}
WEIGHTS = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6}
# objective, or a kind of case → its options, under trl's names
PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.2},
    "orpo": {"beta": 0.5},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.8},
    "kto": WEIGHTS,
    "apo_zero_unpaired": {**WEIGHTS, "loss_type": "apo_zero_unpaired"},
    "hh": {"beta": 0.3},  # whole transcripts, as HH-RLHF has them: each side finds the prompt itself
    "reward": {"center_rewards_coefficient": 0.02},
}
# further loss types of dpo; beta is so large that they bend within 20 steps
LOSS_TYPES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")},
    **{name: {} for name in ("aot", "aot_unpaired", "sft", "sigmoid_norm")},
    "exo_pair": {"label_smoothing": 0.001},
    "robust": {"label_smoothing": 0.1},
    "sigmoid,bco_pair,sft": {"loss_weights": "0.8,0.2,1.0"},
}
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
STEEP = ("forward_kl",)
OBJECTIVE_OF = {"apo_zero_unpaired": "kto", "hh": "dpo"}  # of kinds that are no objective
# (family, whether with LoRA, beta) of students of a teacher of another shape
STUDENTS = [("llama", False, 0.0), ("llama", False, 0.5), ("llama", False, 1.0), ("llama", True, 0.5)]
STUDENTS += [("mixtral", False, 0.5)]
TEACHER = {**CONFIGS["llama"], "hidden_size": 96, "num_hidden_layers": 3}


def cases() -> Iterator[tuple[str, Case]]:
    """Name → case: objective or kind, family, full or lora, packed or unpacked."""
    tuned = itertools.product(["sft"], CONFIGS, (False, True), (True, False))
    preferring = itertools.product(PREFERENCES, CONFIGS, (False, True), [True])
    for kind, family, lora, packed in (*tuned, *preferring):
        if not (lora and kind in ("orpo", "simpo")):
            yield _case(kind, family, lora, packed, PREFERENCES.get(kind, {}))
    for kind in ("dpo", "kto"):  # from an adapter that was trained before: both compare with it as it was
        name, case = _case(kind, "llama", True, True, PREFERENCES[kind], f"{kind} trained")
        yield name, {**case, "lora": {**case["lora"], "init_lora_weights": False}}
    yield _case("sft", "llama", False, False, {"label_smoothing_factor": 0.1}, "sft smoothed")
    for family, lora, beta in STUDENTS:
        # trl adds no router loss to it
        config = {**CONFIGS[family], **({"router_aux_loss_coef": 0.0} if family == "mixtral" else {})}
        more = {"config": config, "teacher": TEACHER}
        yield _case("distill", family, lora, True, {"beta": beta}, f"distill beta={beta}", **more)
    for name, options in LOSS_TYPES.items():
        numbers = {"beta": 0.3, "loss_type": name, **options}
        yield _case("dpo", "llama", False, True, numbers, f"dpo {name}")
    for name in DIVERGENCES:
        numbers = {"beta": 0.3, "f_divergence_type": name}
        yield _case("dpo", "llama", False, True, numbers, f"dpo {name}", steep=name in STEEP)


def _case(
    kind: str, family: str, lora: bool, packed: bool, numbers: Mapping[str, Any], words: str = "", **more: Any
) -> tuple[str, Case]:
    """A case under its name, which begins with ``words``, else with its kind."""
    name = f"{words or kind} {family} {'lora' if lora else 'full'} {'packed' if packed else 'unpacked'}"
    case = {
        "family": family,
        "config": CONFIGS[family],
        "kind": kind,
        "objective": OBJECTIVE_OF.get(kind, kind),
        "lora": {"r": 4, "lora_alpha": 8, **LORA[family]} if lora else None,
        "packed": packed,
        "options": OPTIONS,
        "numbers": numbers,
    }
    return name, {**case, **more}


def compared(case: Case, folder: Path) -> tuple[Steps, Steps, float, float, float]:
    """Our log of each step, trl's, the mean samples a step, the fullness of our rows, and the limit of a difference."""
    (folder / "case.json").write_text(json.dumps(case))
    trl_plain.write_start(folder, case)
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in _records(case)))
    entries, batches, full = ours(case, folder)
    (folder / "batches.json").write_text(json.dumps(batches))
    _plain("train", folder)
    theirs, limit = json.loads((folder / "losses.json").read_text()), TOLERANCE
    if case.get("steep"):
        _plain("train64", folder)
        limit = max(limit, 2 * worst(theirs, json.loads((folder / "losses.json").read_text())))
    return entries, theirs, sum(map(len, batches)) / len(batches), full, limit


def _plain(what: str, folder: Path) -> None:
    command = [sys.executable, trl_plain.__file__, what, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    if done.returncode:
        raise SystemExit(f"trl_plain.py {what}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def _records(case: Case) -> Iterator[dict[str, Any]]:
    """Prompts and completions, or pairs, of random letters; unpacked, some are as long as a row and most shorter."""
    rng = np.random.default_rng(0)

    def words(count: int) -> str:
        return "".join(rng.choice(list("etaoin shrdlu"), count))

    for _ in range(1600 if case["packed"] else 400):
        # one less than a row: a token ends the sample
        length = int(rng.integers(6, 59) if case["packed"] else np.exp(rng.uniform(np.log(8), np.log(LENGTH - 1))))
        asked = int(rng.integers(1, length - 1))
        prompt, answer = words(asked), words(length - asked)
        if case["objective"] in ("sft", "distill"):
            yield {"prompt": prompt, "completion": answer}
        elif case["objective"] == "kto":
            # so short that an answer and a mismatched one fit into a row with their prompt
            yield {"prompt": prompt[:30], "completion": answer[:30], "label": bool(rng.random() < 0.6)}
        elif case["kind"] == "hh":
            asked_for = f"\n\nHuman: {prompt[:20]}\n\nAssistant:"
            yield {name: f"{asked_for} {words(int(rng.integers(1, 20)))}" for name in ("chosen", "rejected")}
        else:
            most = min(30, LENGTH - length - asked - 2)  # pairs must fit into a row: trl ends cut ones too
            yield {"prompt": prompt, "chosen": answer, "rejected": words(int(rng.integers(1, most)))}


def ours(case: Case, folder: Path) -> tuple[Steps, list[Samples], float]:
    """(log of each step, samples of each step's batch, fullness of the rows)."""
    more: dict[str, Any] = {"adapter": str(folder / "adapter"), "base_dtype": "float32"} if case["lora"] else {}
    if "teacher" in case:  # the whole vocabulary, as trl has it
        more |= {"teacher": str(folder / "teacher"), "teacher_top_k": SIZES["vocab_size"]}
    args = TrainingArguments(
        model=str(folder / "model"),
        dataset=str(folder / "data.jsonl"),
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        packing=case["packed"],
        objective=case["objective"],
        **OURS,
        **RECIPES[case["family"]],
        **case["numbers"],
        **OPTIONS,
        **more,
    )
    done = train(args, Console(quiet=True))
    entries = [entry for entry in done.state.log_history if "loss" in entry]
    rows = TrainingBatches(done.corpus.train, done.job.rows, args.seed, 0, 1, done.job.row_lengths)
    taken = list(itertools.islice(rows, STEPS))
    segments = [[*_segments(batch)] for batch in taken]
    batches = [[sample for _, sample in each] for each in segments]
    if case["objective"] == "kto":
        batches = [_examples(each, len(args.goal.segments)) for each in segments]
    elif case["objective"] in PREFERENCES:
        batches = [_pairs(samples, case["kind"]) for samples in batches]
    used = sum(int((batch["segment_ids"] > 0).sum()) for batch in taken)
    return entries, batches, used / sum(batch["segment_ids"].numel() for batch in taken)


def _segments(batch: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each segment's number in its row, and its tokens and labels."""
    columns = (batch[name].numpy() for name in ("input_ids", "labels", "segment_ids"))
    for tokens, labels, segments in zip(*columns, strict=True):
        for number in sorted({*segments.tolist()} - {0}):
            own = segments == number
            yield number, {"input_ids": tokens[own].tolist(), "labels": labels[own].tolist()}


def _start(sample: Mapping[str, Any]) -> int:
    return next(i for i, label in enumerate(sample["labels"]) if label >= 0)


def _examples(segments: Sequence[tuple[int, Mapping[str, Any]]], places: int) -> Samples:
    """Answers one by one as trl's collator takes them, with the mismatched ones behind them."""
    examples: Samples = []
    for number, sample in segments:
        prompt, answer = (sample["input_ids"][part] for part in (slice(_start(sample)), slice(_start(sample), None)))
        if (number - 1) % places == 2:
            assert prompt == examples[-1]["prompt_ids"], "a mismatched answer has the prompt of the one before it"
            examples[-1]["KL_completion_ids"] = answer
        else:
            examples.append({"prompt_ids": prompt, "completion_ids": answer, "label": (number - 1) % places == 0})
    return examples


def _pairs(samples: Samples, kind: str) -> Samples:
    """Pairs as trl's collator takes them; for two of its trainers as tokens that become texts."""
    pairs = []
    for chosen, rejected in zip(samples[0::2], samples[1::2], strict=True):
        start = _start(chosen)
        parts = chosen["input_ids"][:start], chosen["input_ids"][start:], rejected["input_ids"][start:]
        pair = dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))
        if kind == "reward":
            pairs.append({"chosen_ids": chosen["input_ids"], "rejected_ids": rejected["input_ids"]})
            continue
        texts = kind in ("orpo", "simpo", "hh")
        if kind == "hh":
            pair = {name: chosen["input_ids"][:start] + answer for name, answer in pair.items() if name != "prompt"}
        pairs.append({"tokens": pair} if texts else {f"{name}_ids": tokens for name, tokens in pair.items()})
    return pairs


def worst(ours: Steps, theirs: Steps, name: str = "loss") -> float:
    """The largest relative difference of a step's loss, or absolute difference of another log value."""
    return largest(
        abs(a[name] - b[name]) / (abs(b[name]) if name == "loss" else 1) for a, b in zip(ours, theirs, strict=True)
    )


def worst_margin(ours: Steps, theirs: Steps) -> float | None:
    """The largest difference of a step's values of :data:`MARGINS`; None: trl logs none of them."""
    return max((worst(ours, theirs, name) for name in MARGINS if name in theirs[0]), default=None)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="words with commas between them, which a case's name has all")
    wanted = {word for word in parser.parse_args().only.split(",") if word}
    failed = False
    table = Table("case", "rows full", "a step", "first loss", "last loss", "trl's last", "worst step", "worst margin")
    for name, case in cases():
        if not wanted <= set(name.split()):
            continue
        with tempfile.TemporaryDirectory(prefix="parity-") as folder:
            entries, theirs, count, full, limit = compared(case, Path(folder))
        difference = worst(entries, theirs)
        failed |= not difference <= min(limit, 1.0)
        losses = (f"{step['loss']:.5f}" for step in (entries[0], entries[-1], theirs[-1]))
        found = worst_margin(entries, theirs)
        margin = "" if found is None else f"{found:.1e}"
        rounding = f" (trl in float32 and float64: {limit / 2:.1e})" * (limit > TOLERANCE)
        table.add_row(name, f"{full:.0%}", f"{count:.1f}", *losses, f"{difference:.1e}{rounding}", margin)
        print(f"{name}: {difference:.1e}{rounding}", file=sys.stderr, flush=True)
    Console(width=160).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
