"""Whether torchmetrics takes predictions for logits: decided over all of them, not in each batch.

Its metrics of classes apply a sigmoid or a softmax in each update where a value lies outside
[0, 1]. So what they compute would depend on which samples come together. Here each update is made
twice, with the predictions as they are and as logits. Which one counts is known at the end: the
second if any value of any batch lies outside.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.base.patches import patched

_FUNCTION = "normalize_logits_if_needed"
"""What all of these metrics call in torchmetrics, from 1.6 on."""


@dataclass
class HowTaken:
    """How torchmetrics is to take predictions, and what it was given."""

    as_logits: bool = False
    """Whether all are turned into probabilities, or none."""
    outside: list[Tensor] = field(default_factory=list)
    """Of each prediction, whether a value lies outside [0, 1]."""

    def checked(self, name: str) -> Tensor | None:
        """Return whether a value of a metric's one prediction lies outside; None if it had none.

        Raises:
            UserError: there were several, and each would be taken for logits or not by itself.
        """
        if len(self.outside) > 1 and bool(torch.stack(self.outside).any()):
            raise UserError(
                f"The recipe's metric {name!r} gives torchmetrics several predictions in one "
                "update, and some have values outside [0, 1]. Pass it .sigmoid() or .softmax(1)."
            )
        return self.outside[0] if len(self.outside) == 1 else None


def places() -> list[ModuleType]:
    """Return the modules that have torchmetrics' function, as far as they are imported."""
    source = sys.modules.get("torchmetrics.utilities.compute")
    function = getattr(source, _FUNCTION, None)
    if function is None:
        return []
    return [m for m in [*sys.modules.values()] if vars(m).get(_FUNCTION) is function]


@contextmanager
def taking_predictions(modules: Sequence[ModuleType]) -> Iterator[HowTaken]:
    """Let torchmetrics, in the modules of `places`, take predictions as the yielded object says."""
    taking = HowTaken()

    def around(_: Any, values: Tensor, kind: Literal["sigmoid", "softmax"] | None) -> Tensor:
        if not kind:
            return values
        taking.outside.append(((values < 0) | (values > 1)).any())
        if not taking.as_logits:
            return values
        return values.sigmoid() if kind == "sigmoid" else values.softmax(dim=1)

    with patched(*((module, _FUNCTION, around) for module in modules)):
        yield taking
