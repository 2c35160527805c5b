"""An explanation as blocks of lines: each number with how it follows."""

from collections.abc import Iterable, Iterator

from samestep.explanation.explain import Explanation
from samestep.explanation.memory_text import memory_rows
from samestep.explanation.shares import Share, StepShares
from samestep.screen.words import count, size, wrapped
from samestep.training.plan import ENDLESS

Row = tuple[str, str]
"""A name, and what is told of it; an empty name goes on with the row above."""
_INDENT = 15
_SHOWN = 4


def lines(told: Explanation) -> Iterator[str]:
    """Yield the lines for people, of at most 80 columns."""
    blocks = {
        "where it runs": _where(told),
        "one step": _step(told),
        "length": _length(told),
        "learning rate": _rates(told),
        "memory of one rank": memory_rows(told),
        "other numbers of ranks": (*_others(told), *_equal(told)),
        "evaluation": _evaluation(told),
        "checkpoints": _checkpoints(told),
        "notes": [("note", note) for note in told.notes],
    }
    parameters = told.memory.weights.elements if told.memory else None
    known = f", {parameters:,} parameters" if parameters else ""
    yield f"{told.recipe}{known}: explained, not run. Nothing is started or written."
    for title, rows in blocks.items():
        found = list(rows)
        if found:
            yield ""
            yield title
        for name, text in found:
            yield from wrapped(f"  {name:<{_INDENT - 3}} {text}", " " * _INDENT)


def _where(told: Explanation) -> Iterator[Row]:
    world, settings = told.world, told.settings
    nodes = ""
    if world.num_nodes > 1:
        nodes = f" = {count(world.num_nodes, 'node')} × {world.local_world_size} ranks per node"
    yield "ranks", f"{world.world_size:,}{nodes}; each is a process with all of the model"
    if told.plan.virtual_ranks:
        yield (
            "virtual ranks",
            f"{told.plan.virtual_ranks}: fixed shares of each step, whatever the number of ranks",
        )
    connected = f", connected by {world.backend}" if world.world_size > 1 else ""
    yield "device", f"{told.device}{connected}, {settings.precision}"
    yield "run", told.run or f"a new directory, runs/{told.recipe}-…"
    if told.goes_on is None:
        return
    at = told.goes_on
    before = f" It was trained on {count(at.ranks_before, 'rank')}." if at.ranks_before else ""
    if not at.checkpoint:
        yield "goes on", f"from its beginning: there is no checkpoint yet.{before}"
        return
    left = ""
    if told.plan.total_steps < ENDLESS:
        left = f"; {max(0, told.plan.total_steps - at.step):,} steps are left"
    yield "goes on", f"from {at.checkpoint}, step {at.step:,}{left}.{before}"
    for problem in at.problems:
        yield "passed over", problem
    for change in at.changes:
        yield "changed", change


def _step(told: Explanation) -> Iterator[Row]:
    plan = told.plan
    parts = count(plan.virtual_ranks or plan.world_size, "rank")
    parts = parts.replace("rank", "virtual rank") if plan.virtual_ranks else parts
    even = plan.batch_size * (plan.virtual_ranks or plan.world_size) * plan.accumulate
    most = "" if even == plan.global_batch_size else "at most "
    yield (
        "samples",
        (
            f"{plan.global_batch_size:,} per step = {most}{plan.batch_size:,} × {parts} × "
            f"{count(plan.accumulate, 'micro-step')}"
        ),
    )
    yield from _shares(told.step)
    if plan.accumulate > 1:
        yield (
            "micro-steps",
            (
                "A rank computes its samples in portions and adds up the gradients: less memory, the "
                "same step."
            ),
        )
    if plan.world_size > 1:
        yield (
            "then",
            (
                "All ranks average their gradients, weighted by their samples, and take the same "
                "optimizer step."
            ),
        )


def _shares(step: StepShares) -> Iterator[Row]:
    for number, share in enumerate(step.shares[:_SHOWN]):
        yield _ranks_of(share, alone=len(step.shares) == 1), _share(share)
        if number == _SHOWN - 1 and len(step.shares) > _SHOWN:
            yield "…", f"{len(step.shares) - _SHOWN} more groups; --json has all"


