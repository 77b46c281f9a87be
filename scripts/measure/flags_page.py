"""Print docs/flags.md: what becomes of other trainers' arguments; --counts: how many of each kind.

python scripts/measure/flags_page.py > docs/flags.md
"""

from shardwright.arguments.command_line import Parser
from shardwright.arguments.known_flags.page import counts, page


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--counts", action="store_true", help="print the number of arguments of each source and kind")
    if not parser.parse_args().counts:
        print(page(), end="")
        return
    for source, kinds in counts().items():
        print(f"{source:<40}{sum(kinds.values()):>5}  " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))


if __name__ == "__main__":
    main()
