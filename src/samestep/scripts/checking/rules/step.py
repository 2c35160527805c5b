"""Rules about a step: clipping, the weight of each sample, and its learning rate."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import Found, NotSeen, replaced, rule
from samestep.scripts.checking.rules.accumulation import (
    added_up,
    by_step,
    divides_twice,
    is_plain_mean,
)
from samestep.scripts.checking.rules.data import uneven_batches
from samestep.scripts.checking.seen import RankSeen, Seen

_FEW_STEPS, _FEW = 3, 8  # the second: elements, fewer than in a batch
_UNLIKE = 1.01  # weights of samples are the same within this factor
_UNLIKE_COUNTS = 1.1  # counts in batches of one size, and weights of ranks, differ by chance too
_EXACT_STEP, _ROUGH_STEP = 1e-3, 5e-2
_AT_TOP = 0.999  # a cosine may come back to it with another rounding
_FADED = 0.0101  # of the largest learning rate: nothing is learnt any more


@rule("SS302", least_ranks=1)
def clips_scaled_gradients(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for clipping between `scale` and `unscale_`."""
    clips = [event for event in seen.ranks[0].of(ev.GradientsClipped) if event.scaled > 1]
    times = Counter(event.where for event in clips)
    for where, number in times.items():
        event = next(event for event in clips if event.where == where)
        norm = f"; their norm was {event.norm:.4g}" if event.norm is not None else ""
        line = seen.line(where)
        step = seen.ranks[0].first(ev.OptimizerStep)
        optimizer = seen.optimizer_at(step.where if step is not None else "")
        text = f"{event.name} with a limit of {event.limit:g} on gradients that are still "
        text += f"multiplied by {event.scaled:g}{norm} ({number} times)"
        yield Found(where, text, f"+ scaler.unscale_({optimizer})\n {line}" if line else "")


