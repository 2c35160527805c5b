"""Rules about the model: is it one model, on all ranks, from the first step to the last?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from math import prod

from samestep.base.errors import listed
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import Found, NotSeen, replaced, rule
from samestep.scripts.checking.rules.accumulation import by_step
from samestep.scripts.checking.rules.files import named
from samestep.scripts.checking.seen import M, Seen, why_apart

_FEW_SAMPLES, _STEPS = 16, 2
_CLIPPED, _ABOUT = 1.001, 0.1  # factors are the same
_NORMS = ("running_mean", "running_var", "num_batches_tracked")
_INTEGERS = ("int", "uint", "bool")  # of random states, objects and counts
_UNUSED = "Expected to have finished reduction in the prior iteration"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One model, as all ranks trained it. What is of one rank is of rank 0."""

    name: str
    models: tuple[ev.ModelTrained, ...]  # its first forward pass with gradients, rank by rank
    wrap: ev.ModelWrapped | None
    forwards: list[ev.ForwardPass]  # those with gradients, of rank 0
    steps: list[tuple[ev.OptimizerStep, ...]]  # those whose gradients were looked at, rank by rank
    weights: list[tuple[ev.WeightSums, ...]]  # before the first step and after those, rank by rank
    is_exchanged: bool
    """Whether the script itself sends tensors as large as a weight from rank to rank."""
    is_fed_alike: bool  # whether all ranks are known to be given the same samples

    @property
    def is_wrapped(self) -> bool:
        """Whether its wrapper is called in training."""
        return any(event.wrapped for event in self.forwards)

    @property
    def is_one(self) -> bool:
        """Whether the ranks are meant to keep it equal, and see to it by themselves or by DDP."""
        if not self.steps:
            return False
        by_hand = self.is_exchanged and not _differing([step.grads for step in self.steps[0]])
        return (self.is_wrapped or by_hand) and not self.past_wrapper(True)

    def past_wrapper(self, is_exchanged: bool) -> list[ev.ForwardPass]:
        """Return a forward pass of each step to whose gradients DDP was not called."""
        past, before = [], 0.0
        for step in self.steps:
            window = [e for e in self.forwards if before < e.time < step[0].time]
            before = step[0].time
            apart = _differing([rank.grads for rank in step]) or not is_exchanged
            if window and apart and all(e.inner and not e.wrapped for e in window):
                past.append(window[-1])
        return past


def _trained(seen: Seen) -> Iterator[Trained]:
    """Yield the models that every rank trains; of sharded ones no rank has all the weights."""
    for models in seen.together(ev.ModelTrained):
        weights = list(zip(*_of(seen, models, ev.WeightSums), strict=False))
        same = all(model.shapes == models[0].shapes for model in models)
        if not same or any(event.sharded for event in weights[0]):
            continue
        steps = [
            [e for e in rank.of(ev.OptimizerStep) if e.grads and model.model_id in e.models]
            for rank, model in zip(seen.ranks, models, strict=True)
        ]
        passes = _of(seen, models, ev.ForwardPass)
        rows = [[event.rows for event in events] for events in passes]
        whole = [prod(shape) for shape in models[0].shapes.values()]
        largest = max(whole, default=0)
        # Without gradients a script averages weights, or gathers what it evaluates.
        own = {largest, sum(whole)}
        yield Trained(
            name=models[0].model,
            models=models,
            wrap=next(iter(_of(seen, models, ev.ModelWrapped)[0]), None),
            is_fed_alike=any(rows[0]) and all(own == rows[0] for own in rows),
            forwards=[e for e in passes[0] if e.grad and e.training],
            steps=list(zip(*steps, strict=False)),
            weights=weights,
            is_exchanged=any(
                sum(sizes) >= largest and (not event.evaluating or sizes[0] in own)
                for event in seen.ranks[0].of(ev.CollectiveCalled)
                if event.time > models[0].time and not (event.dtype or "").startswith(_INTEGERS)
                if (sizes := [prod(shape) for shape in event.shapes])
            ),
        )


