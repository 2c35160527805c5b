"""What a training keeps that checkpoints do not hold, or that depends on a rank's samples.

It is looked for before the first step, on a copy of the model and with a few samples.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, defined_at, kind_of_data, listed
from samestep.base.run.checkpoints import why_not_kept
from samestep.base.settings import Settings
from samestep.base.trees import has_packed, map_tensors, real_parts, tree_leaves
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.source import Batch, OrderedSource, Source
from samestep.core.learner.agreement import check_same_samples, random_numbers
from samestep.core.learner.optimizer_state import Trial, kind_of, with_inner
from samestep.core.learner.side_effects import (
    GENERATORS,
    batch_norms,
    closure_prints,
    differing,
    forward_prints,
    keep_buffers,
    kept_by,
    kept_by_optimizer,
    optimizer_prints,
)
from samestep.core.recipe import Recipe
from samestep.launch.ranks.world import World

_HOLD = "Let a buffer or get_extra_state hold it"
_TRIED = 4
"""Training samples that are read again: as few as mixup takes, and enough for a draw to show."""

_NUMBERS = (Tensor, int, float)

ASKS_TRAINED = ContextVar("asks_trained", default=False)
"""Whether a model in eval mode is asked for the loss of its training, where it has two."""


class Unkept(NamedTuple):
    """Names of what was found."""

    loss: tuple[str, ...] = ()
    """What the loss keeps by itself, and changes from call to call."""
    lost: tuple[str, ...] = ()
    """Buffers that training changes and `state_dict` leaves out."""
    of_rank: tuple[str, ...] = ()
    """Buffers, of several ranks, that are made of a rank's own samples."""
    forward: tuple[str, ...] = ()
    """What a model keeps besides parameters and buffers, and its outputs depend on."""
    counts: tuple[str, ...] = ()
    """Numbers that a model counts up in attributes, without effect on the first outputs."""
    by_call: tuple[str, ...] = ()
    """Buffers that each forward changes, of whichever samples it is."""
    data: tuple[str, ...] = ()
    """What gives other samples when it is asked again, with all generators seeded alike."""
    among: tuple[str, ...] = ()
    """What gives another sample where others are in the batch with it."""
    no_mean: tuple[str, ...] = ()
    """What its loss is said to be a mean over, where those of two shares do not add up to it."""

    def refuse(self, loss: object, model: object = None) -> None:
        """Refuse to resume a training with such a loss or such a model."""
        other = "no checkpoint holds it: a resumed run would be another training"
        found = {
            f"The recipe's model{defined_at(model)} changes {listed(self.forward, 3)} from call to "
            f"call, and {other}. {_HOLD}": self.forward,
            f"The recipe's loss{defined_at(loss)} changes {listed(self.loss, 3)} from call to "
            f"call, and {other}. Let the loss name `step` or `epoch` among its arguments, and keep "
            "nothing itself": self.loss,
        }
        for sentence, names in found.items():
            if names:
                unless = "or, if no weight depends on it, add --no-self-check."
                raise UserError(f"{sentence}; {unless}", on_all_ranks=True)

    def notes(
        self, remedy: str, owner: str = "The recipe's", keyed: str = "in augment by its keys"
    ) -> list[str]:
        """Return what to tell before the first step; `remedy` is for buffers of one rank."""
        names_by_note = {
            f"{owner} {' or '.join(self.data)} gives other samples when it is asked again "
            "with the same seeds: it draws from a generator of its own, or counts. So will other "
            "ranks, and a resumed run. Draw from the generators of torch, NumPy and Python: "
            "samestep seeds them.": self.data,
            f"What {owner.lower()} {' or '.join(self.among)} makes of a sample depends on the "
            "others in its batch, or is drawn for all of them at once: on another number of ranks "
            f"this is another training. Draw in a data set, or {keyed}.": self.among,
            "The loss of a batch is not the mean of the losses of its shares, weighted by their "
            f"{listed(self.no_mean)}: the training depends on the number of ranks. "
            "If the loss is a sum, divide it by the number of samples. Otherwise set a field of "
            "the recipe: loss_terms for a weighted mean (such as class weights), loss_over='batch' "
            "for a loss that compares samples.": self.no_mean,
            f"The loss changes {listed(self.loss, 3)} from call to call, and no checkpoint holds "
            "it: a resume will be refused. Let the loss name `step` or `epoch` among its "
            "arguments.": self.loss,
            f"A forward in training changes {listed(self.forward, 3)}, and no checkpoint holds it: "
            f"a resume will be refused. {_HOLD}.": self.forward,
            f"The model counts {listed(self.counts, 3)} in an attribute, and no checkpoint holds "
            f"it: a resumed run begins it anew. {_HOLD}.": self.counts,
            f"Training changes the model's buffer {listed(self.lost, 3)}, and no checkpoint holds "
            "it: a resumed run begins with its first value. Register it with "
            "persistent=True.": self.lost,
            f"The model's buffer {listed(self.of_rank, 3)} is made of rank 0's own samples, so "
            f"this is another training than on one rank. {remedy}": self.of_rank,
        }
        return [note for note, names in names_by_note.items() if names]


