"""Rules that one process can break too: what is trained, how, in which mode, and what is saved."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from samestep.base.errors import listed
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import Found, NotSeen, replaced, rule
from samestep.scripts.checking.rules.evaluation import evaluations, with_loader
from samestep.scripts.checking.seen import RankSeen, Seen

_LEAST_STEPS = 2
_FEW = 3  # steps
_AGAINST = -0.5  # a cosine: losses that share a model may disagree now and then
_LARGE = 0.1  # of the largest learning rate
_LEFT_ON, _IN_A_ROW = 3, 2  # training steps; forward passes of an evaluation
_SKIPS = 8  # in a row; a scaler's first guess may be wrong by some powers of 2


def _astray(
    rank: RankSeen,
) -> Iterator[tuple[ev.OptimizerStep, ev.ModelTrained, dict[str, list[int]], bool]]:
    """Yield the models with weights that get gradients, but that no optimizer holds or changes.

    With the step, the weights' shapes by name, and whether the optimizer holds tensors of these
    shapes instead, without a gradient.
    """
    steps = [step for step in rank.of(ev.OptimizerStep) if step.grads or step.strangers]
    for model in {model.model_id: model for model in rank.of(ev.ModelTrained)}.values():
        number = str(model.model_id)
        first = [step for step in steps if number in step.unheld]
        if not first or len(first) < min(_LEAST_STEPS, rank.steps):
            continue
        changed = _changed(rank, model)
        shapes = {n: shape for n, shape in first[0].unheld[number].items() if n not in changed}
        dead = {tuple(shape) for shape, gradient in first[0].strangers if gradient is None}
        if shapes:
            yield first[0], model, shapes, not dead.isdisjoint(map(tuple, shapes.values()))


def _changed(
    rank: RankSeen, model: ev.ModelTrained, kind: type[ev.ModelSums] = ev.WeightSums
) -> set[str]:
    """Return the weights that are not always the same as before the first step."""
    start = rank.of_model(ev.ModelSums, model.model_id)[0].parameters
    later = [event.parameters for event in rank.of_model(kind, model.model_id)]
    return {name for name in start if any(sums.get(name) != start[name] for sums in later)}


def _made_at(rank: RankSeen, step: ev.OptimizerStep) -> str:
    optimizers = [e for e in rank.of(ev.OptimizerMade) if e.optimizer_id == step.optimizer_id]
    return optimizers[0].where if optimizers else step.where


def _unheld(
    seen: Seen, *, instead: bool
) -> Iterator[tuple[RankSeen, ev.OptimizerStep, ev.ModelTrained, dict[str, list[int]]]]:
    """Yield stray weights of the first rank that has some, with or without other tensors."""
    for rank in seen.ranks:
        astray = [part for part in _astray(rank) if part[3] == instead]
        for step, model, shapes, _ in astray:
            yield rank, step, model, shapes
        if astray:
            return


@rule("SS701", least_ranks=1)
def unheld_parameters(seen: Seen) -> Iterator[Found | NotSeen]:
    """Gradients other than zero, in no optimizer that was ever made, and never changed."""
    for rank, step, model, shapes in _unheld(seen, instead=False):
        whole = not any(model.model_id in event.models for event in rank.of(ev.OptimizerStep))
        passes = rank.of_model(ev.ForwardPass, model.model_id)
        if whole and passes and not any(event.training for event in passes):
            continue  # a frozen part of a loss, for instance
        text = f"{len(shapes)} of {len(model.shapes)} parameters of {model.model} get gradients "
        text += f"but no optimizer holds them: {listed([*shapes])}; they are the same after "
        text += f"{rank.steps} steps"
        remedy = "Give them to the optimizer, or freeze them with requires_grad_(False). A plain "
        remedy += "list hides layers: make it an `nn.ModuleList`."
        yield Found(_made_at(rank, step), text, remedy, severity="warning" if whole else None)


@rule("SS306", least_ranks=1)
def made_too_early(seen: Seen) -> Iterator[Found | NotSeen]:
    """The same parts of the same model have other tensors than when the optimizer was made."""
    for rank, step, model, shapes in _unheld(seen, instead=True):
        if moved := step.tensors_replaced:
            text = f"{len(moved)} tensors that {step.optimizer} holds are no longer those of "
            text += f"{model.model}: since it was made, {listed(moved)} became other tensors; "
            text += f"{len(shapes)} parameters are unchanged after {rank.steps} steps"
            remedy = "Make the optimizer after the model is moved, converted, loaded and wrapped."
            yield Found(_made_at(rank, step), text, remedy)


@rule("SS702", least_ranks=1)
def other_model(seen: Seen) -> Iterator[Found | NotSeen]:
    """Tensors of the same shapes as the model's, which never get a gradient."""
    for rank, step, model, shapes in _unheld(seen, instead=True):
        if not step.tensors_replaced:
            text = f"{step.optimizer} holds {len(step.strangers)} tensors of no model that is "
            text += f"called; {len(shapes)} parameters of {model.model} of the same shapes "
            text += f"({listed([*shapes])}) get gradients and are unchanged after {rank.steps} "
            text += "steps"
            remedy = "Make the optimizer from the parameters of the model that is trained, once "
            remedy += "that is complete."
            yield Found(_made_at(rank, step), text, remedy)


