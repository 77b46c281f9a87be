"""Scripts of others under their own trainers and, ported, under this one: the losses that each side logs.

python -m tests.support.originals [run_clm sft dpo kto reward course_trainer course_loop]

The originals run on the plain CPU, the ports on one virtual device, so that a step has as many rows. Rows come in each
side's own order.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import test_scripts_of_others as scripts

LOSS = re.compile(r"'(?:eval_loss|loss|loss/eval)': '?([\d.]+)")
OURS = re.compile(r"(?:loss|held-out loss) ([\d.]+)")


def losses_of(name: str, folder: Path, *, ours: bool) -> list[str]:
    """The losses that the script prints, held-out ones too, in their order."""
    inspect.unwrap(scripts.folder)(folder)
    words, environment = [str(word) for word in scripts.WORDS[name]], {**os.environ, "OMP_NUM_THREADS": "1"}
    if ours:
        text = scripts.script_of(name)
        environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
        environment.pop("USE_TORCH_XLA", None)
    else:
        file, kind = scripts.FILES[name]
        text = (scripts.SCRIPTS / file).read_text().replace("SFT", kind.removesuffix("Trainer"))
        environment |= {"USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "true"}
        words += ["--use_cpu", "--report_to", "none"] if words else []
    (folder / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, f"{name}.py", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    logged = ours and name != "course_loop"  # which prints its own
    steps = "\n".join(line for line in done.stdout.splitlines() if not logged or line.strip().startswith("step"))
    return (OURS if logged else LOSS).findall(steps)


def main() -> None:
    for name in sys.argv[1:] or scripts.WORDS:
        for ours in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found = losses_of(name, Path(folder), ours=ours)
            print(name, "here:" if ours else "there:", *found, flush=True)


if __name__ == "__main__":
    main()
