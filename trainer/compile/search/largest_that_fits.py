"""The largest batch or share that fits, found in a few compiles."""

import math
from collections.abc import Callable, Mapping

_MOST_TRIES = 12  # each takes minutes


def largest_batch(
    arguments: float, known: Mapping[int, float], limit: float, attempt: Callable[[int], float | None]
) -> int:
    """The largest batch a device that fits in ``limit`` bytes; 0: not even one row.

    Memory is about linear in the batch, except near the limit, where the compiler trades time for memory. So the next
    try is where a line through the known sizes meets the limit, but at least an eighth more while everything fits.
    After a try that left more than half of the open range, the next is its middle.
    ``arguments`` are the bytes that any batch requires, ``known`` those of batches. ``attempt`` compiles a batch and
    returns its bytes, None if it can't be compiled.
    """
    sizes = {0: arguments, **known}
    middle = False
    for _ in range(_MOST_TRIES):
        low = max((batch for batch, needed in sizes.items() if needed <= limit), default=None)
        if low is None:  # the arguments alone are too large
            return 0
        high = min((batch for batch, needed in sizes.items() if needed > limit and batch > low), default=None)
        if high is not None and high - low == 1:
            break
        if high is None:
            line = (limit - arguments) / max(sizes[low] - arguments, 1) * low
            batch = max(math.floor(min(line, 8 * low)), low + -(-low // 8))
        elif middle:
            batch = (low + high) // 2
        else:
            line = low + (limit - sizes[low]) / (sizes[high] - sizes[low]) * (high - low)
            batch = min(max(math.floor(line), low + 1), high - 1)
        found = attempt(batch)
        sizes[batch] = math.inf if found is None else found
        left = batch - low if sizes[batch] > limit else math.inf if high is None else high - batch
        middle = high is not None and not middle and 2 * left > high - low
    return max(batch for batch, needed in sizes.items() if needed <= limit)
