"""Wait for something that may never answer, no longer than a bound."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_NAME = "samestep-doctor-timeout"


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Return a function's value, or raise what it raises.

    What does not answer cannot be interrupted: a name server, a port behind which something else
    listens. The thread that waits for it is left behind and ends with the process.

    Raises:
        TimeoutError: it takes too long.
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
    """Return a function's value, or something else if it raises or takes too long."""
    try:
        return call_within(seconds, function)
    except Exception:
        return otherwise


def still_waiting() -> bool:
    """Whether something that was given up has not answered yet."""
    return any(thread.name == _NAME for thread in threading.enumerate())