@rule("SS303")
def clips_before_the_all_reduce(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for clipping that the reduction of the same gradients follows within the step."""
    by_line: dict[str, Found] = {}
    before: ev.GradientsClipped | None = None
    norms: list[float | None] = []  # on the ranks
    clips = [rank.of(ev.GradientsClipped) for rank in seen.ranks]
    number = reduced = 0  # of the next clip; elements that were reduced since the last
    kinds = ev.GradientsClipped, ev.CollectiveCalled, ev.BackwardPass, ev.OptimizerStep
    for event in seen.ranks[0].of(*kinds):
        if isinstance(event, ev.OptimizerStep):
            before = None
        elif isinstance(event, ev.GradientsClipped):
            before, norms = event, [own[number].norm for own in clips if len(own) > number]
            number, reduced = number + 1, 0
        elif before is not None and before.where not in by_line:
            known = [norm for norm in norms if norm is not None]
            differ = len(known) == len(norms) and not _close(known, 1 + 1e-4)
            later = False
            if isinstance(event, ev.BackwardPass):
                later = event.sync and differ
            elif isinstance(event, ev.CollectiveCalled):
                # Most of what was clipped, and no number that is logged and as large as a bias.
                sizes, whole = (math.prod(shape) for shape in event.shapes), sum(before.sizes)
                reduced += sum(size for size in sizes if size in {*before.sizes, whole})
                later = event.name == "all_reduce" and 2 * reduced > whole
            if later:
                numbers = ", ".join(f"{norm:.4g}" for norm in known)
                differing = f"; the norms on the ranks were {numbers}" if differ else ""
                text = f"{before.name} with a limit of {before.limit:g} comes before the "
                text += f"all-reduce at {event.where}{differing}"
                remedy = "Clip once per step, after the gradients have been averaged."
                by_line[before.where] = Found(before.where, text, remedy)
    late = {finding.where for finding in clips_too_late(seen) if isinstance(finding, Found)}
    yield from (finding for finding in by_line.values() if finding.where not in late)


@rule("SS315", least_ranks=1)
def clips_too_late(seen: Seen) -> Iterator[Found]:
    """Look for lines that clip no gradients but those that a step was taken with before."""
    stepped: set[int | None] | None = None  # their checksums, until the next backward pass
    late: dict[str, list[bool]] = defaultdict(list)
    for event in seen.ranks[0].of(ev.BackwardPass, ev.OptimizerStep, ev.GradientsClipped):
        if isinstance(event, ev.BackwardPass):
            stepped = None
        elif isinstance(event, ev.OptimizerStep):
            stepped = {*(stepped or ()), *event.grads.values()}
        elif isinstance(event, ev.GradientsClipped):
            known = stepped != set() and len(event.sums) == len(event.sizes)
            late[event.where] += [bool(stepped and stepped >= {*event.sums} - {0})] if known else []
    for where, times in late.items():
        if len(times) > 2 and all(times[1:]):  # before the first there was no step
            text = f"in {sum(times)} of {len(times)} calls, a step had taken its gradients already"
            yield Found(where, text, "Clip between the backward pass and the step.")


@rule("SS307")
def averages_unequal_shares(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the weight of a sample on each rank in steps whose batches differ in size."""
    uneven = any(isinstance(result, Found) for result in uneven_batches(seen))
    if uneven or seen.stall is not None or seen.any(ev.JoinEntered):
        return  # the ranks do not even take the same steps
    yield from _unlike_weights(seen, shares=True)


@rule("SS308")
def divides_by_own_count(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the weight of a token on each rank in steps whose batches have the same size."""
    yield from _unlike_weights(seen, shares=False)


def _unlike_weights(seen: Seen, *, shares: bool) -> Iterator[Found]:
    """Yield the first step in which a summand of the loss does not count alike on all ranks."""
    unlike: list[list[tuple[ev.LossAverage, int]]] = []
    for losses in zip(*(_losses(rank) for rank in seen.ranks), strict=False):
        averages = [(average, n) for average, n, _ in losses if average is not None]
        if len(averages) < len(losses) or not all(synced for _, _, synced in losses):
            continue
        differ = len({n for _, n in averages}) > 1
        within = _UNLIKE if shares else _UNLIKE_COUNTS
        if (
            differ == shares
            and _close([average.other for average, _ in averages], _UNLIKE)
            and not _close([average.weight for average, _ in averages], within)
        ):
            unlike.append(averages)
    if not unlike or (not shares and len(unlike) < 2):
        return
    event = unlike[0][0][0]
    by = " and ".join(f"{average.by:g}" for average, _ in unlike[0])
    samples = " and ".join(str(n) for _, n in unlike[0])
    evidence = f"in step {event.step + 1} the ranks divide their losses by {by}, for batches of "
    evidence += f"{samples} samples ({len(unlike)} such steps)"
    remedy = "All-reduce the count, and divide the summed loss by count / world size"
    remedy += ", or give all ranks equally many samples." if shares else "."
    yield Found(event.where, evidence, remedy)


def _losses(rank: RankSeen) -> Iterator[tuple[ev.LossAverage | None, int, bool]]:
    """Yield the mean that each backward pass began with, its samples, and if others meet it."""
    samples, average = 0, None
    for event in rank.of(ev.ForwardPass, ev.LossAverage, ev.BackwardPass):
        if isinstance(event, ev.ForwardPass):
            samples += (event.n or 0) if event.grad else 0
        elif isinstance(event, ev.LossAverage):
            average = event
        elif isinstance(event, ev.BackwardPass):
            yield average, samples, event.sync
            samples, average = 0, None


@rule("SS309", residual=True)
def not_the_joined_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare what the optimizer was given with the gradient of all parts in one process."""
    event, backward = seen.ranks[0].first(ev.GradientCompared), seen.ranks[0].first(ev.BackwardPass)
    yield from _scaled_by_ranks(seen, averaged=event is not None and event.averaged)
    if (event is None or event.not_seen) and not seen.any(ev.ModelWrapped):
        yield from _added_by_hand(seen)
    met = (c.time for c in seen.ranks[0].of(ev.CollectiveCalled) if not c.step)
    if backward and not seen.any(ev.ModelWrapped) and max(met, default=0.0) < backward.time:
        yield NotSeen("no gradient was exchanged before the first step")
        return
    if event is None or event.not_seen or seen.ranks[0].steps < 2:
        why = "fewer than two optimizer steps were taken, or the script failed"
        yield NotSeen((event.not_seen if event is not None else "") or why)
        return
    most = _ROUGH_STEP if event.rough else _EXACT_STEP
    sizes = " + ".join(map(str, event.sizes))
    if event.residual <= most:
        return
    if event.direction <= most:
        text = (
            f"the gradient of the first step is {event.scale:.4g} times that of the joined batch "
        )
        text += f"of {sizes} samples"
        remedy = "Weight each rank's loss by its share of the batch."
        if abs(event.scale - seen.world_size) < most * seen.world_size:
            remedy = "Average gradients over the ranks, not add them up: divide by the world size."
        yield Found(event.where, text, remedy)
        return
    first = f", first in {event.first}" if event.first else ""
    text = f"the gradient of the first step differs by {event.residual:.1%} from that of the "
    text += f"joined batch of {sizes} samples, computed in one process{first}"
    yield Found(event.where, text)


def _added_by_hand(seen: Seen) -> Iterator[Found]:
    """Yield gradients of means that are added up over the ranks, or of several calls."""
    rank, added = seen.ranks[0], added_up(seen)
    losses, calls = [average for average, *_ in _losses(rank)], rank.of(ev.ForwardPass)
    means = 2 * sum(mean is not None and is_plain_mean(mean) for mean in losses) > len(losses)
    # A sum over the samples of one call may be meant as one over all ranks' samples.
    parts = any(mean is not None and mean.weight * mean.count < 1 - _EXACT_STEP for mean in losses)
    judged = means or (not parts and sum(call.grad for call in calls) > len(losses))
    if judged and len(added) >= _FEW_STEPS and 2 * len(added) > len(rank.of(ev.GradientsUsed)):
        text = f"in {len(added)} steps the gradients of {seen.world_size} ranks are added up, and "
        text += "not divided: the step grows with the number of ranks"
        remedy = "Divide after the all-reduce: `param.grad /= dist.get_world_size()`."
        sure = means and added[0].optimizer == "SGD"  # others divide the gradient by its own size
        where = rank.of(ev.BackwardPass)[0].where
        yield Found(where, text, remedy, None if sure else "advice")


def _scaled_by_ranks(seen: Seen, *, averaged: bool) -> Iterator[Found]:
    """Yield means that are divided or multiplied by the number of ranks, then averaged."""
    rank, ranks, factors = seen.ranks[0], seen.world_size, Counter[float]()
    losses, passes = _losses(rank), list[ev.BackwardPass]()
    for passes, step in by_step(rank, ev.BackwardPass, ev.GradientsUsed):
        for average, n, _ in islice(losses, len(passes)):
            if average is None or average.other != 1.0:
                return
            own = average.count if average.count > 1 else n
            micro_batches = 1 if average.by == own else len(passes)
            factors[round(average.weight * own * micro_batches, 6)] += 1
        if not passes or not (passes[-1].sync or averaged):
            return
        if passes[-1].sync and step.step and step.grown != 1.0:  # of the first it is not known
            return
    if any(divides_twice(seen)):
        return
    (usual, times), *_ = [*factors.most_common(1), (1.0, 0)]
    divides = usual == round(1 / ranks, 6)
    met = (c for c in rank.of(ev.CollectiveCalled) if c.step and not c.evaluating)
    # A loss over gathered rows has but a part of its gradient on each rank.
    gathers = any("reduce" not in c.name and sum(map(math.prod, c.shapes)) > _FEW for c in met)
    scaled = divides or (usual == ranks and not gathers)
    if scaled and times >= _FEW_STEPS and 2 * times > factors.total():
        does, size = ("divided", "smaller") if divides else ("multiplied", "larger")
        text = f"{times} losses are {does} by {ranks}, the number of ranks, although the gradients "
        text += f"are averaged: the step is that much {size}"
        maybe = ranks == 2 or step.optimizer != "SGD"  # a mean of two; Adam has its own size
        remedy = "Leave it out. If it has another reason, `--nproc 3` does not show this."
        yield Found(passes[-1].where, text, remedy, "advice" if maybe else None)


@rule("SS310", least_ranks=1)
def steps_with_scaled_gradients(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for an optimizer's own step where the scaler's was meant."""
    update = "" if seen.ranks[0].of(ev.ScaleUpdated) else "\n+ scaler.update()"
    for event in seen.ranks[0].of(ev.ScaledStep):
        line, optimizer = seen.line(event.where), seen.optimizer_at(event.where)
        instead = line.replace(f"{optimizer}.step()", f"scaler.step({optimizer})", 1)
        text = f"the optimizer steps with gradients that are multiplied by {event.scale:g}: since "
        text += "`scale` neither `unscale_` nor the scaler's `step` was called"
        yield Found(event.where, text, replaced(line, instead) + update if instead != line else "")


@rule("SS312", least_ranks=1)
def casts_of_earlier_weights(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for two steps between which the outermost autocast was not left."""
    for event in seen.ranks[0].of(ev.AutocastKept)[:1]:
        text = f"by step {event.step + 1} two steps were taken within one `torch.autocast`, which "
        text += "keeps its casts of weights until it is left"
        remedy = "Enter autocast for each forward and loss: `with torch.autocast(…):` inside the "
        remedy += "loop."
        yield Found(event.where, text, remedy)


@rule("SS316")
def labels_of_other_ranks(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for labels that count from the first rank's rows where all ranks' are gathered."""
    mixed: list[ev.RowsLabelled] = []
    for compared in seen.together(ev.RowsLabelled):
        own = [one.blocks[one.own // one.rows] for one in compared if one.blocks]
        by_rank = all(one.own == k * one.rows for k, one in enumerate(compared))
        first = own if by_rank else []
        # Other numbers may be of other rows, such as those of a queue.
        known = [event for event in compared if {*event.blocks} <= {*own}]
        wrong = [e for e in known if {*own} - {*e.blocks} or e.blocks[: len(first)] != first]
        mixed += wrong[:1] if len(own) == seen.world_size else []
    if len(mixed) >= _FEW_STEPS:
        text = f"in {len(mixed)} steps the columns of a product are the rows of "
        text += f"{len(mixed[0].blocks)} ranks, and what is compared here are not their labels"
        remedy = "Gather the labels in the same way as the rows, and join both in the same order."
        yield Found(mixed[0].where, text, remedy)
    for event in [one for one in seen.any(ev.RowsLabelled) if one.own != one.first][:1]:
        rank = next(rank.rank for rank in seen.ranks if event in rank.events)
        text = f"rank {rank}'s labels are the columns {event.first} to "
        text += f"{event.first + event.rows - 1}, and the rows that it gave to the gather are "
        text += f"columns {event.own} to {event.own + event.rows - 1}"
        remedy = "Add the rank's place to the labels: `labels + rank * len(labels)`."
        yield Found(event.where, text, remedy)


@rule("SS304")
def schedules_by_world_size(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare how often a schedule is stepped with how long it was made for."""
    rank, ranks = seen.ranks[0], seen.world_size
    for scheduler in rank.of(ev.SchedulerMade):
        stepped = [e for e in rank.of(ev.SchedulerStep) if e.scheduler_id == scheduler.scheduler_id]
        if len({event.where for event in stepped}) != 1:
            continue
        ((times, _),) = Counter(Counter(e.step for e in stepped).values()).most_common(1)
        by_epoch = len({event.step for event in stepped if event.epoch <= 1}) < _FEW_STEPS
        lengths = [rank.epochs] if by_epoch else _lengths(rank)
        total, name, where = scheduler.total, scheduler.scheduler, stepped[0].where
        unit = "epoch" if by_epoch else "optimizer step"
        # Whether the script asked for the length of a loader that has all ranks' batches.
        most = max((order.batches for order in rank.of(ev.OrderDrawn)), default=0)
        asked_of_all = any(cut.whole > most * (ranks - 0.5) for cut in rank.of(ev.LengthCut))
        within = 0 if by_epoch else rank.epochs  # each may end with less than a whole step
        own, joined = (
            seen.complete and any(abs((total or 0) - k * length) <= within for length in lengths)
            for k in (1, ranks)
        )
        if times == ranks and by_epoch and stepped[0].step < _FEW_STEPS:
            yield NotSeen(f"too few steps to tell whether {name} counts epochs")
        elif times == ranks and asked_of_all:
            yield NotSeen(f"{name} may be made for the batches of all ranks, whose count was cut")
        elif times == ranks and not joined and (by_epoch or own):
            text = f"{name} is stepped {times} times per {unit} on {ranks} ranks"
            text += f", and was made for {total} steps" if total else ""
            text += f"; its learning rate was {', '.join(f'{e.lr:.3g}' for e in stepped[:6])}"
            origin = {"the scheduler is made": scheduler.where}
            yield Found(where, text, f"Step it once per {unit}.", comes_from=origin)
        elif times == 1 and not by_epoch and joined and not own:
            text = f"{name} was made for {total} steps, but each of the {ranks} ranks takes "
            text += f"{max(lengths)}: it comes to {1 / ranks:.0%} of its schedule"
            remedy = "Count one rank's batches, `len(loader)` with its sampler, times the epochs."
            yield Found(scheduler.where, text, remedy)


@rule("SS305", least_ranks=1)
def never_steps_the_scheduler(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a scheduler whose `step()` is never called, or has no effect."""
    rank = seen.ranks[0]
    schedulers = [event for event in rank.of(ev.SchedulerMade) if event.scheduler != "SWALR"]
    inner = {number for event in schedulers for number in event.inner}
    stepped = {event.scheduler_id: event.replaced for event in rank.of(ev.SchedulerStep)}
    for event in schedulers:
        if event.scheduler_id in inner or stepped.get(event.scheduler_id) is False:
            continue
        if event.scheduler_id in stepped:
            text = f"{event.scheduler} sets the rate of an optimizer that takes no step: others "
            text += "step its weights"
            yield Found(event.where, text, "Make it for the optimizer whose `step()` is called.")
            continue
        if not seen.complete or rank.epochs < 2 or rank.steps < _FEW_STEPS:
            yield NotSeen(f"no whole training with {event.scheduler} ({event.where})")
            continue
        whole = len(set(_lengths(rank))) == 1
        text = f"{event.scheduler} was made, and not stepped once in {rank.steps} optimizer steps "
        text += f"of {rank.epochs} epochs"
        remedy = "Call its `step()` after each epoch, or after each optimizer step if it counts "
        remedy += "those."
        # It may be stepped every N batches, of which too few were run.
        yield Found(event.where, text, remedy, None if whole else "advice")


@rule("SS311", least_ranks=1)
def counts_in_another_unit(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for schedules that are over within the first of several epochs, and for the reverse."""
    rank = seen.ranks[0]
    by_id = {event.scheduler_id: event for event in rank.of(ev.SchedulerMade)}
    for scheduler in by_id.values():
        stepped = [e for e in rank.of(ev.SchedulerStep) if e.scheduler_id == scheduler.scheduler_id]
        first = [e.lr for e in stepped if e.epoch <= 1]
        later = [e.lr for e in stepped if e.epoch > 1]
        if not first or scheduler.scheduler == "ReduceLROnPlateau":
            continue
        parts = [by_id[number] for number in scheduler.inner if number in by_id] or [scheduler]
        totals = [part.total or 0 for part in parts]
        period = sum(totals) if all(totals) else 0
        once = len({event.step for event in stepped}) == len(stepped)  # per optimizer step
        rates = [scheduler.lr, *first, *later]
        top = max(rates)
        peak = next(number for number, rate in enumerate(rates) if rate >= _AT_TOP * top)
        fallen = min(rates[peak:])
        name, text = parts[-1].scheduler, ""
        if len(first) < _FEW_STEPS:
            each = [n // rank.epochs for n in _lengths(rank) if n == period and seen.complete]
            if len(first) == 1 and rank.epochs > 1 and each:
                text = f"was made for {period} steps, {each[0]} in each of {rank.epochs} epochs, "
                text += f"and is stepped once per epoch; its last learning rate is {rates[-1]:.3g}"
        elif name == "CosineAnnealingLR" and 0 < period < len(first) - 1:
            text = f"was made for {period} steps, and is stepped {len(first)} times in the first "
            text += "epoch; its learning rates: "
            text += ", ".join(f"{lr:.3g}" for lr in first[: 2 * period + 2])
        elif seen.complete and _FEW_STEPS < rank.epochs == period and once and fallen < top / 2:
            text = f"was made for {period} steps, as many as there are epochs, and is stepped "
            text += f"{len(first)} times in the first of them"
        elif later and once and max(first[-1], *later) <= _FADED * top:
            text = f"takes the learning rate from {top:.3g} to {first[-1]:.3g} in the first of "
            text += f"{rank.epochs} epochs, and it stays there"
        if text:
            remedy = "Count the same in both: step it once per epoch, after its batches, or make "
            remedy += "it for epochs * len(loader) steps and step it after each optimizer step."
            origin = {"the scheduler is made": scheduler.where}
            yield Found(stepped[0].where, f"{name} {text}", remedy, comes_from=origin)


def _lengths(rank: RankSeen) -> list[int]:
    """Return the number of optimizer steps of the whole training, and of the part that is run."""
    latest = None
    for event in rank.of(ev.BatchRead, ev.BackwardPass):
        if isinstance(event, ev.BatchRead):
            latest = event.loader_id
        else:
            break
    whole = [order.batches for order in rank.of(ev.OrderDrawn) if order.loader_id == latest]
    run = sum(batch.loader_id == latest and batch.turn == 0 for batch in rank.of(ev.BatchRead))
    passes = Counter(len(passes) for passes, _ in by_step(rank, ev.BackwardPass, ev.OptimizerStep))
    micro_steps = passes.most_common(1)[0][0] if passes else 1
    steps = {batches // micro_steps for batches in (*whole[:1], run)}
    return [batches * rank.epochs for batches in steps if batches >= _FEW_STEPS]


def _close(numbers: Sequence[float], within: float) -> bool:
    """Whether numbers are the same within a factor."""
    least, most = min(map(abs, numbers)), max(map(abs, numbers))
    return most <= within * least or most == 0
