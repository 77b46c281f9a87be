"""The launch command: shows and writes a launch plan, and runs it under ``--run``."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shardwright.arguments.command_line import parse
from shardwright.errors import UserError
from shardwright.launch.launch_arguments import LaunchArguments
from shardwright.launch.launch_plan import LaunchPlan, script
from shardwright.launch.targets import TARGETS, find_target, read_request
from shardwright.report.lines import Terminal, say, say_table

_SCRIPT = "run.sh"
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|KEY|CREDENTIALS)$", re.IGNORECASE)  # names of variables


def main(words: Sequence[str], description: str | None) -> int:
    """Plans the launch that ``words`` ask for; raises UserError for bad options and a command that fails."""
    at = list(words).index("--") if "--" in words else len(words)
    own, train = words[:at], words[at + 1 :]
    needs = {name: ", ".join(f"--{key}" for key in each.needs) for name, each in TARGETS.items()}
    rows = (f"  {name:<9} {'needs ' + text if text else ''}".rstrip() for name, text in needs.items())
    epilog = "\n".join(["Targets, each of which needs --topology too:", *rows])
    name = own[0] if own else "(none)"
    (options,) = parse([LaunchArguments], own if name.startswith("-") else own[1:], description, epilog)
    plan = find_target(name).plan(read_request(name, options, train))
    if secrets := [name for name in options.environment if _SECRET.search(name)]:
        plan.notes.append(
            f"{', '.join(secrets)} of --env stands in these files as it is, for whoever may read them; a secret is "
            "better given by what keeps the cluster's (Kubernetes' Secret, Secret Manager)"
        )
    folder = Path(os.path.expanduser(options.output or Path("launch", options.name)))
    console = Terminal()
    write(plan, folder)
    _show(plan, folder, console)
    if options.run:
        _run(plan, folder, console)
    else:
        say(console, f"Nothing was started: --run runs these commands, as does {folder / _SCRIPT}")
    return 0


def write(plan: LaunchPlan, folder: Path) -> None:
    """Writes the plan's files and folders, and its commands as a script; raises UserError if it can't."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**plan.files, _SCRIPT: script(plan.commands)}.items():
            (folder / name).write_text(text)
        for name, source in plan.folders.items():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    except OSError as error:
        raise UserError(
            asked=f"--output {folder}",
            found=f"{type(error).__name__}: {error.strerror}",
            why="the files are written there",
            instead="--output and a folder that this user may write to",
        ) from error


def _show(plan: LaunchPlan, folder: Path, console: Console) -> None:
    files = [(str(folder / name), str(len(text.splitlines()))) for name, text in plan.files.items()]
    say_table(console, ("file", "lines"), files, header_style="bold")
    for heading, commands in (("Commands", plan.commands), ("Afterwards", plan.afterwards)):
        console.print(Text(f"\n{heading} (in {folder})" if heading == "Commands" else f"\n{heading}", style="bold"))
        for command in commands:
            say(console, f"  {shlex.join(command)}")
    for note in plan.notes:
        say(console, f"\nNote: {note}.")
    console.print()


def _run(plan: LaunchPlan, folder: Path, console: Console) -> None:
    """Runs the commands in order, up to the first that can't be started or fails."""
    for number, command in enumerate(plan.commands, start=1):
        say(console, f"[{number}/{len(plan.commands)}] {shlex.join(command)}")
        try:
            code = subprocess.run(command, cwd=folder, check=False).returncode
        except OSError as error:
            raise UserError(
                asked=shlex.join(command),
                found=f"{type(error).__name__}: {error.strerror}",
                why=f"{command[0]} starts what this target needs",
                instead=f"{command[0]} installed and in PATH, and the same command again",
            ) from error
        if code != 0:
            last = number == len(plan.commands)
            raise UserError(
                asked=shlex.join(command),
                found=f"it ended with exit code {code}",
                why="the run was not started, or did not end well" if last else "what comes after it needs it",
                instead=f"what it says above put right; then the same command again, or the rest of {folder / _SCRIPT}",
            )