@rule("SS703", least_ranks=1)
def never_changed(seen: Seen) -> Iterator[Found | NotSeen]:
    """Weights with the same bits after several steps with gradients."""
    for rank in seen.ranks:
        is_astray = False
        for model in rank.of(ev.ModelTrained):
            steps = [e for e in rank.of(ev.OptimizerStep) if model.model_id in e.models and e.grads]
            sums = rank.of_model(ev.WeightSumsBefore, model.model_id)
            changed = _changed(rank, model, ev.WeightSumsBefore)
            before, latest = [0.0, 0.0, *(event.time for event in sums)][-2:]
            # Of a vector all values may be 1, to which a small update adds nothing yet.
            matrices = [name for name, shape in model.shapes.items() if len(shape) > 1]
            names = [
                name
                for name in matrices
                if name not in changed
                and len(_with_gradients(steps, name)) >= _FEW
                and len(_with_gradients(steps, name, until=latest)) >= _LEAST_STEPS
            ]
            after = [
                name
                for name in changed.intersection(matrices)
                if len(_with_gradients(steps, name, before, latest)) >= _LEAST_STEPS
            ]
            stopped = [n for n in after if len({e.parameters[n] for e in sums[-2:]}) == 1]
            if len(stopped) < len(after):  # else it has learnt all that it could
                names += stopped
            idle = [e for e in steps if len(e.still) == len(e.grads)]
            if names or (len(idle) == len(steps) >= _FEW):
                is_astray = True
                yield Found(
                    steps[0].where,
                    f"{len(names)} of {len(model.shapes)} parameters of {model.model} have "
                    f"gradients in {len(_with_gradients(steps, names[0]))} steps, and the same "
                    f"bits before step {sums[-1].step + 1} as "
                    + (f"before step {sums[-2].step + 1}" if names == stopped else "at first")
                    + f": {listed(names)}"
                    if names
                    else f"the learning rate is 0 in all {len(steps)} steps looked at",
                    "Look for what writes weights back after the step."
                    if names
                    else "Let the schedule begin above 0, and step it once per optimizer step.",
                    comes_from={"the optimizer is made": _made_at(rank, steps[0])},
                )
        if is_astray:
            return


def _with_gradients(
    steps: list[ev.OptimizerStep], name: str, since: float = 0.0, until: float = math.inf
) -> list[ev.OptimizerStep]:
    """Return the steps that were taken with a gradient of a parameter, and not at a tiny rate."""
    most = max((event.lr for event in steps), default=0.0)
    return [
        e
        for e in steps
        if since < e.time < until and e.grads.get(name) and name not in e.still
        if e.lr >= _LARGE * most
    ]