def _ranks_of(share: Share, *, alone: bool) -> str:
    if alone:
        return "each rank"
    first, last = share.first_rank, share.last_rank
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _share(share: Share) -> str:
    if not share.samples:
        return "none: it stands in with samples of others, which do not count"
    text = count(share.samples, "sample")
    if share.virtual_ranks:
        text += (
            f" = {_sum(share.virtual_ranks)} of {count(len(share.virtual_ranks), 'virtual rank')}"
        )
    elif len(share.micro_steps) > 1:
        text += f" = {_sum(share.micro_steps)}"
    if share.virtual_ranks and share.micro_steps != share.virtual_ranks:
        text += f", in micro-steps of {max(share.micro_steps)} at most"
    return text


def _sum(numbers: tuple[int, ...]) -> str:
    """Return equal numbers as a product, others as a sum of their first few."""
    if len(set(numbers)) == 1:
        return f"{len(numbers)} × {numbers[0]}" if len(numbers) > 1 else f"{numbers[0]}"
    shown = " + ".join(map(str, numbers[:_SHOWN]))
    return shown + (" + …" if len(numbers) > _SHOWN else "")


def _length(told: Explanation) -> Iterator[Row]:
    plan, settings = told.plan, told.settings
    if plan.is_stream:
        yield "epoch", "a stream: it says itself when it ends, so its length is not known"
        if plan.total_steps < ENDLESS:
            yield "training", f"at most {plan.total_steps:,} steps (--max-steps)"
        if plan.epochs:
            yield "training", f"{count(plan.epochs, 'epoch')}"
        return
    per_epoch, samples, batch = plan.steps_per_epoch, plan.num_samples, plan.global_batch_size
    how = "floor" if settings.drop_last else "ceil"
    yield "epoch", f"{count(per_epoch, 'step')} = {how}({samples:,} samples / {batch:,})"
    left = samples - per_epoch * batch
    if left > 0:
        yield (
            "left out",
            f"{count(left, 'sample')} of each epoch, other ones each time (--drop-last)",
        )
    if plan.total_steps == plan.epochs * per_epoch:
        epochs = f"{count(plan.epochs, 'epoch')} × {per_epoch:,}"
        yield "training", f"{count(plan.total_steps, 'step')} = {epochs}"
    else:
        yield (
            "training",
            (
                f"{count(plan.total_steps, 'step')} (--max-steps) = "
                f"{plan.total_steps / per_epoch:.4g} epochs of {per_epoch:,}"
            ),
        )
    if told.last_step is not None:
        few = told.last_step
        each = f": {few.shares[0].samples} per rank" if len(few.shares) == 1 else ""
        yield (
            "last step",
            f"of an epoch: {count(few.samples, 'sample')}{each}; each counts the same",
        )
        yield from _shares(few) if len(few.shares) > 1 else ()


def _rates(told: Explanation) -> Iterator[Row]:
    plan, settings = told.plan, told.settings
    base = settings.base_batch_size
    if settings.lr_scaling == "none":
        yield "lr", f"{plan.lr:.6g} (--lr), whatever the global batch: --lr-scaling is none"
    else:
        root = "square root of " if settings.lr_scaling == "sqrt" else ""
        yield (
            "lr",
            (
                f"{plan.lr:.6g} = {settings.lr:.6g} × {plan.lr / settings.lr:.4g} "
                f"({settings.lr_scaling} scaling: {root}{plan.global_batch_size:,} samples per step / "
                f"{base:,} that --lr was tuned for)"
            ),
        )
    own = "the recipe's own" if plan.schedule is not None else settings.schedule
    ramp = (
        f"{count(settings.warmup_steps, 'step')} of warm-up, then " if settings.warmup_steps else ""
    )
    yield "schedule", f"{ramp}{own}"
    for rate in told.rates:
        yield f"step {rate.step:,}", f"{rate.lr:.6g}  {rate.what}"
    yield "optimizer", told.optimizer


