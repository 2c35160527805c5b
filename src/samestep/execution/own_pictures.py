"""A recipe's own pictures: its functions are called, and what they return is kept as files."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from samestep.errors import UserError, defined_at, no_exit, raised_at
from samestep.recipe import Recipe, Splits
from samestep.run.pictures import Album

_DPI = 120
_MOST_PIXELS = 2000
"""Of the longer side."""
_MOST_SVG_BYTES = 1_000_000
_NO_MATPLOTLIB = "It is drawn by matplotlib, which cannot be imported: pip install 'samestep[plot]'"


def title_of(name: str) -> str:
    """Return what a picture is called where nothing else says it: "decision_map" → Decision map."""
    words = name.replace("_", " ").replace("-", " ")
    return words[:1].upper() + words[1:]


def draw_own(
    recipe: Recipe, model: Callable[[], nn.Module], data: Splits, album: Album, name: str
) -> None:
    """Draw one of the recipe's own pictures; where that fails, a note says why.

    Args:
        recipe: whose picture it is.
        model: returns the model that is given to it.
        data: what is given to it, too.
        album: where to keep it.
        name: of the picture.
    """
    draw = recipe.pictures[name]
    try:
        with no_exit(), _without_window():
            found = draw(model(), data)
            if isinstance(found, str):
                _keep_html(album, name, found)
            elif hasattr(found, "savefig"):
                _keep_figure(album, name, found, draw)
            else:
                raise UserError(
                    f"Recipe(pictures=…): {name!r}{defined_at(draw)} returned "
                    f"{type(found).__name__}; it must return a matplotlib figure or HTML text."
                )
    except Exception as error:
        album.note(name, title_of(name), _why(error, draw))


def _why(error: Exception, draw: Callable[..., Any]) -> str:
    if isinstance(error, ImportError) and "matplotlib" in f"{error.name} {error}":
        told = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        return f"{_NO_MATPLOTLIB}{told}"
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}{raised_at(error) or defined_at(draw)}"


def _keep_html(album: Album, name: str, text: str) -> None:
    file = f"{name}.html"
    entry = {"name": name, "kind": "html", "title": title_of(name), "file": file}
    album.add(entry, {file: text.encode()})


def _keep_figure(album: Album, name: str, figure: Any, draw: Callable[..., Any]) -> None:
    dpi = min(_DPI, _MOST_PIXELS / max(figure.get_size_inches()))
    files = {f"{name}.png": _saved(figure, format="png", dpi=dpi)}
    drawing = _saved(figure, format="svg", metadata={"Date": None})
    if len(drawing) <= _MOST_SVG_BYTES:
        files[f"{name}.svg"] = drawing
    told = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    title = next((text for text in told if text), title_of(name))
    about = " ".join((draw.__doc__ or "").split("\n\n")[0].split()).removeprefix("Return ")
    about = about[:1].upper() + about[1:]
    entry = {"name": name, "kind": "figure", "title": title, "file": list(files)[-1]}
    album.add({**entry, "text": about or title}, files, f"{name}.png")


def _saved(figure: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, **how)
    return file.getvalue()


@contextmanager
def _without_window() -> Iterator[None]:
    """Let pyplot draw without a window; its other figures and its settings stay as they are.

    A function that draws into a `matplotlib.figure.Figure` needs none of this.
    """
    mpl = sys.modules.get("matplotlib")
    if mpl is None:  # it asks for the backend when it is imported
        variable = os.environ.get("MPLBACKEND")
        os.environ["MPLBACKEND"] = "agg"
        try:
            yield
        finally:
            os.environ.pop("MPLBACKEND")
            if variable is not None:
                os.environ["MPLBACKEND"] = variable
            _go_back(variable, set())
        return
    pyplot = sys.modules.get("matplotlib.pyplot")
    backend = dict.__getitem__(mpl.rcParams, "backend")  # as it is, without choosing one
    open_before = set(pyplot.get_fignums()) if pyplot is not None else set()
    with mpl.rc_context():
        if pyplot is not None:
            pyplot.switch_backend("agg")
        else:
            mpl.rcParams["backend"] = "agg"
        try:
            yield
        finally:
            _go_back(backend, open_before)


def _go_back(backend: Any, open_before: set[int]) -> None:
    """Close the figures that are new in pyplot, and give it back its backend; None: its choice."""
    mpl, pyplot = sys.modules.get("matplotlib"), sys.modules.get("matplotlib.pyplot")
    if mpl is None:
        return
    if pyplot is not None:
        for number in set(pyplot.get_fignums()) - open_before:
            pyplot.close(number)
    if isinstance(backend, str) and pyplot is not None:
        pyplot.switch_backend(backend)
        return
    chooses = mpl.rcsetup._auto_backend_sentinel  # noqa: SLF001 - there is no public name for it
    mpl.rcParams["backend"] = chooses if backend is None else backend
    if pyplot is not None:
        vars(pyplot)["_backend_mod"] = None  # it chooses anew when it is next used
