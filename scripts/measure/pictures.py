"""Make the pictures in docs/pictures/ again, from pages of real runs, by a headless Chromium.

python scripts/measure/pictures.py --run output/mixtral_ep [--compile page.html] [--output docs/pictures]

plan.png is of Mixtral-8x7B on 64 devices. run.png is of the page in the output folder --run, compile.png and step.png
of a page that scripts/compile.py --report has written.
"""

import argparse
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
MOST_BYTES = 150 * 1024
# picture → its width and height in pixels, and CSS that leaves the part to be shown
_KINDS = ".kind:not(:nth-child(4)):not(:nth-child(6))"
PLAN = (960, 950, f"{_KINDS}, noscript, h2:nth-of-type(n+4), h2:nth-of-type(n+4) ~ * {{ display: none }}")
DEVICE = 37  # pointed at in the plan
RUN = (1000, 900, "")
COMPILE = (940, 1060, ".wide, .schedule, h2:first-of-type { display: none }")
STEP = (960, 800, "body > :not(.schedule) { display: none } .schedule ~ * { display: none }")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="DIR", help="output folder of a run")
    parser.add_argument("--compile", metavar="FILE", help="page of a compiled step")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        print(f"no browser: one of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.html")
        words = ["--recipe", "mixtral_ep", "--model", "docs/configs/mixtral_8x7b.json", "--devices", "64"]
        line = [sys.executable, "scripts/plan.py", *words, "--html", str(plan)]
        subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        pages = {"plan": (plan, PLAN)}
        if arguments.run:
            pages["run"] = Path(arguments.run, "report.html"), RUN
        if arguments.compile:
            pages |= {"compile": (Path(arguments.compile), COMPILE), "step": (Path(arguments.compile), STEP)}
        for name, (page, shown) in pages.items():
            target = arguments.output / f"{name}.png"
            _picture(browser, page, target, *shown, folder=Path(folder))
            print(f"{target}: {target.stat().st_size:,} bytes")
            if target.stat().st_size > MOST_BYTES:
                print(f"{target} is larger than {MOST_BYTES:,} bytes", file=sys.stderr)
                return 1
    return 0


def _picture(browser: str, page: Path, target: Path, width: int, height: int, style: str, folder: Path) -> None:
    """Shows the part of ``page`` that ``style`` leaves in a window of that size, and keeps it as ``target``."""
    part = folder / f"part-{target.stem}.html"
    text = page.read_text(encoding="utf-8")
    text = text.replace("select(0);", f"select({DEVICE});")
    part.write_text(text.replace("</style>", f"body {{ margin: .5rem auto }} {style}</style>", 1), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'own'}"]
    options += [f"--window-size={width},{height}", "--virtual-time-budget=2000", f"--screenshot={target.absolute()}"]
    line = [browser, *options, part.as_uri()]
    subprocess.run(line, check=True, stderr=subprocess.DEVNULL, timeout=300, env={**os.environ, "LANG": "C.UTF-8"})
    target.write_bytes(_smaller(target.read_bytes()))


def _smaller(png: bytes) -> bytes:
    """The same PNG, its pixels compressed as far as zlib can."""
    parts, at = [png[:8]], 8
    pixels = b""
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        if kind == b"IDAT":
            pixels += png[at + 8 : at + 8 + length]
        else:
            if kind == b"IEND":
                parts.append(_chunk(b"IDAT", zlib.compress(zlib.decompress(pixels), 9)))
            parts.append(png[at : at + 12 + length])
        at += 12 + length
    return b"".join(parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    sys.exit(main())
