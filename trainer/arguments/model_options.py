"""Options of the model and its layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass
class ModelArguments(Checked):
    """The model, its layout and the dtypes of its state."""

    recipe: str = option(
        "auto",
        "Name of a recipe in recipes/, or the path of a .py file that defines `recipe`; or auto: made from --model's "
        "own parallel plan and shapes, on the axes of --mesh.",
    )
    model: str | None = option(
        None,
        "Hub id (id@revision) or local checkpoint folder, whose weights are the start; or a config's .json file, for "
        "random weights. Default: the recipe's own small model, with random weights.",
    )
    revision: str | None = option(
        None, "Branch, tag or commit of --model's repository, as in --model id@revision. Default: main as it is now."
    )
    from_scratch: bool = option(False, "Start from random weights although --model is a hub id or a folder.")
    tokenizer: str | None = option(
        None,
        "Hub id or folder of a tokenizer. Default: the one with --model's weights, which is needed then; with random "
        "weights and none beside their config, a BPE trained on the dataset.",
    )
    mesh: str | None = option(
        None,
        "Other ICI factors for the recipe's mesh, e.g. `fsdp=4,expert=2`; of auto any of the axes data, fsdp, inner, "
        "expert, tensor. `sequence` splits the tokens of each row, in any recipe (docs/recipe_parts.md).",
    )
    compute: str | None = option(
        None, "Another compute policy than the recipe's, e.g. `remat=0.5,capacity_factor=1.25` (docs/recipe_parts.md)."
    )
    bf16: bool | None = option(
        None,
        "Compute in bfloat16 over float32 weights (true), or in float32 (false). Default: as the recipe says.",
    )
    weight_dtype: str = option(
        "float32",
        "What weights are stored in: float32, or bfloat16 at half the memory.",
        choices=("float32", "bfloat16"),
    )
    optimizer_dtype: str = option(
        "float32", "What the optimizer's state is stored in: float32 or bfloat16.", choices=("float32", "bfloat16")
    )
    seed: int = option(42, "Of the random init, of the order of the data, and of dropout.")

    def check_model(self) -> None:
        self._take_revision()
        self.check_path("recipe", "model", "tokenizer")
        self.at_least(0, "it can't be negative", "seed")

    def _take_revision(self) -> None:
        """Puts ``revision`` into ``model``, which names the weights in all that follows; UserError if it has none."""
        if self.revision is None:
            return
        from shardwright.files.hub_names import is_hub_name, split

        name, own = split(self.model or "")
        if self.model is None or not is_hub_name(self.model) or own not in (None, self.revision):
            raise UserError(
                asked=f"--revision {self.revision}",
                found=f"--model {self.model}" if self.model else "no --model",
                why="it is a branch, a tag or a commit of a repository on the hub, and a model has one",
                instead="no --revision"
                + (f", or --model {name}@{self.revision}" if own else "; or with it a --model that is on the hub"),
            )
        self.model, self.revision = f"{name}@{self.revision}", None

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of weights and optimizer state, as `make_plan` takes them."""
        import torch

        return {name: getattr(torch, getattr(self, name)) for name in ("weight_dtype", "optimizer_dtype")}
