"""A comparison as tables and sentences, which the terminal and the page share; and as JSON."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from samestep.base.errors import listed
from samestep.base.table import Table, number, text_lines
from samestep.base.words import count, duration, measured, short, size, wrapped
from samestep.show.reporting.comparison import UNKNOWN, UNSET, Comparison, SameTraining
from samestep.show.reporting.curves import Aligned, Point, has_epochs
from samestep.show.reporting.plot import picture
from samestep.show.reporting.run_data import TRAIN_LOSS

_WIDTH = 80
_LABEL, _LEAST_VALUE = 24, 12
_MOST_DIFF = 60
"""Lines of differing code that a terminal shows."""
_MOST_NAMES = 5
T = TypeVar("T")


def lines(found: Comparison) -> Iterator[str]:
    """Yield the lines of the whole comparison for a terminal."""
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    yield from _header(found)
    if len(found.runs) > 1:
        differ = settings(found, max(_LEAST_VALUE, (width - _LABEL) // len(found.runs) - 2))
        yield ""
        if differ is None:
            yield "settings: no difference is recorded"
        else:
            marks = ["* " if n in differ.marked else "  " for n in range(len(differ.rows))]
            rows = [(m + str(row[0]), *row[1:]) for m, row in zip(marks, differ.rows, strict=True)]
            note = differ.note.replace("Marked rows make", "* makes")
            yield from _table_lines(replace(differ, rows=rows, note=note), width)
        yield from _code_lines(found, width)
        yield from ("", "The same training?")
        for text in same_training_lines(found):
            yield from wrapped(f"  {text}", "  ")
    speed = throughput(found)
    if speed is None:
        yield from ("", "throughput: not enough is recorded yet")
    for table in (speed, phases(found), pauses(found), *curves(found), time_to_target(found)):
        if table is not None:
            yield ""
            yield from _table_lines(table, width)
    if found.by_samples is None and found.by_seconds is None:
        yield from ("", f"{metric_name(found)}: no places that all runs cover")
    if found.notes:
        yield ""
    for note in found.notes:
        yield from wrapped(f"note: {note}", "      ")


def _table_lines(table: Table, width: int) -> Iterator[str]:
    """Yield a table below its title, which stands in the corner if there is room."""
    corner = table.columns[0] or ("" if len(table.title) > width // 2 else table.title)
    if corner != table.title:
        yield from wrapped(table.title, "  ", width)
    yield from text_lines(replace(table, columns=(corner, *table.columns[1:])), width)
    if table.note:
        yield from wrapped(table.note, "", width)


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


def overview(found: Comparison) -> Table:
    """Return the runs with their names."""
    rows = [
        (
            name,
            str(run.path),
            run.recipe or "unknown",
            run.status,
            number(run.plan.get("world_size")),
            measured(_best(found, curve)),
        )
        for name, run, curve in zip(found.names, found.runs, found.curves, strict=True)
    ]
    columns = ("run", "directory", "recipe", "status", "ranks", f"best {metric_name(found)}")
    return Table(title="Runs", columns=columns, rows=rows)


def _best(found: Comparison, curve: list[Point]) -> float | None:
    pick = min if found.smaller else max
    return pick((point.value for point in curve), default=None)


def settings(found: Comparison, longest: int = 60, *, shared: bool = False) -> Table | None:
    """Return the settings and facts that differ; with `shared`, only those that all recipes have.

    Values with more than `longest` characters lose their middle: what differs is often at the end.
    """
    head = longest // 3

    def cut(text: str) -> str:
        return text if len(text) <= longest else f"{text[:head]}…{text[head + 1 - longest :]}"

    differ = [one for one in found.differences if not (shared and UNSET in one.values)]
    if not differ:
        return None
    marked = frozenset(place for place, one in enumerate(differ) if one.decides)
    notes = ["Marked rows make it another training."] if marked else []
    if left := len(found.differences) - len(differ):
        notes.append(f"{left} more are not of all recipes.")
    rows = tuple((one.name, *map(cut, one.values)) for one in differ)
    return _beside(found, "Settings that differ", rows, marked=marked, note=" ".join(notes))


def code(found: Comparison) -> Table | None:
    """Return the files of the runs' code that differ, with lines added and removed.

    Below it stands which functions differ by more than comments and layout.
    """
    changes = [{one.file: one.short for one in run or ()} for run in found.code]
    names = sorted({name for run in changes for name in run})
    if not names:
        return None

    def cells(name: str) -> Iterator[str]:
        yield UNSET
        for run, known in zip(changes, found.code, strict=True):
            yield UNKNOWN if known is None else run.get(name, UNSET)

    rows = [(name, *cells(name)) for name in names]
    title = f"Code that differs from {found.names[0]}, in lines"
    places = range(1, len(found.runs))
    told = [f"{found.names[n]}: {one}." for n in places if (one := _edited(found, n))]
    return _beside(found, title, rows, note=" ".join(told))


def _edited(found: Comparison, place: int) -> str:
    """Return which functions differ from the first run's; "" if none, or it is not known."""
    files = found.code[place - 1] or ()
    return listed([f"{name} in {one.file}" for one in files for name in one.functions], _MOST_NAMES)


