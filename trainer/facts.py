"""What must be equal on every host of a job, as text: two programs that wait for each other would do so for ever."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import models
import trainer
from trainer.checkpoint.host_state import versions
from trainer.job import Job

_OWN = ("output_dir", "staging_dir")  # which the first host chooses for all, and each for itself


def facts(job: Job) -> dict[str, str]:
    """What it is → its value: the arguments, the recipe, the model, the packages and our own code."""
    arguments = {f"--{name}": json.dumps(value) for name, value in job.args.as_dict().items() if name not in _OWN}
    texts = {f"the job's {name}": json.dumps(content, default=str) for name, content in job.as_texts().items()}
    return {
        **arguments,
        "whether --staging_dir is given": str(job.args.staging_dir is not None),
        "the model's config": json.dumps(job.config.to_dict(), default=str),
        "Python": sys.version.split()[0],
        **versions(),
        "Shardwright's code": code_digest(),
        **{name: text for name, text in texts.items() if "training_args" not in name},
    }


def code_digest() -> str:
    """A checksum of every module of the trainer and the models as they lie on this host's disk."""
    found = hashlib.sha256()
    for package in (trainer, models):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]
