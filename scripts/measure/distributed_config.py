"""Print how far transformers' own sharded training (`DistributedConfig`) is from the same model in one process.

python scripts/measure/distributed_config.py             four processes on the CPU, by gloo; a tiny Mixtral

All processes get the same rows, so loss and gradients should be those of one process. docs/comparison.md has the table.
"""

import os
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code

PROCESSES = 4
# mesh → what DistributedConfig is given
CASES: dict[str, dict[str, Any]] = {
    "fsdp_size=4": {"fsdp_size": 4},
    "tp_size=4": {"tp_size": 4},
    "fsdp_size=2, tp_size=2": {"fsdp_size": 2, "tp_size": 2},
    "fsdp_size=4, ep_size=4": {"fsdp_size": 4, "ep_size": 4},
}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--case", choices=list(CASES), help="one of them alone")
    parser.add_argument("--folder", help="for a worker: the model's folder")
    args = parser.parse_args()
    if args.folder:
        work(args.case, Path(args.folder))
        return 0
    print(f"transformers {version('transformers')}, torch {version('torch')}, {PROCESSES} processes\n")
    print("| mesh | loss | of one process | worst gradient | its parameter |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model().save_pretrained(folder)
        for case in [args.case] if args.case else CASES:
            print(f"| `{case}` | {run(case, folder)} |", flush=True)
    return 0


def model() -> Any:
    """A tiny Mixtral with seeded weights."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    }
    return AutoModelForCausalLM.from_config(MixtralConfig(**sizes))


def run(case: str, folder: str) -> str:
    """The worker's row of ``case``, or how it ended."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "--case", case, "--folder", folder]
    shared = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(PROCESSES)}
    shared |= {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(PROCESSES)}
    workers = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    outputs = [worker.communicate(timeout=600) for worker in workers]
    said = [line for line in outputs[0][0].splitlines() if line.startswith("row: ")]
    failed = [error.strip().splitlines()[-1] for _, error in outputs if error.strip()]
    return said[0].removeprefix("row: ") if said else f"{(failed or ['nothing said'])[0][:120]} | | |"


def work(case: str, folder: Path) -> None:
    """One of the processes: loads the folder sharded, and compares a backward pass with the plain model's."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.distributed.init_process_group("gloo")
    tokens = torch.arange(8 * 32).reshape(8, 32) * 7 % 512
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    expected = plain(input_ids=tokens, labels=tokens).loss
    expected.backward()
    config = DistributedConfig(**CASES[case])
    sharded = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    loss = sharded(input_ids=tokens, labels=tokens).loss
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    worst, where = 0.0, ""
    for name, parameter in sharded.named_parameters():
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        want = wanted[name]
        if found is None or want is None or found.shape != want.shape:
            continue
        apart = float((found - want).norm() / want.norm())
        worst, where = max((worst, where), (apart, name))
    if torch.distributed.get_rank() == 0:
        print(f"row: {float(loss):.4f} | {float(expected):.4f} | {worst:.1e} | `{where}`", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(exit_code(main))