def _of(seen: Seen, models: tuple[ev.ModelTrained, ...], kind: type[M]) -> list[list[M]]:
    """Return the events of a model of each rank; each rank has its own number for it."""
    return [
        rank.of_model(kind, model.model_id) for rank, model in zip(seen.ranks, models, strict=True)
    ]


def _differing(sums: Sequence[ev.Checksums]) -> list[str]:
    """Return the names whose checksums are not the same on all ranks."""
    return [name for name in sums[0] if any(own.get(name) != sums[0][name] for own in sums)]


@rule("SS201")
def separate_models(seen: Seen) -> Iterator[Found | NotSeen]:
    """Nothing wraps the model, and no tensor as large as a weight goes from rank to rank."""
    if _shares_out(seen) or _clipped_apart(seen) is not None:
        return  # or what they share is exchanged: its gradients were equal on all ranks
    for trained in _trained(seen):
        wrapped = trained.wrap is not None or trained.is_wrapped
        if wrapped or trained.is_exchanged or not trained.steps or _left_out(seen, trained):
            continue
        apart = [(w[0].step, _differing([e.parameters for e in w])) for w in trained.weights]
        if any(names for _, names in apart) and not apart[-1][1]:
            continue  # the ranks average their models from time to time
        step, names = next((pair for pair in apart if pair[1]), (0, []))
        first, last = (own[0].parameters for own in (trained.weights[0], trained.weights[-1]))
        matrices = [n for n, shape in trained.models[0].shapes.items() if len(shape) > 1]
        trains = any(last[n] != first[n] for n in matrices if n not in apart[-1][1])
        if (trains or not names) and not trained.is_fed_alike:
            continue  # equal weights from other samples: they exchange gradients in some way
        of = len(trained.weights[0][0].parameters)
        when = f"after step {step}" if step else "before the first step"
        difference = (
            f"{len(names)} of its {of} parameters differ {when}, {names[0]} first"
            if names
            else "the ranks train equal copies"
        )
        text = f"{trained.name} is called without DistributedDataParallel, and in "
        text += f"{seen.ranks[0].steps} steps of {seen.world_size} ranks no gradient is exchanged: "
        remedy = "Wrap the model once it is built: model = DistributedDataParallel(model)"
        yield Found((trained.forwards or trained.models)[0].where, text + difference, remedy)


@rule("SS202")
def unequal_start(seen: Seen) -> Iterator[Found | NotSeen]:
    """The gradients are the same, but the weights before the first step are not."""
    for trained in _trained(seen):
        names = _differing([event.parameters for event in trained.weights[0]])
        if names and trained.steps and (trained.is_wrapped or trained.is_exchanged):
            if _differing([step.grads for step in trained.steps[0]]):
                continue
            text = f"{len(names)} of {len(trained.weights[0][0].parameters)} parameters of "
            text += f"{trained.name} differ between the {seen.world_size} ranks before the first "
            text += f"step, {names[0]} first"
            remedy = "Broadcast the weights of rank 0 before the first step, as DDP does."
            if trained.is_wrapped and trained.wrap is not None:
                text += ", although DDP made them equal"
                remedy = "Change weights on all ranks, before DDP is made: it broadcasts rank 0's."
            yield Found(trained.models[0].where, text, remedy)


