"""TrainedModel: the model on the devices, saved, written out, or given other weights."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwright.checkpoint.read import open_checked, saved_buffers
from shardwright.files.arrays import whole
from shardwright.files.folder import Folder, UnwrittenFolder
from shardwright.hosts.hosts import hosts
from shardwright.job import Job
from shardwright.models.adapters.lora import own_parameters
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.report.lines import waiting
from shardwright.weights.adapter_weights import files_of, weights_of
from shardwright.weights.formats.plain_weights import base_dtype
from shardwright.weights.hub_read import HubWeights
from shardwright.weights.hub_write import export, kept_in_float32, says_how
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.peft_files import save_adapter
from shardwright.weights.place import place_parameters
from shardwright.weights.weight_sources import Source, in_dtype, part_and_rest
from shardwright.xla.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TrainedModel:
    """A model whose parameters are trained on the devices."""

    job: Job
    model: PreTrainedModel  # holds the buffers
    mesh: DeviceMesh
    parameters: Tensors  # the dict that the steps share
    base: Source  # the starting weights, under the names of `job.facts.whole`
    tokenizer: PreTrainedTokenizerBase | None
    console: Console

    @property
    def published(self) -> HubWeights | None:
        """The starting weights, where they are files in the hub's format."""
        return self.base if isinstance(self.base, HubWeights) else None

    @functools.cached_property
    def base_noted(self) -> dict[str, Any]:
        """Notes for a checkpoint: of the base's tensors how many are not trained, and whether an export asks for them.

        And a mark of files that are read again.
        """
        base, again = self.published, self.job.lora is not None or self.job.facts.is_part
        return {
            "says_how": base is not None and not again and says_how(base, self.job.facts.whole),
            "untrained": 0 if base is None else len(base.untrained),
            "base": base.mark if base is not None and again else None,
        }

    def saved(self, state: Tensors) -> Tensors:
        """A checkpoint's tensors: the train step's ``state`` and buffers; no frozen weights under an adapter."""
        adapted = self.job.lora is not None
        left_out = self.job.untrained - own_parameters(self.job.assembled).keys() if adapted else frozenset()
        everything = {**state, **saved_buffers(self.model)}
        return {name: tensor for name, tensor in everything.items() if name not in left_out}

    def write(self, folder: Folder, source: Source | None = None) -> None:
        """Write the weights of ``source``, by default those trained, for `from_pretrained`; an adapter's for PEFT.

        A model's are in the dtype that its base is published in.
        """
        folder, facts = folder if hosts().first else UnwrittenFolder(str(folder)), self.job.facts
        source = source or LiveWeights(self.model, self.job.stored, self.mesh, self.parameters)
        with waiting(self.console, f"writing {folder} …"):
            if self.job.lora is not None:
                save_adapter(folder, files_of(self.job), source, self.tokenizer, self.console)
                return
            # a copy, since a model's config is written with the dtype of its weights
            model = copy.deepcopy(facts.whole)
            kept = kept_in_float32(model, self.published)
            own = in_dtype(source, base_dtype(self.job.config), lambda name: kept(facts.names_in_whole.get(name, name)))
            weights = part_and_rest(own, self.base, facts.names_in_whole)
            export(folder, model, weights, self.tokenizer, console=self.console, base=self.published)

    def into(self, model: PreTrainedModel) -> None:
        """Copy the trained weights into ``model``, one of `job.facts.whole`'s class on this host, a tensor at a time.

        All hosts call it. Under an adapter there is nothing to copy: the weights are as they were.
        """
        facts, tensors = self.job.facts, model.state_dict()
        source = LiveWeights(self.model, self.job.stored, self.mesh, self.parameters)
        trained = part_and_rest(source, self.base, facts.names_in_whole)
        for name, tensor in tensors.items():
            tensor.copy_(whole(trained(name)))

    def in_checkpoint(self, folder: Folder) -> Source:
        """The weights in a checkpoint of this run; raises UserError if they can't be read, or are another model's."""
        source = open_checked(folder, self.console)
        source.check_model(self.job.adapted, self.job.config)
        return source

    def place(self, source: Source) -> None:
        """Train, evaluate and export these weights from now on."""
        self.parameters.clear()  # all that share it see the new weights, and the old are freed one by one
        weights = weights_of(self.job, self.base, source)
        self.parameters.update(place_parameters(self.model, self.job.stored, self.mesh, weights))
