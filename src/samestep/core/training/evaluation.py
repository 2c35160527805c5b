"""Evaluate a model: every sample counts once, and metrics are averaged exactly over all samples."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, blame
from samestep.base.settings import Precision, Settings
from samestep.base.trees import describe, narrow
from samestep.core.data.keyed_random import mix, seed_reading, seed_torch
from samestep.core.data.order import held_parts
from samestep.core.data.source import Batch
from samestep.core.learner.agreement import random_numbers, sum_over_parts
from samestep.core.learner.apply import (
    Applied,
    Measure,
    Terms,
    call,
    of_counted,
    over_nothing,
    parts_of,
)
from samestep.core.learner.device import autocast
from samestep.core.learner.side_effects import keep_buffers
from samestep.core.recipe import Reduction
from samestep.core.training.metrics import Confusion, Objects, explained, functions_of, values_of
from samestep.core.training.step import check_loss
from samestep.core.training.stopping import Agreement
from samestep.launch.ranks import watched
from samestep.launch.ranks.mesh import any_sharded, free_gathered
from samestep.launch.ranks.world import World


def evaluation_batch(settings: Settings, micro_batch_size: int | None = None) -> int:
    """Return the samples per rank and forward of an evaluation: at least a micro-batch fits."""
    most = micro_batch_size or settings.micro_batch_size or settings.batch_size
    return settings.eval_batch_size or most or 1


class EvaluationError(UserError):
    """A mistake of the recipe in an evaluation; the training so far is sound."""


class Evaluable(Protocol):
    """Data of which every rank reads its share once."""

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's share of all samples once."""

    def peek(self, samples: int) -> Batch:
        """Return the first samples."""


class Interruptible:
    """Data to evaluate, of which a rank skips the rest once it got a stop signal.

    Ranks do not meet within an evaluation: if only one got the signal, it waits for the others.
    """

    def __init__(self, source: Evaluable, agreement: Agreement) -> None:
        self._source, self._agreement = source, agreement
        self.left_for = 0
        """The signal for which this rank has skipped something, or 0."""

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches until the end, or until this rank has to stop."""
        for number, batch in enumerate(self._source.evaluation(batch_size)):
            if number and self._agreement.signum:
                self.left_for = self._agreement.signum
                return
            yield batch

    def peek(self, samples: int) -> Batch:
        """Return the first samples."""
        return self._source.peek(samples)


def evaluate(
    model: nn.Module,
    source: Evaluable,
    totals: "Totals",
    *,
    batch_size: int,
    precision: Precision,
    seed: int,
    forward: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Return loss and metrics as means over all samples of all ranks, and their number.

    The model is not wrapped: ranks may hold unequal shares. `forward` replaces it, such as the same
    model compiled. Each evaluation draws the same random numbers, from `seed`. With classes, the
    `totals`, in which nothing is yet, add `per_class` and `confusion`. A mistake of the recipe on
    any rank raises an `EvaluationError` on all.
    """
    world, carried, sharded = totals.world, CarriedOn(model), any_sharded(model)
    # A forward may write buffers, and ranks compute another number of them.
    put_back = keep_buffers(model) if world.virtual_ranks else lambda: None

    def count_all(batches: Iterator[Batch]) -> None:
        first: dict[int, int] = {}
        for number, batch in enumerate(batches):
            watched.alive()
            part = batch.part if world.virtual_ranks else world.rank
            nth = number - first.setdefault(part, number)
            if nth == 0:
                put_back()
            drawn = mix(seed, part, nth) if batch.whole is None else mix(seed, 0, 0, batch.whole)
            if world.virtual_ranks:  # reading draws numbers too
                seed_reading(drawn)
            seed_torch(drawn, world.device)
            outputs = carried.outputs_of(forward or model, batch, precision, world.device)
            with autocast(precision, world.device):
                totals.add(outputs, batch)

    def count_in_step() -> None:
        stand_in = partial(outputs_of, forward or model, precision=precision, device=world.device)
        with closing(_in_step(source, batch_size, world, stand_in)) as batches:
            count_all(batches)

    with as_evaluated(model, mix(seed, world.rank)):
        try:
            world.on_every(
                count_in_step if sharded else lambda: count_all(source.evaluation(batch_size))
            )
        except UserError as error:
            raise EvaluationError(str(error), on_all_ranks=True) from error
        finally:
            if sharded:
                free_gathered(model)  # no backward follows, which would do it
    put_back()
    return totals.means()


