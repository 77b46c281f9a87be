"""A certificate: on the terminal, and as one HTML page that loads nothing."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from shardwright.report.html import render
from shardwright.report.lines import say, say_table
from shardwright.report.units import mesh_text, size

_NAMED = 8  # on the terminal, of what is off
_QUANTITIES = ("what", "how many", "worst", "allowed", "where")
_OF_STEPS = ("loss", "norm of the gradients")  # the other quantities are of parameters

Certificate = Mapping[str, Any]  # what shardwright.prove.prove_command.as_json makes


def print_proof(console: Console, proof: Certificate) -> None:
    header = ("compared", *_QUANTITIES[1:])
    say_table(console, header, _quantities(proof), padding=(0, 2, 0, 0), header_style="bold")
    wrong = _wrong(proof)
    for what, off, allowed, name in wrong[:_NAMED]:
        text = f"off: {what} of {name}: {off}, where rounding explains {allowed}"
        console.print(Text(text, style="red"), soft_wrap=True)
    if len(wrong) > _NAMED:
        say(console, f"     and {len(wrong) - _NAMED} more, on the page")
    for text in proof["layout"]:
        say(console, f"layout:  {text}")
    console.print(Text(_verdict(proof), style="bold green" if proof["proved"] else "bold red"), soft_wrap=True)


def proof_page(proof: Certificate) -> str:
    of_parameters = [name for name in proof["compared"] if not name.endswith(_OF_STEPS)]
    cells = {(what, name): f"{off:.1e}" for what, name, off, _ in proof["differences"]}
    names = dict.fromkeys(name for what, name, *_ in proof["differences"] if what in of_parameters)
    moved = [(kind, axes, str(count), size(total), where) for kind, axes, where, count, total in proof["collectives"]]
    return render(
        "proof.html.j2",
        title=f"Proof of {proof['recipe']} for {proof['family']}",
        proof=proof,
        verdict=_verdict(proof),
        facts=_facts(proof),
        wrong=_wrong(proof),
        header=_QUANTITIES,
        quantities=_quantities(proof),
        collectives=moved,
        of_parameters=of_parameters,
        parameters=[(name, *(cells.get((what, name), "") for what in of_parameters)) for name in names],
    )


def _verdict(proof: Certificate) -> str:
    count = len(proof["differences"])
    if proof["proved"]:
        return f"proved: {count} comparisons, none off by more than rounding"
    return f"not proved: {len(_wrong(proof))} of {count} comparisons are off by more than rounding"


def _quantities(proof: Certificate) -> list[tuple[str, ...]]:
    """Cells under :data:`_QUANTITIES`."""
    return [
        (name, str(each["count"]), f"{each['worst']:.1e}", f"{each['allowed']:.0e}", each["where"])
        for name, each in proof["compared"].items()
    ]


def _wrong(proof: Certificate) -> list[tuple[str, ...]]:
    """(quantity, difference, allowed, where) of what is off by more than rounding, the farthest first."""
    far = [row for row in proof["differences"] if not row[2] <= row[3]]
    far.sort(key=lambda row: row[2] / row[3], reverse=True)
    return [(what, f"{off:.1e}", f"{allowed:.0e}", name) for what, name, off, allowed in far]


def _facts(proof: Certificate) -> list[tuple[str, str]]:
    facts = {
        "recipe": f"{proof['recipe']} ({proof['recipe_hash']})",
        "model": f"{proof['family']}: {proof['model'] or 'the recipe’s own'}",
        "options": ", ".join(f"--{name} {value}" for name, value in proof["options"].items()) or "the defaults",
        "beside": proof["referee"],
        "precision": " and ".join(proof["precision"]),
        "mesh of the proof": mesh_text(proof["mesh"]),
        "date": f"{proof['date']}, in {proof['seconds']:.0f} s",
        "versions": ", ".join(f"{name} {version}" for name, version in proof["versions"].items()),
    }
    if proof["only_rounding"]:
        facts["told nothing"] = f"their gradients are zero but for rounding: {', '.join(proof['only_rounding'])}"
    return list(facts.items())
