"""A job to compile for a slice of TPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.compile.libtpu import CompileTarget, compile_for
from shardwright.compile.lowering import graphs_of, lower, shorter_steps
from shardwright.compile.report.estimate import given_efficiencies
from shardwright.compile.report.report import CompileReport, Expected
from shardwright.errors import UserError
from shardwright.evaluation.prompt_samples import expected_shape
from shardwright.evaluation.teacher import teacher_job
from shardwright.evaluation.teacher_rows import TEACHER_PASS
from shardwright.job import Job
from shardwright.layout.mesh import Mesh
from shardwright.step.auto_remat import with_remat
from shardwright.xla.chips import Chip, Topology, find_topology
from shardwright.xla.libtpu_library import find_library


@dataclass(frozen=True)
class CompileJob:
    """A job, and the options of its compile."""

    job: Job
    options: CompileArguments

    @classmethod
    def of(cls, args: TrainingArguments, options: CompileArguments) -> CompileJob:
        """The job of ``args``; raises UserError for a bad slice or efficiency, arguments, recipe, model or prompts."""
        where = find_topology(str(options.topology), options.slices)
        given_efficiencies(options.efficiency)  # a bad one is refused before minutes of compiling
        if options.libtpu is not None:
            find_library(options.libtpu)  # as is one that is not there
        job = Job.resolve(args, lambda: where.devices)
        if args.sample_prompts is not None:
            expected_shape(job)  # as are bad prompts
        if args.teacher is not None:
            teacher_job(job)  # and a bad teacher
        return cls(job, options)

    def with_batch(self, rows: int) -> CompileJob:
        args = replace(self.job.args, per_device_train_batch_size=rows)
        return replace(self, job=replace(self.job, args=args))

    def with_mesh(self, sizes: Mapping[str, int]) -> CompileJob:
        """The job on a mesh of these sizes within a slice."""
        mesh = Mesh(dcn=self.job.recipe.mesh.dcn, **sizes)
        return replace(self, job=replace(self.job, recipe=replace(self.job.recipe, mesh=mesh)))

    def with_remat(self, remat: str | float) -> CompileJob:
        return replace(self, job=with_remat(self.job, remat))

    @property
    def where(self) -> Topology:
        return find_topology(str(self.options.topology), self.options.slices)

    @property
    def flags(self) -> dict[str, str]:
        """Compiler flag → value; raises UserError without a libtpu, and for what is no flag."""
        version = find_library(self.options.libtpu).version
        return compiler_flags(self.where.chip, self.options.compiler_options, version)

    @property
    def title(self) -> str:
        """The heading of the report."""
        args = self.job.args
        return (
            f"{self.job.recipe.name}, {args.model or 'its own model'}: {args.per_device_train_batch_size} × "
            f"{args.sequence_length} tokens a device"
        )

    def compile(self) -> CompileReport:
        """Lowers and compiles the train step and, if it fits, the run's other graphs, unless the cache has them.

        Raises UserError without a libtpu, for a mesh that can't lie on the slices, or if the compiler failed.
        """
        job, options, where = self.job, self.options, self.where
        crossed = [axis for name in job.facts.experts[:1] for axis in job.plan[f"{name}.down_proj"].axes_of(0)]
        target = CompileTarget(
            topology=where.name,
            slices=where.slices,
            dcn=job.recipe.mesh.over_slices(where.slices, where.devices).dcn,
            flags=self.flags,
            timeout=options.compile_timeout,
            libtpu=options.libtpu,
        )
        expected = Expected(
            model_flops=job.training_flops(job.args.sequence_length),
            exchange=crossed[0] if crossed else None,
            tokens=job.tokens,
            efficiency=options.efficiency,
            traced_layers=0 if job.recipe.compute.scan else job.config.get_text_config().num_hidden_layers,
        )
        given = (f"{name}={value}" for name, value in target.flags.items())
        flags = " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), *given])
        step, *others = graphs_of(job)
        lowered = lower(job, step, compiler_flags=flags, chip=where.chip)
        report = replace(compile_for(lowered, target, expected), uncompiled=shorter_steps(job))
        if options.only_train_step or not report.fits:  # if it does not fit, the others can't change the verdict
            return report
        for graph in others:
            lowered = lower(job, graph, compiler_flags=flags, chip=where.chip)
            report = report.beside(graph, compile_for(lowered, target), alone=graph == TEACHER_PASS)
        return report


def compiler_flags(chip: Chip, text: str, libtpu: str) -> dict[str, str]:
    """Compiler flag → value: the chip's for that version, but for those of a run alone, overridden by ``text``.

    ``text`` is ``name=value name=value``, where ``name=`` removes one. Raises UserError for any other.
    """
    flags = chip.missing_flags(os.environ.get("LIBTPU_INIT_ARGS", ""), libtpu)
    for word in text.split():
        name, equals, value = word.lstrip("-").partition("=")
        if not (name and equals):
            raise UserError(
                asked=f"--compiler_options {text!r}",
                found=f"{word!r}",
                why="each is a name and a value",
                instead="--compiler_options xla_tpu_scoped_vmem_limit_kib=65536; name= takes a flag back",
            )
        flags[name] = value
    return {name: value for name, value in flags.items() if value}
