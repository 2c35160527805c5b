"""What can be wrong, by subject; importing this registers every rule."""

from samestep.scripts.checking.rules import (
    data,
    evaluation,
    files,
    life,
    mode,
    model,
    one_process,
    resume,
    schedule,
    step,
)

__all__ = [
    "data",
    "evaluation",
    "files",
    "life",
    "mode",
    "model",
    "one_process",
    "resume",
    "schedule",
    "step",
]
