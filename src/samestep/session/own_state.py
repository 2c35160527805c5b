"""The checkpoints of a loop of one's own: what they hold, how they are written and read."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from samestep.data.trees import map_tensors
from samestep.errors import UserError, blame, listed
from samestep.ranks.world import World
from samestep.run import checkpoints
from samestep.run.index import Entry, announce, find_checkpoint, read_index
from samestep.run.records import Record
from samestep.session.means import Sums
from samestep.training.prepare import check_dense, share_buffers
from samestep.training.snapshot import load_model
from samestep.training.stopping import Watch
from samestep.training.work import Position

_STEPPING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""What holds no weights."""
_KNOWN = (nn.Module, *_STEPPING)
_OF_AN_EPOCH = ("num_samples", "data")
"""What may be another in each epoch."""
_MADE_IN_EPOCHS = (
    " Where each epoch makes its data with the model, a run cannot go on within an epoch: delete "
    "the newest checkpoint to go on from the one before, or make the data in the loop over "
    "run.batches(torch.arange(…), …)."
)


@runtime_checkable
class Kept(Protocol):
    """What a checkpoint can hold: a module, an optimizer, a schedule, anything with these two."""

    def state_dict(self) -> Any:
        """Return all that it depends on, as tensors, numbers, texts, lists and dicts of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Become what it was when it returned this."""


@dataclass(kw_only=True)
class Standing:
    """Where a run stands: all that the next step depends on."""

    program: str
    """The name of the script."""
    settings: Mapping[str, Any]
    """Of the script's own."""
    state: Mapping[str, Kept] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    order: dict[str, Any] = field(default_factory=dict)
    """What the order of the samples depends on; empty until the data is open."""
    own: dict[str, Any] = field(default_factory=dict)
    """Plain values that the script keeps, by name."""
    watch: Watch | None = None
    """What the best checkpoint is chosen by; None where the script chooses none."""
    metric: float | None = None
    """Its value in this epoch."""
    finished: dict[str, Any] | None = None
    """Why the script has ended the training, and how many epochs it had asked for."""

    @property
    def is_best(self) -> bool:
        """Whether this epoch is the best so far."""
        return (
            self.metric is not None and self.watch is not None and not self.watch.evaluations_since
        )


def check_state(state: Any) -> None:
    """Check that a checkpoint can hold a state and give it back.

    Raises:
        UserError: something in it cannot be saved, or would not come back.
    """
    if not isinstance(state, Mapping) or not state:
        raise UserError(
            "run.epochs(…, state=…) takes a dict of all that changes in training: "
            'state={"model": model, "optimizer": optimizer}. Checkpoints hold it.'
        )
    if all(isinstance(kept, _STEPPING) for kept in state.values()):
        raise UserError(
            f"state has {', '.join(map(repr, state))} and no weights. Name the modules, too: "
            'state={"model": model, …}.'
        )
    for name, kept in state.items():
        if not isinstance(kept, Kept):
            raise UserError(
                f"state[{name!r}] is a {type(kept).__name__}, which has no state_dict and "
                "load_state_dict. Leave it out, or put it into an object that has both."
            )
        if isinstance(kept, nn.Module):
            check_dense(kept, f"state[{name!r}] has")
        if _is_sharded(kept):
            raise UserError(
                f"state[{name!r}] is in parts on the ranks (FSDP, DTensor), and checkpoints hold "
                "what rank 0 has. Leave the model whole on each rank."
            )
        _readable_state(name, kept)


def share_weights(state: Mapping[str, Kept], world: World) -> None:
    """Give every rank rank 0's weights and buffers."""
    for kept in state.values():
        if isinstance(kept, nn.Module):
            share_buffers(kept, world)
            for parameter in kept.parameters():
                world.take_from_main(parameter.detach())


def _is_sharded(kept: Kept) -> bool:
    if not isinstance(kept, nn.Module):
        return False
    fsdp = any(type(m).__name__ == "FullyShardedDataParallel" for m in kept.modules())
    return fsdp or any(hasattr(p, "placements") for p in kept.parameters())


def _readable_state(name: str, kept: Kept) -> Any:
    """Return an entry of the state as a checkpoint holds it.

    Raises:
        UserError: a checkpoint with it could not be read again.
    """
    try:
        state = kept.state_dict()
    except Exception as error:
        blame(f"state[{name!r}].state_dict() failed", error)
    # Tensors may be large, and it is the rest that can be of any type.
    small = map_tensors(lambda _: torch.empty(0), state)
    if why := checkpoints.why_not_kept(small):
        raise UserError(
            f"state[{name!r}].state_dict() holds what a checkpoint would not give back: {why}. It "
            "may hold tensors, numbers, texts, and lists and dicts of them."
        )
    return state


