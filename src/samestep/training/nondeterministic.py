"""Where a model computes what PyTorch cannot compute in the same way each time."""

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from samestep.errors import is_not_deterministic, is_users

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
Frame = tuple[str, int]
"""File and line."""


def refused_operation(model: nn.Module, error: Exception, again: Callable[[], Any]) -> str:
    """Return " in the module NAME (CLASS) at FILE:LINE", as far as it can be found.

    Args:
        model: the model.
        error: what a forward or a backward of it raised.
        again: does the same once more.
    """
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    names = _modules_at(model, frames)
    if not names:  # within a backward, which begins in the loss
        frames = _forward_of(again)
        names = _modules_at(model, frames)
    own = [f"{file}:{line}" for file, line in frames if is_users(file)]
    return (f" in the module {names}" if names else "") + (f" at {own[-1]}" if own else "")


def _modules_at(model: nn.Module, frames: Sequence[Frame]) -> str:
    """Return the innermost modules in whose forward the frames are: up (Upsample)."""
    found: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        found.setdefault(type(module), []).append(name or "itself")
    spans = {kind: _span(kind) for kind in found}
    for file, line in reversed(frames):
        for kind, (source, lines) in spans.items():
            if file == source and line in lines:
                return f"{' or '.join(found[kind][:3])} ({kind.__name__})"
    return ""


def _span(kind: type) -> tuple[str, range]:
    """Return the file and the lines of a module's forward."""
    try:
        code = kind.forward.__code__  # type: ignore[attr-defined]
        lines, first = inspect.getsourcelines(code)
    except (AttributeError, OSError, TypeError):
        return "", range(0)
    return code.co_filename, range(first, first + len(lines))


def _forward_of(again: Callable[[], Any]) -> list[Frame]:
    """Return the lines of the forward whose backward fails, by PyTorch's anomaly mode."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True):
            try:
                again()
            except RuntimeError as error:
                if not is_not_deterministic(error):
                    return []
    text = "".join(str(one.message) for one in told if "Error detected in" in str(one.message))
    return [(file, int(line)) for file, line in _FRAME.findall(text)]
