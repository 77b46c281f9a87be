"""CompileJob: a step to compile, and where."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from trainer.arguments import TrainingArguments
from trainer.compile.command import CompileArguments
from trainer.compile.libtpu import Target, compile_for
from trainer.compile.lowering import lower
from trainer.compile.report import CompileReport, Expected
from trainer.errors import UserError
from trainer.layout.plan import make_plan
from trainer.layout.recipe import Recipe
from trainer.model import experts_modules, load_config, meta_model, training_flops
from trainer.xla.chips import Chip, find_topology


@dataclass(frozen=True)
class CompileJob:
    """A step to compile: recipe, options, and where."""

    recipe: Recipe
    args: TrainingArguments
    options: CompileArguments

    @classmethod
    def of(cls, args: TrainingArguments, options: CompileArguments) -> CompileJob:
        from trainer.job import effective_recipe

        return cls(effective_recipe(args), args, options)

    @property
    def title(self) -> str:
        return (
            f"{self.recipe.name}, {self.args.model or 'its own model'}: {self.args.per_device_train_batch_size} × "
            f"{self.args.sequence_length} tokens a device"
        )

    def compile(self) -> CompileReport:
        """Lower and compile it, or take the cached result.

        Raises:
            UserError: whatever a run would refuse; no libtpu; a compiler that failed.
        """
        options, args = self.options, self.args
        where = find_topology(str(options.topology), options.slices)
        flags = compiler_flags(where.chip, options.compiler_options)
        config = load_config(args.model, self.recipe)
        model = meta_model(config)
        plan = make_plan(self.recipe, model, where.devices, **args.state_dtypes)
        rows = args.per_device_train_batch_size * plan.batch_shards * args.gradient_accumulation_steps
        crossed = [axis for name in experts_modules(model)[:1] for axis in plan[f"{name}.down_proj"].axes_of(0)]
        dcn = self.recipe.mesh.dcn_sizes()
        target = Target(
            where.name,
            slices=options.slices,
            dcn=dcn if math.prod(dcn.values()) > 1 else None,
            flags=flags,
            timeout=options.compile_timeout,
        )
        expected = Expected(
            model_flops=training_flops(model, config, rows, args.sequence_length),
            exchange=crossed[0] if crossed else None,
        )
        return compile_for(lower(self.recipe, args, config, plan), target, expected)


def compiler_flags(chip: Chip, text: str) -> dict[str, str]:
    """The chip's flags, as a run there sets them, and the user's own before them; ``name=`` takes one of ours back."""
    flags = chip.missing_flags(os.environ.get("LIBTPU_INIT_ARGS", ""))
    for word in text.split():
        name, equals, value = word.lstrip("-").partition("=")
        if not (name and equals):
            raise UserError(
                asked=f"--compiler_options {text!r}",
                found=f"{word!r}",
                why="each is a name and a value",
                instead="name=value, such as xla_tpu_scoped_vmem_limit_kib=65536",
            )
        flags[name] = value
    return {name: value for name, value in flags.items() if value}
