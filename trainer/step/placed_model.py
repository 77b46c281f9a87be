"""PlacedModel: a job's model and its weights on a mesh, from which every step is made."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from shardwright.job import Job
from shardwright.layout.partition import PartitionSpec
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.loss import Loss
from shardwright.xla.device_mesh import DeviceMesh


@dataclass(frozen=True)
class PlacedModel:
    """A model on its mesh, with its buffers. Steps of any kind and export share the dict of its placed parameters."""

    job: Job
    mesh: DeviceMesh
    model: PreTrainedModel
    parameters: Tensors
    loss: Loss

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """Name → partition spec of the parameter and of its gradient."""
        return self.job.stored.specs

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return self.job.recipe.batch
