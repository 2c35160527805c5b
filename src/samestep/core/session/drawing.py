"""Stored images as small PNG files, one by one and side by side."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from samestep.base.errors import UserError, defined_at, no_exit, raised_at
from samestep.base.run.pictures import Album, Entry, png
from samestep.core.recipe import Recipe, Splits

_LEAST_SIDE, _MOST_SIDE = 8, 4096
_TILE = 128
"""Pixels of the longer side at most."""
_SEEN = 48
"""Pixels that a tile of a sheet has at least: digits of 28 would be hard to see."""
_COLUMNS, _FRAME, _GAP = 8, 2, 4
_GREEN, _RED = (46, 125, 50), (198, 40, 40)


def is_image(stored: Any) -> bool:
    """Whether an input, as it is stored, is an image: rows and columns, grey or in three colours.

    Floats of two dimensions may be a table or a time series, unless they are square.
    """
    if not isinstance(stored, Tensor) or stored.layout != torch.strided:
        return False
    is_bytes, shape = stored.dtype == torch.uint8, tuple(stored.shape)
    if not is_bytes and not stored.is_floating_point():
        return False
    sides: tuple[int, ...] = ()
    if len(shape) == 2 and (is_bytes or shape[0] == shape[1]):
        sides = shape
    elif len(shape) == 3 and (shape[0] in (1, 3) or shape[2] in (1, 3)):
        sides = shape[1:] if shape[0] in (1, 3) else shape[:2]
    return bool(sides) and all(_LEAST_SIDE <= side <= _MOST_SIDE for side in sides)


def tile_of(stored: Tensor) -> Tensor:
    """Return an image as (rows, columns, 3) uint8 on the CPU, its longer side 128 at most."""
    image = stored.detach().cpu()
    if image.dim() == 2:
        image = image.unsqueeze(0)
    elif image.shape[0] not in (1, 3):
        image = image.permute(2, 0, 1)
    image = _as_bytes(image) if image.dtype != torch.uint8 else image.to(torch.float32)
    rows, columns = image.shape[1:]
    if max(rows, columns) > _TILE:
        scale = _TILE / max(rows, columns)
        size = [max(1, round(side * scale)) for side in (rows, columns)]
        image = interpolate(image[None], size=size, mode="area")[0]
    return image.round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0)


def _as_bytes(image: Tensor) -> Tensor:
    """Return floats from 0 to 255; those in no usual range are spread over all of it."""
    image = image.to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    low, high = float(image.min()), float(image.max())
    if low >= 0 and high <= 1:
        return image * 255
    if low >= 0 and high <= 255:
        return image
    return (image - low) * (255 / max(high - low, 1e-12))


def png_of(tile: Tensor) -> bytes:
    """Return (rows, columns, 3) uint8 as a PNG file; one with only grey tones takes a third."""
    rows, columns = tile.shape[:2]
    grey = bool((tile == tile[..., :1]).all())
    pixels = tile[..., 0] if grey else tile
    return png(pixels.contiguous().numpy().tobytes(), columns, rows, 1 if grey else 3)


def sheet_of(right: Sequence[Tensor], wrong: Sequence[Tensor]) -> bytes:
    """Return one PNG file: the right tiles framed in green, below them the wrong ones in red."""
    shapes = [tile.shape for tile in (*right, *wrong)]
    side = max(max(shape[:2]) for shape in shapes)
    factor = -(-_SEEN // side) if side < _SEEN else 1
    row_pitch, column_pitch = (
        max(shape[axis] for shape in shapes) * factor + 2 * _FRAME + _GAP for axis in (0, 1)
    )
    groups = [(tiles, colour) for tiles, colour in ((right, _GREEN), (wrong, _RED)) if tiles]
    columns = min(_COLUMNS, max(len(tiles) for tiles, _ in groups))
    lines = [
        (tiles[k : k + columns], colour)
        for tiles, colour in groups
        for k in range(0, len(tiles), columns)
    ]
    size = (_GAP + len(lines) * row_pitch, _GAP + columns * column_pitch, 3)
    sheet = torch.full(size, 255, dtype=torch.uint8)
    for line, (tiles, colour) in enumerate(lines):
        for place, tile in enumerate(tiles):
            large = tile.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
            framed = torch.tensor(colour, dtype=torch.uint8).repeat(
                large.shape[0] + 2 * _FRAME, large.shape[1] + 2 * _FRAME, 1
            )
            framed[_FRAME:-_FRAME, _FRAME:-_FRAME] = large
            top, left = _GAP + line * row_pitch, _GAP + place * column_pitch
            sheet[top : top + framed.shape[0], left : left + framed.shape[1]] = framed
    return png_of(sheet)


_NUM_SHOWN = 16
_MOST_TEXT = 400


@dataclass(frozen=True)
class SampleSubset:
    """Samples of a split."""

    data: Any
    """Inputs and targets in memory, or a data set."""
    of: int | None
    """How many the split has; None of a stream."""
    places: tuple[int, ...] = ()
    """Where each of them is in the split; nothing of a stream."""

    def __len__(self) -> int:
        return len(self.data[0]) if isinstance(self.data, tuple) else len(self.data)

    def __getitem__(self, place: int) -> Any:
        if isinstance(self.data, tuple):
            return self.data[0][place], self.data[1][place]
        return self.data[place]


def keep_images(
    album: Album, some: SampleSubset, pair: tuple[Tensor, Tensor], classes: Sequence[str]
) -> None:
    """Keep images that were predicted right, and those most confidently wrong.

    Args:
        album: where to.
        some: the samples; the first of them were asked.
        pair: outputs (samples, classes) and targets (samples,); others are not kept.
        classes: the names of the classes, if they have any.
    """
    outputs, targets = pair
    fits = outputs.dim() == 2 and outputs.is_floating_point() and outputs.shape[1] > 1
    if not fits or targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        return
    if classes and len(classes) != outputs.shape[1]:
        return
    names = list(classes) or [str(k) for k in range(outputs.shape[1])]
    sure, predicted = outputs.to(torch.float64).softmax(dim=1).max(dim=1)
    has_class = sure.isfinite() & (targets >= 0) & (targets < len(names))
    right = torch.nonzero(has_class & (predicted == targets)).flatten().tolist()
    wrong = torch.nonzero(has_class & (predicted != targets)).flatten().tolist()
    wrong.sort(key=lambda place: -float(sure[place]))
    files: dict[str, bytes] = {}
    tiles: dict[str, list[Tensor]] = {"right": [], "wrong": []}
    rows: dict[str, list[Entry]] = {"right": [], "wrong": []}
    for kind, places in (("right", right[:_NUM_SHOWN]), ("wrong", wrong[:_NUM_SHOWN])):
        for number, place in enumerate(places):
            tile, file = tile_of(some[place][0]), f"{kind}-{number:02}.png"
            tiles[kind].append(tile)
            files[file] = png_of(tile)
            fields = {"predicted": names[predicted[place]], "probability": float(sure[place])}
            rows[kind].append({"file": file, "target": names[targets[place]], **fields})
    if not files:
        return
    title = "Predictions: right, and most confidently wrong"
    image = "predictions.png"
    files[image] = sheet_of(tiles["right"], tiles["wrong"])
    album.add({"name": "predictions", "kind": "images", "title": title, **rows}, files, image)


def keep_points(album: Album, some: SampleSubset, measured: tuple[Tensor, Tensor]) -> None:
    """Keep predicted against actual values, where there is one of each per sample."""
    outputs, targets = measured
    actual, predicted = targets.flatten().to(torch.float64), outputs.flatten().to(torch.float64)
    if not outputs.is_floating_point() or len(actual) != len(targets) != 0:
        return
    # Targets of two classes are only 0 and 1: no numbers to predict.
    if len(predicted) != len(outputs) or bool(((actual == 0) | (actual == 1)).all()):
        return
    points = [
        [float(f"{value:.6g}") for value in pair]
        for pair in zip(actual.tolist(), predicted.tolist(), strict=True)
    ]
    finite = [point for point in points if all(abs(value) < float("inf") for value in point)]
    if not finite:
        return
    entry = {"name": "regression", "kind": "points", "title": "Predicted against actual"}
    album.add({**entry, "points": finite, "of": len(points) if some.of is None else some.of})


def keep_rows(
    album: Album, some: SampleSubset, rows: Sequence[dict[str, Any]], classes: Sequence[str]
) -> None:
    """Keep rows of what the recipe's `show` says, texts cut to what a reader looks at.

    Before it stands which sample it is, its text if it is stored as one, and its class.
    """
    if rows:
        labelled = [{**_about(some, place, classes), **row} for place, row in enumerate(rows)]
        short = [{name: _shortened(value) for name, value in row.items()} for row in labelled]
        album.add({"name": "samples", "kind": "rows", "title": "Samples", "rows": short})


def _about(some: SampleSubset, place: int, classes: Sequence[str]) -> dict[str, Any]:
    about: dict[str, Any] = {"sample": some.places[place]} if some.places else {}
    sample = some[place]
    stored, target = sample if isinstance(sample, tuple) and len(sample) == 2 else (sample, None)
    if isinstance(stored, str):
        about["text"] = stored
    elif isinstance(stored, dict):
        about |= {str(name): value for name, value in stored.items() if isinstance(value, str)}
    if isinstance(target, Tensor) and target.numel() == 1 and not target.is_floating_point():
        target = int(target)
    if type(target) is int and 0 <= target < len(classes):
        about["target"] = classes[target]
    return about


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return f"{value[: _MOST_TEXT - 1]}…"
    if isinstance(value, list):
        return [_shortened(part) for part in value[:100]]
    if isinstance(value, dict):
        return {name: _shortened(part) for name, part in value.items()}
    return value


_DPI = 120
_MOST_PIXELS = 2000
"""Of the longer side."""
_MOST_SVG_BYTES = 1_000_000
_NO_MATPLOTLIB = "It needs matplotlib, which cannot be imported: pip install 'samestep[plot]'"


def title_of(name: str) -> str:
    """Return the title of a picture that has none: "decision_map" → Decision map."""
    words = name.replace("_", " ").replace("-", " ")
    return words[:1].upper() + words[1:]


def draw_own(
    recipe: Recipe, model: Callable[[], nn.Module], data: Splits, album: Album, name: str
) -> None:
    """Draw the recipe's own picture of this name; where that fails, a note says why."""
    draw = recipe.pictures[name]
    try:
        with no_exit(), _without_window():
            drawn = draw(model(), data)
            if isinstance(drawn, str):
                entry = {"name": name, "kind": "html", "title": title_of(name)}
                album.add({**entry, "file": f"{name}.html"}, {f"{name}.html": drawn.encode()})
            elif hasattr(drawn, "savefig"):
                _keep_figure(album, name, drawn, draw)
            else:
                raise UserError(
                    f"Recipe(pictures=…): {name!r}{defined_at(draw)} returned "
                    f"{type(drawn).__name__}; it must return a matplotlib figure or HTML text."
                )
    except Exception as error:
        album.note(name, title_of(name), _why_failed(error, draw))


def _why_failed(error: Exception, draw: Callable[..., Any]) -> str:
    if isinstance(error, ImportError) and "matplotlib" in f"{error.name} {error}":
        reason = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        return f"{_NO_MATPLOTLIB}{reason}"
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}{raised_at(error) or defined_at(draw)}"


def _keep_figure(album: Album, name: str, figure: Any, draw: Callable[..., Any]) -> None:
    dpi = min(_DPI, _MOST_PIXELS / max(figure.get_size_inches()))
    files = {f"{name}.png": _saved(figure, format="png", dpi=dpi)}
    drawing = _saved(figure, format="svg", metadata={"Date": None})
    if len(drawing) <= _MOST_SVG_BYTES:
        files[f"{name}.svg"] = drawing
    titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    title = next((text for text in titles if text), title_of(name))
    about = " ".join((draw.__doc__ or "").split("\n\n")[0].split()).removeprefix("Return ")
    about = about[:1].upper() + about[1:]
    entry = {"name": name, "kind": "figure", "title": title, "file": list(files)[-1]}
    album.add({**entry, "text": about or title}, files, f"{name}.png")


def _saved(figure: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, **options)
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
            del os.environ["MPLBACKEND"]
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
