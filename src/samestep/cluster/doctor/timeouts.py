"""Bound the time of calls that may never return: name servers, file systems, other ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_NAME = "samestep-doctor-timeout"


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Return a function's value or raise its error; raise TimeoutError if it takes too long.

    A hanging system call cannot be interrupted: its thread is left behind and ends with the
    process.
    """
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    thread = threading.Thread(target=call, name=_NAME, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()


def value_within(seconds: float, function: Callable[[], T], otherwise: T) -> T:
    """Return a function's value, or `otherwise` if it raises or takes too long."""
    try:
        return call_within(seconds, function)
    except Exception:
        return otherwise


def still_waiting() -> bool:
    """Whether a call that timed out is still running."""
    return any(thread.name == _NAME for thread in threading.enumerate())
