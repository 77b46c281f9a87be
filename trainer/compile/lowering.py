"""Lowers a run's graphs to HLO with the plan's shardings, on an abstract mesh.

The code is the run's own (:mod:`shardwright.step.build`, :mod:`shardwright.weights`). Tensors have shapes and layouts
but no data, so a model of any size is lowered in seconds.
"""

import functools
import gc
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
import torch_xla

from shardwright.compile.lowered_graph import TRAIN_STEP, Argument, LoweredGraph
from shardwright.evaluation.decoders import NEXT_TOKEN, PROMPTS, CachedDecoder, build_generator
from shardwright.evaluation.generate import can_cache
from shardwright.evaluation.prompt_samples import expected_shape, sampling_of
from shardwright.evaluation.reference_rows import REFERENCE_PASS, ReferenceStep
from shardwright.evaluation.teacher import teacher_job
from shardwright.evaluation.teacher_rows import TEACHER_PASS
from shardwright.job import Job
from shardwright.layout.partition import PartitionSpec
from shardwright.layout.plan import ParameterPlan
from shardwright.layout.stacking import is_stacked
from shardwright.models.layers.decoder_layers import DecoderLayers
from shardwright.models.ops import jax_call, scopes
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.auto_remat import LayerValue, layer_values
from shardwright.step.build import evaluation_step, place_model
from shardwright.step.placed_model import PlacedModel
from shardwright.step.train_step import TrainStep, step_name
from shardwright.weights.place import layer_batches, read_layer, write_layer
from shardwright.weights.weight_sources import state_dict_weights
from shardwright.xla.batch import batch_spec
from shardwright.xla.chips import Chip
from shardwright.xla.device_mesh import AbstractMesh
from shardwright.xla.runtime import init_runtime

EVALUATION, LOADING, READING = "evaluation", "loading", "reading back"
BATCH = ("input_ids", "labels")
ISOLATED = ("segment_ids", "position_ids")  # besides, where documents are isolated
# a graph of lazy tensors: its results, layouts of tensors that are no placeholders, and `LoweredGraph.values`
Traced: TypeAlias = tuple[Tensors, Mapping[str, PartitionSpec], tuple[LayerValue, ...]]


def graphs_of(job: Job) -> tuple[str, ...]:
    """The names of all graphs of a run, but for transfers, zeros on the devices and :func:`shorter_steps`.

    One graph loads, or reads back for an export, one layer of a batch of parameters; the batch with the largest
    parameter stands for all.
    """
    names = [TRAIN_STEP, EVALUATION, *((LOADING, READING) if _largest_batch(job) else ())]
    if job.args.entry.reference:
        names.append(REFERENCE_PASS)
    if job.args.teacher is not None:
        names.append(TEACHER_PASS)
    if job.args.sample_prompts is not None:
        names += [PROMPTS, NEXT_TOKEN] if can_cache(job.model) else [NEXT_TOKEN]
    return tuple(names)


def shorter_steps(job: Job) -> tuple[str, ...]:
    """The names of a run's train steps on rows shorter than ``sequence_length``, which need no report of their own."""
    return tuple(step_name(length, job.row_lengths) for length in job.row_lengths[:-1])


def lower(
    job: Job, graph: str = TRAIN_STEP, *, platform: str = "tpu", compiler_flags: str = "", chip: Chip | None = None
) -> LoweredGraph:
    """One of :func:`graphs_of` the job as HLO, with the kernels of ``platform``, ``tpu`` or ``cpu``.

    ``compiler_flags`` are as LIBTPU_INIT_ARGS holds them. Raises UserError for a teacher that can't be laid out.
    """
    init_runtime()
    job = teacher_job(job) if graph == TEACHER_PASS else job
    # autograd asks the device for its context, which only a first computation makes
    torch.ones(1, device=torch_xla.device()).cpu()
    mesh = AbstractMesh(job.plan.mesh, chip)
    try:
        with jax_call.lowering_for(platform, compiler_flags), scopes.kept():
            return _lower(job, graph, mesh)
    finally:
        # Tensors without data must not outlive this: a sync of all lazy tensors would try to compute them. The mesh
        # keeps some, and reference cycles keep the model.
        mesh.placed.clear()
        gc.collect()


def _lower(job: Job, graph: str, mesh: AbstractMesh) -> LoweredGraph:
    results, layouts, values = _TRACED[graph](job, mesh)
    # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
    context = torch_xla._XLAC.lowering.LoweringContext(graph.replace(" ", "_"))
    context.build(list(results.values()))
    hlo = context.hlo()
    outputs = {name: number for number, name in enumerate(results)}
    known = {context.tensor_parameter_id(placeholder.tensor): placeholder.name for placeholder in mesh.placed}
    specs = {placeholder.name: placeholder.spec for placeholder in mesh.placed} | dict(layouts)
    arguments = []
    for number, parameter in enumerate(jax_call.xla_client.XlaComputation(hlo).program_shape().parameter_shapes()):
        name, shape = known.get(number, "a constant"), tuple(parameter.dimensions())
        spec, dtype = specs.get(name, (None,) * len(shape)), str(parameter.numpy_dtype())
        arguments.append(Argument(name, _kind(name, job), shape, dtype, spec, outputs.get(name)))
    decoders = (module for module in job.assembled.modules() if isinstance(module, DecoderLayers))
    return LoweredGraph(
        hlo=hlo,
        arguments=tuple(arguments),
        outputs=tuple(specs[name] for name in results),
        mesh=dict(job.plan.mesh),
        layers=max((run.count for decoder in decoders for run in decoder.runs), default=1),
        graph=graph,
        values=values,
    )