def save(folder: Path, world: World, standing: Standing, sums: Sums, keep: int | None) -> Record:
    """Write and announce a checkpoint; return its record. All ranks call it.

    Only the newest `keep` are kept, or all of them.
    """
    everywhere = world.gather(sums)
    return world.on_main(lambda: _write(folder, standing, everywhere, keep))


def _write(folder: Path, standing: Standing, sums: list[Sums], keep: int | None) -> Record:
    position = standing.position
    content = {
        "format": checkpoints.FORMAT,
        "program": standing.program,
        "settings": dict(standing.settings),
        "state": {name: _readable_state(name, kept) for name, kept in standing.state.items()},
        "position": asdict(position),
        "order": standing.order,
        "sums": sums,
        "own": _plain_values(standing.own),
        "watch": standing.watch and asdict(standing.watch),
        "finished": standing.finished,
    }
    name = f"checkpoint_epoch_{position.epoch}.pt"
    if position.step_in_epoch:
        name = f"checkpoint_step_{position.step}.pt"
    digest = checkpoints.save(folder, name, content)
    epoch = position.epoch + (position.step_in_epoch > 0)
    metric = standing.metric if math.isfinite(standing.metric or 0.0) else None
    entry = Entry(path=name, step=position.step, epoch=epoch, sha256=digest, metric=metric)
    index = read_index(folder).up_to(position.step)  # later ones were passed over as damaged
    if standing.watch is not None:
        index = replace(index, monitor=standing.watch.metric, mode=standing.watch.mode)
    newest = sorted(index.checkpoints, key=lambda old: -old.step)[: (keep or 1) - 1]
    announce(folder, index, entry, keep and 1, [old.path for old in newest])
    path = f"checkpoints/{name}"
    return {"event": "checkpoint", "step": position.step, "path": path, "sha256": digest}


def restore(standing: Standing, saved: dict[str, Any], path: Path, free: Collection[str]) -> None:
    """Bring a new run to where a checkpoint stands; the settings in `free` may be others.

    Raises:
        UserError: it is of another program, or of other settings, or does not fit.
    """
    if "program" not in saved:
        raise UserError(
            f"{path} holds a run of samestep train: go on with it by samestep train {path} "
            "--resume, or name another directory in open_run."
        )
    if saved["program"] != standing.program:
        raise UserError(
            f"{path} was written by {saved['program']!r}, not by {standing.program!r}. Name "
            f"another directory in open_run; or, if it is the same program by another name, say "
            f"open_run(…, name={saved['program']!r})."
        )
    before, now = saved["settings"], standing.settings
    for name in sorted({*before, *now}.difference(free)):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{path} was begun with {name} = {before.get(name)}, and now it is "
                f"{now.get(name)}: that is another training. Take the value of before, name "
                f"it in open_run(…, may_change=[{name!r}]), or begin a run in another directory."
            )
    kept = saved["state"]
    if kept.keys() != standing.state.keys():
        raise UserError(
            f"The checkpoints of {path} hold {', '.join(kept)}; state has "
            f"{', '.join(standing.state)}. A run has the same names in state each time."
        )
    for name, one in standing.state.items():
        _load(name, one, kept[name])
    standing.position = Position(**saved["position"])
    standing.order = saved["order"]
    standing.own.update(saved.get("own", {}))
    standing.watch = Watch(**saved["watch"]) if saved.get("watch") else None
    standing.finished = saved.get("finished")


def best_on_all(standing: Standing, world: World) -> bool:
    """Return whether the epoch is the best so far; ranks save the best checkpoint together.

    Raises:
        UserError: only some ranks have rated it.
    """
    rated = world.gather(standing.metric is not None)
    if len(set(rated)) > 1:
        ranks = listed([str(rank) for rank, has in enumerate(rated) if has])
        raise UserError(
            f"run.best was called on rank {ranks} of {len(rated)} in epoch "
            f"{standing.position.epoch}. All ranks save the best checkpoint together: call it on "
            "each, and ask run.is_main afterwards.",
            on_all_ranks=True,
        )
    return standing.is_best


def load_best(standing: Standing, folder: Path, world: World) -> int:
    """Bring the modules of the state to the best checkpoint, and return its epoch.

    Raises:
        UserError: there is none, or it does not fit.
    """
    if standing.watch is None:
        raise UserError("run.load_best: no epoch was rated. Call run.best(…) in each epoch.")
    entry = world.on_main(lambda: find_checkpoint(folder, "best"))
    saved = world.on_every(lambda: checkpoints.load(folder, entry))["state"]
    for name, one in standing.state.items():
        if isinstance(one, nn.Module):
            _load(name, one, saved[name])
    return entry.epoch


