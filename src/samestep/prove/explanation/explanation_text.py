"""An explanation for people: blocks of lines, each number with how it follows."""

from collections.abc import Iterator

from samestep.base.errors import listed
from samestep.base.run.index import Retention
from samestep.base.settings import order_name
from samestep.base.words import count, short, size, wrapped
from samestep.core.plan import ENDLESS, warmup_steps
from samestep.core.session.training_run import retention_of
from samestep.launch.ranks.nproc import RANK_BYTES
from samestep.prove.explanation.explain import Explanation
from samestep.prove.explanation.rank_memory import MemoryPart, RankMemory
from samestep.prove.explanation.schedule import Share, StepShares, saves_the_best

_INDENT = 15
_SHOWN = 4  # groups of ranks, parts of a sum, and files that are shown
_ORDERS = {
    "sequential": "each sample once, in the order of the data (--order sequential)",
    "columns": "each sample once; each slot of a step reads on where it was in the step before "
    "(--order columns)",
    "replacement": "drawn with replacement, as many draws as samples (--order replacement)",
    "weighted": "drawn with replacement in proportion to the recipe's weights, as many draws as "
    "samples (--order weighted)",
    "by tokens": "samples of similar length in each batch, the batches shuffled (--batch-tokens)",
    "by length": "shuffled, with samples of similar length in each batch (--group-by-length)",
}

Rows = Iterator[tuple[str, str]]  # each line's name and text


def text_of(explained: Explanation) -> str:
    """Return the text, in at most 80 columns."""
    blocks = {
        "where it runs": _ranks_and_run(explained),
        "one step": _step(explained),
        "length": _length(explained),
        "learning rate": _rates(explained),
        "memory of one rank": _memory(explained),
        "other numbers of ranks": (*_other_rank_counts(explained), *_equal(explained)),
        "evaluation": _evaluation(explained),
        "checkpoints": _checkpoints(explained),
        "notes": [("note", note) for note in explained.notes],
    }
    parameters = explained.memory.weights.elements if explained.memory else None
    counted = f", {parameters:,} parameters" if parameters else ""
    lines = [f"{explained.recipe}{counted}. Nothing is started or written."]
    for title, rows in blocks.items():
        named = list(rows)
        lines += ["", title] if named else []
        for name, text in named:
            lines += wrapped(f"  {name:<{_INDENT - 3}} {text}", " " * _INDENT)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _ranks_and_run(explained: Explanation) -> Rows:
    world, at = explained.world, explained.goes_on
    nodes = ""
    if world.num_nodes > 1:
        nodes = f" = {count(world.num_nodes, 'node')} × {world.local_world_size} ranks per node"
    yield "ranks", f"{world.world_size:,}{nodes}; each process holds the whole model"
    if explained.plan.virtual_ranks:
        virtual = count(explained.plan.virtual_ranks, "virtual rank")
        yield "shares", f"{virtual}: fixed shares of each step, on any number of ranks"
    connected = f", connected with {world.backend}" if world.world_size > 1 else ""
    yield "device", f"{explained.device}{connected}, {explained.settings.precision}"
    yield "run", explained.run or f"a new directory, runs/{explained.recipe}-…"
    if at is None:
        return
    before = f" It was trained on {count(at.ranks_before, 'rank')}." if at.ranks_before else ""
    if not at.checkpoint:
        yield "resumes", f"from its beginning: there is no checkpoint yet.{before}"
        return
    left = ""
    if explained.plan.total_steps < ENDLESS:
        left = f"; {max(0, explained.plan.total_steps - at.step):,} steps are left"
    yield "resumes", f"from {at.checkpoint}, step {at.step:,}{left}.{before}"
    yield from (("skipped", problem) for problem in at.problems)
    yield from (("changed", change) for change in at.changes)


