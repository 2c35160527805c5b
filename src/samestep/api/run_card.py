"""What a notebook shows of a run: a small table of facts, the loss as a line, and a picture."""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from samestep.run.pictures import FOLDER, read_pictures, read_png
from samestep.run.records import NOT_METRICS

_MOST_PICTURE = 150_000
"""Bytes: as text they become 200 kB."""
_WIDTH, _HEIGHT = 220, 44


def run_card(
    path: Path, state: str, facts: Mapping[str, str], losses: Sequence[float | None]
) -> str:
    """Return HTML that stands by itself, in the colours of the page that it is shown on.

    Args:
        path: the run's directory.
        state: how it ended, or that it has not.
        facts: name → what is said of it.
        losses: the training loss of each epoch.
    """
    rows = {"state": state, **facts, "loss": None, "path": str(path)}
    line = _sparkline(losses)
    cells = "".join(
        f"<tr><th style='text-align:left;font-weight:600'>{escape(name)}</th>"
        f"<td style='text-align:left'>{line if text is None else escape(text)}</td></tr>"
        for name, text in rows.items()
        if text is not None or line
    )
    table = f"<table style='margin:0'>{cells}</table>"
    return f"<div style='display:flex;gap:1.5em;align-items:center'>{table}{_picture(path)}</div>"


def facts_of(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of a run's result, without what it does not have."""
    facts: dict[str, str] = {}
    best, test = result.get("best") or {}, result.get("test") or {}
    if isinstance(best.get("value"), int | float):
        facts["best"] = f"{best.get('metric')} {best['value']:.4f}, epoch {best.get('epoch')}"
    shown = [
        f"{name} {value:.4f}"
        for name, value in test.items()
        if name not in NOT_METRICS and isinstance(value, int | float)
    ]
    if shown:
        facts["test"] = ", ".join(shown)
    if isinstance(seconds := result.get("training_seconds"), int | float):
        facts["trained"] = f"{seconds:.1f} s, {result.get('steps', 0):,} steps"
    if ranks := result.get("world_size"):
        facts["ranks"] = f"{ranks} on {result.get('device', '?')}"
    return facts


def _sparkline(losses: Sequence[float | None]) -> str:
    """Return the losses as an SVG line; nothing for fewer than two."""
    values = [(k, v) for k, v in enumerate(losses) if v is not None and math.isfinite(v)]
    if len(values) < 2:
        return ""
    step = max(1, len(values) // _WIDTH)
    values = [*values[:-1:step], values[-1]]
    low, high = min(v for _, v in values), max(v for _, v in values)
    span, last = (high - low) or 1.0, values[-1][0]
    points = " ".join(
        f"{2 + k / last * (_WIDTH - 4):.1f},{2 + (high - v) / span * (_HEIGHT - 4):.1f}"
        for k, v in values
    )
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='training loss from "
        f"{values[0][1]:.4g} to {values[-1][1]:.4g}'><polyline points='{points}' fill='none' "
        "stroke='currentColor' stroke-width='1.5'/></svg>"
    )


def _picture(path: Path) -> str:
    """Return the decision boundary, else the first figure of the run's pictures, if it is small."""
    figures = [e for e in read_pictures(path) if e.get("kind") == "figure" and "name" in e]
    figures.sort(key=lambda entry: entry["name"] != "boundary")
    for entry in figures[:1]:
        content = read_png(path, f"{FOLDER}/{entry['name']}.png")
        if content is not None and len(content) <= _MOST_PICTURE:
            about = escape(str(entry.get("text") or entry.get("title") or ""), quote=True)
            data = base64.b64encode(content).decode()
            return f"<img style='height:14em' alt='{about}' src='data:image/png;base64,{data}'>"
    return ""
