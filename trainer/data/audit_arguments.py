"""The audit's own options, beside those of a run."""

from dataclasses import dataclass

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
        self.check_path("html", "json")
