"""Prefetching: makes an iterator's next item on a thread while the current one is used."""

import atexit
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

SECONDS_TO_END = 10  # how long a program that ends waits for each thread
_THREAD = "next item"
_program_ends = threading.Event()


def ahead(items: Iterator[T]) -> Future[T]:
    """The next of ``items``, made on a thread; ``result()`` raises the thread's error."""
    made: Future[T] = Future()

    def make() -> None:
        try:
            made.set_result(next(items))
        except BaseException as error:
            made.set_exception(error)

    # a daemon: a program that ends does not wait for a network that is silent
    threading.Thread(target=make, name=_THREAD, daemon=True).start()
    return made


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