def _step(explained: Explanation) -> Rows:
    plan = explained.plan
    parts = plan.virtual_ranks or plan.world_size
    even = plan.micro_batch_size * parts * plan.accumulate
    most = "" if even == plan.global_batch_size else "at most "
    text = (
        f"{plan.global_batch_size:,} per step = {most}{plan.micro_batch_size:,} × "
        f"{count(parts, 'virtual rank' if plan.virtual_ranks else 'rank')} × "
        f"{count(plan.accumulate, 'micro-step')}"
    )
    if plan.by_tokens is not None:
        fewest, tokens = min(plan.by_tokens.sizes), explained.settings.batch_tokens
        yield "tokens", f"at most {tokens:,} per step over all ranks, padding included"
        text = f"{fewest:,} to {plan.global_batch_size:,} per step; below, of the largest"
    yield "samples", text
    yield from _shares(explained.step)
    if plan.accumulate > 1:
        yield "micro-steps", "accumulate their gradients: less memory, the same step"
    if explained.memory is not None and explained.memory.gathered.bytes:
        twice = ", and a second forward of each micro-step" if plan.accumulate > 1 else ""
        yield "loss", f"computed over the whole batch: ranks gather their outputs{twice}"
    if plan.world_size > 1:
        yield "then", "all ranks average their gradients, weighted by their samples"


def _shares(step: StepShares) -> Rows:
    for share in step.shares[:_SHOWN]:
        first, last = share.first_rank, share.last_rank
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        yield "each rank" if len(step.shares) == 1 else ranks, _share(share)
    if len(step.shares) > _SHOWN:
        yield "…", f"{len(step.shares) - _SHOWN} more groups; --json has all"


def _share(share: Share) -> str:
    if not share.samples:
        return "none: it computes samples of others, which do not count, to keep in step"
    text = count(share.samples, "sample")
    if virtual := share.virtual_ranks:
        text += f" = {_sum(virtual)} of {count(len(virtual), 'virtual rank')}"
        if share.micro_steps != virtual:
            text += f", in micro-steps of {max(share.micro_steps)} at most"
    elif len(share.micro_steps) > 1:
        text += f" = {_sum(share.micro_steps)}"
    return text


def _sum(numbers: tuple[int, ...]) -> str:
    """Return equal numbers as a product, others as a sum of the first few."""
    if len(set(numbers)) == 1:
        return f"{len(numbers)} × {numbers[0]}" if len(numbers) > 1 else f"{numbers[0]}"
    shown = " + ".join(map(str, numbers[:_SHOWN]))
    return shown + (" + …" if len(numbers) > _SHOWN else "")


def _length(explained: Explanation) -> Rows:
    plan, settings = explained.plan, explained.settings
    steps, limited = count(plan.total_steps, "step"), plan.total_steps < ENDLESS
    if plan.is_stream:
        yield "epoch", "a stream, whose length is not known before it ends"
        if limited:
            yield "training", f"at most {steps} (--max-steps)"
        if plan.epochs:
            yield "training", count(plan.epochs, "epoch")
        return
    per_epoch, samples, batch = plan.steps_per_epoch, plan.num_samples, plan.global_batch_size
    rounding, order = "floor" if settings.drop_last else "ceil", order_name(settings)
    computed = f"{rounding}({samples:,} samples / {batch:,})"
    if plan.by_tokens is not None:
        computed = f"cut({samples:,} samples by {settings.batch_tokens:,} tokens)"
    yield "epoch", f"{count(per_epoch, 'step')} = {computed}"
    if order != "shuffled":
        yield "order", _ORDERS[order]
    if (left := samples - per_epoch * batch) > 0:
        same = order in ("sequential", "columns")
        each = "the last ones" if same else "others each time"
        yield "left out", f"{count(left, 'sample')} per epoch, {each} (--drop-last)"
    if plan.total_steps == plan.epochs * per_epoch:
        yield "training", f"{steps} = {count(plan.epochs, 'epoch')} × {per_epoch:,}"
    else:
        epochs = f"{plan.total_steps / per_epoch:.4g} epochs of {per_epoch:,}"
        yield "training", f"{steps} (--max-steps) = {epochs}"
    if few := explained.last_step:
        each = f", {few.shares[0].samples} per rank" if len(few.shares) == 1 else ""
        text = (
            f"{count(few.samples, 'sample')} at the end of an epoch = {samples:,} - "
            f"{per_epoch - 1:,} × {batch:,}{each}; each has equal weight"
        )
        yield "last step", text
        yield from _shares(few) if len(few.shares) > 1 else ()


