"""Write docs/reference from the code: options, public names, flags of other trainers.

python scripts/measure/reference_pages.py            writes the pages that differ
python scripts/measure/reference_pages.py --check    writes none, and ends with 1 where one differs
"""

import sys
from pathlib import Path

from shardwright.arguments.command_line import Parser
from shardwright.arguments.known_flags import page as flags
from shardwright.hosts.output_streams import exit_code
from shardwright.scripts.measure import api_pages, option_pages

FOLDER = Path(__file__).parents[2] / "docs/reference"


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a page differs")
    check = parser.parse_args().check
    stale = []
    for name, text in {**option_pages.pages(), **api_pages.pages(), **flags.pages()}.items():
        file = FOLDER / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                file.parent.mkdir(exist_ok=True)
                file.write_text(text, encoding="utf-8")
    print(f"{'not as the code says' if check else 'written'}: {', '.join(stale)}" if stale else "all as the code says")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(exit_code(main))
