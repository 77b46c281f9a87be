"""What people ask of a run, on two hosts: the losses are those of one host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from tests.support.chats import byte_tokenizer, write_records
from tests.support.hosts import HostLives, assert_same_losses, log_of, same_weights
from tests.support.lives import write_text
from tests.support.tasks import MOE, TINY
from tests.support.tpu_compiler import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]  # whose table of functions the stand-in takes
COMMON = ["--max_steps", 4, "--logging_steps", 1, "--save_steps", 2, "--max_eval_rows", 12, "--sequence_length", 32]
COMMON += ["--compute", "scan=False,remat=none"]  # to trace and compile a scan takes longest: one case has it
EXPERTS = ["--recipe", "mixtral_ep", "--model", "{home}/experts", "--dataset", "{home}/text"]
PAIRS = ["--recipe", "llama_fsdp", "--model", "{home}/dense", "--dataset", "{home}/pairs.jsonl", "--objective", "dpo"]
BEST = ["--eval_strategy", "steps", "--eval_steps", 2, "--load_best_model_at_end", "true"]
CASES = {
    "dropless experts, tensor parallel": [*EXPERTS, "--recipe", "mixtral_ep_tp", "--compute", "scan=True"],
    "capacity experts with an adapter on 8 bits": [
        *EXPERTS,
        "--compute",
        "experts=capacity,scan=False,remat=none",
        "--lora_r",
        4,
        "--base_dtype",
        "int8",
    ],
    "pairs, against the starting weights, one a row": [*PAIRS, "--packing", "false"],
    "a stream, accumulation, spikes, the best weights and answers to prompts": [
        *("--recipe", "llama_fsdp", "--model", "{home}/dense"),
        *("--dataset", "{home}/long.jsonl", "--streaming", "true", "--shuffle_rows", 20),
        *(*BEST, "--gradient_accumulation_steps", 2, "--on_spike", "skip"),
        *("--sample_prompts", "{home}/prompts.txt", "--sample_tokens", 5),
    ],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("features")
    write_text(made)
    torch.manual_seed(0)
    dense = LlamaConfig(**TINY | {"num_hidden_layers": 1})
    for name, config in {"experts": MixtralConfig(**MOE), "dense": dense}.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(made / name)
        byte_tokenizer().save_pretrained(made / name)
    pairs = [{"prompt": f"{i}?", "chosen": f"{i * i} it", "rejected": "no " * (i % 5 + 1)} for i in range(300)]
    write_records(made / "pairs.jsonl", pairs)
    write_records(made / "long.jsonl", [{"text": f"{i} plus {i} makes {i + i}. " * 9} for i in range(900)])
    (made / "prompts.txt").write_text("1 plus 1 makes\n2 times")
    return made


@pytest.fixture(scope="module")
def lives(home) -> Iterator[HostLives]:
    with HostLives(home) as found:
        yield found


@pytest.mark.parametrize("case", CASES)
def test_two_hosts_train_what_one_does(home, lives, case, tmp_path):
    arguments = [*COMMON, *(str(word).replace("{home}", str(home)) for word in CASES[case])]
    for hosts in (1, 2):
        logs = tmp_path / f"{hosts}-logs"
        codes = lives.run(logs, *arguments, "--output_dir", tmp_path / str(hosts), hosts=hosts)
        assert codes == [0] * hosts, "\n".join(log_of(logs, host)[-3000:] for host in range(hosts))
    one, two = tmp_path / "1", tmp_path / "2"
    assert_same_losses(two, one)
    assert same_weights(two, one)
    names = [
        sorted(path.name for path in each.rglob("*") if path.is_file() and not path.name.startswith("tensors-"))
        for each in (two, one)
    ]
    assert names[0] == names[1]
    for name in ("samples.jsonl", "trainer_state.json"):
        if (one / name).exists():
            sizes = [len((each / name).read_text().splitlines()) for each in (one, two)]
            assert sizes[0] == sizes[1]
    assert json.loads((two / "trainer_state.json").read_text())["global_step"] == 4