def diffs(found: Comparison) -> Iterator[tuple[str, str]]:
    """Yield a run's name and how its code differs from the first's, as a unified diff."""
    for name, changes in zip(found.names[1:], found.code, strict=True):
        if text := "\n".join(one.diff for one in changes or () if one.diff):
            yield name, text


def _code_lines(found: Comparison, width: int) -> Iterator[str]:
    """Yield the files of the code that differ, and the diffs if they are short enough to read."""
    edited, texts = code(found), [*diffs(found)]
    if edited is None:
        return
    yield ""
    yield from _table_lines(edited, width)
    if sum(text.count("\n") for _, text in texts) > _MOST_DIFF:
        yield "The changed lines: compare --json, or samestep report"
        return
    for name, text in texts:
        yield from ("", f"{name} against {found.names[0]}", *text.split("\n"))


def _beside(found: Comparison, title: str, rows: Sequence[Sequence[str]], **more: Any) -> Table:
    return Table(title=title, columns=("", *found.names), rows=rows, **more)


def same_training_lines(found: Comparison) -> Iterator[str]:
    """Yield a text for each run but the first: whether it is the same training as the first."""
    for place, result in enumerate(found.alike, start=1):
        text = _verdict(result, found.names[place], found.names[0])
        if result.evaluated_otherwise is not None:
            text += (
                f" Their validation losses differ by at most {result.evaluations_apart:.1e}, first "
                f"at step {result.evaluated_otherwise:,}, while the training losses stay alike: "
                "the same weights are measured otherwise (other samples, another function, dropout "
                "or BatchNorm left in training mode)."
            )
        if result.verdict in ("apart", "unknown"):
            text += _reasons(found, place)
        yield text


def _verdict(found: SameTraining, other: str, one: str) -> str:
    if found.verdict == "unknown":
        return f"{other} and {one} cannot be compared by step: {found.why}."
    kinds = {"recorded step": found.steps, "epoch": found.epochs, "evaluation": found.evaluations}
    *most, last = [count(number, kind) for kind, number in kinds.items() if number]
    steps = f"{', '.join(most)} and {last}" if most else last
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


def _reasons(found: Comparison, place: int) -> str:
    """Return what differs from the first run and may make another training of this one."""
    differ = [d.name for d in found.differences if d.decides and d.values[0] != d.values[place]]
    code = f" The code differs: {edited}." if (edited := _edited(found, place)) else ""
    settings = f" Settings that decide the training differ: {', '.join(differ)}." * bool(differ)
    if found.alike[place - 1].verdict == "unknown":
        return settings + code
    # Steps were compared, so both have a plan.
    if found.runs[0].plan["world_size"] != found.runs[place].plan["world_size"]:
        equal = "" if settings or code else " The settings that decide the training are equal."
        return (
            f"{settings}{code}{equal} On another number of ranks rounding grows differently"
            f"{_by_ranks(found, place)}; samestep verify names the cause."
        )
    if settings or code:
        return settings + code
    return " No setting that decides the training differs; samestep verify looks for the cause."


_BY_RANKS = {
    "BatchNorm": "BatchNorm normalises over each rank's own samples",
    "dropout": "dropout draws other numbers",
}


def _by_ranks(found: Comparison, place: int) -> str:
    """Return what else the models of two runs have that differs with the ranks by itself."""
    told: list[Any] = [found.runs[n].plan.get("by_ranks") for n in (0, place)]
    if None in told:  # runs of earlier versions do not say
        return ", and so do BatchNorm, dropout and other random draws, if the model has any"
    has = [why for name, why in _BY_RANKS.items() if any(name in one for one in told)]
    return f", and {' and '.join(has)}" if has else ""


