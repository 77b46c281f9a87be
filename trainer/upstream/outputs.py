"""Outputs: the methods of transformers' Trainer that write beside a model: metrics, the state, a model card, a push."""

import datetime
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.errors import UserError
from shardwright.files.folder import Folder, as_json
from shardwright.hosts.hosts import hosts
from shardwright.hosts.versions import versions
from shardwright.report.lines import say
from shardwright.upstream.model_card import FILE, Card, last_metrics, may_write
from shardwright.upstream.processes import Processes
from shardwright.weights.hub_push import push_folder


class Outputs:
    """Methods of a trainer whose ``loop`` is open or opened on use."""

    loop: Any  # a `shardwright.loop.TrainingLoop`
    console: Any
    hub_model_id: str | None  # the repository of a push, where the arguments name it
    _given: Any  # a `shardwright.inputs.RunInputs`
    _hub: dict[str, Any]  # further options of a push that the arguments hold

    @property
    def accelerator(self) -> Processes:
        """The processes of the job: `accelerator.print`, `accelerator.is_main_process`."""
        return Processes()

    def is_world_process_zero(self) -> bool:
        """Whether this process writes what all share."""
        return hosts().first

    def is_local_process_zero(self) -> bool:
        """True: a host runs one process."""
        return True

    def end(self) -> None:
        """Do nothing: trackers and hosts end with the run. transformers' scripts call it last."""

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print ``metrics`` of a ``split`` (``train``, ``eval``, ``test``) as a table, on the first host."""
        if hosts().first:
            say(self.console, f"***** {split} metrics *****")
            width = max(map(len, metrics), default=0)
            for name, value in sorted(metrics.items()):
                say(self.console, f"  {name.ljust(width)} = {_shown(name, value):>12}")

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``metrics`` to SPLIT_results.json of the output folder, and add them to all_results.json."""
        folder = self.loop.folder
        folder.write(f"{split}_results.json", as_json(dict(sorted(metrics.items()))))
        if combined:
            name = "all_results.json"
            before = _read_json(folder, name)
            folder.write(name, as_json(dict(sorted({**before, **metrics}.items()))))

    def save_state(self) -> None:
        """Write the trainer's state as :meth:`train` does, to trainer_state.json of the output folder."""
        self.loop.folder.write("trainer_state.json", as_json(asdict(self.loop.state)))

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        *,
        dataset_name: str | None = None,
    ) -> None:
        """Write the README.md of the run's ``model`` folder; one that somebody wrote there stays.

        It tells the base, the dataset, options that are not as by default, the last evaluation and versions.
        """
        said = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._write_card(self.loop.folder / "model", said)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the model in the hub's format, or the adapter in PEFT's, with the tokenizer and a model card.

        ``output_dir`` is on disk or in a store; default: the run's ``model`` folder, as :meth:`train` leaves it.
        """
        folder = Folder(str(output_dir)) if output_dir else self.loop.folder / "model"
        self.loop.trained.write(folder)
        self._write_card(folder, {})

    def push_to_hub(
        self,
        repo_id: str | None = None,
        commit_message: str = "End of training",
        *,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        blocking: bool = True,
        **card: Any,
    ) -> str:
        """Write the model as :meth:`save_model` does, and upload that folder; returns the commit's address.

        Args:
            repo_id: ``owner/name``. Default: what the arguments name, else the output folder's name, under the token's
                owner.
            token: None: the arguments', HF_TOKEN, or what `hf auth login` left. It is kept nowhere.
            card: what the model card says besides, as :meth:`create_model_card` takes it.

        Raises:
            UserError: the hub can't be reached or refuses this token, or the output folder is in a store.
        """
        folder = self.loop.folder / "model"
        _check_push(folder, repo_id, blocking)
        self.loop.trained.write(folder)
        self._write_card(folder, card)
        self.loop.callbacks.on_push_begin(self.loop.args, self.loop.state, self.loop.control)
        how: dict[str, Any] = {"token": token, "private": private, "revision": revision}
        how = {name: self._hub.get(name) if value is None else value for name, value in how.items()}
        self.hub_model_id = repo_id or self.hub_model_id or self.loop.folder.name
        how["private"] = bool(how["private"])
        return push_folder(Path(str(folder)), self.hub_model_id, commit_message, **how)

    def _write_card(self, folder: Folder, said: dict[str, Any]) -> None:
        if not hosts().first:
            return
        job, history = self.loop.job, self.loop.state.log_history
        held = self._given.model  # whose config says where it was loaded from
        base = job.base or (None if held is None else held.config.name_or_path) or None
        mesh, adapter = job.plan.mesh, job.lora is not None
        card = Card(job.args, job.recipe.name, mesh, base, adapter, last_metrics(history), versions())
        text = card.text(folder.name if folder.name != "model" else self.loop.folder.name, **said)
        if may_write(folder.read(FILE) if folder.is_file(FILE) else None):
            folder.write(FILE, text.encode())


def shown(model: Any, trainer: Outputs) -> Any:
    """``model``, which lies on the devices, such that ``save_pretrained`` and ``push_to_hub`` are ``trainer``'s.

    Its ``generate`` is a UserError.
    """

    def generate(*_: Any, **__: Any) -> Any:
        raise UserError(
            asked="trainer.model.generate(…)",
            found="a model on the devices, made for steps of one shape",
            why="each token would compile another computation",
            instead="TrainingArguments(sample_prompts=…) for answers as it trains; the model in save_model(folder)",
        )

    model.save_pretrained = lambda folder, **more: trainer.save_model(folder)
    model.push_to_hub, model.generate = trainer.push_to_hub, generate
    return model


def hub_options(args: Any) -> tuple[str | None, dict[str, Any]]:
    """The repository that transformers' arguments name for a push, and further options of it."""
    names = {"token": "hub_token", "private": "hub_private_repo", "revision": "hub_revision"}
    return getattr(args, "hub_model_id", None), {ours: getattr(args, name, None) for ours, name in names.items()}


def _check_push(folder: Folder, repo_id: str | None, blocking: bool) -> None:
    if folder.remote:
        raise UserError(
            asked=f"to push {folder}",
            found="a folder in a store",
            why="the hub's client uploads what lies on disk",
            instead="save_model with a folder on disk, and `hf upload`",
        )
    if repo_id is not None and " " in repo_id:
        raise UserError(
            asked=f"push_to_hub({repo_id!r:.80})",
            found="a message in place of a repository's name",
            why="the first argument is the repository here",
            instead=f"push_to_hub(commit_message={repo_id!r:.80})",
        )
    if not blocking:
        raise UserError(
            asked="push_to_hub(blocking=False)",
            found="a push that is waited for",
            why="it returns the commit, which is there once the hub has all",
            instead="push_to_hub(), or `hf upload` of the folder model/ in another process",
        )


def _read_json(folder: Folder, name: str) -> dict[str, Any]:
    return json.loads(folder.read(name)) if folder.is_file(name) else {}


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float) and "_runtime" in name and math.isfinite(value):
        return str(datetime.timedelta(seconds=round(value, 2)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