def _placed(job: Job, mesh: AbstractMesh) -> PlacedModel:
    return place_model(job, mesh, state_dict_weights(job.model.state_dict()))


def _trace_train_step(job: Job, mesh: AbstractMesh) -> Traced:
    placed = _placed(job, mesh)
    step = TrainStep(placed)
    step.trace(_batch(job, job.rows), step=1, learning_rate=1.0)
    return step.replaced, {}, layer_values(job, placed.model)


def _trace_evaluation(job: Job, mesh: AbstractMesh) -> Traced:
    evaluation = evaluation_step(_placed(job, mesh))
    sums = evaluation.begin()
    evaluation.trace(_batch(job, job.evaluation_rows), sums)
    return {"sums": sums}, {}, ()


def _trace_layer(job: Job, mesh: AbstractMesh, *, reads: bool) -> Traced:
    """Reads or writes a layer of the stacks of :func:`_largest_batch`."""
    specs = job.stored.specs
    stacks = {e.name: mesh.place(e.name, e.shape, e.dtype, specs[e.name]) for e in _largest_batch(job)}
    number = mesh.place("layer", (1,), torch.int64, (None,))
    layouts = {f"a layer of {name}": specs[name][1:] for name in stacks}
    if reads:
        rows = read_layer(stacks, number, job.stored, mesh)
        return {f"a layer of {name}": row for name, row in rows.items()}, layouts, ()
    rows = {
        name: mesh.place(row, stack.shape[1:], stack.dtype, layouts[row])
        for (name, stack), row in zip(stacks.items(), layouts, strict=True)
    }
    write_layer(stacks, rows, number, job.stored, mesh)
    return stacks, {}, ()


def _trace_reference(job: Job, mesh: AbstractMesh) -> Traced:
    # a teacher has a column of its own; it is asked for all its words, a few rows more than it shares with a student
    step = ReferenceStep(_placed(job, mesh), job.args.goal.teacher)
    batch = _batch(job, job.evaluation_rows)
    del batch[step.column]
    values = step.trace(batch)
    return {"logps": values}, {"logps": batch_spec(values.dim(), job.recipe.batch)}, ()


def _trace_generation(job: Job, mesh: AbstractMesh, *, next_token: bool) -> Traced:
    """The graph of the run's prompts, or that of a further token."""
    shape = expected_shape(job)
    decoder = build_generator(_placed(job, mesh), shape, sampling_of(job.args)).decoder
    results = decoder.begin([[0]] * shape.rows, torch.empty(shape.rows, device="meta"))
    if next_token and isinstance(decoder, CachedDecoder):
        decoder.as_if_run()
        results = decoder.next(torch.empty(decoder.shape.rows, device="meta"))
    return results, {name: decoder.spec_of(tensor) for name, tensor in results.items()}, ()


_TRACED: dict[str, Callable[[Job, AbstractMesh], Traced]] = {
    TRAIN_STEP: _trace_train_step,
    EVALUATION: _trace_evaluation,
    LOADING: functools.partial(_trace_layer, reads=False),
    READING: functools.partial(_trace_layer, reads=True),
    **dict.fromkeys((REFERENCE_PASS, TEACHER_PASS), _trace_reference),
    PROMPTS: functools.partial(_trace_generation, next_token=False),
    NEXT_TOKEN: functools.partial(_trace_generation, next_token=True),
}


def _largest_batch(job: Job) -> list[ParameterPlan]:
    """The batch of stacks, loaded together, with the largest parameter; empty if layers are not stacked."""
    return next(iter(layer_batches([entry for entry in job.stored.parameters if is_stacked(entry.name)])), [])


def _batch(job: Job, rows: int) -> Tensors:
    args = job.args
    names = (*BATCH, *ISOLATED) if args.isolate_documents else BATCH
    batch = {name: torch.empty((rows, args.sequence_length), dtype=torch.int64, device="meta") for name in names}
    columns = args.goal.columns
    return batch | {name: torch.empty((rows, *shape), device="meta") for name, shape in columns.items()}


def _kind(name: str, job: Job) -> str:
    if name in job.stored.specs:
        return "weights"
    if name.partition(" ")[0] in job.stored.specs:  # whose state has its name behind the parameter's
        return "optimizer"
    return "batch" if name in (*BATCH, *ISOLATED, *job.args.goal.columns) else "other"