def throughput(found: Comparison) -> Table | None:
    """Return how fast each run was."""
    speeds = found.throughput
    if not any(speeds):
        return None
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
        _row("measured over", speeds, lambda s: s.basis),
    ]
    for name, field, shown in (
        ("model FLOP/s", "flops_per_s", short),
        ("MFU", "mfu", "{:.1%}".format),
        ("peak memory", "peak_memory_bytes", size),
    ):
        values = [speed and getattr(speed, field) for speed in speeds]
        if any(value is not None for value in values):
            rows.append(_row(name, values, shown))
    return _beside(found, "Throughput", rows)


def _row(
    name: str, values: Iterable[T | None], shown: Callable[[T], str], empty: str = "–"
) -> tuple[str, ...]:
    return (name, *(empty if value is None else shown(value) for value in values))


def phases(found: Comparison) -> Table | None:
    """Return where the time of a step goes."""
    names = dict.fromkeys(name for one in found.phases for name in one or ())
    if not names:
        return None
    shown = "{:,.3f}".format
    rows = [_row(name, [one and one.get(name) for one in found.phases], shown) for name in names]
    rows.append(_row("together", found.phases, lambda one: shown(sum(one.values()))))
    return _beside(found, "ms per step, rank 0", rows)


def pauses(found: Comparison) -> Table | None:
    """Return what happened between the steps, how often, and how long it took."""
    names = dict.fromkeys(name for one in found.pauses for name in one)
    if not names:
        return None

    def shown(one: Mapping[str, float]) -> str:
        return f"{one['count']} in {duration(one['seconds'])}"

    rows = [_row(name, [one.get(name) for one in found.pauses], shown) for name in names]
    return _beside(found, "Between the steps", rows)


def curves(found: Comparison) -> Iterator[Table]:
    """Yield the metric by samples and by seconds, where the runs share places."""
    for curve, by, form in (
        (found.by_samples, "samples trained", ",.0f"),
        (found.by_seconds, "seconds of training", ",.3g"),
    ):
        if curve is None or not _is_shared(curve):
            continue
        how = "as recorded" if curve.as_recorded else "on the line between two records"
        rows = [
            _row(format(place, form), values, measured)
            for place, values in zip(curve.places, curve.values, strict=True)
        ]
        title = f"{metric_name(found)}, by {by}, {how}"
        yield Table(title=title, columns=(by.split()[0], *found.names), rows=rows)


def _is_shared(curve: Aligned) -> bool:
    """Whether runs can be compared at most of the places; short ones may share no time."""
    several = [row for row in curve.values if sum(value is not None for value in row) > 1]
    return len(curve.values[0]) == 1 or 2 * len(several) > len(curve.values)


def metric_name(found: Comparison) -> str:
    """Return what the curves show, in words."""
    if found.metric != TRAIN_LOSS:
        return f"validation {found.metric}"
    by_epoch = has_epochs(found.runs)
    return "training loss, mean of an epoch" if by_epoch else "training loss of single steps"


def time_to_target(found: Comparison) -> Table | None:
    """Return when each run's metric was first at the target, if there is one."""
    if found.target is None:
        return None
    sign = "≤" if found.smaller else "≥"
    goals, best = found.reached, [_best(found, curve) for curve in found.curves]
    with_pauses = [goal and goal.with_pauses for goal in goals]
    rows = [
        _row("step", goals, lambda goal: f"{goal.step:,}", "not reached"),
        _row("samples", goals, lambda goal: f"{goal.samples:,.0f}"),
        _row("seconds of training", goals, lambda goal: f"{goal.seconds:.3g}"),
        _row("with pauses", with_pauses, "{:.3g}".format),
        _row("best of the run", best, measured),
    ]
    title = f"{metric_name(found)} {sign} {found.target:g}, first seen at a record"
    return _beside(found, title, rows)


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
        "code": [
            {
                "run": name,
                "against": found.names[0],
                "files": None if changes is None else [asdict(one) for one in changes],
            }
            for name, changes in zip(found.names[1:], found.code, strict=True)
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
    """Draw every recorded value of the metric, all runs in one picture."""
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