def of_data(
    train: Source, data: object, recipe: Recipe, settings: Settings, world: World
) -> Mapping[str, tuple[str, ...]]:
    """Name the functions that give other training samples when called again; all ranks call it.

    The ranks have read the first elements of a stream twice already.
    """
    named = {n: getattr(recipe, n) for n in ("collate", "augment", "transform")}
    makers = [f"{n}{defined_at(maker)}" for n, maker in named.items() if maker is not None]
    if train.collates and recipe.collate is None:
        makers.append("collate")
    names: dict[str, tuple[str, ...]] = {"data": (), "among": ()}
    marks: list[float] = []

    with contextlib.suppress(Exception):  # the first step tells how it fails
        in_memory, first = isinstance(train, MemorySource), range(min(_TRIED, train.num_samples))
        if isinstance(train, OrderedSource) and (makers or not in_memory):
            read, last = partial(_read, train, world), first[len(first) // 2 :]
            batch = read(first)
            if not _equal_batches(batch, read(first)):
                readers = () if in_memory else (f"data set {kind_of_data(data)}",)
                names["data"] = (*readers, *makers)
            else:
                marks = _marks(batch)
                # Other samples may be padded to another length, which says nothing; copies are not.
                copies = first if makers else first[-1:]  # draws may be equal by chance
                tries = [(first, last), *(([one] * _TRIED, [one] * 2) for one in copies)]
                apart = all(_equal_batches(read(of), read(few), len(few)) for of, few in tries)
                names["among"] = () if apart else (*makers,)
        mixes = recipe.batch_transform is not None and not names["data"]
        if mixes and not _repeats(train.peek(_TRIED), recipe, settings, world):
            names["data"] = (f"batch_transform{defined_at(recipe.batch_transform)}",)
    every, samples = zip(*world.gather((names, marks)), strict=True)
    if all(samples):
        check_same_samples(samples)
    return {n: tuple(dict.fromkeys(name for of in every for name in of[n])) for n in names}


def _marks(batch: Batch) -> list[float]:
    """Return a number for each tensor of a batch: equal, to rounding, where the batch is."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel()]
    flat = [real_parts(leaf).to_dense().flatten().cpu().double() for leaf in leaves]
    return [float(row @ torch.arange(len(row), dtype=row.dtype).cos()) for row in flat]


def _read(train: OrderedSource, world: World, samples: Sequence[int]) -> Batch:
    with random_numbers(0, world.device):
        return train.trained(samples)


def _repeats(batch: Batch, recipe: Recipe, settings: Settings, world: World) -> bool:
    """Whether `batch_transform` makes the same of a batch a second time."""
    from samestep.core.learner.batch_transform import BatchTransform  # noqa: PLC0415 - few have it

    change = BatchTransform(recipe, settings, world).change

    def made() -> Any:
        inputs, targets = map_tensors(torch.clone, [batch.inputs, batch.targets])
        return change(inputs, targets, batch.samples)

    return _equal_batches(made(), made())


def _equal_batches(first: Any, other: Any, last: int = 0) -> bool:
    """Whether two batches are equal, but for what an operation may round.

    `other` may be the `last` samples of `first`; what is padded to another length is not compared,
    nor what is packed, and numbers of rows are those within each.
    """
    leaves, others = [*tree_leaves(first)], [*tree_leaves(other)]
    if last and (has_packed(first) or len(leaves) != len(others)):  # or a list with one for each
        return True
    for mine, theirs in zip(leaves, others, strict=False):
        if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
            continue
        if last:
            mine = mine[-last:] if mine.dim() else mine  # noqa: PLW2901
            if mine.shape != theirs.shape or len(mine) != last:
                continue
        if torch.equal(mine, theirs):
            continue
        places = last and mine.dim() == 1 and not mine.is_floating_point()
        if places and torch.equal(mine.long() - mine[0], theirs.long() - theirs[0]):
            continue
        if mine.shape != theirs.shape or not mine.is_floating_point():
            return False
        most = float(mine.abs().nan_to_num().max())
        if not torch.allclose(mine, theirs, 0.0, 1e-4 * most, equal_nan=True):
            return False
    return True


def of_loss(
    loss: object, call: Callable[[Any, Any], Any], outputs: Any, targets: Any
) -> tuple[str, ...]:
    """Name the state that a loss keeps by itself, if its value depends on it or it is a number.

    Args:
        loss: the recipe's own.
        call: the same, as it is called.
        outputs: of the model, without a graph.
        targets: theirs.
    """

    def trained(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor

    values, prints, held = [], [], []
    # Some count only the calls that have gradients.
    with contextlib.suppress(Exception), torch.enable_grad():  # the first step tells how it fails
        for _ in range(2):
            value = call(map_tensors(trained, outputs), targets)
            values.append(float(torch.as_tensor(value).detach()))
            prints.append(closure_prints(loss))
            held.append(kept_by(loss))
    if len(held) < 2 or not (changed := differing(*prints)):
        return ()
    counts = [f"the loss's {n}" for n, value in held[1].items() if isinstance(value, int | float)]
    return tuple(
        name.removeprefix("the loss's ")
        for name in changed
        if values[0] != values[1] or name in counts
    )


def of_shares(
    model: nn.Module,
    train: Source,
    loss: Callable[[Batch], Tensor],
    recipe: Recipe,
    most: int,
    rounds: float,
) -> tuple[str, ...]:
    """Name what a loss should be a mean over, unless that of a batch is the mean of its shares'.

    A loss that draws numbers is not judged. `most` samples are tried, of which two shares are made;
    `loss` is right to the fraction `rounds`.
    """
    if not isinstance(train, OrderedSource) or train.num_samples < most:
        return ()
    terms = recipe.loss_terms
    head = [p for p in model.parameters() if p.dim() > 1][-1:]  # of the model itself
    before, token = [p.data for p in head], ASKS_TRAINED.set(True)

    def of(samples: Sequence[int], seed: int = 0) -> Tensor:
        with random_numbers(seed, *(p.device for p in head)):
            batch = train.trained(samples)
            whole = batch.inputs if recipe.forward else (batch.inputs, batch.targets)
            number = float(terms(whole)) if terms else len(samples)
            return torch.tensor([float(loss(batch)) * number, number])

    try:
        for weight in head:
            weight.data = 16.0 * weight.data  # to a new model all samples are alike
        chosen, cut = range(0, train.num_samples, train.num_samples // most)[:most], most // 3 or 1
        whole, again, shares = of(chosen), of(chosen, 1), of(chosen[:cut]) + of(chosen[cut:])
    except Exception:  # the first step tells how it fails
        return ()
    finally:
        ASKS_TRAINED.reset(token)
        for weight, data in zip(head, before, strict=True):
            weight.data = data
    value, divided = whole[0] / whole[1], shares[0] / shares[1]
    apart = torch.allclose(whole, again) and abs(value - divided) > rounds * abs(value)
    return ("samples" if terms is None else "loss_terms",) if apart else ()


class OptimizerTrial:
    """Whether checkpoints can hold a recipe's own optimizer: its first steps show it."""

    def __init__(self, optimizer: torch.optim.Optimizer, maker: object, *, counts: bool) -> None:
        """Begin before the first step; `counts`: whether to look at attributes of its own."""
        self._optimizer, self._trial, self._counts = optimizer, Trial(optimizer), counts
        self._told = f"The recipe's optimizer, {kind_of(optimizer)}{defined_at(maker)},"
        self._prints: dict[str, str] | None = None

    @property
    def is_new(self) -> bool:
        """Whether no step has been taken yet."""
        return self._prints is None

    def after_step(self) -> bool:
        """Check the optimizer after a step; return whether the next one need not be checked.

        The first step may fill what later ones only read.
        """
        before, now = self._prints, _attributes(self._optimizer) if self._counts else {}
        if before is None:
            self._check_state()
            counts = self._trial.lost_counts(self._optimizer) if self._counts else []
            lost = [f"its attribute {name}" for name in counts]
        else:
            lost = [name.partition(" ")[2] for name in differing(before, now)]
        if lost:
            raise UserError(
                f"{self._told} could not be resumed: a step changes {listed(lost, 3)}, and no "
                "checkpoint holds it.",
                remedy="Keep it in its groups or its state; or, if no weight depends on it, add "
                "--no-self-check.",
            )
        self._prints = now
        return before is not None or not now

    def _check_state(self) -> None:
        from samestep.core.learner.kept_objects import packed  # noqa: PLC0415 - of one's own

        state = packed(self._optimizer)
        # Tensors may be large, and it is the rest that can be of any type.
        if why := why_not_kept(state):
            raise UserError(
                f"{self._told} holds what a checkpoint cannot: {why}. Its state and groups may "
                "hold tensors, numbers, texts, and lists and dicts of them."
            )
        if why := self._trial.why_lost(self._optimizer, state):
            raise UserError(
                f"{self._told} could not be resumed: {why}. Its load_state_dict must restore all "
                "that its state_dict returns."
            )


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Fingerprint the tensors, numbers and generators that an optimizer keeps in attributes.

    What has a `state_dict` of its own says there what it keeps.
    """
    changes = {}
    for place, holder in enumerate(with_inner(optimizer)):
        if type(holder).state_dict is torch.optim.Optimizer.state_dict:
            prints, kept = optimizer_prints(holder), kept_by_optimizer(holder)
            for name, value in kept.items():
                numbers = GENERATORS | (Tensor if name[0] == "_" else Tensor | int | float)
                key = f"the optimizer's {name}"
                if key in prints and any(isinstance(leaf, numbers) for leaf in tree_leaves(value)):
                    what = "its attribute" if name in vars(holder) else "the generator"
                    changes[f"{place} {what} {name}"] = prints[key]
    return changes


def of_buffers(
    model: nn.Module, forward: Callable[[int], object], rows: int, world: World
) -> Mapping[str, tuple[str, ...]]:
    """Return buffers that are lost, of a rank's own samples, or of a call; `model` is a copy.

    `forward` calls it in training mode with that many samples, of which there are `rows`.
    """
    (lost, own), norms = watched_buffers(model, world), batch_norms(model)
    by_call = {n for n, _ in model.named_buffers() if n.rpartition(".")[0] not in norms}
    if not (lost | own | by_call):
        return {}
    put_back = keep_buffers(model)
    snapshots: list[dict[str, Tensor]] = []

    def run(samples: int) -> None:
        forward(samples)
        snapshots.append({n: b.detach().clone() for n, b in model.named_buffers()})

    with contextlib.suppress(Exception):  # the first step tells how it fails
        run(rows)
        run(rows)
        put_back()
        run(max(1, rows // 2))
    if len(snapshots) < 2:
        return {}
    first, again, half = snapshots[0], snapshots[1], snapshots[-1]

    def apart(other: dict[str, Tensor], among: set[str]) -> tuple[str, ...]:
        pairs = {n: (first[n], other[n]) for n in first if n in among and n in other}
        return tuple(
            n for n, (a, b) in pairs.items() if a.shape == b.shape and not torch.equal(a, b)
        )

    floats = {n for n in own if n in first and first[n].is_floating_point() and half is not again}
    found = {"lost": apart(again, lost), "of_rank": apart(half, floats)}
    return {**found, "by_call": apart(again, by_call)}


def of_forward(
    model: nn.Module, function: object, forward: Callable[[int], object], rows: int
) -> Mapping[str, tuple[str, ...]]:
    """Return the state outside of buffers that a model changes, tried on a copy."""
    put_back = keep_buffers(model)
    outputs_seen: list[list[Any]] = []
    prints: list[dict[str, str]] = []

    def run() -> None:
        put_back()
        with random_numbers(0):
            outputs = forward(rows)
        leaves = [torch.as_tensor(t) for t in tree_leaves(outputs) if isinstance(t, _NUMBERS)]
        outputs_seen.append([t.clone() for t in leaves])
        prints.append(forward_prints(model, function))

    with contextlib.suppress(Exception):  # the first step tells how it fails
        run()
        run()
        if differing(*prints):  # the first call may fill what later ones only read
            run()
    changed, of_model = differing(*prints[1:]) if len(prints) == 3 else [], "the model's "
    own = tuple(n.removeprefix(of_model) for n in changed if n.startswith(of_model))
    if not changed or all(map(torch.equal, outputs_seen[1], outputs_seen[2])):
        return {"counts": tuple(n for n in own if n in numbers_in(model))}
    return {"forward": own or (*changed,)}  # what else differs may hold the model


def watched_buffers(model: nn.Module, world: World) -> tuple[set[str], set[str]]:
    """Return the buffers that could be lost, and those that a rank may make of its own samples."""
    names = {n for n, _ in model.named_buffers()}
    several = world.world_size > 1 and not world.virtual_ranks
    norms = tuple(f"{n}." if n else "" for n in batch_norms(model))
    own = {n for n in names if several and not (norms and n.startswith(norms))}
    return names - {*model.state_dict()}, own


def numbers_in(model: nn.Module) -> dict[str, str]:
    """Return the numbers in attributes of modules without extra state, as text."""
    return {
        f"{name}.{attribute}".lstrip("."): repr(value)
        for name, module in model.named_modules()
        if type(module).get_extra_state is nn.Module.get_extra_state
        for attribute, value in vars(module).items()
        if isinstance(value, int | float) and attribute[0] != "_" and attribute != "training"
    }
