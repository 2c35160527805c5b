"""Small experiments on one process, each with one question to the recipe's model, loss or data.

They are not needed to see that ranks differ, but to say why.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from samestep.data.batches import open_source
from samestep.data.blocks import Block, narrow
from samestep.recipe import Recipe, Splits
from samestep.settings import Precision, Settings
from samestep.training.precision import autocast, data_dtype
from samestep.training.prepare import prepare
from samestep.training.state import seed_alike
from samestep.verify.compare import TOLERANCES, relative
from samestep.verify.cut import Cut
from samestep.verify.digest import sample_marks
from samestep.verify.facts import Facts, Loss
from samestep.verify.hold import KINDS, Seen, batch_norms, hold_model, watched
from samestep.world import World

_ALL = frozenset(KINDS)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A recipe with its few samples, on one device."""

    recipe: Recipe
    options: Any
    settings: Settings
    splits: Splits
    cut: Cut
    world: World
    """This process alone, whatever others there are."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and data."""
        return data_dtype(self.settings.precision)

    def build(self) -> nn.Module:
        """Return the model as a run builds it, in training mode."""
        seed_alike(self.settings.seed)
        plain = replace(self.settings, sync_batchnorm=False, compile="off")
        model = prepare(self.recipe.build_model(self.options), plain, self.world, self.dtype)
        return model.train()

    def batch(self, step: int = 0, *, recipe: Recipe | None = None, seed: int = 0,
              world: World | None = None) -> Block:  # fmt: skip
        """Return a step of the first epoch, read anew.

        Args:
            step: of the epoch, counted from 0.
            recipe: another one that reads the same data.
            seed: of the global generators while it is read.
            world: whose part of the step.
        """
        source = open_source(
            self.splits.train, recipe or self.recipe, world or self.world,
            seed=self.settings.seed, dtype=self.dtype, num_workers=0,
        )  # fmt: skip
        seed_alike(seed)
        try:
            blocks = source.blocks(0, step, global_batch=self.cut.global_batch,
                                   drop_last=self.cut.drop_last)  # fmt: skip
            return next(single for block in blocks for single in block.singles())
        finally:
            source.close()

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's outputs in the precision of the settings."""
        with autocast(self.settings.precision, self.world.device):
            return model(inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss with all that it draws held still."""
        with autocast(self.settings.precision, self.world.device):
            return cast("Tensor", watched(self.recipe.loss, Seen(), _ALL)(outputs, targets))

    @property
    def rounding(self) -> float:
        """Relative difference that is no more than rounding."""
        return TOLERANCES[self.settings.precision]


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


def held_model(subject: Subject, block: Block) -> nn.Module:
    """Return the model with all that it draws held still."""
    model = subject.build()
    hold_model(model, Seen(), _ALL, lambda: few_inputs(block))
    return model


def few_inputs(block: Block) -> Any:
    """Return some inputs for the statistics at which batch normalisation is held."""
    return narrow(block.inputs, 0, min(4, block.rows))


def _randomness(subject: Subject, facts: Facts) -> Facts:
    """Take a step as it is, and see what it draws and which parameters it leaves out."""
    seen, block, model = Seen(), subject.batch(), subject.build()
    hold_model(model, seen, frozenset())
    with autocast(subject.settings.precision, subject.world.device):
        loss = watched(subject.recipe.loss, seen)(model(block.inputs), block.targets)
    loss.backward()
    named = model.named_parameters()
    return replace(
        facts,
        batchnorm=tuple(batch_norms(model)),
        draws=seen.draws,
        generators=seen.generators,
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
        rows = len(torch.utils._pytree.tree_leaves(targets)[0])  # noqa: SLF001
        first = rows // 2 + 1
        try:
            whole = metric(outputs, targets).double()
            parts = [metric(narrow(outputs, s, n), narrow(targets, s, n)).double()
                     for s, n in ((0, first), (first, rows - first))]  # fmt: skip
            found[name] = float((whole - torch.cat(parts)).abs().max())
        except Exception:  # what it fails with, the evaluation tells
            found[name] = 0.0
    return found


# --- the model ---


def mixing(subject: Subject, model: nn.Module, block: Block) -> tuple[str, float] | None:
    """Return the first module that gives a sample something of the others, all draws held still."""
    rows = block.rows // 2
    if rows < 1:
        return None
    part = narrow(block.inputs, 0, rows)

    def kept(tree: Any) -> list[Tensor]:
        return [leaf[:rows] for leaf in _leaves(tree) if leaf.dim() and len(leaf) >= rows]

    return _first_difference(
        model, subject,
        lambda: _outputs(subject, model, block.inputs, kept),
        lambda: _outputs(subject, model, part, kept),
    )  # fmt: skip


def remembering(subject: Subject, block: Block) -> tuple[str, float] | None:
    """Return the first module whose output changes though weights, buffers and inputs do not."""
    model = held_model(subject, block)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> list[tuple[str, list[Tensor]]]:
        model.load_state_dict(state)
        return _outputs(subject, model, block.inputs, _leaves)

    return _first_difference(model, subject, run, run)


Run = Callable[[], list[tuple[str, list[Tensor]]]]


def _first_difference(
    model: nn.Module, subject: Subject, one: Run, other: Run
) -> tuple[str, float] | None:
    """Return the first of two runs' modules that gave something else, if the model did at all."""
    try:
        pairs = list(zip(one(), other(), strict=True))
    except Exception:  # modules that run or not, or a size that fails
        return None
    if not pairs or _difference(pairs[-1][0][1], pairs[-1][1][1]) <= subject.rounding:
        return None
    for (name, mine), (_, others) in pairs:
        found = _difference(mine, others)
        if found > subject.rounding:
            return name or type(model).__name__, found
    return None


def _outputs(
    subject: Subject, model: nn.Module, inputs: Any, kept: Callable[[Any], list[Tensor]]
) -> list[tuple[str, list[Tensor]]]:
    """Return what each module gave, in the order in which they ended; the model is the last."""
    found: list[tuple[str, list[Tensor]]] = []
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: found.append(
                (name, [leaf.detach().clone() for leaf in kept(output)])
            )
        )
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            subject.forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _difference(mine: list[Tensor], others: list[Tensor]) -> float:
    pairs = [
        (a.double(), b.double())
        for a, b in zip(mine, others, strict=False)
        if a.shape == b.shape and a.is_floating_point() and a.numel()
    ]
    return max((float((a - b).abs().max() / _scale(a)) for a, b in pairs), default=0.0)


def _scale(tensor: Tensor) -> float:
    return max(float(tensor.abs().max()), 1e-12)


def _leaves(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]  # noqa: SLF001


def _detached(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(  # noqa: SLF001
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree
    )


def _by_sample(outputs: Any, rows: int) -> bool:
    """Whether the first dimension of all that the model returns is the sample."""
    leaves = torch.utils._pytree.tree_leaves(outputs)  # noqa: SLF001
    return all(isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows for x in leaves)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
