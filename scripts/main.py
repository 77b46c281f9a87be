"""Train Hugging Face models across TPU pods from a sharding recipe that a person can read.

shardwright train --recipe mixtral_ep     the same as `python scripts/train.py --recipe mixtral_ep`; each has --help
"""

import importlib
import sys

from shardwright import __version__
from shardwright.errors import did_you_mean
from shardwright.hosts.output_streams import exit_code

# command → what it does; each is a module beside this one
COMMANDS = {
    "train": "train a model by a recipe",
    "plan": "print where a recipe puts every parameter; needs no device and no weights",
    "check": "say what loads of a checkpoint, before it is fetched, and on which slice it trains",
    "port": "translate a published command or YAML file of another trainer",
    "data": "read all of a dataset as a run would, and say what would train wrongly",
    "prove": "train a shrunk model beside the plain one, and certify the recipe",
    "compile": "compile the step for a TPU that need not be here, and say whether it fits",
    "export": "write a checkpoint in the hub's format",
    "evaluate": "measure a model by lm-evaluation-harness's tasks, on its mesh",
    "compare": "put several runs over one another on one page",
    "launch": "start a run on the hosts of TPU slices, or show how",
}


def main() -> int:
    """The console command `shardwright`: its first word is the command, the others are the command's own."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(__doc__.strip(), "", *(f"  {each:<10}{what}" for each, what in COMMANDS.items()), sep="\n")
        return 0
    if name == "--version":
        print(f"shardwright {__version__}")
        return 0
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS)
        print(f"shardwright: no command {name!r}; {near}one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv = [f"shardwright {name}", *sys.argv[2:]]  # which is what --help and errors then call it
    return exit_code(importlib.import_module(f"shardwright.scripts.{name}").main)


if __name__ == "__main__":
    sys.exit(main())