@rule("SS203")
def drift(seen: Seen) -> Iterator[Found | NotSeen]:
    """The ranks begin with the same weights and end with different ones."""
    if seen.any(ev.JoinEntered):
        yield NotSeen("within `model.join()` ranks take different numbers of steps")
        return
    if any(unused_parameters(seen)):
        return  # what shares a bucket with those is not all-reduced
    each = [*_trained(seen)]
    left_out = next(filter(None, (_left_out(seen, trained) for trained in each)), None)
    alone = _clipped_apart(seen) or _stepped_apart(seen) or _scheduled_apart(seen)
    apart_by = alone or left_out or _loose(seen)
    if apart_by is not None:
        yield apart_by
        return
    for trained in each:
        apart = [(w, _differing([e.parameters for e in w])) for w in trained.weights]
        if not trained.is_one or apart[0][1] or not apart[-1][1]:
            continue
        weights, names = next(pair for pair in apart if pair[1])
        steps = [
            max((e for e in rank.of(ev.OptimizerStep) if e.time <= w.time), key=lambda e: e.time)
            for rank, w in zip(seen.ranks, weights, strict=True)
        ]
        rates = {event.lr for event in steps}
        unequal = _differing([step.grads for step in steps])
        if unequal and trained.is_exchanged:
            yield NotSeen("the script averages weights or gradients itself, perhaps rarely")
            continue
        wrap = trained.wrap if trained.is_wrapped else None
        if wrap is not None and len(unequal) == len(steps[0].grads):
            cause = (
                "no gradient is averaged, although DDP is called: a model that is converted or "
                "moved after DDP was made is no longer known to it"
            )
        elif len(rates) > 1:
            cause = f"their learning rates are {', '.join(format(e.lr, 'g') for e in steps)}"
        elif unequal:
            passes = seen.ranks[0].of(ev.BackwardPass)
            reduced = any(e.sync and e.time < weights[0].time for e in passes)
            cause = f"the gradients of {unequal[0]} already differed in this step" + (
                "" if reduced else ", and no backward pass has all-reduced them"
            )
        else:
            cause = "their gradients and learning rates are equal: something else changes weights"
        text = f"after step {weights[0].step} {len(names)} of {len(weights[0].parameters)} "
        text += f"parameters of {trained.name} differ between the {seen.world_size} ranks, "
        text += f"{names[0]} first; {cause}"
        remedy = "Let every rank change weights, gradients and learning rates in the same way."
        origin = {} if wrap is None else {"DDP is made": wrap.where}
        yield Found(weights[0].where, text, remedy, comes_from=origin)


def _left_out(seen: Seen, trained: Trained) -> Found | None:
    """Return a finding if some gradients are made equal on all ranks, and others are not."""
    apart = [_differing([e.parameters for e in sums]) for sums in trained.weights]
    parts = [(step, _differing([rank.grads for rank in step])) for step in trained.steps]
    late = [*dropwhile(lambda part: not part[1], parts)]
    shared = all(any(step[0].grads[n] for n in {*step[0].grads} - {*own}) for step, own in late)
    # Of what only one rank has gradients, such as the head of its own task, there is no mean.
    each = [{n for step, _ in late for n in step[r].grads if step[r].grads[n]} for r in range(2)]
    names = [n for n in apart[-1] if n in each[0] & each[1] and all(n in own for _, own in late)]
    differ = [*dropwhile(lambda own: not own, apart)]  # else they are averaged now and then
    if trained.wrap is not None or apart[0] or len(late) < _STEPS or not (names and shared):
        return None
    if not all(differ) or _shares_out(seen):
        return None
    step = late[0][0][0]
    calls = [c for c in seen.ranks[0].of(ev.CollectiveCalled) if c.time < step.time]
    where = next((c.where for c in calls[::-1] if c.name.startswith("all_")), step.where)
    text = f"in {len(late)} steps looked at from step {step.step} on, the gradients of "
    text += f"{len(names)} of {len(step.grads)} parameters of {trained.name} differ between the "
    text += f"{seen.world_size} ranks ({listed(names)}), and those of the others are equal"
    remedy = "Exchange the gradients of all parameters that are trained in this step."
    return Found(where, text, remedy, comes_from={"the step is taken": step.where})


def _loose(seen: Seen) -> Found | None:
    """Return a finding if a parameter of no module is not exchanged, as others of its step are."""
    loose: list[tuple[ev.OptimizerStep, list[int]]] = []
    for steps in seen.together(ev.OptimizerStep):
        shared = any(steps[0].grads.values()) and not _differing([step.grads for step in steps])
        columns = zip(*(step.strangers for step in steps), strict=False)
        unlike = [each[0][0] for each in columns if len({g for _, g in each} | {None}) > 2]
        loose += [(steps[0], shape) for shape in unlike[:1] if shared]
    if len(loose) < _STEPS or _shares_out(seen):
        return None
    step, shape = loose[0]
    text = f"{step.optimizer} holds a parameter of no module (shape {shape}), whose gradient "
    text += f"differs between the ranks in {len(loose)} steps looked at; those of the model are "
    text += "equal"
    return Found(step.where, text, "Make it a parameter of the module that DDP wraps.")


