"""A bar while something is counted, such as files that are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_TOLD_FROM = 5000


@contextmanager
def counting(what: str, total: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a bar on standard error while something is counted; off a terminal, one line of much.

    Yields what is to be called, from any thread, with each number that is done of this rank's
    `total`. Only one rank is `shown`.
    """
    console = Console(stderr=True, highlight=False)
    if not shown or not console.is_terminal:
        if shown and total >= _TOLD_FROM:
            console.print(f"{what}: {total:,} on this rank", soft_wrap=True)
        yield lambda _: None
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn()),
        *(MofNCompleteColumn(), TimeRemainingColumn(compact=True)),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda number: bar.advance(task, number)
