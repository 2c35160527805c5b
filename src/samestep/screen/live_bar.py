"""Where the progress bar is drawn: on a terminal, or below a notebook's cell."""

import html
import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from samestep.screen.bar import BarState

_NOTEBOOK_WIDTH = 100
_REDRAW_EVERY_S = 0.2


class LiveBar(Protocol):
    """A bar that shows how far a training is."""

    def draw(self, state: BarState, *, refresh: bool) -> None:
        """Show a state; without `refresh` it may wait for the next one."""

    def stop(self) -> None:
        """Take the bar away."""


def bar_for(console: Console) -> LiveBar | None:
    """Return the bar for what this process prints to; None where it would only fill a file."""
    if in_notebook():
        return NotebookBar()
    return TerminalBar(console) if console.is_terminal else None


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class TerminalBar:
    """A line that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),  # of one width: the bar does not jump
            console=console,
            auto_refresh=False,  # a thread that redraws would take turns with the training
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, epoch="", numbers="")

    def draw(self, state: BarState, *, refresh: bool) -> None:
        """Show a state."""
        self._bar.update(
            self._task,
            total=state.plan["total_steps"],
            completed=state.step,
            epoch=state.epoch,
            numbers=state.numbers(self._bar.console.width),
        )
        self._bar.start()
        if refresh:
            self._bar.refresh()

    def stop(self) -> None:
        """Take the bar away."""
        self._bar.stop()


class NotebookBar:
    """A cell's output that is replaced, through IPython alone: it needs no widgets."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._drawn_at = 0.0

    def draw(self, state: BarState, *, refresh: bool) -> None:
        """Show a state."""
        now = time.monotonic()
        if self._handle is not None and (not refresh or now - self._drawn_at < _REDRAW_EVERY_S):
            return
        self._drawn_at = now
        text = f"epoch {state.epoch}  {state.numbers(_NOTEBOOK_WIDTH)}".rstrip()
        total = state.plan["total_steps"]
        value = "" if total is None else f' value="{state.step}" max="{total}"'
        words = html.escape(text).replace("  ", " &nbsp;")
        bar = f'<progress style="width: 16em"{value}></progress> <code>{words}</code>'
        self._show({"text/plain": text, "text/html": bar})

    def stop(self) -> None:
        """Leave nothing of the bar."""
        if self._handle is not None:
            self._show({"text/plain": "", "text/html": ""})

    def _show(self, shown: dict[str, str]) -> None:
        if self._handle is None:
            display = sys.modules["IPython"].display.display
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
