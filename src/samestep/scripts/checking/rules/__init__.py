"""What can be wrong, by subject; importing this registers every rule."""

from samestep.scripts.checking.rules import (  # noqa: F401
    accumulation,
    data,
    evaluation,
    files,
    life,
    model,
    one_process,
    resume,
    step,
)
