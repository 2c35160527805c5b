"""What a Trainer's `compute_metrics` is given: the predictions of all ranks, as a metric object."""

import functools
from dataclasses import dataclass
from typing import Any

from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_numpify

_IGNORED = -100  # pads predictions of other lengths


@dataclass
class _Seen:
    """Predictions of a batch; it travels as a tensor does."""

    predictions: Any
    labels: Any

    def detach(self) -> "_Seen":
        return self

    def to(self, _device: Any) -> "_Seen":
        return self


class Predictions:
    """A metric object: gathers all predictions and labels, and calls `compute_metrics` once."""

    evaluated_alone = True
    _reductions = {"seen": None}  # noqa: RUF012 - as of a metric of torchmetrics

    def __init__(self, function: Any) -> None:
        self.function, self.device = function, "cpu"
        self.reset()

    def to(self, _device: Any) -> None:
        """Stay on the CPU."""

    def reset(self) -> None:
        """Begin anew."""
        self.seen: list[_Seen] = []
        self._update_count = 0

    def update(self, outputs: dict[str, Any], _batch: Any) -> None:
        """Take in a batch."""
        arrays = (nested_numpify(outputs[name]) for name in ("predictions", "labels"))
        self.seen.append(_Seen(*arrays))
        self._update_count += 1

    def compute(self) -> dict[str, float]:
        """Return what `compute_metrics` returns of all predictions, padded by -100."""
        join = functools.partial(nested_concat, padding_index=_IGNORED)
        predictions = functools.reduce(join, [one.predictions for one in self.seen])
        labels = functools.reduce(join, [one.labels for one in self.seen])
        values = self.function(EvalPrediction(predictions=predictions, label_ids=labels))
        return {
            n.removeprefix("eval_"): getattr(v, "item", lambda v=v: v)() for n, v in values.items()
        }
