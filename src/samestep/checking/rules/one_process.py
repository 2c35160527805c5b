"""Rules about one process: does what is trained reach the model, and the model the file?"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from samestep.checking.events import Event, RankSeen, Seen
from samestep.checking.findings import Found, NotSeen, rule

_LEAST_STEPS = 2
_SURE_STEPS = 3


def _astray(rank: RankSeen) -> Iterator[tuple[Event, str, dict[str, list[int]], int]]:
    """Yield the models with weights that get gradients, but that no optimizer holds or changes.

    With the step, the class, the weights' shapes by name, and how many tensors of these shapes the
    optimizer holds instead, without a gradient.
    """
    steps = [event for event in rank.of("step") if event["grads"] or event.get("strangers")]
    models = {event["model_id"]: event for event in rank.of("model")}
    for number, model in models.items():
        found = [e for e in steps if str(number) in e["unheld"]]
        if len(found) < min(_LEAST_STEPS, rank.steps):
            continue
        names = [n for n in found[0]["unheld"][str(number)] if n not in _changed(rank, number)]
        shapes = {n: found[0]["unheld"][str(number)][n] for n in names}
        dead = Counter(tuple(shape) for shape, alive in found[0]["strangers"] if not alive)
        instead = (Counter(map(tuple, shapes.values())) & dead).total()
        if names:
            yield found[0], model["model"], shapes, instead


def _changed(rank: RankSeen, model_id: int) -> set[str]:
    """Return the weights that are not always the same."""
    seen = [event["parameters"] for event in rank.of("weights") if event["model_id"] == model_id]
    return {name for name in seen[0] if len({each.get(name) for each in seen}) > 1}


def _made(rank: RankSeen, step: Event) -> str:
    """Return where the optimizer of a step was made."""
    made = [e for e in rank.of("optimizer") if e["optimizer_id"] == step["optimizer_id"]]
    return made[0].where if made else step.where


def _listed(names: Any) -> str:
    return ", ".join([*names][:3]) + (" …" if len([*names]) > 3 else "")


def _unheld(seen: Seen, *, instead: bool) -> Iterator[tuple[RankSeen, Event, str, dict[str, Any]]]:
    """Yield what is astray on the first rank that has such, with or without other tensors."""
    for rank in seen.ranks:
        found = [one for one in _astray(rank) if bool(one[3]) == instead]
        for step, name, shapes, _ in found:
            yield rank, step, name, shapes
        if found:
            return


@rule(
    "SS701",
    "error",
    "no optimizer holds parameters that get gradients",
    "They keep the values with which they were made, however long the training is.",
    least_ranks=1,
)
def unheld_parameters(seen: Seen) -> Iterator[Found | NotSeen]:
    """Gradients other than zero, in no optimizer that was ever made, and never changed."""
    for rank, step, name, shapes in _unheld(seen, instead=False):
        of = next(e for e in rank.of("model") if e["model"] == name)
        forwards = [e for e in rank.of("forward") if e["model"] == name and e["grad"]]
        whole = len(shapes) == len(of["shapes"])
        if whole and not any(event["training"] for event in forwards):
            continue  # a frozen part of a loss, for instance
        yield Found(
            _made(rank, step),
            f"{len(shapes)} of {len(of['shapes'])} parameters of {name} get gradients but no "
            f"optimizer holds them: {_listed(shapes)}. They are unchanged after {rank.steps} steps.",
            "Give them to the optimizer, or freeze them with requires_grad_(False).",
            severity="warning" if whole else None,
        )


@rule(
    "SS306",
    "error",
    "the optimizer was made before the model was moved or wrapped",
    "It updates the tensors that the model had then; those that the model has now stay as they are.",
    least_ranks=1,
)
def made_too_early(seen: Seen) -> Iterator[Found | NotSeen]:
    """The same parts of the same model have other tensors than when the optimizer was made."""
    for rank, step, name, shapes in _unheld(seen, instead=True):
        if moved := step.get("tensors_replaced"):
            yield Found(
                _made(rank, step),
                f"{len(moved)} tensors that {step['optimizer']} holds are no longer those of "
                f"{name}: since it was made, {_listed(moved)} became other tensors. "
                f"{len(shapes)} parameters are unchanged after {rank.steps} steps.",
                "Make the optimizer after the model is moved, converted, loaded and wrapped.",
            )


@rule(
    "SS702",
    "error",
    "the optimizer holds the tensors of another model",
    "It updates tensors that no forward pass uses, and the model stays as it is.",
    least_ranks=1,
)
def other_model(seen: Seen) -> Iterator[Found | NotSeen]:
    """Tensors of the same shapes as the model's, which never get a gradient."""
    for rank, step, name, shapes in _unheld(seen, instead=True):
        if not step.get("tensors_replaced"):
            yield Found(
                _made(rank, step),
                f"{step['optimizer']} holds {len(step['strangers'])} tensors that are in no model "
                f"that is called; {len(shapes)} parameters of {name} ({_listed(shapes)}) of the "
                f"same shapes get gradients and are unchanged after {rank.steps} steps.",
                "Make the optimizer from the parameters of the model that is trained, once that "
                "is complete.",
            )


@rule(
    "SS703",
    "warning",
    "parameters never change, although they have gradients and an optimizer",
    "Something undoes the updates, or they are too small for the number format.",
    least_ranks=1,
)
def never_changed(seen: Seen) -> Iterator[Found | NotSeen]:
    """Weights with the same bits after several steps with gradients."""
    for rank in seen.ranks:
        found = False
        for model in rank.of("model"):
            steps = [e for e in rank.of("step") if model["model_id"] in e["models"] and e["grads"]]
            changed = _changed(rank, model["model_id"])
            # Of a vector all values may be 1, to which a small update adds nothing yet.
            names = [
                name
                for name, shape in model["shapes"].items()
                if len(shape) > 1
                and name not in changed
                and len(steps) >= _SURE_STEPS
                and all(e["grads"].get(name) and name not in e["still"] for e in steps)
            ]
            idle = [e for e in steps if len(e["still"]) == len(e["grads"])]
            if names or (len(idle) == len(steps) >= _SURE_STEPS):
                found = True
                yield Found(
                    steps[0].where,
                    f"{len(names)} of {len(model['shapes'])} parameters of {model['model']} have "
                    f"gradients in {len(steps)} steps and the same bits after step "
                    f"{steps[-1].step}: {_listed(names)}."
                    if names
                    else f"The learning rate is 0 in all {len(steps)} steps looked at.",
                    "Look for what writes weights back after the step."
                    if names
                    else "Let the schedule begin above 0, and step it once per optimizer step.",
                )
        if found:
            return


@rule(
    "SS712",
    "error",
    "the saved weights are not those that were trained",
    "The file has the weights of the beginning: the training is lost.",
    least_ranks=1,
)
def saved_untrained(seen: Seen) -> Iterator[Found | NotSeen]:
    """A module that still has the weights of the beginning is saved, the trained one never."""
    saved = seen.any("saved")
    fresh = {event["model"] for event in saved if event["fresh"]}
    wrong = [e for e in saved if e["stale"] and e["live"] and e["model"] not in fresh]
    if wrong:
        yield Found(
            wrong[0].where,
            f"After {wrong[0].step} steps {len(wrong)} saves have the weights with which "
            f"{wrong[0]['model']} began, and none has those that it was trained to.",
            "Save the state_dict of the model that the optimizer trains.",
        )
    elif not saved:
        yield NotSeen("no weights were saved")
