"""Small experiments on one process, each with one question to the recipe's model, loss or data.

They are not needed to see that ranks differ, but to say why.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from samestep.data.trees import map_leaves, narrow, tree_leaves
from samestep.ranks.world import World
from samestep.recipe import Recipe
from samestep.settings import Precision
from samestep.training.precision import autocast
from samestep.verification.difference import relative
from samestep.verification.digest import sample_marks
from samestep.verification.facts import Facts, Loss
from samestep.verification.modules import mixing, remembering
from samestep.verification.randomness import Seen, batch_norms, hold_model, watched
from samestep.verification.subject import Subject, held_model


def exact_precision(subject: Subject, chosen: Precision) -> tuple[Precision, str, str]:
    """Return the precision to compare in, why it is not float64, and why no other works either."""
    problem = last = ""
    candidates: tuple[Precision, ...] = ("fp64", chosen)
    for precision in dict.fromkeys(candidates):
        if precision == "fp64" and subject.world.device.type == "mps":
            problem = "Apple GPUs have no float64"
            continue
        settings = replace(subject.settings, precision=precision)
        error = _try_step(replace(subject, settings=settings))
        if not error:
            return precision, problem if precision != "fp64" else "", ""
        problem = problem or error
        last = error
    return chosen, problem, last


def _try_step(subject: Subject) -> str:
    """Return how a forward and backward fails, or nothing."""
    try:
        block = subject.batch()
        model = subject.build()
        loss = subject.recipe.loss(subject.forward(model, block.inputs), block.targets)
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return _first_line(error)
    return ""


def look_at(subject: Subject, facts: Facts) -> Facts:
    """Return the facts with what the experiments found."""
    facts = _randomness(subject, facts)
    facts = replace(facts, failed_sizes=_failed_sizes(subject))
    facts = _data(subject, facts)
    block = subject.batch()
    model = held_model(subject, block)
    outputs = subject.forward(model, block.inputs)
    if not _by_sample(outputs, block.rows):
        return facts
    outputs = _detached(outputs)
    remembers = remembering(subject, block)
    return replace(
        facts,
        loss=loss_of_parts(subject, model),
        metrics=metrics_of_parts(subject, outputs, block.targets),
        remembers=remembers,
        # What remembers gives something else each time, in whichever company.
        mixes=None if remembers is not None else mixing(subject, model, block),
    )


def _randomness(subject: Subject, facts: Facts) -> Facts:
    """Take a step as it is, and see what it draws and which parameters it leaves out."""
    seen, block, model = Seen(), subject.batch(), subject.build()
    hold_model(model, seen, frozenset())
    with_loss = watched(subject.recipe.loss, seen)

    def forward() -> Tensor:
        with autocast(subject.settings.precision, subject.world.device):
            return cast("Tensor", with_loss(model(block.inputs), block.targets))

    forward().backward()  # type: ignore[no-untyped-call]
    stood = dict(seen.own)
    if stood:  # one that is made or seeded anew in each forward has nothing to be saved
        seen.own.clear()
        forward()
    named = model.named_parameters()
    return replace(
        facts,
        batchnorm=tuple(batch_norms(model)),
        draws=seen.draws,
        generators=seen.generators,
        own_generators=tuple(line for line in stood if stood[line] != seen.own.get(line)),
        unused=tuple(n for n, p in named if p.requires_grad and p.grad is None),
    )


def _failed_sizes(subject: Subject) -> dict[int, str]:
    """Try the incomplete batch, and a batch of one sample."""
    failed = {}
    block = subject.batch()
    for size in (subject.cut.rest, 1):
        try:
            model = held_model(subject, block)
            targets = narrow(block.targets, 0, size)
            subject.loss(subject.forward(model, narrow(block.inputs, 0, size)), targets)
        except Exception as error:
            failed[size] = _first_line(error)
    return failed


# --- data ---


def _data(subject: Subject, facts: Facts) -> Facts:
    """Read the same samples twice, and in another batch."""
    marks = _marks(subject, subject.recipe, 1)
    again = _marks(subject, subject.recipe, 2)
    if marks != again:
        return replace(facts, unsteady=_origin(subject, lambda r: _twice_the_same(subject, r)))
    if not _in_parts_the_same(subject, subject.recipe):
        origin = _origin(subject, lambda recipe: _in_parts_the_same(subject, recipe))
        return replace(facts, unsteady=origin, batchwise=True)
    return facts


def _marks(subject: Subject, recipe: Recipe, seed: int, world: World | None = None) -> list[str]:
    block = subject.batch(recipe=recipe, seed=seed, world=world)
    return sample_marks(block.inputs, block.targets)


def _twice_the_same(subject: Subject, recipe: Recipe) -> bool:
    return _marks(subject, recipe, 1) == _marks(subject, recipe, 2)


def _in_parts_the_same(subject: Subject, recipe: Recipe) -> bool:
    parts = [replace(subject.world, rank=rank, world_size=2) for rank in range(2)]
    marks = [mark for part in parts for mark in _marks(subject, recipe, 1, part)]
    return marks == _marks(subject, recipe, 1)


def _origin(subject: Subject, is_same: Callable[[Recipe], bool]) -> str:
    """Return which part of reading makes the difference."""
    bare = replace(subject.recipe, augment=None, transform=None)
    if not is_same(bare):
        return "dataset"
    if not is_same(replace(subject.recipe, augment=None)):
        return "transform"
    return "augment"


# --- loss and metrics ---


def loss_of_parts(subject: Subject, model: nn.Module) -> Loss:
    """Compare batches' losses with their parts', for full batches and for the incomplete one.

    The parts are as small as those that ranks will hold.
    """
    cut = subject.cut
    apart, from_sum = zip(*(_parts(subject, model, step) for step in range(cut.full)), strict=True)
    uneven = 0.0
    if not cut.drop_last:
        with contextlib.suppress(Exception):  # it fails with so many, and that is told elsewhere
            uneven, _ = _parts(subject, model, cut.full)
    full = max(apart)
    return Loss(full=full, uneven=uneven, adds_up=max(from_sum) <= subject.rounding < full)


def _parts(subject: Subject, model: nn.Module, step: int) -> tuple[float, float]:
    """Return how far a loss is from its parts' weighted mean, and how far from their sum."""
    block = subject.batch(step)
    with torch.no_grad():
        outputs = subject.forward(model, block.inputs)
    rows = block.rows
    last = max(1, rows // max(2, subject.cut.ranks))
    if rows < 2:
        return 0.0, 0.0
    whole = float(subject.loss(outputs, block.targets))
    losses = [
        (float(subject.loss(narrow(outputs, s, n), narrow(block.targets, s, n))), n)
        for s, n in ((0, rows - last), (rows - last, last))
    ]
    mean = sum(loss * count for loss, count in losses) / rows
    total = sum(loss for loss, _ in losses)
    return relative(whole, mean), relative(whole, total)


def metrics_of_parts(subject: Subject, outputs: Any, targets: Any) -> dict[str, float]:
    """Return how much each metric of a sample depends on the others of its batch."""
    found = {}
    for name, metric in subject.recipe.metrics.items():
        rows = len(tree_leaves(targets)[0])
        first = rows // 2 + 1
        try:
            whole = metric(outputs, targets).double()
            parts = [
                metric(narrow(outputs, s, n), narrow(targets, s, n)).double()
                for s, n in ((0, first), (first, rows - first))
            ]
            found[name] = float((whole - torch.cat(parts)).abs().max())
        except Exception:  # what it fails with, the evaluation tells
            found[name] = 0.0
    return found


def _detached(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _by_sample(outputs: Any, rows: int) -> bool:
    """Whether the first dimension of all that the model returns is the sample."""
    leaves = tree_leaves(outputs)
    return all(isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows for x in leaves)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