def _rates(explained: Explanation) -> Rows:
    plan, settings = explained.plan, explained.settings
    if settings.lr_scaling == "none":
        yield "lr", f"{plan.lr:.6g} (--lr), whatever the global batch: --lr-scaling is none"
    else:
        root = "square root of " if settings.lr_scaling == "sqrt" else ""
        text = (
            f"{plan.lr:.6g} = {settings.lr:.6g} × {plan.lr / settings.lr:.4g} "
            f"({settings.lr_scaling} scaling: {root}{plan.global_batch_size:,} samples per "
            f"step / {settings.base_batch_size:,} that --lr was tuned for)"
        )
        yield "lr", text
    own: str = settings.schedule
    if plan.schedule is not None:
        own = f"the recipe's own{explained.scheduler and f', {explained.scheduler}'}"
    warmup = warmup_steps(plan, settings)
    ramp = f"{count(warmup, 'step')} of warm-up, then " if warmup else ""
    longer = ": it ends within the warm-up" if warmup >= plan.total_steps else ""
    yield "schedule", f"{ramp}{own}{longer}"
    for rate in explained.rates:
        yield f"step {rate.step:,}", f"{rate.lr:.6g}  {rate.what}"
    yield "optimizer", explained.optimizer


def _memory(explained: Explanation) -> Rows:
    memory, settings = explained.memory, explained.settings
    if memory is None:
        yield "not measured", explained.not_measured
        yield from _strategies(explained)
        return
    yield "weights", _product(memory.weights)
    if memory.buffers.bytes:
        yield "buffers", _product(memory.buffers)
    yield "gradients", _product(memory.gradients)
    yield "optimizer", _optimizer(memory)
    if settings.ema is not None:
        yield "average", f"{_product(memory.average)} (--ema), once more while it evaluates"
    samples = count(explained.step.most, "sample")
    if explained.plan.by_tokens is not None and settings.batch_tokens is not None:
        parts = explained.plan.world_size * explained.plan.accumulate
        samples = f"about {settings.batch_tokens // parts:,} tokens"
    yield "a batch", f"{size(memory.batch.bytes)}: inputs and targets of a micro-step, {samples}"
    activations = f"what one forward of {samples} keeps for its backward"
    if settings.checkpoint_activations:
        activations += "; without the inputs of the marked blocks"
    yield "activations", f"{size(memory.activations.bytes)}: {activations}"
    yield from _gathered(memory)
    yield "data", _data(explained, memory)
    yield "total", f"{size(memory.total)} per rank"
    yield from _strategies(explained)
    yield from _muon(explained)
    missing = ["temporary buffers of operations", "the allocator's reserve"]
    if explained.plan.world_size > 1:
        missing.append("communication buffers")
    if settings.compile == "on":
        missing.append("what compilation changes")
    if settings.num_workers:
        missing.append(f"the loader processes ({settings.num_workers} per rank)")
    base = f" (about {size(RANK_BYTES)})" if explained.device == "cpu" else ""
    yield "not counted", f"Python and PyTorch themselves{base}, {', '.join(missing)}"
    if explained.device != "cpu":
        yield "on the GPU", "kernels may keep more: these numbers were measured on the CPU"


def _gathered(memory: RankMemory) -> Rows:
    if memory.gathered.bytes:
        text = "outputs and targets of the whole batch, on each rank; all ranks gather them"
        yield "gathered", f"{size(memory.gathered.bytes)}: {text} in each step"
    if memory.blocks.bytes:
        text = "weights and gradients of the blocks that are gathered at once"
        yield "blocks", f"{size(memory.blocks.bytes)}: {text}"


def _muon(explained: Explanation) -> Rows:
    if (taken := explained.whole_matrices) is None:
        return
    text = (
        f"every rank orthogonalises {count(taken.number, 'whole weight')}: {short(taken.flops)} "
        f"FLOPs per step, and {size(taken.largest_bytes)} for the largest"
    )
    gathered = f"; they are gathered for it, {size(taken.gathered_bytes)} per step"
    yield "Muon", text + (gathered if taken.gathered_bytes else "")


def _strategies(explained: Explanation) -> Rows:
    for name, memory in explained.strategies.items():
        least = "" if memory.complete else "at least "
        text = f"{least}{size(memory.bytes_per_rank)} per rank"
        if memory.available_bytes is not None:
            where = "on this GPU" if explained.device == "cuda" else "free here"
            ranks = "" if explained.device == "cuda" else f" × {explained.world.local_world_size}"
            fits = "fits" if memory.fits else "does not fit"
            text += f"{ranks}: {fits} ({size(memory.available_bytes)} {where})"
        yield name, text