def simple(value: Any) -> str | int | float | None:
    """Return a number or a text without what a subclass adds, such as an enum's name; else None."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None


def _plain_values(own: Mapping[str, Any]) -> dict[str, Any]:
    values = {str(name): simple(value) for name, value in own.items()}
    for name, value in own.items():
        if value is not None and values[str(name)] is None:
            raise UserError(
                f"run.state[{name!r}] is a {type(value).__name__}; it may hold numbers and texts. "
                "Of a tensor take .item(); what has a state_dict belongs to run.epochs(…, state=…)."
            )
    return values


def _load(name: str, one: Kept, saved: Any) -> None:
    if isinstance(one, nn.Module):
        try:
            load_model(one, {"model": saved})
        except UserError as error:
            raise UserError(f"state[{name!r}]: {error}") from error
        return
    try:
        one.load_state_dict(saved)
    except Exception as error:
        blame(f"state[{name!r}].load_state_dict() failed with what the checkpoint holds", error)


def check_order(
    before: Mapping[str, Any], now: dict[str, Any], path: Path, *, may_be_new: bool, within: bool
) -> None:
    """Check that a run goes on with the same order of the same samples.

    Each epoch may have data of its own, such as what was played in it: `now` gets "changes" then.

    Args:
        before: of the epoch before, or in the checkpoint; empty if there is none.
        now: of the running epoch.
        path: the run directory.
        may_be_new: whether nothing speaks against data of its own: this process trained the epoch
            before, or there was only one.
        within: whether the run goes on within the epoch.

    Raises:
        UserError: it does not; what differs is named.
    """
    if not before:
        return
    differs = any(before[name] != now[name] for name in _OF_AN_EPOCH)
    if before.get("changes") or (may_be_new and differs):
        now["changes"] = True
    free = not within and (may_be_new or before.get("changes"))
    for name, value in now.items():
        if name == "changes" or (free and name in _OF_AN_EPOCH):
            continue
        if before[name] != value:
            told = f"{name} = {before[name]}, and now it is {value}"
            if name == "data":
                told = "other data"
            raise UserError(
                f"{path} was begun with {told}: the order of the samples would change within the "
                "run. Take what it was before, or begin a run in another directory."
                + (_MADE_IN_EPOCHS if within and name in _OF_AN_EPOCH else "")
            )


def sums_of(saved: list[Sums], world: World) -> Sums:
    """Return what this rank goes on adding to: its own sums, or on other ranks' number rank 0's."""
    if len(saved) == world.world_size:
        return saved[world.rank]
    together: Sums = {}
    for sums in saved if world.is_main else ():
        for name, (total, weight) in sums.items():
            before = together.get(name, (0.0, 0.0))
            together[name] = before[0] + total, before[1] + weight
    return together


def check_kept(state: Mapping[str, Kept], trained: Sequence[Any]) -> set[int]:
    """Return the ids of all that is trained, after a check that checkpoints hold it.

    Raises:
        UserError: they do not hold some of it.
    """
    modules = [one for one in state.values() if isinstance(one, nn.Module)]
    held = {id(one) for one in state.values()}
    held |= {id(parameter) for module in modules for parameter in module.parameters()}
    # An object of the user's own may hold an optimizer, and all modules where state names none.
    own = any(not isinstance(one, _KNOWN) for one in state.values())
    pieces = [named for one in trained for named in _pieces(one)]
    lacking = [
        name
        for name, piece in pieces
        if id(piece) not in held
        and not (own and (not modules or isinstance(piece, torch.optim.Optimizer)))
    ]
    if lacking:
        raise UserError(
            f"run.backward was given {listed(lacking)}, which state does not name, so "
            "checkpoints would not hold it. Name the module and the optimizer in run.epochs(…, "
            "state={…}), and a parameter by itself as nn.ParameterList([parameter])."
        )
    return {id(one) for one in trained} | {id(piece) for _, piece in pieces}


def _pieces(one: Any) -> list[tuple[str, Any]]:
    """Return all that a checkpoint has to hold of what is trained, with names for messages."""
    kind = type(one).__name__
    if isinstance(one, nn.Module):
        return [(f"{kind}.{name}", p) for name, p in one.named_parameters() if p.requires_grad]
    optimizers, parameters = [], [one]
    if isinstance(one, torch.optim.Optimizer):
        optimizers = [(f"an optimizer ({kind})", one)]
        parameters = [p for group in one.param_groups for p in group["params"] if p.requires_grad]
    return [*optimizers, *((f"a parameter of shape {tuple(p.shape)}", p) for p in parameters)]