def _scheduled_apart(seen: Seen) -> Found | None:
    """Return a finding if schedules follow another number on each rank, in a wrapped training."""
    each = [[e for e in rank.of(ev.SchedulerStep) if e.metric is not None] for rank in seen.ranks]
    for steps in zip(*each, strict=False) if seen.any(ev.ModelWrapped) else ():
        least, *_, most = sorted(abs(event.metric or 0.0) for event in steps)
        if most > _CLIPPED * least and len({event.step for event in steps}) == 1:
            numbers = ", ".join(f"{event.metric:.5g}" for event in steps)
            text = f"after step {steps[0].step} the ranks step their schedules by {numbers}, so "
            text += "that one may reduce its learning rate while others do not"
            return Found(steps[0].where, text, "All-reduce the number before.")
    return None


def _shares_out(seen: Seen) -> bool:
    """Whether the ranks have parts of their own, as experts."""
    return any(e.name.startswith("all_to_all") for e in seen.any(ev.CollectiveCalled)) or bool(
        why_apart(seen)
    )


def _stepped_apart(seen: Seen) -> Found | None:
    """Return a finding if only some ranks step with gradients that DDP has averaged on all."""
    taken, passes = list[list[ev.OptimizerStep]](), list[int]()  # the last may be cut off
    for rank in seen.ranks:
        wrapped = {event.model_id for event in rank.of(ev.ModelWrapped)}
        taken.append([e for e in rank.of(ev.OptimizerStep) if not wrapped.isdisjoint(e.models)])
        passes.append(sum(event.sync for event in rank.of(ev.BackwardPass)))
    counts = [len(steps) for steps in taken]
    same_passes = max(passes) - min(passes) <= 1 < max(passes)
    if max(counts) - min(counts) <= 1 or not same_passes:
        return None
    if any(trained.is_exchanged for trained in _trained(seen)):
        return None
    text = f"gradients are averaged in {max(passes)} backward passes, and the ranks take "
    text += f"{' and '.join(map(str, counts))} steps with them"
    remedy = "Step on every rank: each has the weights for itself, and DDP averages gradients only."
    return Found(max(taken, key=len)[0].where, text, remedy)


def _clipped_apart(seen: Seen) -> Found | None:
    """Return a finding if ranks clip parts of one model by norms of their own.

    Either the shards of one, or gradients that are equal on all ranks next to those of experts.
    """
    sharded = all(any(e.sharded for e in rank.of(ev.WeightSums)) for rank in seen.ranks)
    for steps in seen.together(ev.GradientsUsed) if sharded else ():
        times = [event.grown for event in steps]
        if all(times) and max(times) > _CLIPPED * min(times) > 0:
            text = f"in step {steps[0].step + 1} the ranks multiply the gradients of their shards "
            text += f"by {', '.join(f'{factor:.4g}' for factor in times)}"
            remedy = (
                "Scale them on all ranks alike: `clip_grad_norm_` knows the norm of all shards."
            )
            return Found(steps[0].where, text, remedy)
    for clips in seen.together(ev.GradientsClipped):
        norms = [event.norm for event in clips if event.norm is not None]
        if len(norms) < len(clips) or any(event.where != clips[0].where for event in clips):
            continue
        limit = clips[0].limit
        factors = [min(1.0, limit / norm) if norm else 1.0 for norm in norms]
        columns = zip(*(event.sums for event in clips), strict=False)
        shared = sum(len(set(sums)) == 1 and bool(sums[0]) for sums in columns)
        if shared and max(factors) > _CLIPPED * min(factors):
            shown = ", ".join(f"{norm:.4g}" for norm in norms)
            text = f"in step {clips[0].step + 1} {shared} gradients that are equal on all ranks "
            text += f"are clipped by the norm of each rank's own part: {shown}, with a limit of "
            text += f"{limit:g}"
            remedy = "All-reduce the squared norms of what each rank has for itself, and clip by "
            remedy += "the norm of the whole: `torch.nn.utils.clip_grads_with_norm_`."
            return Found(clips[0].where, text, remedy)
    return None