@rule("SS713", least_ranks=1)
def frozen_change(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for weights without a gradient that a step changes, and for frozen norms that learn."""
    rank = seen.ranks[0]
    steps = [event for event in rank.of(ev.OptimizerStep) if event.thawed]
    if len(steps) >= _LEAST_STEPS:
        names = steps[-1].thawed
        text = f"{steps[0].optimizer} changes {len(names)} parameters with requires_grad=False "
        text += f"and without a gradient in {len(steps)} steps: {listed(names)}"
        remedy = "Give the optimizer only what has requires_grad, or clear gradients by "
        remedy += "`zero_grad(set_to_none=True)` once it is frozen."
        origin = {"the optimizer is made": _made_at(rank, steps[0])}
        yield Found(steps[0].where, text, remedy, comes_from=origin)
    for model in rank.of(ev.ModelTrained):
        sums = rank.of_model(ev.WeightSums, model.model_id)
        first, last = sums[0], sums[-1]
        vain = model.frozen_in_vain
        parts = tuple(f"{name}." if name else "" for name in vain)
        thawed = sorted(n for n in _changed(rank, model) if f"{n}.".startswith(parts))
        if vain and thawed:
            text = f"an attribute of {listed(vain)} was set to freeze it, and says nothing to "
            text += f"PyTorch: {len(thawed)} parameters change: {listed(thawed)}"
            remedy = "Call `module.requires_grad_(False)`; on a parameter the name is "
            remedy += "`requires_grad`."
            yield Found(model.where, text, remedy)
        kept, moved = list[str](), set[str]()
        for name in model.frozen_norms:
            own, mean = f"{name}.weight", f"{name}.running_mean"
            if first.parameters.get(own) != last.parameters.get(own):
                moved.add(name.partition(".")[0])  # an average of weights, which may learn
            elif first.buffers.get(mean) != last.buffers.get(mean):
                kept.append(name)
        names = [name for name in kept if name.partition(".")[0] not in moved]
        if names:
            text = f"{len(names)} frozen batch norms of {model.model} are in training mode, and "
            text += f"their statistics have changed after {last.step} steps: {listed(names)}"
            remedy = "Call `eval()` of the frozen part after each `model.train()`."
            yield Found(model.where, text, remedy, "advice")


@rule("SS712", least_ranks=1)
def saved_untrained(seen: Seen) -> Iterator[Found | NotSeen]:
    """A module that still has the weights of the beginning is saved, the trained one never."""
    saved = [(rank.rank, event) for rank in seen.ranks for event in rank.of(ev.WeightsSaved)]
    fresh = {(rank, event.model_id) for rank, event in saved if event.fresh}
    wrong = [
        event
        for rank, event in saved
        if event.stale and event.live and (rank, event.model_id) not in fresh
    ]
    if wrong:
        text = f"after {wrong[0].step} steps {wrong[0].model} is saved as it began, and in "
        text += f"{len(wrong)} saves never as it was trained"
        remedy = "Save the state_dict of the model that the optimizer trains."
        yield Found(wrong[0].where, text, remedy)
    elif not saved:
        yield NotSeen("no weights were saved")


@rule("SS714", least_ranks=1)
def loads_itself(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a model that loads the state_dict that it gave before it was trained on."""
    event = seen.ranks[0].first(ev.LoadedItself)
    if event is not None:
        line = seen.line(event.taken)
        copied = re.sub(r"([\w.]+\.state_dict\(\))", r"copy.deepcopy(\1)", line, count=1)
        text = f"after step {event.step} the model loads its own tensors, as taken after step "
        text += f"{event.at}: they have the values of now"
        remedy = replaced(line, copied, "Keep `copy.deepcopy(…)` of them.")
        origin = {"the state_dict is taken": event.taken}
        yield Found(event.where, text, remedy, comes_from=origin)


@rule("SS715", least_ranks=1)
def loads_nothing(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for loaded names of which none is of the model, and that no other load makes good."""
    last = {(event.into, event.step): event for event in seen.ranks[0].of(ev.NamesLoaded)}
    for event in last.values():
        if event.strangers and event.own:
            text = f"none of the names that are loaded ({listed(event.strangers)}) is one of the "
            text += f"model's own ({listed(event.own)})"
            remedy = "Rename them, or save the model without its wrapper; `strict=True` would fail."
            yield Found(event.where, text, remedy)


@rule("SS716", least_ranks=1)
def evaluates_without_statistics(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for an average of weights whose batch norms stay as they were made."""
    for events in _inferred_only(seen.ranks[0]):
        moves = len({event.weights for event in events}) >= _LEAST_STEPS
        if moves and all(event.blank for event in events):
            text = f"{events[-1].blank} batch norms of {events[0].model} still have a mean of 0 "
            text += f"after step {events[-1].step}, although its weights follow those that are "
            text += "trained"
            remedy = "Copy the buffers of the trained model, too, as `AveragedModel` does."
            yield Found(events[0].where, text, remedy)


@rule("SS704", least_ranks=1)
def never_zeroes_gradients(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for gradients of the last step that the next backward pass adds to."""
    for optimizer, (rank, steps) in _by_optimizer(seen).items():
        left = [event for event in steps if event.left]
        if len(left) < _FEW or 3 * len(left) < 2 * (len(steps) - 1):
            continue
        backward = _backward_before(rank, left[0])
        text = f"in {len(left)} of {len(steps)} steps of {optimizer} the gradients of the step "
        text += "before were still there when the backward pass began"
        remedy = f"+ {seen.optimizer_at(left[0].where)}.zero_grad()\n  {seen.line(backward)}"
        yield Found(backward, text, remedy)


@rule("SS718", least_ranks=1)
def mixes_gradients_of_losses(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for gradients of another optimizer's loss that point against those of the step's own."""
    for optimizer, (_, steps) in _by_optimizer(seen).items():
        mixed = [event for event in steps if event.against < _AGAINST]
        if len(mixed) >= _FEW and 3 * len(mixed) >= 2 * (len(steps) - 1):
            text = f"in {len(mixed)} of {len(steps)} steps of {optimizer}, the gradients that "
            text += "another optimizer's loss left are added to the step's own, and point against "
            text += f"them (cosine {mixed[0].against:.2f})"
            remedy = "Detach what the other loss is given of this model (`fake.detach()`), or "
            remedy += "clear these gradients before the backward pass of their own loss."
            origin = {"the step is taken": mixed[0].where}
            yield Found(mixed[0].leaked, text, remedy, comes_from=origin)


@rule("SS705", least_ranks=1)
def zeroes_before_the_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for `zero_grad` as the last thing before a step, or between its micro-batches."""
    for optimizer, (_, steps) in _by_optimizer(seen).items():
        lost = [event for event in steps if event.cleared]
        if len(lost) >= _FEW and 2 * len(lost) > len(steps):
            where, first = lost[0].cleared, lost[0].lost
            does, place = "came after a zero_grad with no backward pass between", "backward pass"
            if first:
                does = f"lack the gradients of {first} of their micro-batches: a zero_grad came "
                does += "between them"
                place = "first backward pass of a step"
            text = f"{len(lost)} of {len(steps)} steps of {optimizer} {does}"
            remedy = f"Move `{seen.line(where)}` before the {place}, or after the step."
            yield Found(where, text, remedy)


@rule("SS708", least_ranks=1)
def loss_is_detached(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for losses whose graph has no parameters, and steps without gradients."""
    for optimizer, (rank, steps) in _by_optimizer(seen).items():
        reach = rank.of(ev.LossReach)
        cut = [event for event in reach if not event.parameters]
        empty = [event for event in steps if event.missing == event.tensors]
        clears = any(event.cleared for event in steps)
        forward = any(event.grad for event in rank.of(ev.ForwardPass))
        if len(cut) == len(reach) >= _FEW <= len(empty) == len(steps) and forward and not clears:
            text = f"none of the {steps[0].tensors} tensors of {optimizer} had a gradient in "
            text += f"{len(steps)} steps: the graph of the loss holds {reach[0].leaves} leaves and "
            text += "none of them is a parameter"
            remedy = "Call backward on the loss as the model's output gave it, without `detach`, "
            remedy += "`item`, `numpy` or a new `torch.tensor` in between."
            yield Found(reach[0].where, text, remedy)


@rule("SS710", least_ranks=1)
def scaler_skips_every_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a scaler that skipped more steps in a row than finding its scale takes."""
    for rank in seen.ranks:
        calls = rank.of(ev.ScalerStep)
        taken = [n for n, event in enumerate(calls) if not event.skipped]
        row = calls[taken[-1] + 1 if taken else 0 :]
        if len(row) >= _SKIPS:
            text = f"the last {len(row)} of {len(calls)} steps were skipped on rank {rank.rank}; "
            text += f"the scale fell to {row[-1].scale:g}"
            remedy = "Find where the loss or a gradient becomes infinite: "
            remedy += "`torch.autograd.set_detect_anomaly(True)`."
            yield Found(row[0].where, text, remedy)
            return


def _by_optimizer(seen: Seen) -> dict[str, tuple[RankSeen, list[ev.GradientsUsed]]]:
    """Return the steps of each optimizer on the first rank that took any."""
    for rank in seen.ranks:
        each: dict[int, list[ev.GradientsUsed]] = {}
        for event in rank.of(ev.GradientsUsed):
            each.setdefault(event.optimizer_id, []).append(event)
        if each:
            names = Counter(steps[0].optimizer for steps in each.values())
            return {
                f"{name} ({steps[0].where})" if names[name] > 1 else name: (rank, steps)
                for steps in each.values()
                for name in [steps[0].optimizer]
            }
    return {}


def _backward_before(rank: RankSeen, step: ev.GradientsUsed) -> str:
    """Return the line of the first backward pass that a step was taken with."""
    lines: list[str] = []
    for event in rank.of(ev.GradientsUsed, ev.BackwardPass):
        if event is step:
            break
        if isinstance(event, ev.BackwardPass):
            lines.append(event.where)
        elif isinstance(event, ev.GradientsUsed) and event.optimizer_id == step.optimizer_id:
            lines = []
    return lines[0] if lines else step.where


@rule("SS706", least_ranks=1)
def trains_in_eval_mode(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for training steps in evaluation mode of a model whose layers depend on it."""
    for rank in seen.ranks:
        for forwards in _training_forwards(rank).values():
            off = [*takewhile(lambda event: not event.training, forwards[::-1])][::-1]
            steps = {event.step for event in off}
            on, layers = off[0].modal if off else (0, 0)
            if len(steps) < _LEFT_ON or on or not layers:
                continue
            never = len(off) == len(forwards)
            text = f"{len(steps)} training steps of {off[0].model} from step {off[0].step + 1} on "
            text += f"ran in evaluation mode, with {layers} layers of dropout or batch norm"
            text += "" if never else "; the steps before did not"
            remedy = "Call `model.train()` at the start of each epoch, after every evaluation."
            # Some fine-tune so on purpose.
            yield Found(off[0].where, text, remedy, "advice" if never else None)
            return


@rule("SS707", least_ranks=1)
def evaluates_in_train_mode(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for forward passes without gradients on other data, with layers in training mode."""
    for call in seen.ranks[0].of(ev.DropoutCalled):
        name = call.function
        remedy = f"`F.{name}(…, training=self.training)` drops nothing in evaluation mode."
        if name == "scaled_dot_product_attention":
            remedy = "Give it `dropout_p=self.p if self.training else 0.0`."
        text = f"after step {call.step} `{name}` dropped values (p={call.p:g}) of a model in "
        text += "evaluation mode, without gradients"
        yield Found(call.where, text, remedy)
    yield from _teachers(seen.ranks[0])
    for rank in seen.ranks:
        row: list[ev.ForwardPass] = []
        for event, foreign in with_loader(seen, rank, ev.ForwardPass):
            wrong = foreign and not event.grad and event.training and event.modal[0]
            row = [*row, event] if wrong else []
            if len(row) >= _IN_A_ROW:
                on, layers = row[0].modal
                text = f"after step {row[0].step} {row[0].model} ran without gradients on another "
                text += f"loader's batches, with {on} of {layers} layers of dropout or batch norm "
                text += "in training mode"
                remedy = "Call `model.eval()` before the evaluation and `model.train()` after it."
                yield Found(row[0].where, text, remedy)
                return


def _teachers(rank: RankSeen) -> Iterator[Found]:
    """Yield models that never change, and are called in training mode between the steps."""
    for events in _inferred_only(rank):
        unsteady = [e for e in events if e.training and (e.dropped or e.learnt)]
        if len(unsteady) < _LEFT_ON or len({e.weights for e in events}) > 1:
            continue
        does = "drops values" if unsteady[0].dropped else "learns the statistics of its batches"
        text = f"{unsteady[0].model}, whose weights never change, {does}: it is in training mode "
        text += f"in {len(unsteady)} of {len(events)} steps looked at"
        remedy = "Call its `eval()` once it is built or loaded, and where `train()` of a model "
        remedy += "with it inside undoes that."
        yield Found(unsteady[0].where, text, remedy, "warning")


def _inferred_only(rank: RankSeen) -> list[list[ev.InferencePass]]:
    """Return the passes of each model that is never called with gradients."""
    trained = {event.model_id for event in rank.of(ev.ModelTrained)}
    passes = [event for event in rank.of(ev.InferencePass) if event.model_id not in trained]
    numbers = dict.fromkeys(event.model_id for event in passes)
    return [[event for event in passes if event.model_id == number] for number in numbers]


@rule("SS709", least_ranks=1)
def evaluates_with_gradients(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for forward passes in evaluation mode whose graph no backward pass uses."""
    for rank in seen.ranks:
        foreign = {id(event) for event, other in with_loader(seen, rank, ev.ForwardPass) if other}
        for part in evaluations(seen, rank):
            passes = [e for e in part.forwards if e.grad and id(e) in foreign]
            if len(passes) >= _IN_A_ROW:
                text = f"{len(passes)} forward passes of {passes[0].model} after step {part.step} "
                text += "recorded a graph, and no backward pass followed"
                remedy = "Evaluate under `with torch.no_grad():`."
                yield Found(passes[0].where, text, remedy)
                return


def _training_forwards(rank: RankSeen) -> dict[int, list[ev.ForwardPass]]:
    """Return, by model, the forward passes that a backward pass followed."""
    by_model: dict[int, list[ev.ForwardPass]] = {}
    pending: list[ev.ForwardPass] = []
    for event in rank.of(ev.ForwardPass, ev.BackwardPass):
        if isinstance(event, ev.ForwardPass):
            pending = [*pending, event] if event.grad else []
            continue
        trains = any(forward.training for forward in pending)
        for forward in pending:
            # Next to a model in training mode, one in evaluation mode is a teacher or a critic.
            if forward.training or not trains:
                by_model.setdefault(forward.model_id, []).append(forward)
        pending = []
    return by_model