def _product(part: MemoryPart) -> str:
    """Return bytes as a product, if all elements are of one size."""
    if not part.elements:
        return "nothing"
    each, rest = divmod(part.bytes, part.elements * part.copies)
    copies = f"{part.copies} × " if part.copies > 1 else ""
    factors = f"{part.elements:,} numbers" if rest else f"{part.elements:,} × {each} bytes"
    why = ", sums of virtual ranks that wait for each other" if part.copies > 1 else ""
    return f"{size(part.bytes)} = {copies}{factors}{why}"


def _optimizer(memory: RankMemory) -> str:
    parts = memory.optimizer.values()
    if not parts:
        return "nothing: it keeps no state between steps"
    names = " + ".join(f"{name} {part.elements:,}" for name, part in memory.optimizer.items())
    each = {part.bytes / max(1, part.elements) for part in parts}
    times = f", each × {each.pop():g} bytes" if len(each) == 1 else ""
    return f"{size(sum(part.bytes for part in parts))}: {names} numbers{times}"


def _data(explained: Explanation, memory: RankMemory) -> str:
    if not memory.data.bytes:
        return "none: samples are read on demand"
    where = "in the rank's memory"
    if explained.device == "cuda":
        where = "on its GPU if they fit a quarter of it, else in the CPU's memory"
    use = "for training"
    if explained.evaluations.has_validation:
        use += " and validation"
    number = count(memory.data.elements, "sample")
    return f"{size(memory.data.bytes)}: {number} {use}, all {where}"


def _other_rank_counts(explained: Explanation) -> Rows:
    yield "", f"{'samples/step':>12}  {'micro-steps':>11}  {'steps':>9}  {'lr':>8}"
    for other in explained.others:
        name = count(other.ranks, "rank")
        if other.refused:
            yield name, f"refused: {other.refused}"
            continue
        steps = f"{other.total_steps:,}" if other.total_steps < ENDLESS else "-"
        this = other.ranks == explained.plan.world_size
        word = "this one" if this else "the same" if other.same else "another training"
        portions = f"{other.accumulate} × {other.micro_batch_size}"
        yield (
            name,
            f"{other.global_batch_size:>12,}  {portions:>11}  {steps:>9}  {other.lr:>8.4g}  {word}",
        )


def _equal(explained: Explanation) -> Rows:
    plan, drawn = explained.plan, explained.drawn
    if any(not (other.same or other.refused) for other in explained.others):
        text = (
            "with --batch-size-per-rank, the global batch changes with the number of ranks. Keep "
            f"it with --batch-size {plan.global_batch_size}."
        )
        yield "another", text
    if plan.virtual_ranks:
        text = (
            f"to the last bit on 1 to {plan.virtual_ranks} ranks, dropout and batch normalisation "
            "included, with the same PyTorch and device model"
        )
        yield "equal", text
        return
    text = (
        "with the same global batch: the order of the samples, the samples of each step, the "
        "learning rate, and, to rounding, losses and gradients"
    )
    yield "equal", text
    if drawn is None:
        yield "not equal", "not known: the model was not tried. samestep verify tries it."
        return
    accepted = dict.fromkeys(explained.accepts, ", as the recipe accepts")
    reasons = []
    if drawn.draws:
        lines = sorted({line for line in drawn.draws.values() if line})[:3]
        at = f" ({', '.join(lines)})" if lines else ""
        reasons.append(
            f"what the model draws from torch: {', '.join(sorted(drawn.draws)[:3])}{at}. Each rank "
            f"draws different numbers{accepted.get('dropout', '')}."
        )
    if drawn.batch_norms and not explained.settings.sync_batchnorm:
        reasons.append(
            f"batch normalisation ({listed(drawn.batch_norms, 1)}): it normalises over the "
            f"{explained.step.most} samples of a micro-step{accepted.get('batchnorm', '')}."
        )
    if drawn.generators:
        reasons.append(f"{' and '.join(drawn.generators)}: each rank draws different numbers.")
    yield from (("not equal", reason) for reason in reasons)
    if reasons:
        remedy = "" if plan.is_stream else "--virtual-ranks makes them equal; "
        yield "remedy", f"{remedy}samestep verify checks all the rest"
        return
    without = "has no batch normalisation"
    if drawn.batch_norms:
        without = "normalises over the samples of all ranks (--sync-batchnorm)"
    yield "not equal", f"nothing found: the model draws nothing and {without}"