@rule("SS204")
def past_the_wrapper(seen: Seen) -> Iterator[Found | NotSeen]:
    """Steps whose forward passes went to `.module`, or to a part of the model."""
    for trained in _trained(seen):
        past = trained.past_wrapper(trained.is_exchanged) if trained.wrap is not None else []
        if past:
            line = seen.line(past[0].where)
            text = f"in {len(past)} of {len(trained.steps)} steps looked at, {trained.name} is "
            text += "called without the DDP around it, and no gradient is all-reduced"
            otherwise = "Call the DDP model itself; what else its parts have to do belongs into "
            otherwise += "the forward of the model that is wrapped."
            remedy = replaced(line, line.replace(".module(", "(", 1), otherwise)
            origin = {} if trained.wrap is None else {"DDP is made": trained.wrap.where}
            yield Found(past[0].where, text, remedy, comes_from=origin)


@rule("SS205")
def few_samples(seen: Seen) -> Iterator[Found | NotSeen]:
    """BatchNorm in training under DDP, with few samples of a rank."""
    for trained in _trained(seen):
        norms = trained.models[0].batch_norms
        counts = [event.n for event in trained.forwards if event.n is not None]
        if norms and trained.wrap is not None and counts and max(counts) < _FEW_SAMPLES:
            text = f"{len(norms)} BatchNorm layers of {trained.name} ({norms[0]} first) are "
            text += f"normalised over {max(counts)} samples on each rank"
            remedy = "Before DDP: model = nn.SyncBatchNorm.convert_sync_batchnorm(model)"
            yield Found(trained.wrap.where, text, remedy)


@rule("SS206")
def unequal_buffers(seen: Seen) -> Iterator[Found | NotSeen]:
    """Buffers that DDP does not broadcast, and that the ranks do not change alike."""
    for trained in _trained(seen):
        if not trained.is_one:
            continue
        if trained.wrap is not None and trained.wrap.broadcast_buffers:
            yield from _overwritten(trained)
            continue
        names = _differing([rank.buffers for rank in trained.weights[-1]])
        if not names:
            continue
        own = [name for name in names if not name.endswith(_NORMS)]
        changed = {
            rank
            for rank, (first, last) in enumerate(
                zip(trained.weights[0], trained.weights[-1], strict=True)
            )
            if any(first.buffers.get(name) != last.buffers[name] for name in own)
        }
        some = own and len(changed) < seen.world_size
        text = f"after step {trained.weights[-1][0].step} {len(names)} buffers of {trained.name} "
        text += f"differ between the ranks, {(own or names)[0]} first"
        text += f"; only {named(changed)} changed it" if some else ""
        remedy = "Change buffers on all ranks alike, or leave DDP's broadcast_buffers on."
        where = (trained.wrap or trained.models[0]).where
        yield Found(where, text, remedy, severity=None if some else "advice")


def _overwritten(trained: Trained) -> Iterator[Found]:
    """Yield tables that each rank fills with its own rows, until DDP copies those of rank 0."""
    tables = {*trained.models[0].tables}
    start, *later = [_differing([r.buffers for r in sums]) for sums in trained.weights]
    always = tables.intersection(*later)
    if always and not start and len(later) >= _STEPS and trained.wrap is not None:
        text = f"after {len(later)} steps looked at, the ranks have filled "
        text += f"{listed(sorted(always))} of {trained.name} differently; before each forward pass "
        text += "DDP overwrites that with what rank 0 has"
        remedy = "Gather on all ranks what is written into it."
        yield Found(trained.forwards[0].where, text, remedy, "advice")


