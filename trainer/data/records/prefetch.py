"""Prefetching: makes an iterator's next item on a thread while the current one is used."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar, cast

T = TypeVar("T")

SECONDS_TO_END = 10  # how long a program that ends waits for each thread
_THREAD = "next item"
_program_ends = threading.Event()


class Ahead(Generic[T]):
    """The next of ``items``, made on a thread; :meth:`result` raises the thread's error."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._made: T | None = None
        self._error: BaseException | None = None
        # a daemon: a program that ends does not wait for a network that is silent
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    def result(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return cast(T, self._made)

    def _run(self) -> None:
        try:
            self._made = next(self._items)
        except BaseException as error:
            self._error = error


def stop_if_the_program_ends() -> None:
    """Raise InterruptedError once the program has begun to end. Iterators call it before long work."""
    if _program_ends.is_set():
        raise InterruptedError("the program ends")


@atexit.register
def _end_threads() -> None:
    """Wait for the threads: if Python ends while one is inside the tokenizer, the process can abort."""
    _program_ends.set()
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(SECONDS_TO_END)