def _intervals(every_epochs: int, every_steps: int | None) -> list[str]:
    epochs = "epoch" if every_epochs == 1 else count(every_epochs, "epoch")
    intervals = [f"after every {epochs}, and at the end"]
    if every_steps:
        steps = "step" if every_steps == 1 else count(every_steps, "step")
        intervals.append(f"after every {steps}")
    return intervals


def _evaluation(explained: Explanation) -> Rows:
    evaluations, settings, events = explained.evaluations, explained.settings, explained.events
    if not evaluations.has_validation:
        yield "validation", "none"
    else:
        when = ", ".join(_intervals(settings.eval_every_epochs, settings.eval_every_steps))
        times = sum(event.evaluates for event in events or ())
        in_all = f": {count(times, 'evaluation')}" if events is not None else ""
        yield "when", f"{when}{in_all}"
        samples, share = "a stream", ""
        if evaluations.num_samples is not None:
            samples = count(evaluations.num_samples, "sample")
        if evaluations.share is not None and explained.world.num_parts > 1:
            of = "virtual rank" if explained.plan.virtual_ranks else "rank"
            fewest, most = evaluations.share
            between = "or" if most == fewest + 1 else "to"  # several sets are shared out each
            share = f", {fewest}{f' {between} {most}' if most > fewest else ''} per {of}"
        yield "on", f"{samples}{share}, {evaluations.batch_size} per forward; each counts once"
        better = "lowest" if evaluations.mode == "min" else "highest"
        yield "best", f"the one with the {better} {evaluations.monitor}"
    if settings.patience is not None:
        first = explained.stops_first
        where = "" if events is None else ": not before the end"
        if first is not None and first.step < explained.plan.total_steps:
            where = f"; after step {first.step:,} at the earliest"
        patience, metric = count(settings.patience, "evaluation"), settings.stop_monitor or ""
        of_it = f" of {metric.partition(':')[0]}" if metric else ""
        yield "may stop", f"after {patience} without improvement{of_it}{where}"
    if (n := settings.halving) is not None:
        epochs = ", ".join(str(settings.eval_every_epochs * n**k) for k in range(3))
        yield "may stop", f"after epochs {epochs} … if others of the sweep are better"
    if evaluations.has_test:
        yield "test", "once, at the end, with the best checkpoint"


def _checkpoints(explained: Explanation) -> Rows:
    settings, events, files_kept = explained.settings, explained.events, explained.kept
    ways = _intervals(settings.checkpoint_every_epochs, settings.checkpoint_every_steps)
    if settings.checkpoint_every_minutes:
        ways.append(f"after {settings.checkpoint_every_minutes:g} minutes without one")
    names = [event.saves for event in events or () if event.saves]
    number = f": {count(len(names), 'file')}" if events is not None else ""
    also = ""
    if saves_the_best(settings, events or ()):
        also = ", and after each evaluation that is the best so far (--patience)"
    yield "when", f"{', '.join(ways)}{number}; also when it is stopped{also}"
    if names:
        shown = names if len(names) < _SHOWN else [*names[:2], "…", names[-1]]
        yield "which", ", ".join(shown)
    if files_kept is not None:
        fewest = "" if files_kept.fewest == files_kept.most else f"{files_kept.fewest} or "
        files = f"{fewest}{count(files_kept.most, 'file')}"
        yield "kept", f"{_retention_phrase(retention_of(settings))}: {files} at the end"
    if explained.checkpoint_bytes is not None:
        each, average = explained.checkpoint_bytes, "" if settings.ema is None else ", average"
        yield "size", f"about {size(each)} each: weights, optimizer{average}, the state of the run"
        if files_kept is not None:
            most = files_kept.most + 1
            text = (
                f"up to {size(most * each)} = {most} × {size(each)}: one extra "
                "while a new one is written"
            )
            yield "disk", text


def _retention_phrase(rules: Retention) -> str:
    if rules.keeps_all:
        return "all"
    best = "the best" if rules.top_k is None else f"the best {rules.top_k}"
    last = "the last" if rules.newest in (None, 1) else f"the newest {rules.newest}"
    if rules.hours is None:
        return f"{best} and {last}"
    return f"{best}, {last}, and those of the last {rules.hours:g} hours"
