"""What a Trainer's `compute_metrics` is given: the predictions of all ranks, as a metric object."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

_IGNORED = -100  # pads predictions of other lengths


def predicted(
    outputs: Any,
    labels: tuple[Any, ...],
    left_out: Collection[str],
    preprocess: Callable[[Any, Any], Any] | None,
) -> dict[str, Any]:
    """Return what of a model's outputs `compute_metrics` is given, and the labels."""
    named = isinstance(outputs, Mapping)
    logits: Any = tuple(v for n, v in outputs.items() if n not in left_out) if named else ()
    logits = nested_detach(logits if named else outputs[1:])
    logits = logits[0] if len(logits) == 1 else logits
    given = labels[0] if len(labels) == 1 else labels
    return {"predictions": preprocess(logits, given) if preprocess else logits, "labels": given}


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
        predictions = functools.reduce(join, [batch.predictions for batch in self.seen])
        labels = functools.reduce(join, [batch.labels for batch in self.seen])
        values = self.function(EvalPrediction(predictions=predictions, label_ids=labels))
        return {
            n.removeprefix("eval_"): getattr(v, "item", lambda v=v: v)() for n, v in values.items()
        }