def _others(told: Explanation) -> Iterator[Row]:
    yield "", f"{'samples/step':>12}  {'micro-steps':>11}  {'steps':>9}  {'lr':>8}"
    for other in told.others:
        name = count(other.ranks, "rank")
        if other.refused:
            yield name, f"refused: {other.refused}"
            continue
        steps = f"{other.total_steps:,}" if other.total_steps < ENDLESS else "-"
        this = other.ranks == told.plan.world_size
        word = "this one" if this else "the same" if other.same else "another training"
        portions = f"{other.accumulate} × {other.batch_size}"
        yield (
            name,
            f"{other.global_batch_size:>12,}  {portions:>11}  {steps:>9}  {other.lr:>8.4g}  {word}",
        )


def _equal(told: Explanation) -> Iterator[Row]:
    plan, drawn, virtual = told.plan, told.drawn, told.plan.virtual_ranks
    if any(not (other.same or other.refused) for other in told.others):
        yield (
            "another",
            (
                "--batch-size counts per rank, so other ranks make another global batch. Keep it with "
                f"--global-batch-size {plan.global_batch_size}."
            ),
        )
    if virtual:
        yield (
            "equal",
            (
                f"to the last bit on 1 to {virtual} ranks, dropout and batch normalisation included, "
                "with the same PyTorch on the same model of device"
            ),
        )
        return
    yield (
        "equal",
        (
            "with the same global batch: the order of the samples, the samples of each step, the "
            "learning rate, and, to rounding, losses and gradients"
        ),
    )
    if drawn is None:
        yield "not equal", "not known here: the model was not tried. samestep verify tries it."
        return
    reasons = list(_differences(told))
    for reason in reasons:
        yield "not equal", reason
    if not reasons:
        yield "not equal", "nothing found: the model draws nothing and has no batch normalisation"
    else:
        yield "remedy", "--virtual-ranks makes them equal; samestep verify checks all the rest"


def _differences(told: Explanation) -> Iterator[str]:
    drawn = told.drawn
    assert drawn is not None
    accepted = dict.fromkeys(told.accepts, ", as the recipe accepts")
    if drawn.draws:
        where = sorted({line for line in drawn.draws.values() if line})
        at = f" ({', '.join(where[:3])})" if where else ""
        names = ", ".join(sorted(drawn.draws)[:3])
        yield (
            f"what the model draws from torch: {names}{at}. Each rank draws other numbers"
            f"{accepted.get('dropout', '')}."
        )
    if drawn.batch_norms and not told.settings.sync_batchnorm:
        more = len(drawn.batch_norms) - 1
        named = drawn.batch_norms[0] + (f" and {more} more" if more else "")
        yield (
            f"batch normalisation ({named}): it normalises over the {told.step.most} samples of a "
            f"micro-step{accepted.get('batchnorm', '')}."
        )
    if drawn.generators:
        yield f"{' and '.join(drawn.generators)}: each rank draws other numbers."


def _evaluation(told: Explanation) -> Iterator[Row]:
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
        where = f"; after step {first.step:,} at the earliest" if first else ""
        yield (
            "may stop",
            f"after {count(settings.patience, 'evaluation')} without improvement{where}",
        )
    if how.has_test:
        yield "test", "once, at the end, with the best checkpoint"


def _every(number: int, noun: str) -> str:
    return noun if number == 1 else count(number, noun)


def _checkpoints(told: Explanation) -> Iterator[Row]:
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
            yield (
                "disk",
                (
                    f"up to {size(most * each)} = {most} × {size(each)}: one more is there while a new "
                    "one is written"
                ),
            )


def _kept(told: Explanation) -> str:
    kept, top = told.kept, told.settings.keep_top_k
    assert kept is not None
    files = count(kept.most, "file")
    if kept.fewest != kept.most:
        files = f"{kept.fewest} or {files}"
    if top is None:
        return f"all: {files} at the end"
    return f"the best {top} and the last: {files} at the end"


def text_of(told: Explanation) -> str:
    """Return all lines as one text."""
    return "\n".join(_stripped(lines(told))) + "\n"


def _stripped(found: Iterable[str]) -> Iterator[str]:
    return (line.rstrip() for line in found)
