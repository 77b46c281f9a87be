"""The audit's own options, beside those of a run."""

from dataclasses import dataclass
from pathlib import Path

from shardwright.arguments.option_values import Checked, check_values, option


@dataclass
class AuditArguments(Checked):
    """Options of the output of an audit."""

    show: int = option(3, "Samples of each dataset to show, decoded, what the loss is on in colour.")
    html: str | None = option(None, "Write the audit to this file, as a page that loads nothing.")
    json: str | None = option(None, "Write the audit to this file, as JSON.")

    def __post_init__(self) -> None:
        check_values(self)
        self.check("show", self.show >= 0, "it is a number of samples", 3)
        for name in ("html", "json"):
            self.check_path(name)
            path = getattr(self, name)
            self.check(name, path is None or not Path(path).is_dir(), "it is a folder, not a file", "audit.html")
