"""Each engine's rule for restarting a run after its exit code. tests/launch/test_exits.py has the codes' meanings."""

from collections.abc import Callable

from shardwright.errors import BUG, INTERRUPTED, LOST, PREEMPTED

USER_ERROR = 2
FINAL = (USER_ERROR, BUG, INTERRUPTED)  # no restart, for the engines whose rule lists such codes
XPK_ALWAYS = frozenset({42, *range(127, 256)})  # xpk 1.16 restarts on these in any case
XPK_TOO = (1, PREEMPTED, LOST)  # and on these by `--restart-on-exit-codes`
# SkyPilot does not count restarts by exit code, so only codes for "stopped from outside" are listed. It sees the loss
# of a host's machine by itself, and restarts whatever the code.
SKYPILOT = (PREEMPTED, LOST, 143)


def ours(code: int) -> bool:
    """The rule of engines that list the final codes."""
    return code not in (0, *FINAL)


# engine → whether it restarts a run after an exit code
RULES: dict[str, Callable[[int], bool]] = {
    "xpk": lambda code: code in XPK_ALWAYS or code in XPK_TOO,
    "jobset": ours,
    "skypilot": lambda code: code in SKYPILOT,
    "tpu-vm": ours,
    "ray": ours,
}
