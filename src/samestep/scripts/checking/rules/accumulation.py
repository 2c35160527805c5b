"""Rules about steps of several backward passes: what is added up or divided twice."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import starmap
from typing import TypeVar

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import Found, NotSeen, replaced, rule
from samestep.scripts.checking.seen import E, RankSeen, Seen

_Step = TypeVar("_Step", bound=ev.Event)
_FEW_STEPS = 3
_EXACT_STEP = 1e-3
_SCALE = 1024.0  # a scaler multiplies by more


@rule("SS301")
def accumulates_without_no_sync(seen: Seen) -> Iterator[Found | NotSeen]:
    """Count the backward passes of one line that meet the other ranks in one step."""
    rank = seen.ranks[0]
    wrap = rank.first(ev.ModelWrapped)
    if wrap is None or wrap.wrapper != "ddp":  # FSDP may have no memory to put it off
        return
    if late := [event for event in rank.of(ev.BackwardPass) if event.late]:
        text = f"{len(late)} backward passes within `no_sync` whose forwards were not within it: "
        text += "DDP decides in the forward, and reduces the gradients"
        yield Found(late[0].where, text, "Begin `with model.no_sync():` before the forward.")
        return
    steps_of: dict[str, Counter[int]] = defaultdict(Counter)
    for passes, _ in by_step(rank, ev.BackwardPass, ev.OptimizerStep):
        # Each call of a closure makes gradients of its own, at other weights.
        passes_at = Counter((event.where, event.closure) for event in passes if event.sync)
        for (where, _), times in passes_at.items():
            steps_of[where][times] += times > 1
    for where, counts in steps_of.items():
        times, steps = counts.most_common(1)[0]
        if counts.total() < 2:
            continue
        text = f"{times} backward passes per optimizer step, each with an all-reduce of "
        text += f"{wrap.parameters:,} gradients ({steps} steps of rank 0)"
        remedy = "Run all but the last micro-batch of a step, forward and backward, within `with "
        remedy += "model.no_sync():`."
        if not wrap.own:
            remedy += " In Lightning use `optimizer.toggle_model(sync_grad=False)`, in Fabric "
            remedy += "`no_backward_sync(model)`, in Accelerate `accumulate(model)`."
        yield Found(where, text, remedy, comes_from={"DDP is made": wrap.where})


@rule("SS313")
def adds_up_again(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for an all-reduce between DDP's own and the step that multiplies by the world size."""
    rank = seen.ranks[0]
    wrap = rank.first(ev.ModelWrapped)
    if wrap is None or wrap.wrapper != "ddp":
        return
    steps, elements = {used.step for used in added_up(seen)}, Counter[str]()
    for call in rank.of(ev.CollectiveCalled):
        if (call.name, call.op) == ("all_reduce", "SUM") and call.step in steps:
            elements[call.where] += sum(map(math.prod, call.shapes))
    # A number that is logged is small.
    if len(steps) >= _FEW_STEPS and 2 * elements.total() > len(steps) * wrap.parameters:
        ((where, _),) = elements.most_common(1)
        text = f"in {len(steps)} steps an all-reduce makes the gradients that DDP has averaged "
        text += f"{seen.world_size} times as large"
        remedy = "Leave out the all-reduce: DDP has averaged them in the backward pass."
        yield Found(where, text, remedy, comes_from={"DDP is made": wrap.where})


def added_up(seen: Seen) -> list[ev.GradientsUsed]:
    """Return rank 0's steps with the sum of what the gradients of all ranks were before."""
    close = partial(math.isclose, rel_tol=_EXACT_STEP)
    steps = []
    for used in seen.together(ev.GradientsUsed):
        each = zip(*(event.changes for event in used), strict=False)
        # After a sum that is clipped, a division may follow.
        changed = [own for own in each if not all(starmap(close, own))]
        sums = [(math.fsum(before for before, _ in own), own) for own in changed]
        if sums and all(close(total, after) for total, own in sums for _, after in own):
            steps.append(used[0])
    return steps


