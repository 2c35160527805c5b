"""What `--help` of every verb shows below tyro's text."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def examples(text: str) -> Iterator[None]:
    """Print examples after the help that is asked for inside; tyro has no place for them."""
    try:
        yield
    except SystemExit as stop:
        if not stop.code:
            sys.stdout.write(f"\n{text.strip()}\n")
        raise
