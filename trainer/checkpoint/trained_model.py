"""TrainedModel: the model on the devices, saved, written out, or given other weights."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwright.checkpoint.read import open_checked, saved_buffers
from shardwright.files.folder import Folder, UnwrittenFolder
from shardwright.hosts.hosts import hosts
from shardwright.job import Job
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.weights.adapter_weights import weights_of
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.place import place_parameters
from shardwright.weights.weight_sources import Source
from shardwright.weights.write_model import write_model
from shardwright.xla.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TrainedModel:
    """A model whose parameters are trained on the devices.

    Args:
        model: holds the buffers.
        parameters: name → placed parameter; the dict that the steps share.
        base: the source of the starting weights, under the names of ``job.facts.whole``.
    """

    job: Job
    model: PreTrainedModel
    mesh: DeviceMesh
    parameters: Tensors
    base: Source
    tokenizer: PreTrainedTokenizerBase
    console: Console

    def saved(self, state: Tensors) -> Tensors:
        """A checkpoint's tensors: the train step's ``state`` and buffers; no frozen weights under an adapter."""
        left_out = self.job.untrained if self.job.lora is not None else frozenset()
        everything = {**state, **saved_buffers(self.model)}
        return {name: tensor for name, tensor in everything.items() if name not in left_out}

    def write(self, folder: Folder, source: Source | None = None) -> None:
        """Write the model as `AutoModelForCausalLM.from_pretrained` loads it; or the adapter, as `PeftModel` loads it.

        The weights are those of ``source``, by default those being trained.
        """
        folder = folder if hosts().first else UnwrittenFolder(str(folder))
        live = LiveWeights(self.model, self.job.stored, self.mesh, self.parameters)
        write_model(self.job, folder, source or live, self.base, self.tokenizer, self.console)

    def in_checkpoint(self, folder: Folder) -> Source:
        """The weights in a checkpoint of this run.

        Raises:
            UserError: they can't be read, or are another model's.
        """
        source = open_checked(folder, self.console)
        source.check_model(self.job.adapted, self.job.config)
        return source

    def place(self, source: Source) -> None:
        """Train, evaluate and export these weights from now on."""
        self.parameters.clear()  # all that share it see the new weights, and the old are freed one by one
        weights = weights_of(self.job, self.base, source)
        self.parameters.update(place_parameters(self.model, self.job.stored, self.mesh, weights))
