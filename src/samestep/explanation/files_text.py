"""When a training evaluates and saves, and what it leaves, in words."""

from collections.abc import Iterator

from samestep.explanation.explain import Explanation
from samestep.reporting.words import count, size

_SHOWN = 4
"""Names of files that are shown."""


def evaluation_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield when and on what the training evaluates."""
    how, settings, events = told.evaluations, told.settings, told.events
    if not how.has_validation:
        yield "validation", "there is none"
    else:
        ways = [f"after every {_every(settings.eval_every_epochs, 'epoch')}, and at the end"]
        if settings.eval_every_steps:
            ways.append(f"after every {_every(settings.eval_every_steps, 'step')}")
        times = [event for event in events or () if event.evaluates]
        number = f": {count(len(times), 'evaluation')}" if events is not None else ""
        yield "when", f"{', '.join(ways)}{number}"
        known = "a stream" if how.num_samples is None else count(how.num_samples, "sample")
        share = ""
        if how.share is not None and told.world.num_parts > 1:
            low, high = how.share
            of = "virtual rank" if told.plan.virtual_ranks else "rank"
            share = f", {low if low == high else f'{low} or {high}'} per {of}"
        yield "on", f"{known}{share}, {how.batch_size} per forward; each counts once"
        better = "lowest" if how.mode == "min" else "highest"
        yield "the best", f"is the one with the {better} {how.monitor}"
    if settings.patience is not None:
        first = told.stops_first
        where = "" if events is None else ": not before the end"
        if first is not None and first.step < told.plan.total_steps:
            where = f"; after step {first.step:,} at the earliest"
        yield (
            "may stop",
            f"after {count(settings.patience, 'evaluation')} without improvement{where}",
        )
    if how.has_test:
        yield "test", "once, at the end, with the best checkpoint"


def _every(number: int, noun: str) -> str:
    return noun if number == 1 else count(number, noun)


def checkpoints_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield when it saves, how many files it keeps, and how large they are."""
    settings, events = told.settings, told.events
    ways = [f"after every {_every(settings.checkpoint_every_epochs, 'epoch')}, and at the end"]
    if settings.checkpoint_every_steps:
        ways.append(f"after every {_every(settings.checkpoint_every_steps, 'step')}")
    if settings.checkpoint_every_minutes:
        ways.append(f"after {settings.checkpoint_every_minutes:g} minutes without one")
    saves = [event for event in events or () if event.saves]
    number = f": {count(len(saves), 'file')}" if events is not None else ""
    yield "when", f"{', '.join(ways)}{number}; also when it is told to stop"
    if saves:
        names = [event.saves for event in saves]
        shown = names if len(names) < _SHOWN else [*names[:2], "…", names[-1]]
        yield "which", ", ".join(shown)
    if told.kept is not None:
        yield "kept", _kept(told)
    if told.checkpoint_bytes is not None:
        each = told.checkpoint_bytes
        held = "weights, optimizer, the state of the run"
        held = held.replace("optimizer", "optimizer, average") if settings.ema else held
        yield "size", f"about {size(each)} each: {held}"
        if told.kept is not None:
            most = told.kept.most + 1
            text = (
                f"up to {size(most * each)} = {most} × {size(each)}: one more is there while a new "
                "one is written"
            )
            yield "disk", text


def _kept(told: Explanation) -> str:
    kept, top = told.kept, told.settings.keep_top_k
    assert kept is not None
    files = count(kept.most, "file")
    if kept.fewest != kept.most:
        files = f"{kept.fewest} or {files}"
    if top is None:
        return f"all: {files} at the end"
    return f"the best {top} and the last: {files} at the end"
