"""What a Trainer's `compute_metrics` is given: the predictions of all ranks, as a metric object."""

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from transformers import EvalPrediction, Seq2SeqTrainer
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

from samestep.base.errors import UserError
from samestep.core.learner.gathered import ComputedOnce

_IGNORED = -100  # pads predictions of other lengths


def predicted(
    outputs: Any,
    labels: tuple[Any, ...],
    left_out: Collection[str],
    preprocess: Callable[[Any, Any], Any] | None,
) -> dict[str, Any]:
    """Return the outputs and labels that `compute_metrics` takes."""
    named = isinstance(outputs, Mapping)
    logits: Any = tuple(v for n, v in outputs.items() if n not in left_out) if named else ()
    logits = nested_detach(logits if named else outputs[1:])
    logits = logits[0] if len(logits) == 1 else logits
    given = labels[0] if len(labels) == 1 else labels
    return {"predictions": preprocess(logits, given) if preprocess else logits, "labels": given}


def generated(
    model: Any,
    batch: Any,
    args: Any,
    smoother: Any,
    processing_class: Any,
    preprocess: Callable[[Any, Any], Any] | None,
) -> dict[str, Any]:
    """Return the loss of a batch, what the model generates for it, and the labels.

    A Seq2SeqTrainer's own method does so; it is called with what it asks of its trainer.
    """
    if hasattr(model, "unshard"):
        raise UserError(
            "predict_with_generate: ranks that share a model cannot generate on their own.",
            remedy="Leave --strategy fsdp out, or predict_with_generate.",
        )
    asked = {"max_length": args.generation_max_length, "num_beams": args.generation_num_beams}
    trainer: Any = SimpleNamespace(
        args=args,
        model=model,
        label_smoother=smoother,
        processing_class=processing_class,
        compute_loss_context_manager=nullcontext,
        _prepare_inputs=dict,
        _gen_kwargs={n: v for n, v in asked.items() if v is not None},
    )
    step, pad = Seq2SeqTrainer.prediction_step, Seq2SeqTrainer._pad_tensors_to_max_len  # noqa: SLF001
    trainer._pad_tensors_to_max_len = functools.partial(pad, trainer)  # noqa: SLF001
    loss, tokens, labels = step(trainer, model, dict(batch), prediction_loss_only=False)
    tokens = preprocess(tokens, labels) if preprocess else tokens
    return {"loss": loss, "predictions": tokens, "labels": labels}


class Predictions(ComputedOnce):
    """A metric object: gathers all predictions and labels, and calls `compute_metrics` once."""

    def take(self, outputs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the predictions and labels of a batch."""
        return tuple(nested_numpify(outputs[name]) for name in ("predictions", "labels"))

    def compute(self) -> dict[str, float]:
        """Return the values of `compute_metrics` for all predictions, padded by -100."""
        join = functools.partial(nested_concat, padding_index=_IGNORED)
        predictions, labels = (functools.reduce(join, s) for s in zip(*self.seen, strict=True))
        values = self.by(EvalPrediction(predictions=predictions, label_ids=labels))
        return {
            n.removeprefix("eval_"): getattr(v, "item", lambda v=v: v)() for n, v in values.items()
        }
