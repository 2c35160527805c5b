"""A comparison as tables and sentences, which the terminal and the page share; and as JSON."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from samestep.base.errors import listed
from samestep.base.table import Table, text_lines
from samestep.base.words import count, duration, joined, measured, number, short, size, wrapped
from samestep.show.reporting.comparison import UNKNOWN, UNSET, Comparison, SameTraining
from samestep.show.reporting.curves import Aligned, has_epochs
from samestep.show.reporting.plot import picture
from samestep.show.reporting.run_data import TRAIN_LOSS

_WIDTH = 80
_LABEL, _LEAST_VALUE = 24, 12
_MOST_DIFF = 60  # lines of differing code that a terminal shows
_MOST_NAMES = 5
T = TypeVar("T")


def lines(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the whole comparison for a terminal."""
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    yield from _header(comparison)
    if len(comparison.runs) > 1:
        differ = settings(
            comparison, max(_LEAST_VALUE, (width - _LABEL) // len(comparison.runs) - 2)
        )
        yield ""
        if differ is None:
            yield "settings: no difference is recorded"
        else:
            marks = ["* " if n in differ.marked else "  " for n in range(len(differ.rows))]
            rows = [(m + str(row[0]), *row[1:]) for m, row in zip(marks, differ.rows, strict=True)]
            note = differ.note.replace("Marked rows make", "* makes")
            yield from _table_lines(replace(differ, rows=rows, note=note), width)
        yield from _code_lines(comparison, width)
        yield from ("", "The same training?")
        for text in same_training_lines(comparison):
            yield from wrapped(f"  {text}", "  ")
    speed = throughput(comparison)
    if speed is None:
        yield from ("", "throughput: too few records yet")
    for table in (
        speed,
        phases(comparison),
        pauses(comparison),
        *curves(comparison),
        time_to_target(comparison),
    ):
        if table is not None:
            yield ""
            yield from _table_lines(table, width)
    if comparison.by_samples is None and comparison.by_seconds is None:
        yield from ("", f"{metric_name(comparison)}: the runs' curves do not overlap")
    if comparison.notes:
        yield ""
    for note in comparison.notes:
        yield from wrapped(f"note: {note}", "      ")


def _table_lines(table: Table, width: int) -> Iterator[str]:
    """Yield a table below its title, which stands in the corner if there is room."""
    corner = table.columns[0] or ("" if len(table.title) > width // 2 else table.title)
    if corner != table.title:
        yield from wrapped(table.title, "  ", width)
    yield from text_lines(replace(table, columns=(corner, *table.columns[1:])), width)
    if table.note:
        yield from wrapped(table.note, "", width)


def _header(comparison: Comparison) -> Iterator[str]:
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        plan = run.plan
        where = f"{count(plan['world_size'], 'rank')} on {plan.get('device', '?')}" if plan else "?"
        steps = max((r["step"] for r in run.records if "step" in r), default=0)
        yield f"{name}  {run.path}"
        head = f"   {run.recipe or 'recipe unknown'}, {where}, {steps:,} steps, {run.status}"
        yield from wrapped(head, "   ")
        for problem in run.problems:
            yield from wrapped(f"   ! {problem}", "     ")


def overview(comparison: Comparison) -> Table:
    """Return the runs with their names."""
    rows = [
        (
            name,
            str(run.path),
            run.recipe or "unknown",
            run.status,
            number(run.plan.get("world_size")),
            measured(best),
        )
        for name, run, best in zip(comparison.names, comparison.runs, comparison.best, strict=True)
    ]
    columns = ("run", "directory", "recipe", "status", "ranks", f"best {metric_name(comparison)}")
    return Table(title="Runs", columns=columns, rows=rows)


def settings(comparison: Comparison, longest: int = 60, *, shared: bool = False) -> Table | None:
    """Return the settings and facts that differ; with `shared`, only those that all recipes have.

    Values with more than `longest` characters lose their middle: what differs is often at the end.
    """
    head = longest // 3

    def cut(text: str) -> str:
        return text if len(text) <= longest else f"{text[:head]}…{text[head + 1 - longest :]}"

    differ = [d for d in comparison.differences if not (shared and UNSET in d.values)]
    if not differ:
        return None
    marked = frozenset(place for place, difference in enumerate(differ) if difference.decides)
    notes = ["Marked rows change the training."] if marked else []
    if left := len(comparison.differences) - len(differ):
        notes.append(f"{left} more are not of all recipes.")
    rows = tuple((d.name, *map(cut, d.values)) for d in differ)
    return _beside(comparison, "Settings that differ", rows, marked=marked, note=" ".join(notes))


def code(comparison: Comparison) -> Table | None:
    """Return the files of the runs' code that differ, with lines added and removed.

    Below it stands which functions differ by more than comments and layout.
    """
    changes = [{change.file: change.short for change in run or ()} for run in comparison.code]
    names = sorted({name for run in changes for name in run})
    if not names:
        return None

    def cells(name: str) -> Iterator[str]:
        yield UNSET
        for run, changed in zip(changes, comparison.code, strict=True):
            yield UNKNOWN if changed is None else run.get(name, UNSET)

    rows = [(name, *cells(name)) for name in names]
    title = f"Code that differs from {comparison.names[0]}, in lines"
    places = range(1, len(comparison.runs))
    edited = ((comparison.names[n], _edited(comparison, n)) for n in places)
    note = " ".join(f"{name}: {functions}." for name, functions in edited if functions)
    return _beside(comparison, title, rows, note=note)


def _edited(comparison: Comparison, place: int) -> str:
    """Return the functions that differ from the first run's; "" if none, or if unknown."""
    files = comparison.code[place - 1] or ()
    functions = [f"{name} in {change.file}" for change in files for name in change.functions]
    return listed(functions, _MOST_NAMES)


def diffs(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield a run's name and how its code differs from the first's, as a unified diff."""
    for name, changes in zip(comparison.names[1:], comparison.code, strict=True):
        if text := "\n".join(change.diff for change in changes or () if change.diff):
            yield name, text


def _code_lines(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield the files of the code that differ, and the diffs if they are short enough to read."""
    edited, texts = code(comparison), [*diffs(comparison)]
    if edited is None:
        return
    yield ""
    yield from _table_lines(edited, width)
    if sum(text.count("\n") for _, text in texts) > _MOST_DIFF:
        yield "The changed lines: compare --json, or samestep report"
        return
    for name, text in texts:
        yield from ("", f"{name} against {comparison.names[0]}", *text.split("\n"))


def _beside(
    comparison: Comparison,
    title: str,
    rows: Sequence[Sequence[str]],
    note: str = "",
    marked: frozenset[int] = frozenset(),
) -> Table:
    columns = ("", *comparison.names)
    return Table(title=title, columns=columns, rows=rows, note=note, marked=marked)


def same_training_lines(comparison: Comparison) -> Iterator[str]:
    """Yield a text for each run but the first: whether it is the same training as the first."""
    for place, result in enumerate(comparison.same_training, start=1):
        text = _verdict(result, comparison.names[place], comparison.names[0])
        if result.evaluated_otherwise is not None:
            text += (
                f" Their validation losses differ by at most {result.evaluations_apart:.1e}, first "
                f"at step {result.evaluated_otherwise:,}, while the training losses agree: "
                "the same weights are evaluated differently (other samples, another function, "
                "dropout or BatchNorm left in training mode)."
            )
        if result.verdict in ("apart", "unknown"):
            text += _reasons(comparison, place)
        yield text


def _verdict(result: SameTraining, other: str, first: str) -> str:
    if result.verdict == "unknown":
        return f"{other} and {first} cannot be compared by step: {result.why}."
    kinds = {
        "recorded step": result.steps,
        "epoch": result.epochs,
        "evaluation": result.evaluations,
    }
    steps = joined(count(number, kind) for kind, number in kinds.items() if number)
    if result.verdict == "equal":
        bits = f"every bit of the loss on {steps}."
        if not result.weights_sha256:
            return f"{other} is the same training as {first}: {bits}"
        return (
            f"{other} is the same training as {first}, bit for bit: {result.weights_step:,} steps, "
            f"final weights sha256 {result.weights_sha256}; {bits}"
        )
    size = f"by at most {result.largest:.1e}, at step {result.largest_at:,}"
    explained = f"(rounding explains {result.tolerance:.0e})."
    if result.verdict == "rounding":
        same = f"{other} is the same training as {first}, to rounding"
        equal = not result.largest and result.weights_step is not None
        differ = "are equal, but the weights are not." if equal else f"differ {size} {explained}"
        return f"{same}: the losses of {steps} {differ}"
    if result.last_alike is None:
        apart = f"{other} is a different training from {first}: of {steps}, losses differ from the"
        return f"{apart} first on, {size} {explained}"
    return (
        f"{other} parts from {first} after step {result.last_alike:,}: up to there the losses are "
        f"the same to rounding, from step {result.first_apart:,} on they differ {size}. A "
        "difference that starts at rounding and grows slowly is only rounding; a jump is not."
    )


def _reasons(comparison: Comparison, place: int) -> str:
    """Return a phrase on the differences from the first run that may change the training."""
    differ = [
        d.name for d in comparison.differences if d.decides and d.values[0] != d.values[place]
    ]
    code = f" The code differs: {edited}." if (edited := _edited(comparison, place)) else ""
    settings = f" Settings that decide the training differ: {', '.join(differ)}." if differ else ""
    if comparison.same_training[place - 1].verdict == "unknown":
        return settings + code
    # Steps were compared, so both have a plan.
    if comparison.runs[0].plan["world_size"] != comparison.runs[place].plan["world_size"]:
        equal = "" if settings or code else " The settings that decide the training are equal."
        return (
            f"{settings}{code}{equal} On another number of ranks rounding grows differently"
            f"{_by_ranks(comparison, place)}; samestep verify names the cause."
        )
    if settings or code:
        return settings + code
    return " No setting that decides the training differs; samestep verify looks for the cause."


_BY_RANKS = {
    "BatchNorm": "BatchNorm normalises over each rank's own samples",
    "dropout": "dropout draws different numbers",
}


def _by_ranks(comparison: Comparison, place: int) -> str:
    """Return a phrase on other parts of two models that depend on the number of ranks."""
    modules: list[Any] = [comparison.runs[n].plan.get("by_ranks") for n in (0, place)]
    if None in modules:  # a loop of the user's own does not say
        return ", and so do BatchNorm, dropout and other random draws, if the model has any"
    has = [why for name, why in _BY_RANKS.items() if any(name in m for m in modules)]
    return f", and {' and '.join(has)}" if has else ""


def throughput(comparison: Comparison) -> Table | None:
    """Return a table of the runs' speeds."""
    speeds = comparison.throughput
    if not any(speeds):
        return None
    first = next(speed for speed in speeds if speed).samples_per_s
    ranks = [run.plan.get("world_size") for run in comparison.runs]
    rows = [
        _row("samples/s", speeds, lambda s: short(s.samples_per_s)),
        _row("  lowest–highest", speeds, lambda s: f"{short(s.lowest)}–{short(s.highest)}"),
        _row("  against the first", speeds, lambda s: f"{s.samples_per_s / first:.2f} ×"),
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
    return _beside(comparison, "Throughput", rows)


def _row(
    name: str, values: Iterable[T | None], shown: Callable[[T], str], empty: str = "–"
) -> tuple[str, ...]:
    return (name, *(empty if value is None else shown(value) for value in values))


def phases(comparison: Comparison) -> Table | None:
    """Return a table of the time per step by phase."""
    names = dict.fromkeys(name for of_run in comparison.phases for name in of_run or ())
    if not names:
        return None
    shown = "{:,.3f}".format
    rows = [_row(name, [ms and ms.get(name) for ms in comparison.phases], shown) for name in names]
    rows.append(_row("total", comparison.phases, lambda ms: shown(sum(ms.values()))))
    return _beside(comparison, "ms per step, rank 0", rows)


def pauses(comparison: Comparison) -> Table | None:
    """Return a table of the pauses between steps: their number and their time."""
    names = dict.fromkeys(name for of_run in comparison.pauses for name in of_run)
    if not names:
        return None

    def shown(pause: Mapping[str, float]) -> str:
        return f"{pause['count']} in {duration(pause['seconds'])}"

    rows = [_row(name, [of.get(name) for of in comparison.pauses], shown) for name in names]
    return _beside(comparison, "Between the steps", rows)


def curves(comparison: Comparison) -> Iterator[Table]:
    """Yield the metric by samples and by seconds, where the runs share places."""
    for curve, by, form in (
        (comparison.by_samples, "samples trained", ",.0f"),
        (comparison.by_seconds, "seconds of training", ",.3g"),
    ):
        if curve is None or not _is_shared(curve):
            continue
        source = "as recorded" if curve.as_recorded else "on the line between two records"
        rows = [
            _row(format(place, form), values, measured)
            for place, values in zip(curve.places, curve.values, strict=True)
        ]
        title = f"{metric_name(comparison)}, by {by}, {source}"
        yield Table(title=title, columns=(by.split()[0], *comparison.names), rows=rows)


def _is_shared(curve: Aligned) -> bool:
    """Whether runs can be compared at most of the places; short ones may share no time."""
    several = [row for row in curve.values if sum(value is not None for value in row) > 1]
    return len(curve.values[0]) == 1 or 2 * len(several) > len(curve.values)


def metric_name(comparison: Comparison) -> str:
    """Return the name of the curves' metric."""
    if comparison.metric != TRAIN_LOSS:
        return f"validation {comparison.metric}"
    by_epoch = has_epochs(comparison.runs)
    return "training loss, mean of an epoch" if by_epoch else "training loss of single steps"


def time_to_target(comparison: Comparison) -> Table | None:
    """Return when each run's metric was first at the target, if there is one."""
    if comparison.target is None:
        return None
    sign = "≤" if comparison.smaller else "≥"
    goals = comparison.reached
    with_pauses = [goal and goal.with_pauses for goal in goals]
    rows = [
        _row("step", goals, lambda goal: f"{goal.step:,}", "not reached"),
        _row("samples", goals, lambda goal: f"{goal.samples:,.0f}"),
        _row("seconds of training", goals, lambda goal: f"{goal.seconds:.3g}"),
        _row("including pauses", with_pauses, "{:.3g}".format),
        _row("best of the run", comparison.best, measured),
    ]
    title = f"{metric_name(comparison)} {sign} {comparison.target:g}, at the first such record"
    return _beside(comparison, title, rows)


def as_table(comparison: Comparison) -> dict[str, Any]:
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
            for name, run in zip(comparison.names, comparison.runs, strict=True)
        ],
        "settings": {
            d.name: {"values": list(d.values), "another_training": d.decides}
            for d in comparison.differences
        },
        "same_training": [
            {"run": name, "against": comparison.names[0], **asdict(result)}
            for name, result in zip(comparison.names[1:], comparison.same_training, strict=True)
        ],
        "code": [
            {
                "run": name,
                "against": comparison.names[0],
                "files": None if changes is None else [asdict(change) for change in changes],
            }
            for name, changes in zip(comparison.names[1:], comparison.code, strict=True)
        ],
        "throughput": [speed and asdict(speed) for speed in comparison.throughput],
        "phases_ms_per_step": comparison.phases,
        "pauses": comparison.pauses,
        "metric": comparison.metric,
        "by_samples": comparison.by_samples and asdict(comparison.by_samples),
        "by_seconds": comparison.by_seconds and asdict(comparison.by_seconds),
        "target": comparison.target,
        "reached": [goal and asdict(goal) for goal in comparison.reached],
        "notes": comparison.notes,
    }


def plot(comparison: Comparison, path: Path) -> None:
    """Draw every recorded value of the metric, all runs in one picture."""
    with picture(path) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for name, run, curve in zip(
            comparison.names, comparison.runs, comparison.curves, strict=True
        ):
            values = [point.value for point in curve]
            label = f"{name}  {run.path.name}"
            axes[0].plot([p.samples for p in curve], values, marker=".", label=label)
            axes[1].plot([p.seconds for p in curve], values, marker=".", label=label)
        axes[0].set(xlabel="samples trained", ylabel=metric_name(comparison))
        axes[1].set(xlabel="seconds of training")
        for panel in axes:
            panel.grid(alpha=0.3)
            if comparison.target is not None:
                panel.axhline(comparison.target, linestyle="--", linewidth=1, color="gray")
        axes[0].legend(fontsize="small")
