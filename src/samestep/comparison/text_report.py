"""The comparison for people: text tables; two or three runs fit a terminal of 80 columns."""

from collections.abc import Iterator, Sequence

from samestep.comparison.curves import TRAIN_LOSS, Aligned, Point
from samestep.comparison.same_training import reasons_of, sentence
from samestep.comparison.side_by_side import Comparison
from samestep.screen.words import count, short, wrapped

_LABEL, _LEAST, _WIDTH = 22, 12, 80
Row = tuple[str, Sequence[str]]


def lines(found: Comparison) -> Iterator[str]:
    """Yield the lines of the whole comparison."""
    yield from _header(found)
    yield from _settings(found)
    yield from _alike(found)
    yield from _throughput(found)
    yield from _phases(found)
    yield from _curves(found)
    yield from _target(found)
    if found.notes:
        yield ""
    for note in found.notes:
        yield from wrapped(f"note: {note}", "      ")


def _header(found: Comparison) -> Iterator[str]:
    for name, run in zip(found.names, found.runs, strict=True):
        plan = run.plan
        where = "?"
        if plan:
            ranks = plan["world_size"]
            where = f"{count(ranks, 'rank')} on {plan.get('device', '?')}"
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
    marked = [d for d in found.differences if d.decides]
    most = max(_LEAST, (_WIDTH - _LABEL) // len(found.runs) - 2)
    rows = [
        (("* " if d.decides else "  ") + d.name, [_cut(value, most) for value in d.values])
        for d in found.differences
    ]
    yield from _table("settings that differ", found.names, rows)
    if marked:
        yield "  * makes it another training"


def _cut(text: str, most: int) -> str:
    """Return a text without its middle if it is too long: what differs is often at its end."""
    head = (most - 1) // 3
    return text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most :]}"


def _alike(found: Comparison) -> Iterator[str]:
    yield from ("", "the same training?")
    for place, result in enumerate(found.alike, start=1):
        deciding = [
            d.name for d in found.differences if d.decides and d.values[0] != d.values[place]
        ]
        reasons = reasons_of(
            found.runs[0], found.runs[place], deciding, compared=result.verdict != "unknown"
        )
        text = sentence(result, found.names[place], found.names[0], reasons)
        yield from wrapped(f"  {text}", "  ")


def _throughput(found: Comparison) -> Iterator[str]:
    speeds = found.throughput
    if not any(speeds):
        yield from ("", "throughput  not enough is recorded yet")
        return
    reference = next(speed for speed in speeds if speed)
    ranks = [run.plan.get("world_size") for run in found.runs]
    rows: list[Row] = [
        ("  samples/s", [short(s.samples_per_s) if s else "–" for s in speeds]),
        (
            "    lowest–highest",
            [f"{short(s.lowest)}–{short(s.highest)}" if s else "–" for s in speeds],
        ),
        (
            "    against the first",
            [f"{s.samples_per_s / reference.samples_per_s:.2f} x" if s else "–" for s in speeds],
        ),
    ]
    if len(set(ranks)) > 1:
        each = [
            short(s.samples_per_s / n) if s and n else "–"
            for s, n in zip(speeds, ranks, strict=True)
        ]
        rows.append(("  samples/s per rank", each))
    rows += [
        ("  µs per sample", [f"{s.us_per_sample:,.2f}" if s else "–" for s in speeds]),
        ("  steps/s", [short(s.steps_per_s) if s else "–" for s in speeds]),
        ("  ms per step", [f"{s.ms_per_step:,.3f}" if s else "–" for s in speeds]),
        ("  over", [s.basis if s else "–" for s in speeds]),
    ]
    yield from _table("throughput", found.names, rows)


def _phases(found: Comparison) -> Iterator[str]:
    if any(found.phases):
        names = dict.fromkeys(name for one in found.phases if one for name in one)
        rows: list[Row] = [
            (
                f"  {name}",
                [f"{one[name]:,.3f}" if one and name in one else "–" for one in found.phases],
            )
            for name in names
        ]
        whole = [f"{sum(one.values()):,.3f}" if one else "–" for one in found.phases]
        yield from _table("ms of a step, rank 0", found.names, [*rows, ("  together", whole)])
    kinds = dict.fromkeys(kind for one in found.pauses for kind in one)
    if kinds:
        pauses = [
            (f"  {kind}", [_pause(*one[kind]) if kind in one else "–" for one in found.pauses])
            for kind in kinds
        ]
        yield from _table("between the steps", found.names, pauses)


def _pause(count: int, seconds: float) -> str:
    return f"{count} in {seconds:.3g} s"


def _curves(found: Comparison) -> Iterator[str]:
    what = metric_name(found)
    if found.by_samples is None and found.by_seconds is None:
        yield from ("", f"{what}  no places that all runs cover")
    if found.by_samples is not None:
        how = "as recorded" if found.by_samples.recorded else "on the line between two records"
        yield from _curve(found, found.by_samples, f"{what}, by samples trained, {how}")
    if found.by_seconds is not None:
        how = "as recorded" if found.by_seconds.recorded else "on the line between two records"
        yield from _curve(found, found.by_seconds, f"{what}, by seconds of training, {how}")


def _curve(found: Comparison, curve: Aligned, title: str) -> Iterator[str]:
    form = "{:,.0f}" if curve.along == "samples" else "{:,.3g}"
    rows = [
        (f"  {form.format(place)}", [f"{v:.4f}" if v is not None else "–" for v in values])
        for place, values in zip(curve.places, curve.values, strict=True)
    ]
    yield ""
    yield from wrapped(title, "  ")
    yield from _rows(found.names, f"  {curve.along}", rows)


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
    goals = found.reached
    rows: list[Row] = [
        ("  step", [f"{g.step:,}" if g else "not" for g in goals]),
        ("  samples", [f"{g.samples:,.0f}" if g else "reached" for g in goals]),
        ("  seconds of training", [f"{g.seconds:.3g}" if g else "" for g in goals]),
        (
            "  and of pauses",
            [f"{g.with_pauses:.3g}" if g and g.with_pauses is not None else "" for g in goals],
        ),
    ]
    best = [_best(curve, smaller=found.smaller) for curve in found.curves]
    rows.append(("  best of the run", best))
    title = f"{metric_name(found)} {sign} {found.target:g}, first seen at a record"
    yield ""
    yield title
    yield from _rows(found.names, "", rows)


def _best(curve: Sequence[Point], *, smaller: bool) -> str:
    values = [point.value for point in curve]
    return f"{min(values) if smaller else max(values):.4f}" if values else "–"


def _table(title: str, names: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    yield from _rows(names, title, rows)


def _rows(names: Sequence[str], corner: str, rows: Sequence[Row]) -> Iterator[str]:
    label = max(_LABEL, len(corner), *(len(name) for name, _ in rows))
    widths = [max(_LEAST, *(len(cells[place]) for _, cells in rows)) for place in range(len(names))]
    for name, cells in [(corner, names), *rows]:
        shown = "  ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        yield f"{name:<{label}}  {shown}"
