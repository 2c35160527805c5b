"""Which class is taken for which: counts over a whole data set, exact on any number of ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.ranks.world import World


class Confusion:
    """Count targets against predictions, batch by batch, and add the counts up over the ranks."""

    def __init__(self, classes: Sequence[str], device: torch.device) -> None:
        self._classes = classes
        num = len(classes)
        # The last cell counts targets that are no class; int64, so that sums are exact.
        self._counts = torch.zeros(num * num + 1, dtype=torch.int64, device=device)

    def add(self, outputs: Any, targets: Any) -> None:
        """Count one batch.

        Args:
            outputs: (batch, classes); the largest is the prediction.
            targets: (batch,), places in the classes.

        Raises:
            UserError: they have other shapes.
        """
        num = len(self._classes)
        fits = isinstance(outputs, Tensor) and outputs.shape[1:] == (num,)
        if not fits or not isinstance(targets, Tensor) or targets.dim() != 1:
            shapes = [tuple(getattr(t, "shape", ())) for t in (outputs, targets)]
            raise UserError(
                f"The recipe's data names {num} classes, so outputs must be (batch, {num}) and "
                f"targets (batch,); they are {shapes[0]} and {shapes[1]}. Give as many names as "
                "the model has outputs, or leave Splits(classes=…) out.",
                on_all_ranks=True,
            )
        known = (targets >= 0) & (targets < num)
        cells = torch.where(known, targets.long() * num + outputs.argmax(dim=1), num * num)
        cells = cells.to(self._counts.device)
        # bincount() would ask the device for the largest, and the host would wait.
        self._counts.index_add_(0, cells, torch.ones_like(cells))

    def result(self, world: World) -> dict[str, Any]:
        """Return what all ranks counted together, for a result.

        Returns:
            `per_class`, the accuracy of each class by its name (None where it has no samples);
            and `confusion`, rows of counts: row by target, column by prediction.

        Raises:
            UserError: there were targets that are no class.
        """
        num = len(self._classes)
        counts = world.reduce(self._counts.cpu())
        if counts[-1]:
            raise UserError(
                f"{int(counts[-1])} targets lie outside 0 to {num - 1}, the places of the "
                f"{num} classes that the recipe's data names.",
                on_all_ranks=True,
            )
        rows: list[list[int]] = counts[:-1].view(num, num).tolist()
        per_class = {
            name: row[place] / sum(row) if sum(row) else None
            for place, (name, row) in enumerate(zip(self._classes, rows, strict=True))
        }
        return {"per_class": per_class, "confusion": rows}
