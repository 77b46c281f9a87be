"""Runs of `scripts/train.py` one after another in one process, as a notebook has several.

Standard input has a line of JSON for each, its log and its arguments, and gets its exit code as a line.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

from tests.support.paths import ROOT


def main() -> None:
    script, answers = str(ROOT / "scripts" / "train.py"), os.dup(1)
    for line in sys.stdin:
        log, words = json.loads(line)
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(opened, descriptor)
        os.close(opened)
        sys.argv[:] = [script, *words]
        code: object = None
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            code = error.code
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(answers, b"%d\n" % (code if isinstance(code, int) else code is not None))


if __name__ == "__main__":
    main()
