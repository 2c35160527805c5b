"""Rules about the schedule of a learning rate: how often it steps, and how long it is."""

from collections import Counter
from collections.abc import Iterator

from samestep.scripts.checking.events import RankSeen, Seen
from samestep.scripts.checking.findings import Found, NotSeen, rule

_FEW_STEPS = 3


@rule("SS304")
def schedules_by_world_size(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare how often a schedule is stepped with how long it was made for."""
    rank, ranks = seen.ranks[0], seen.world_size
    for made in rank.of("scheduler"):
        stepped = [e for e in rank.of("schedule") if e["scheduler_id"] == made["scheduler_id"]]
        if len({event.where for event in stepped}) != 1:
            continue
        ((times, _),) = Counter(Counter(e.step for e in stepped).values()).most_common(1)
        by_epoch = len({event.step for event in stepped if event.epoch <= 1}) < _FEW_STEPS
        lengths = [rank.epochs] if by_epoch else _lengths(rank)
        total, name, where = made["total"], made["scheduler"], stepped[0].where
        unit = "epoch" if by_epoch else "optimizer step"

        within = 0 if by_epoch else rank.epochs  # each may end with less than a whole step
        own, joined = (
            seen.complete and any(abs((total or 0) - k * length) <= within for length in lengths)
            for k in (1, ranks)
        )
        if times == ranks and by_epoch and stepped[0].step < _FEW_STEPS:
            yield NotSeen(f"too few steps to tell whether {name} counts epochs")
        elif times == ranks and _asked_of_all_shares(rank, ranks):
            yield NotSeen(f"{name} may be made for the batches of all ranks, whose count was cut")
        elif times == ranks and not joined and (by_epoch or own):
            yield Found(
                where,
                f"{name} is stepped {times} times per {unit} on {ranks} ranks"
                + (f", and was made for {total} steps" if total else "")
                + "; its learning rate was "
                + ", ".join(f"{event['lr']:.3g}" for event in stepped[:6]),
                f"Step it once per {unit}.",
                comes_from={"the scheduler is made": made.where},
            )
        elif times == 1 and not by_epoch and joined and not own:
            yield Found(
                made.where,
                f"{name} was made for {total} steps, but each of the {ranks} ranks takes "
                f"{max(lengths)}: it comes to {1 / ranks:.0%} of its schedule",
                "Count one rank's batches, `len(loader)` with its sampler, times the epochs.",
            )


@rule("SS305", least_ranks=1)
def never_steps_the_scheduler(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a scheduler whose `step()` is never called."""
    rank = seen.ranks[0]
    made = [event for event in rank.of("scheduler") if event["scheduler"] != "SWALR"]
    inner = {number for event in made for number in event["inner"]}
    stepped = {event["scheduler_id"] for event in rank.of("schedule")}
    for event in made:
        if event["scheduler_id"] in inner | stepped:
            continue
        if not seen.complete or rank.epochs < 2 or rank.steps < _FEW_STEPS:
            yield NotSeen(f"no whole training with {event['scheduler']} ({event.where})")
            continue
        whole = len(set(_lengths(rank))) == 1
        yield Found(
            event.where,
            f"{event['scheduler']} was made, and not stepped once in {rank.steps} optimizer steps "
            f"of {rank.epochs} epochs",
            "Call its `step()` after each epoch, or after each optimizer step if it counts those.",
            # It may be stepped every N batches, of which too few were run.
            None if whole else "advice",
        )


@rule("SS311", least_ranks=1)
def cosine_of_epochs_in_batches(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a cosine that is shorter than what it is stepped in the first epoch."""
    rank = seen.ranks[0]
    for made in rank.of("scheduler"):
        stepped = [e for e in rank.of("schedule") if e["scheduler_id"] == made["scheduler_id"]]
        first = [e["lr"] for e in stepped if e.epoch <= 1]
        period = made["total"] or 0
        if made["scheduler"] != "CosineAnnealingLR" or not 0 < period < len(first) - 1:
            continue
        yield Found(
            stepped[0].where,
            f"CosineAnnealingLR was made for T_max={period}, and is stepped "
            f"{len(first)} times in the first epoch; its learning rates: "
            + ", ".join(f"{lr:.3g}" for lr in first[: 2 * period + 2]),
            "Step it once per epoch, after its batches, or give it T_max=epochs * len(loader).",
            comes_from={"the scheduler is made": made.where},
        )


def _lengths(rank: RankSeen) -> list[int]:
    """Return how many optimizer steps the whole training has, and has as far as it is run."""
    latest = None
    for event in rank.of("batch", "backward"):
        if event.kind == "backward":
            break
        latest = event["loader_id"]
    whole = [event["batches"] for event in rank.of("order") if event["loader_id"] == latest]
    run = sum(e["loader_id"] == latest and e["turn"] == 0 for e in rank.of("batch"))
    found = {batches // _micro_steps(rank) for batches in (*whole[:1], run)}
    return [batches * rank.epochs for batches in found if batches >= _FEW_STEPS]


def _asked_of_all_shares(rank: RankSeen, ranks: int) -> bool:
    """Whether the script asked for the length of a loader that has all ranks' batches."""
    most = max((event["batches"] for event in rank.of("order")), default=0)
    return any(event["whole"] > most * (ranks - 0.5) for event in rank.of("cut_length"))


def _micro_steps(rank: RankSeen) -> int:
    """Return the backward passes of most steps."""
    counts: Counter[int] = Counter()
    here = 0
    for event in rank.of("backward", "step"):
        if event.kind == "step":
            counts[here] += 1
            here = 0
        else:
            here += 1
    return counts.most_common(1)[0][0] if counts else 1