@rule("SS314", least_ranks=1)
def adds_up_micro_batches(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for steps of several means, each of its own batch of one loader."""
    rank = seen.ranks[0]
    whole: list[tuple[ev.BackwardPass, int, ev.GradientsUsed]] = []
    passes: list[tuple[ev.BackwardPass, int | None]] = []
    loader, is_mean, steps = None, False, 0
    for event in rank.of(ev.BatchRead, ev.LossAverage, ev.BackwardPass, ev.GradientsUsed):
        if isinstance(event, ev.BatchRead):
            loader = event.loader_id
        elif isinstance(event, ev.LossAverage):
            is_mean = is_plain_mean(event)
        elif isinstance(event, ev.BackwardPass):
            passes.append((event, loader if is_mean else None))
            loader, is_mean = None, False
        elif isinstance(event, ev.GradientsUsed):
            same = len({(backward.where, number) for backward, number in passes}) == 1
            if (
                len(passes) > 1
                and same
                and passes[0][1] is not None
                and (event.grown == 1.0 or not event.step)  # of the first it is not known
                and not event.lost
            ):
                whole.append((passes[0][0], len(passes), event))
            steps += bool(passes)
            passes = []
    if len(whole) >= _FEW_STEPS and 2 * len(whole) > steps:
        backward, times, step = whole[0]
        line = seen.line(backward.where)
        instead = re.sub(r"([\w.]+)\.backward\(", rf"(\1 / {times}).backward(", line, count=1)
        text = f"{times} micro-batches per step ({len(whole)} steps), and each loss is the mean of "
        text += "its own: their sum is the gradient"
        remedy = replaced(line, instead, "Divide each by their number.")
        # Optimizers other than SGD divide the gradient by its own size.
        yield Found(backward.where, text, remedy, None if step.optimizer == "SGD" else "advice")


@rule("SS317", least_ranks=1)
def divides_twice(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for means that are divided twice by the number of backward passes of their step."""
    rank, twice, steps = seen.ranks[0], list[tuple[ev.BackwardPass, int, str]](), 0
    for events, step in by_step(rank, ev.Event, ev.GradientsUsed):
        passes = [event for event in events if isinstance(event, ev.BackwardPass)]
        averages = [event for event in events if isinstance(event, ev.LossAverage)]
        # Over one value, the number may be of samples.
        divided, number = [one.by / one.count for one in averages if one.count > 1], len(passes)
        # Without a library that divides, one may be the number of ranks, or both.
        unclear = seen.world_size in (number, number**2) and not passes[-1].aided
        if number > 1 and not unclear and divided == [number**2] * number:
            twice.append((passes[0], number, step.optimizer))
        steps += bool(passes)
    if len(twice) >= _FEW_STEPS and 2 * len(twice) > steps:
        backward, number, optimizer = twice[0]
        text = f"each loss is divided by {number**2} in {len(twice)} steps of {number} "
        text += "micro-batches"
        text += ": the library that is called here divides, too" if backward.aided else ""
        # Other optimizers divide the gradient by its own size.
        sgd = optimizer == "SGD"
        yield Found(backward.where, text, "Divide it once.", None if sgd else "advice")


def by_step(rank: RankSeen, kind: type[E], step: type[_Step]) -> Iterator[tuple[list[E], _Step]]:
    """Yield the events of a kind that each step is taken with."""
    events: list[E] = []
    for event in rank.events:
        if isinstance(event, step):
            yield events, event
        if isinstance(event, step) or (isinstance(event, ev.ScalerStep) and event.skipped):
            events = []
        elif isinstance(event, kind):
            events.append(event)


def is_plain_mean(average: ev.LossAverage) -> bool:
    """Whether a loss is divided by its own count, and at most multiplied by a scaler."""
    times = average.weight * average.count
    scaled = times >= _SCALE and math.log2(times).is_integer()
    own = average.by == average.count and average.other == 1.0
    return own and (math.isclose(times, 1.0) or scaled)
