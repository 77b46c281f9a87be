"""The run's recipe against its model and the slices, before anything is started."""

import os

from shardwright.arguments.training import TrainingArguments
from shardwright.xla.chips import Topology


def check_layout(args: TrainingArguments, topology: Topology) -> None:
    """Raises UserError for what each host would refuse, of a model whose config is here and needs no network."""
    from shardwright.job import Job

    folders = [each for each in (args.model, args.adapter) if each is not None]
    if not all(os.path.exists(os.path.expanduser(each)) for each in folders):
        return
    job = Job.resolve(args, lambda: topology.devices)
    job.recipe.mesh.over_slices(topology.slices, topology.devices)
