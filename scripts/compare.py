"""Put several runs over one another on one HTML page: curves, last numbers, the options in which they differ.

python scripts/compare.py output/a output/b output/c --html compare.html
"""

import os
import sys

# No device is needed, so transformers must not import torch_xla: that takes seconds and opens one.
os.environ["USE_TORCH_XLA"] = "0"

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run, on disk or in a store (gs://…)")
    parser.add_argument("--html", default="compare.html", metavar="FILE", help="the page (default: compare.html)")
    arguments = parser.parse_args()

    from shardwright.files.asked_file import write_asked
    from shardwright.monitoring.compare import read_runs
    from shardwright.report.compare_view import LAST_HEADER, compare_page, differences, last_rows
    from shardwright.report.lines import Terminal, say, say_table

    runs = read_runs(arguments.runs, arguments.html)
    write_asked(arguments.html, "--html", compare_page(runs))
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Terminal(width=200)
    options = differences(runs) or [("none differs", *("" for _ in runs))]
    for header, rows in ((LAST_HEADER, last_rows(runs)), (("option", *(run.name for run in runs)), options)):
        say_table(console, header, rows)
        say(console, "")
    say(console, f"page:    {arguments.html}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
