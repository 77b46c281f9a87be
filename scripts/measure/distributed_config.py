"""Print how far transformers' own sharded training (`DistributedConfig`) is from the same model in one process.

torchrun --nproc_per_node 4 scripts/measure/distributed_config.py fsdp_size=2,tp_size=2

A tiny Mixtral on the CPU, by gloo. All processes get the same rows, so loss and gradients should be those of one
process. docs/comparison.md has the row.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from typing import Any

os.environ |= {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1"}

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.distributed.configuration_utils import DistributedConfig

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code
from shardwright.scripts.measure.tables import largest, markdown

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "num_local_experts": 4, "vocab_size": 512, "max_position_embeddings": 64}
HEADER = ("mesh", "loss", "of one process", "worst gradient", "its parameter")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("mesh", help="what DistributedConfig is given: fsdp_size=2,tp_size=2")
    mesh = parser.parse_args().mesh
    sizes: dict[str, Any] = {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES), experts_implementation="eager")
    with tempfile.TemporaryDirectory() as folder:  # of this process's own
        plain.save_pretrained(folder)  # which of several that know each other the first alone would do
        torch.distributed.init_process_group("gloo")
        sharded = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    expected, loss = (_trained(model) for model in (plain, sharded))
    wanted, worst, where = dict(plain.named_parameters()), 0.0, ""
    for name, parameter in sharded.named_parameters():
        found, want = parameter.grad, wanted[name].grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        if found is None or want is None or found.shape != want.shape:
            continue
        worst, where = max((worst, where), (largest([float((found - want).norm() / want.norm())]), name))
    if torch.distributed.get_rank() == 0:
        print(f"transformers {version('transformers')}, torch {torch.__version__}\n")
        print(markdown(HEADER, [[f"`{mesh}`", f"{loss:.4f}", f"{expected:.4f}", f"{worst:.1e}", f"`{where}`"]]))
    torch.distributed.destroy_process_group()
    return 0


def _trained(model: Any) -> float:
    """The loss, of which the parameters then have gradients."""
    tokens = torch.arange(8 * 32).reshape(8, 32) * 7 % 512
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss)


if __name__ == "__main__":
    sys.exit(exit_code(main))
