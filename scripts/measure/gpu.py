"""The whole program on one NVIDIA GPU: numbers beside the plain model's, speed and memory beside transformers' Trainer.

python scripts/measure/gpu.py                  # some eight minutes on an H100 (estimated); the dearest rows come last
python scripts/measure/gpu.py --only gradients,speed

Each row is a process of its own. Speed: 4 rows of 4,096 tokens, bfloat16, random weights, AdamW, the median step. The
rows of transformers' Trainer need a torch with CUDA: the same models and shapes, bfloat16 autocast, float32 weights,
fused AdamW, SDPA.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any, ClassVar

from shardwright.arguments.command_line import Parser
from shardwright.scripts.measure.tables import in_fresh_process, largest

os.environ["HF_HUB_OFFLINE"] = "1"

# what is not said is as transformers has it for Llama-2-7B and Mixtral-8x7B
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "max_position_embeddings": 4096,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
    },
}
RECIPES = {"llama": "llama_fsdp", "mixtral": "mixtral_ep"}
ROWS, LENGTH, STEPS = 4, 4096, 20
# row → the recipe's compute policies
SPEED = {
    "llama": "remat=none,scan=False",
    "llama, scanned": "remat=none",
    "mixtral": "remat=full,scan=False",
}


KINDS = "gradients,losses,speed,trainer"


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", default=KINDS, help=f"kinds of rows, with commas between them ({KINDS})")
    kinds = parser.parse_args().only.split(",")
    for name in ("llama", "mixtral"):
        if "gradients" in kinds:
            found = in_fresh_process(gradients, name)
            print(
                f"{name}: float32, one step: loss off by {found['loss']:.1e}, worst gradient {found['worst']:.1e} "
                f"({found['where']})",
                flush=True,
            )
        if "losses" in kinds:
            exact, ours = (in_fresh_process(losses, name, dtype) for dtype in ("float32", "bfloat16"))
            off = [abs(a - b) / a for a, b in zip(exact, ours, strict=True)]
            print(
                f"{name}: {len(off)} losses, bfloat16 here beside float32 on the CPU: worst {largest(off):.1e}, last "
                f"{ours[-1]:.4f} and {exact[-1]:.4f}",
                flush=True,
            )
    for name in SPEED if "speed" in kinds else ():
        print(f"{name} ({SPEED[name]}): {in_fresh_process(speed, name)}", flush=True)
    for name, compiled in (("mixtral", False), ("llama", True)) if "trainer" in kinds else ():
        what = f"{name}{', torch.compile' * compiled}"
        print(f"transformers' Trainer, {what}: {in_fresh_process(trainer, name, compiled)}", flush=True)
    return 0


def rates(seconds: float, most: int) -> str:
    """A step's time, its tokens/s, and the ``most`` bytes in use."""
    return f"{seconds * 1e3:.1f} ms, {ROWS * LENGTH / seconds:,.0f} tokens/s, {most / 1e9:.1f} GB at most"


def gradients(name: str) -> dict[str, Any]:
    """Loss and gradients of the family's small model in float32, beside the plain model's on the CPU."""
    from shardwright.scripts.measure import against_plain

    against_plain.DEVICES = 1
    against_plain.DTYPE = "float32"  # a GPU's own is bfloat16
    case = against_plain.plain(name)
    assert isinstance(case, against_plain.Plain), case
    found = against_plain.compared(case, "fsdp=1", True)
    loss, worst = (float(found.get(key, "nan")) for key in ("loss", "worst"))
    return {"loss": loss, "worst": worst, "where": str(found.get("where", found))}


def losses(name: str, dtype: str) -> list[float]:
    """The losses of a recipe's own model over some steps: in float32 on the CPU, in bfloat16 here."""
    if dtype == "float32":
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    loop = _trained(RECIPES[name], f"dtype={dtype}", max_steps=STEPS, warmup_steps=5, logging_steps=1)
    return [entry["loss"] for entry in loop.state.log_history if "loss" in entry]


def speed(name: str) -> str:
    """The median step of a run's log, and the seconds that it spent compiling."""
    from shardwright.xla.program_cache import KEPT
    from shardwright.xla.runtime import compile_seconds

    model = name.partition(",")[0]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        json.dump(MODELS[model], config)
        config.flush()
        size: dict[str, Any] = {"sequence_length": LENGTH, "per_device_train_batch_size": ROWS, "max_steps": STEPS}
        loop = _trained(RECIPES[model], SPEED[name], model=config.name, warmup_steps=5, logging_steps=4, **size)
    # the first rate includes the compile
    rate = statistics.median([e["tokens_per_second"] for e in loop.state.log_history if "tokens_per_second" in e][1:])
    return f"{rates(ROWS * LENGTH / rate, KEPT.most_memory() or 0)}, {compile_seconds():.0f} s to the second step"


def _trained(recipe: str, compute: str, **given: Any) -> Any:
    """The loop of a run of scripts/train.py in this process, on one device."""
    from shardwright import TrainingArguments, train

    mesh = "fsdp=1,expert=1" if recipe == "mixtral_ep" else "fsdp=1"
    # whole rows, as the Trainer's: what a row's documents don't see of each other is not computed
    rest: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "isolate_documents": False}
    with tempfile.TemporaryDirectory() as output:
        return train(TrainingArguments(recipe=recipe, mesh=mesh, compute=compute, output_dir=output, **rest, **given))


def trainer(name: str, compiled: bool) -> str:
    """The median step of transformers' Trainer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100 * ROWS

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(0, 32000, (LENGTH,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": tokens, "labels": tokens}

    class Clock(TrainerCallback):
        seconds: ClassVar[list[float]] = []
        begun = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.begun = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.seconds.append(time.monotonic() - self.begun)

    config, clock = AutoConfig.for_model(**MODELS[name]), Clock()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    given: dict[str, Any] = {"per_device_train_batch_size": ROWS, "max_steps": 8, "bf16": True, "report_to": "none"}
    given |= {"optim": "adamw_torch_fused", "torch_compile": compiled, "save_strategy": "no"}
    given |= {"gradient_checkpointing": name == "mixtral", "logging_steps": 100}  # without it Mixtral has no room
    with tempfile.TemporaryDirectory() as output:
        Trainer(model, TrainingArguments(output, **given), train_dataset=Rows(), callbacks=[clock]).train()
    return rates(statistics.median(clock.seconds[3:]), torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    sys.exit(main())
