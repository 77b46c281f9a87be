"""The launch targets, and the request for one from its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from shardwright.arguments.run_file import with_files
from shardwright.errors import UserError, did_you_mean
from shardwright.launch import jobset, ray_job, skypilot, tpu_vm, xpk
from shardwright.launch.launch_arguments import LaunchArguments
from shardwright.launch.launch_plan import LaunchPlan
from shardwright.launch.local_inputs import check_inputs
from shardwright.launch.request import Mount, Request, check_train
from shardwright.launch.slices import as_large, generation, hosts
from shardwright.report.escapes import escaped
from shardwright.xla.chips import Topology, find_topology

if TYPE_CHECKING:
    from shardwright.arguments.training import TrainingArguments


@dataclass(frozen=True)
class LaunchTarget:
    """A tool that starts runs, and the options that it must and may have beside those that all take."""

    plan: Callable[[Request], LaunchPlan]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    by_size: bool = False  # it asks for a number of TPUs, and can't say which shape
    one_slice: bool = False  # it can't join several
    by_gke: bool = False  # its hosts can be pods of GKE, which has every generation


TARGETS = {
    "xpk": LaunchTarget(xpk.plan, ("image", "cluster"), ("project", "zone", "mount", "spot"), by_gke=True),
    "jobset": LaunchTarget(jobset.plan, ("image",), ("queue", "mount", "spot"), by_gke=True),
    "skypilot": LaunchTarget(skypilot.plan, ("image",), ("zone", "mount", "spot"), by_size=True, one_slice=True),
    "tpu-vm": LaunchTarget(tpu_vm.plan, ("zone",), ("image", "project", "mount", "spot"), by_size=True),
    "ray": LaunchTarget(ray_job.plan, by_gke=True),
}
_SOME = ("image", "cluster", "project", "zone", "queue", "mount", "spot")  # options of some targets only


def find_target(name: str) -> LaunchTarget:
    """The target called ``name``; raises UserError if there is none."""
    if name in TARGETS:
        return TARGETS[name]
    raise UserError(
        asked=f"target {name}",
        found="no target of that name",
        why="a run is started by one of a fixed list of tools",
        instead=f"{did_you_mean(name, TARGETS)}one of {', '.join(TARGETS)}",
    )


def read_request(name: str, options: LaunchArguments, train: Sequence[str]) -> Request:
    """The request for the target ``name`` and a run with the options ``train``; raises UserError for a bad option."""
    target, train = find_target(name), with_files(train)  # the hosts have not the file
    _check_lines([*filter(None, map(str, vars(options).values())), *train])
    _check_options(name, target, options)
    topology = _topology(name, target, options)
    mount = None if options.mount is None else Mount(*options.mount.rsplit(":", 1))
    if mount is not None and mount.bucket and name == "tpu-vm":
        raise UserError(
            asked=f"tpu-vm --mount {options.mount}",
            found="a bucket",
            why="a TPU VM mounts none by itself",
            instead="a folder where each host has it mounted, as --mount /mnt/bucket:/mnt/bucket",
        )
    words, args = check_train(train, mount, container=bool(options.image))
    check_inputs(args, name, container=bool(options.image), mounted=mount.path if mount is not None else "")
    _check_layout(args, topology)
    same = {each.name: getattr(options, each.name, None) for each in fields(Request)}
    given = {key: value for key, value in same.items() if value is not None}
    return Request(**given | {"topology": topology, "train": words, "output_dir": args.output_dir, "mount": mount})


def _check_layout(args: TrainingArguments, topology: Topology) -> None:
    """Raises UserError for what each host would refuse, of a model and a recipe that are here and need no network."""
    from shardwright.job import Job

    recipe = args.recipe if args.recipe.endswith(".py") else None
    if all(os.path.exists(os.path.expanduser(each)) for each in (args.model, args.adapter, recipe) if each is not None):
        job = Job.resolve(args, lambda: topology.devices)
        job.recipe.mesh.over_slices(topology.slices, topology.devices)


def _check_lines(words: Sequence[str]) -> None:
    for word in words:
        if "\n" in word or escaped(word) != word:
            raise UserError(
                asked=f"a launch with {word!r:.200}",
                found="a line break or another control character in it",
                why="the launchers' files and shells would read what follows as a line of its own",
                instead="options of one line each",
            )


def _check_options(name: str, target: LaunchTarget, options: LaunchArguments) -> None:
    if missing := [key for key in target.needs if not getattr(options, key)]:
        raise UserError(
            asked=f"target {name}",
            found=f"no --{missing[0]}",
            why="it can't be started without: " + ", ".join(f"--{key}" for key in target.needs),
            instead=f"--{missing[0]} and its value",
        )
    known = {each: (*target.needs, *target.takes) for each, target in TARGETS.items()}
    if useless := [key for key in _SOME if getattr(options, key) and key not in known[name]]:
        raise UserError(
            asked=f"target {name}",
            found=f"--{useless[0]}",
            why=f"it has no use for it; {', '.join(each for each in known if useless[0] in known[each])} do",
            instead=f"the command without --{useless[0]}",
        )


def _topology(name: str, target: LaunchTarget, options: LaunchArguments) -> Topology:
    if options.topology is None:
        raise UserError(
            asked=f"target {name}",
            found="no --topology",
            why="the files name the TPUs and their hosts",
            instead="--topology v5p:2x2x4, or another of libtpu's names",
        )
    topology = find_topology(options.topology, options.slices)
    others = as_large(topology) if target.by_size else []
    if not (target.by_gke or generation(topology).runtime):
        found, why = f"{topology.chip.name}, which has no TPU VMs of its own", "starts none on GKE"
        instead = "xpk, jobset or ray, or another generation"
    elif others:
        found, why = (
            f"slices of as many chips: {', '.join(others)}",
            "asks for TPUs by their number, not by their shape",
        )
        instead = "xpk or jobset, or a slice of another size"
    elif name in ("xpk", "jobset") and topology.slices > 1 and hosts(topology) == 1:
        # docs.cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice: node pools of one host are not joined
        found, why = "several slices of one host each", "joins slices of several hosts alone, as GKE does"
        instead = "one larger slice, or slices of several hosts"
    elif target.one_slice and topology.slices > 1:
        found, why = "several slices", "does not tell a host which slice it belongs to"
        instead = "xpk, jobset or tpu-vm, or --slices 1"
    else:
        return topology
    asked = f"{topology.slices} × {topology.name} by {name}"
    raise UserError(asked=asked, found=found, why=f"{name} {why}", instead=instead)