@rule("SS207")
def unused_parameters(seen: Seen) -> Iterator[Found | NotSeen]:
    """A loss does not reach some parameters, and find_unused_parameters is off."""
    ends = [event.text for event in seen.any(ev.RankEnded)]
    for trained in _trained(seen):
        wrap = trained.wrap
        if wrap is None or wrap.find_unused_parameters or wrap.static_graph:
            continue
        unused: dict[str, None] = {}
        ranks = set()
        for rank, model in zip(seen.ranks, trained.models, strict=True):
            left: list[str] = []
            events = rank.of(ev.BackwardPass, ev.OptimizerStep, ev.RankEnded)
            for event in (e for e in events if getattr(e, "grads", True)):  # a step not looked at
                if isinstance(event, ev.BackwardPass):
                    left = event.unused.get(str(model.model_id), []) if event.sync else []
                    continue
                if isinstance(event, ev.OptimizerStep):
                    left = [n for n in left if n in event.grads and event.grads[n] is None]
                elif isinstance(event, ev.RankEnded) and _UNUSED not in event.text:
                    left = []
                if left:
                    unused |= dict.fromkeys(left)
                    ranks.add(rank.rank)
        if unused:
            names, of = list(unused), len(trained.models[0].shapes)
            failed = "; the next forward pass failed" if any(_UNUSED in t for t in ends) else ""
            text = f"the loss does not reach {len(names)} of {of} parameters of {trained.name} on "
            text += f"{named(ranks)}: {', '.join(names[:3])}{failed}"
            remedy = "Remove what is not used, or freeze it by requires_grad_(False) before DDP is "
            remedy += "made; if it is used in other steps, DistributedDataParallel(…, "
            remedy += "find_unused_parameters=True)."
            yield Found(wrap.where, text, remedy)


@rule("SS208")
def all_used(seen: Seen) -> Iterator[Found | NotSeen]:
    """Every backward pass on every rank reaches every parameter."""
    for trained in _trained(seen):
        wrap = trained.wrap
        if wrap is None or not wrap.own or not wrap.find_unused_parameters:
            continue
        looked = [
            event.unused[str(model.model_id)]
            for rank, model in zip(seen.ranks, trained.models, strict=True)
            for event in rank.of(ev.BackwardPass)
            if str(model.model_id) in event.unused
        ]
        if len(looked) < 3 * seen.world_size:
            yield NotSeen("too few backward passes")
        elif not any(looked):
            line = seen.line(wrap.where)
            without = line.replace(", find_unused_parameters=True", "", 1)
            text = f"all {len(looked)} backward passes of {seen.world_size} ranks reach all "
            text += f"{len(trained.models[0].shapes)} parameters of {trained.name}"
            yield Found(wrap.where, text, replaced(line, without, "Leave it out."))


@rule("SS209")
def gpu_of_global_rank(seen: Seen) -> Iterator[Found | NotSeen]:
    """Where the ranks seem to have a node each, look at the device that a rank asks for."""
    asked = seen.any(ev.DeviceAsked)
    apart = [event for event in asked if event.rank != event.local_rank]
    if asked and not apart:
        yield NotSeen("all ranks were on one node, where the global rank is the local one")
    wrong = [e for e in apart if e.index == e.rank and not e.alone]
    for event in wrong[:1]:
        others = dict.fromkeys(e.where for e in wrong if e.where != event.where)
        text = f"with one rank per node, rank {event.rank} asked for cuda:{event.index}, and its "
        text += f"LOCAL_RANK is {event.local_rank}"
        text += f" (also {', '.join(others)})" if others else ""
        remedy = 'Choose devices by int(os.environ["LOCAL_RANK"]), and data and files by the rank.'
        yield Found(event.where, text, remedy)


@rule("SS210")
def sums_weights(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for weights that collectives over them leave larger by the number of ranks."""
    shapes = [event.shapes.values() for event in seen.ranks[0].of(ev.ModelTrained)[:1]]
    whole = sum(prod(shape) for own in shapes for shape in own)
    for calls, step in by_step(seen.ranks[0], ev.CollectiveCalled, ev.GradientsUsed):
        sizes = [sum(map(prod, call.shapes)) for call in calls]
        grown = step.weights_grown or 0.0
        if sum(sizes) >= whole and abs(grown / seen.world_size - 1) < _ABOUT:
            call = calls[sizes.index(max(sizes))]
            text = f"{call.name} makes the weights of step {step.step} {grown:.3g} times as large"
            yield Found(call.where, text, "Divide what comes back by the world size.")
            return
