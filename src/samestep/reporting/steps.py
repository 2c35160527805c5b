"""Where the time of a step goes, on rank 0 and rank by rank, with the verdict in words."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.reporting.curves import measured_epochs, pauses, phases
from samestep.reporting.run_data import RunData
from samestep.reporting.table import Table, number, percent
from samestep.reporting.words import count
from samestep.run.records import COMPUTE, WAITS

_STRAGGLES = 0.15
"""As `samestep profile`: below this share of a step, ranks only take turns at being last."""
_BOUND = {
    "compute": "The training is bound by computing",
    "waits": "The training is bound by its input: steps wait for data",
    "all_reduce": "The training is bound by communication: steps wait for other ranks",
    "other": "The training is bound by the loop's own work between the phases",
}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step's phases as a table, and what they mean."""

    bound: str
    """What takes most of a step: compute, waits, all_reduce or other."""
    verdict: str
    table: Table
    between: Table | None
    """Evaluations, checkpoints and compiling."""


@dataclass(frozen=True, kw_only=True)
class RankBar:
    """One rank's part of a step; lengths are per cent of the longest bar."""

    rank: int
    parts: tuple[tuple[str, float, float], ...]
    """(name, where it begins, how long it is)."""


@dataclass(frozen=True, kw_only=True)
class RankByRank:
    """What each rank did of a step, and whether one of them holds up the others."""

    straggler: int | None
    """The rank that does."""
    verdict: str
    bars: tuple[RankBar, ...]
    table: Table


def step_time(run: RunData) -> StepTime | None:
    """Return the mean phases of a step over all epochs but the first, None if not recorded."""
    found = phases(run)
    whole = sum(found.values()) if found else 0.0
    if not found or whole <= 0:
        return None
    stops = pauses(run)
    rows = [(k, number(v), percent(v / whole)) for k, v in found.items()]
    between = Table(
        title="Between the steps",
        columns=("", "count", "seconds"),
        rows=tuple((k, number(v["count"]), number(v["seconds"])) for k, v in stops.items()),
    )
    bound, verdict = _verdict(found, whole)
    return StepTime(
        bound=bound,
        verdict=verdict,
        table=Table(
            title="Mean of a step on rank 0, without the first epoch if there are more",
            columns=("phase", "ms", "share"),
            rows=(*rows, ("together", number(whole), "100 %")),
        ),
        between=between if stops else None,
    )


def _verdict(found: Mapping[str, float], whole: float) -> tuple[str, str]:
    groups = {
        "compute": sum(found.get(name, 0.0) for name in COMPUTE),
        "waits": sum(found.get(name, 0.0) for name in WAITS),
        "all_reduce": found.get("all_reduce", 0.0),
        "other": found.get("other", 0.0),
    }
    first = max(groups, key=lambda name: groups[name])
    parts = [f"{name} {percent(found[name] / whole)}" for name in COMPUTE if found.get(name)]
    computing = percent(groups["compute"] / whole)
    words = {
        "compute": f"computing takes {computing} of a step ({', '.join(parts)})",
        "waits": f"waiting for data takes {percent(groups['waits'] / whole)}",
        "all_reduce": f"the all-reduce that backward does not hide takes "
        f"{percent(groups['all_reduce'] / whole)}",
        "other": f"the rest takes {percent(groups['other'] / whole)}",
    }
    said = [words[name] for name in sorted(groups, key=lambda n: -groups[n]) if groups[name] > 0]
    return first, f"{_BOUND[first]}. A step takes {number(whole)} ms: {'; '.join(said)}."


def rank_by_rank(run: RunData) -> RankByRank | None:
    """Return each rank's milliseconds of a step, None for one rank or if not recorded.

    Where the number of ranks changed, it is of the latest one.
    """
    size = run.plan.get("world_size", 0)
    epochs = [r for r in measured_epochs(run) if _columns(r, size)]
    steps = sum(r["num_steps"] for r in epochs)
    if not epochs or size < 2:
        return None
    names = list(epochs[0]["ranks"])
    ms = [
        {
            n: 1000 * sum(r["ranks"].get(n, [0.0] * size)[rank] for r in epochs) / steps
            for n in names
        }
        for rank in range(size)
    ]
    longest = max(sum(one.values()) for one in ms) or 1.0
    bars = []
    for rank, one in enumerate(ms):
        begin, parts = 0.0, []
        for name, value in one.items():
            parts.append((name, round(begin, 3), round(100 * value / longest, 3)))
            begin += 100 * value / longest
        bars.append(RankBar(rank=rank, parts=tuple(parts)))
    rows = tuple((f"rank {k}", *(number(one[n]) for n in names)) for k, one in enumerate(ms))
    shown = sorted(range(size), key=lambda rank: -_own(ms[rank]))[:64]
    straggler, verdict = _straggler(ms, longest)
    return RankByRank(
        straggler=straggler,
        verdict=verdict,
        bars=tuple(bars[rank] for rank in sorted(shown)),
        table=Table(
            title="Milliseconds of a step on each rank",
            columns=("", *names),
            rows=tuple(rows[rank] for rank in sorted(shown)),
            note=f"The slowest 64 of {count(size, 'rank')}." if size > 64 else "",
        ),
    )


def _columns(record: Mapping[str, object], size: int) -> bool:
    ranks = record.get("ranks")
    return isinstance(ranks, dict) and all(
        isinstance(column, list)
        and len(column) == size
        and all(isinstance(seconds, int | float) for seconds in column)
        for column in ranks.values()
    )


def _own(ms: Mapping[str, float]) -> float:
    """Return the milliseconds that a rank works, or waits for its own data."""
    return sum(value for name, value in ms.items() if name != "all_reduce")


def _straggler(ms: list[dict[str, float]], step: float) -> tuple[int | None, str]:
    own = [_own(one) for one in ms]
    usual = statistics.median(own)
    slowest = max(range(len(own)), key=lambda rank: own[rank])
    more = own[slowest] - usual
    said = (
        f"Rank {slowest} takes {number(own[slowest])} ms of a step for data and computing, the "
        f"median rank {number(usual)} ms"
    )
    if more < _STRAGGLES * step:
        return None, f"No rank holds up the others. {said}."
    waits = "all ranks wait for it in the all-reduce"
    return slowest, f"Rank {slowest} holds up the others: {waits}. {said}."
