"""The comparison for people: text tables; two or three runs fit a terminal of 80 columns."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from samestep.reporting.comparison import Comparison, SameTraining
from samestep.reporting.curves import Aligned
from samestep.reporting.plot import picture
from samestep.reporting.run_data import TRAIN_LOSS
from samestep.reporting.words import count, short, wrapped

_LABEL, _LEAST, _WIDTH = 22, 12, 80
Row = tuple[str, Sequence[str]]
T = TypeVar("T")


def lines(found: Comparison) -> Iterator[str]:
    """Yield the lines of the whole comparison."""
    beside = (_settings, _alike) if len(found.runs) > 1 else ()
    for part in (_header, *beside, _throughput, _phases, _curves, _target):
        yield from part(found)
    if found.notes:
        yield ""
    for note in found.notes:
        yield from wrapped(f"note: {note}", "      ")


def _header(found: Comparison) -> Iterator[str]:
    for name, run in zip(found.names, found.runs, strict=True):
        plan = run.plan
        where = f"{count(plan['world_size'], 'rank')} on {plan.get('device', '?')}" if plan else "?"
        steps = max((r["step"] for r in run.records if "step" in r), default=0)
        yield f"{name}  {run.path}"
        head = f"   {run.recipe or 'recipe unknown'}, {where}, {steps:,} steps, {run.status}"
        yield from wrapped(head, "   ")
        for problem in run.problems:
            yield from wrapped(f"   ! {problem}", "     ")


def _settings(found: Comparison) -> Iterator[str]:
    if not found.differences:
        yield from ("", "settings  no difference is recorded")
        return
    most = max(_LEAST, (_WIDTH - _LABEL) // len(found.runs) - 2)
    rows = [
        (("* " if d.decides else "  ") + d.name, [_cut(value, most) for value in d.values])
        for d in found.differences
    ]
    yield from _table(found, "settings that differ", rows)
    if any(d.decides for d in found.differences):
        yield "  * makes it another training"


def _cut(text: str, most: int) -> str:
    """Return a text without its middle if it is too long: what differs is often at its end."""
    head = (most - 1) // 3
    return text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most :]}"


def _alike(found: Comparison) -> Iterator[str]:
    yield from ("", "the same training?")
    for text in same_training_lines(found):
        yield from wrapped(f"  {text}", "  ")


def same_training_lines(found: Comparison) -> Iterator[str]:
    """Yield a text for each run but the first: whether it is the same training as the first."""
    for place, result in enumerate(found.alike, start=1):
        text = _verdict(result, found.names[place], found.names[0])
        if result.verdict in ("apart", "unknown"):
            text += _reasons(found, place)
        yield text


def _verdict(found: SameTraining, other: str, one: str) -> str:
    if found.verdict == "unknown":
        return f"{other} and {one} cannot be compared by step: {found.why}."
    steps = _evidence(found)
    if found.verdict == "equal":
        bits = f"every bit of the loss on {steps}."
        if not found.weights_sha256:
            return f"{other} is the same training as {one}: {bits}"
        return (
            f"{other} is the same training as {one}, bit for bit: {found.weights_step:,} steps, "
            f"final weights sha256 {found.weights_sha256}; {bits}"
        )
    size = f"by at most {found.largest:.1e}, at step {found.largest_at:,}"
    explained = f"(rounding explains {found.tolerance:.0e})."
    if found.verdict == "rounding":
        alike = f"{other} is the same training as {one}, to rounding"
        equal = not found.largest and found.weights_step is not None
        differ = "are equal, the weights are not." if equal else f"differ {size} {explained}"
        return f"{alike}: the losses of {steps} {differ}"
    if found.last_alike is None:
        apart = f"{other} is another training than {one}: of {steps} the losses differ from the"
        return f"{apart} first on, {size} {explained}"
    return (
        f"{other} parts from {one} after step {found.last_alike:,}: up to there the losses are the "
        f"same to rounding, from step {found.first_apart:,} on they differ {size}. A difference "
        "that begins at rounding and grows slowly is rounding's own; a jump is not."
    )


def _evidence(found: SameTraining) -> str:
    """Return what was compared: 13 recorded steps, 3 epochs and 3 evaluations."""
    kinds = {"recorded step": found.steps, "epoch": found.epochs, "evaluation": found.evaluations}
    *most, last = [count(number, kind) for kind, number in kinds.items() if number]
    return f"{', '.join(most)} and {last}" if most else last


def _reasons(found: Comparison, place: int) -> str:
    """Return what differs from the first run and may make another training of this one."""
    differ = [d.name for d in found.differences if d.decides and d.values[0] != d.values[place]]
    if differ:
        return f" Settings that decide the training differ: {', '.join(differ)}."
    if found.alike[place - 1].verdict == "unknown":
        return ""
    # Steps were compared, so both have a plan.
    if found.runs[0].plan["world_size"] != found.runs[place].plan["world_size"]:
        return (
            " No such setting differs. On another number of ranks dropout draws other numbers, as "
            "does augmentation that is not keyed by sample; samestep verify names the cause."
        )
    return " No setting that decides the training differs; samestep verify looks for the cause."


def _throughput(found: Comparison) -> Iterator[str]:
    speeds = found.throughput
    if not any(speeds):
        yield from ("", "throughput  not enough is recorded yet")
        return
    first = next(speed for speed in speeds if speed).samples_per_s
    ranks = [run.plan.get("world_size") for run in found.runs]
    rows = [
        _row("samples/s", speeds, lambda s: short(s.samples_per_s)),
        _row("  lowest–highest", speeds, lambda s: f"{short(s.lowest)}–{short(s.highest)}"),
        _row("  against the first", speeds, lambda s: f"{s.samples_per_s / first:.2f} x"),
    ]
    if len(set(ranks)) > 1:
        each = [
            s.samples_per_s / n if s and n else None for s, n in zip(speeds, ranks, strict=True)
        ]
        rows.append(_row("samples/s per rank", each, short))
    rows += [
        _row("µs per sample", speeds, lambda s: f"{s.us_per_sample:,.2f}"),
        _row("steps/s", speeds, lambda s: short(s.steps_per_s)),
        _row("ms per step", speeds, lambda s: f"{s.ms_per_step:,.3f}"),
        _row("over", speeds, lambda s: s.basis),
    ]
    yield from _table(found, "throughput", rows)


def _row(name: str, values: Iterable[T | None], shown: Callable[[T], str], empty: str = "–") -> Row:
    return f"  {name}", [empty if value is None else shown(value) for value in values]


def _phases(found: Comparison) -> Iterator[str]:
    if any(found.phases):
        rows = [
            _row(name, [one and one.get(name) for one in found.phases], "{:,.3f}".format)
            for name in _keys(found.phases)
        ]
        rows.append(_row("together", found.phases, lambda one: f"{sum(one.values()):,.3f}"))
        yield from _table(found, "ms of a step, rank 0", rows)
    if any(found.pauses):
        shown = "{0[count]} in {0[seconds]:.3g} s".format
        rows = [_row(k, [one.get(k) for one in found.pauses], shown) for k in _keys(found.pauses)]
        yield from _table(found, "between the steps", rows)


def _keys(tables: Iterable[Mapping[str, object] | None]) -> Iterable[str]:
    """Return the keys of all tables, each once, in their order."""
    return dict.fromkeys(key for table in tables for key in table or ())


def _curves(found: Comparison) -> Iterator[str]:
    what = metric_name(found)
    if found.by_samples is None and found.by_seconds is None:
        yield from ("", f"{what}  no places that all runs cover")
    for curve, by, form in (
        (found.by_samples, "samples trained", ",.0f"),
        (found.by_seconds, "seconds of training", ",.3g"),
    ):
        if curve is None or not _is_shared(curve):
            continue
        how = "as recorded" if curve.as_recorded else "on the line between two records"
        heading = wrapped(f"{what}, by {by}, {how}", "  ")
        rows = [
            _row(format(place, form), values, "{:.4f}".format)
            for place, values in zip(curve.places, curve.values, strict=True)
        ]
        yield from _table(found, f"  {by.split()[0]}", rows, *heading)


def _is_shared(curve: Aligned) -> bool:
    """Whether runs can be compared at most of the places; short ones may share no time."""
    several = [row for row in curve.values if sum(value is not None for value in row) > 1]
    return len(curve.values[0]) == 1 or 2 * len(several) > len(curve.values)


def metric_name(found: Comparison) -> str:
    """Return what the curves show, in words."""
    if found.metric != TRAIN_LOSS:
        return f"validation {found.metric}"
    by_epoch = all(len(run.of("epoch")) > 1 for run in found.runs)
    return "training loss, mean of an epoch" if by_epoch else "training loss of single steps"


def _target(found: Comparison) -> Iterator[str]:
    if found.target is None:
        return
    sign = "≤" if found.smaller else "≥"
    goals, pick = found.reached, min if found.smaller else max
    best = [pick((point.value for point in curve), default=None) for curve in found.curves]
    pauses = [goal and goal.with_pauses for goal in goals]
    rows = [
        _row("step", goals, lambda goal: f"{goal.step:,}", "not"),
        _row("samples", goals, lambda goal: f"{goal.samples:,.0f}", "reached"),
        _row("seconds of training", goals, lambda goal: f"{goal.seconds:.3g}", ""),
        _row("and of pauses", pauses, "{:.3g}".format, ""),
        _row("best of the run", best, "{:.4f}".format),
    ]
    heading = f"{metric_name(found)} {sign} {found.target:g}, first seen at a record"
    yield from _table(found, "", rows, heading)


def _table(found: Comparison, corner: str, rows: Sequence[Row], *heading: str) -> Iterator[str]:
    """Yield a table; of more runs than fit beside each other the later ones come below."""
    yield from ("", *heading)
    names, room = found.names, shutil.get_terminal_size((_WIDTH, 24)).columns
    label = max(_LABEL, len(corner), *(len(name) for name, _ in rows))
    needed = [max(len(name), *(len(cells[n]) for _, cells in rows)) for n, name in enumerate(names)]
    width = max(_LEAST, *needed) if len(names) * (_LEAST + 2) <= room - label else max(needed)
    beside = max(1, (room - label) // (width + 2))
    for first in range(0, len(names), beside):
        yield from [""] * (first > 0)
        for name, cells in [(corner, names), *rows]:
            shown = "  ".join(f"{cell:>{width}}" for cell in cells[first : first + beside])
            yield f"{name:<{label}}  {shown}"


def as_table(found: Comparison) -> dict[str, Any]:
    """Return everything as JSON has it; lists have an entry a run, in the order given."""
    return {
        "runs": [
            {
                "name": name,
                "run_dir": str(run.path),
                "recipe": run.recipe,
                "status": run.status,
                "problems": list(run.problems),
                **{key: run.plan.get(key) for key in ("world_size", "global_batch_size")},
            }
            for name, run in zip(found.names, found.runs, strict=True)
        ],
        "settings": {
            d.name: {"values": list(d.values), "another_training": d.decides}
            for d in found.differences
        },
        "same_training": [
            {"run": name, "against": found.names[0], **asdict(result)}
            for name, result in zip(found.names[1:], found.alike, strict=True)
        ],
        "throughput": [speed and asdict(speed) for speed in found.throughput],
        "phases_ms_per_step": found.phases,
        "pauses": found.pauses,
        "metric": found.metric,
        "by_samples": found.by_samples and asdict(found.by_samples),
        "by_seconds": found.by_seconds and asdict(found.by_seconds),
        "target": found.target,
        "reached": [goal and asdict(goal) for goal in found.reached],
        "notes": found.notes,
    }


def plot(found: Comparison, path: Path) -> None:
    """Draw every recorded value of the metric, all runs in one picture.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    with picture(path) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for name, run, curve in zip(found.names, found.runs, found.curves, strict=True):
            values = [point.value for point in curve]
            label = f"{name}  {run.path.name}"
            axes[0].plot([p.samples for p in curve], values, marker=".", label=label)
            axes[1].plot([p.seconds for p in curve], values, marker=".", label=label)
        axes[0].set(xlabel="samples trained", ylabel=metric_name(found))
        axes[1].set(xlabel="seconds of training")
        for one in axes:
            one.grid(alpha=0.3)
            if found.target is not None:
                one.axhline(found.target, linestyle="--", linewidth=1, color="gray")
        axes[0].legend(fontsize="small")