def _in_step(
    source: Evaluable, batch_size: int, world: World, stand_in: Callable[[Any], object]
) -> Generator[Batch]:
    """Yield this rank's batches, while all ranks take equally many forwards.

    A forward of a sharded model takes all ranks: one that has no batches left calls `stand_in` with
    its last inputs, or others, until none has any. If one fails, all stop.
    """
    failed, done = 2, 0
    last: Any = None
    own = iter(source.evaluation(batch_size))
    going = True
    while True:
        batch = next(own, None) if going else None
        going = batch is not None
        state = int(world.reduce(torch.tensor(int(going)), "max"))
        if state in (failed, done):
            return
        if batch is None:
            last = source.peek(1).inputs if last is None else last
            stand_in(last)
            continue
        last = batch.inputs
        try:
            yield batch
        except GeneratorExit:  # what was to be done with the batch has raised
            world.reduce(torch.tensor(failed), "max")
            raise


@contextmanager
def as_evaluated(model: nn.Module, seed: int) -> Iterator[None]:
    """Put a model in eval mode without gradients; afterwards restore mode and generators."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), random_numbers(seed):
            yield
    finally:
        model.train(was_training)


def outputs_of(
    model: Callable[[Any], Any],
    inputs: Any,
    precision: Precision,
    device: torch.device,
    *makers: object,
) -> Any:
    """Return a model's outputs; a failure names `makers`, the functions that build it."""
    try:
        with autocast(precision, device):
            return call(model, inputs) if isinstance(model, nn.Module) else model(inputs)
    except Exception as error:
        of_types = precision != "fp64" and "Double" in str(error)
        remedy = "Weights and data are float32 here; --precision fp64 makes them float64."
        what = f"The recipe's model failed with inputs {describe(inputs)}"
        blame(what, error, *makers, remedy=remedy if of_types else "")


class CarriedOn:
    """Calls a model batch by batch; where it carries state, with that of the slots before."""

    def __init__(self, model: nn.Module) -> None:
        carries = isinstance(model, Applied) and model.carries
        self._model: Applied | None = cast("Applied", model) if carries else None
        self._whole: int | None = None
        self._state: Any = None

    def outputs_of(
        self, model: Callable[[Any], Any], batch: Batch, precision: Precision, device: torch.device
    ) -> Any:
        """Return the outputs of the next batch."""
        if self._model is None:
            return outputs_of(model, batch.inputs, precision, device)
        if batch.whole is None or batch.whole != self._whole:  # other slots: a new beginning
            self._whole = batch.whole
            self._state = self._model.new_state(batch.inputs, batch.samples)
        before = narrow(self._state, 0, batch.samples)  # the last slots may end before the others
        with_state = partial(self._model, carried=before)
        outputs, self._state = outputs_of(with_state, batch.inputs, precision, device)
        return outputs


