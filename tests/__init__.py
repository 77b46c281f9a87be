"""The tests mirror the packages; what several of them set up is in `tests.support`."""

import sys
from pathlib import Path

# what measures a step against the plain model is a script's, and imported as scripts import each other
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "measure"))