class Totals:
    """Sums of the losses and metrics of samples, and their number.

    `parts` are names of losses, as far as they are known. What is not known the batches tell.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        metrics: Mapping[str, Callable[[Any, Any], Tensor]],
        world: World,
        classes: Sequence[str] = (),
        terms: Terms | None = None,
        *,
        reduction: Reduction = "mean",
        parts: Sequence[str] | None = None,
        measure: Measure | None = None,
    ) -> None:
        self._loss, self.world, self._terms = loss, world, terms
        self._reduction, self._measure = reduction, measure
        self._metrics = functions_of(metrics)
        # float64, so that sums over a large set do not depend on how it was shared out. Apple's
        # GPU has none; there the sums are moved to the CPU batch by batch.
        home = torch.device("cpu") if world.device.type == "mps" else world.device
        self._held = held_parts(world)
        self._part, shape = self._held.start, (len(self._held), len(self._metrics) + 3)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=home)
        self._tells = parts is None or (measure is not None and not measure.names)
        self.parts = {name: self._sums[:, 0].clone() for name in parts or ()}
        """Sums of the losses by name that the loss is the sum of."""
        self.measured = {n: self._sums[:, 0].clone() for n in (measure.names if measure else ())}
        """Sums of what `measure` returns."""
        self.objects = Objects(metrics, home)
        """The metrics that gather a state."""
        self._confusion = Confusion(classes, home) if classes else None
        self._waiting: list[tuple[Any, Any, int]] = []
        """Outputs, targets and samples of a batch whose loss is not due yet."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add a batch."""
        inputs, targets, count, _first, part, _whole, closes, _places = batch
        if self.world.virtual_ranks and part != self._part:
            self._part = part
            self.objects.next_part()
        sums, home = self._sums[self._part - self._held.start], self._sums.device
        terms = count if self._terms is None else self._terms(inputs, targets)
        whole_outputs, whole_targets, weight = outputs, targets, terms
        if self._waiting or not closes:
            self._waiting.append((outputs, targets, count))
        if self._waiting and closes:
            from samestep.core.learner.gathered import put_together  # noqa: PLC0415

            whole, wanted, counts = zip(*self._waiting, strict=True)
            whole_outputs, whole_targets = (put_together(t, counts) for t in (whole, wanted))
            weight = sum(counts)
            self._waiting = []
        if closes:
            batch_loss = explained("loss", self._loss, whole_outputs, whole_targets)
            check_loss(batch_loss, self._loss)
            each = weight if self._reduction == "mean" else 1  # a sum has all of its samples in it
            if self._terms is not None:
                counted = torch.as_tensor(each, device=batch_loss.device)
                batch_loss = of_counted(batch_loss, (), counted)
            sums[0] += batch_loss.to(home).to(torch.float64) * each
            for name, summand in parts_of(batch_loss).items():
                self._named(self.parts, name).add_(summand.to(home).to(torch.float64) * each)
        if self._confusion is not None:
            self._confusion.add(outputs, targets)
        sums[-2] += terms
        for place, (name, metric) in enumerate(self._metrics.items(), start=1):
            value = values_of(name, metric, outputs, targets, count)
            sums[place] += value.to(home).sum(dtype=torch.float64)
        self.objects.update(outputs, targets)
        measured = {} if self._measure is None else self._measure(inputs, targets, count)
        for name, value in measured.items():
            self._named(self.measured, name).add_(value.to(home).sum(dtype=torch.float64))
        sums[-1] += count

    def _named(self, sums: dict[str, Tensor], name: str) -> Tensor:
        if name not in sums:
            sums[name] = torch.zeros_like(self._sums[:, 0])
        return sums[name][self._part - self._held.start]

    def means(self) -> dict[str, Any]:
        """Return the means over all ranks that `evaluate` returns; every rank calls it."""
        if self._tells:  # ranks learn the names, and one order of them, from each other
            ranks, zero = self.world.gather(([*self.parts], [*self.measured])), self._sums[:, 0] * 0
            self.parts, self.measured = (
                {name: sums.get(name, zero) for names in ranks for name in names[place]}
                for place, sums in enumerate((self.parts, self.measured))
            )
        more = [*self.parts.values(), *self.measured.values()]
        rows = torch.cat([self._sums, torch.stack(more, dim=1)], dim=1) if more else self._sums
        values = sum_over_parts(rows, self.world).tolist()
        own = self._sums.shape[1]
        (loss, *totals, terms, samples), others = values[:own], iter(values[own:])
        if not terms > 0:
            subject = f"the {samples:g} samples that are evaluated"
            raise EvaluationError(over_nothing(terms, subject, self._terms), on_all_ranks=True)
        means = {"loss": loss / terms} | {name: next(others) / terms for name in self.parts}
        means |= {n: total / samples for n, total in zip(self._metrics, totals, strict=True)}
        means |= self.objects.values(self.world)
        means |= {name: next(others) / samples for name in self.measured}
        counted = self._confusion.result(self.world) if self._confusion is not None else {}
        return {**means, "samples": int(samples), **counted}
