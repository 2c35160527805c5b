"""What the checkpoints of a user's own loop hold: checked, collected, restored."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from samestep.data.trees import map_tensors
from samestep.errors import UserError, blame, listed
from samestep.ranks.world import World
from samestep.run import checkpoints
from samestep.run.index import find_checkpoint
from samestep.session.means import Sums, added_up
from samestep.training.prepare import check_dense, share_buffers
from samestep.training.snapshot import load_model
from samestep.training.stopping import Watch
from samestep.training.work import Position

_STEPPING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""What holds no weights."""
_KNOWN = (nn.Module, *_STEPPING)
_PER_EPOCH = ("num_samples", "data")
"""Parts of the order that each epoch may have of its own."""
_MADE_IN_EPOCHS = (
    " Where each epoch makes its data with the model, a run cannot go on within an epoch: delete "
    "the newest checkpoint to go on from the one before, or make the data in the loop over "
    "run.batches(torch.arange(…), …)."
)


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold: a module, an optimizer, a schedule, anything with these two."""

    def state_dict(self) -> Any:
        """Return all that it depends on, as tensors, numbers, texts, lists and dicts of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Become what it was when it returned this."""


@dataclass(kw_only=True)
class OwnState:
    """All that the next step of a run depends on."""

    program: str
    """The name of the script."""
    settings: Mapping[str, Any]
    """The script's own."""
    state: Mapping[str, Stateful] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    order: dict[str, Any] = field(default_factory=dict)
    """What the order of the samples depends on; empty until the data is open."""
    own: dict[str, Any] = field(default_factory=dict)
    """Plain values that the script keeps, by name."""
    watch: Watch | None = None
    """What the best checkpoint is chosen by; None where the script never calls `run.best`."""
    metric: float | None = None
    """Its value in this epoch."""
    finished: dict[str, Any] | None = None
    """Why the script has ended the training, and how many epochs it had asked for."""

    @property
    def is_best(self) -> bool:
        """Whether this epoch is the best so far."""
        watch = self.watch
        return self.metric is not None and watch is not None and not watch.evaluations_since

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all modules."""
        return [p for one in self.state.values() for p in getattr(one, "parameters", tuple)()]


def check_state(state: Any) -> None:
    """Refuse a state that a checkpoint cannot hold and give back."""
    if not isinstance(state, Mapping) or not state:
        raise UserError(
            "run.epochs(…, state=…) takes a dict of all that changes in training: "
            'state={"model": model, "optimizer": optimizer}. Checkpoints hold it.'
        )
    if all(isinstance(one, _STEPPING) for one in state.values()):
        raise UserError(
            f"state has {', '.join(map(repr, state))} and no weights. Name the modules, too: "
            'state={"model": model, …}.'
        )
    for name, one in state.items():
        if not isinstance(one, Stateful):
            raise UserError(
                f"state[{name!r}] is a {type(one).__name__}, which has no state_dict and "
                "load_state_dict. Leave it out, or put it into an object that has both."
            )
        if isinstance(one, nn.Module):
            check_dense(one, f"state[{name!r}] has")
            fsdp = any(type(m).__name__ == "FullyShardedDataParallel" for m in one.modules())
            if fsdp or any(hasattr(p, "placements") for p in one.parameters()):
                raise UserError(
                    f"state[{name!r}] is in parts on the ranks (FSDP, DTensor), and checkpoints "
                    "hold what rank 0 has. Leave the model whole on each rank."
                )
        _state_of(name, one)


def share_weights(state: Mapping[str, Stateful], world: World) -> None:
    """Give every rank rank 0's weights and buffers."""
    for one in state.values():
        if isinstance(one, nn.Module):
            share_buffers(one, world)
            for parameter in one.parameters():
                world.take_from_main(parameter.detach())


def _state_of(name: str, one: Stateful) -> Any:
    """Return an entry of the state as a checkpoint holds it; refuse what could not be read back."""
    try:
        state = one.state_dict()
    except Exception as error:
        blame(f"state[{name!r}].state_dict() failed", error)
    # Tensors may be large, and only the rest can be of any type.
    small = map_tensors(lambda _: torch.empty(0), state)
    if why := checkpoints.why_not_kept(small):
        raise UserError(
            f"state[{name!r}].state_dict() holds what a checkpoint would not give back: {why}. It "
            "may hold tensors, numbers, texts, and lists and dicts of them."
        )
    return state


def content_of(own: OwnState, sums: list[Sums]) -> dict[str, Any]:
    """Return what a checkpoint holds; `sums` are those of each rank."""
    return {
        "format": checkpoints.FORMAT,
        "program": own.program,
        "settings": dict(own.settings),
        "state": {name: _state_of(name, one) for name, one in own.state.items()},
        "position": asdict(own.position),
        "order": own.order,
        "sums": sums,
        "own": _plain_values(own.own),
        "watch": own.watch and asdict(own.watch),
        "finished": own.finished,
    }


def restore(own: OwnState, saved: dict[str, Any], path: Path, free: Collection[str]) -> None:
    """Restore a run from what a checkpoint holds; the settings in `free` may differ."""
    if "program" not in saved:
        raise UserError(
            f"{path} holds a run of samestep train.",
            remedy=f"Go on with it by samestep train {path} --resume, or name another directory "
            "in open_run.",
        )
    if saved["program"] != own.program:
        raise UserError(
            f"{path} was written by {saved['program']!r}, not by {own.program!r}. Name "
            f"another directory in open_run; or, if it is the same program by another name, say "
            f"open_run(…, name={saved['program']!r})."
        )
    before, now = saved["settings"], own.settings
    for name in sorted({*before, *now}.difference(free)):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{path} was begun with {name} = {before.get(name)}, and now it is "
                f"{now.get(name)}: that is another training. Take the value of before, name "
                f"it in open_run(…, may_change=[{name!r}]), or begin a run in another directory."
            )
    state = saved["state"]
    if state.keys() != own.state.keys():
        raise UserError(
            f"The checkpoints of {path} hold {', '.join(state)}; state has "
            f"{', '.join(own.state)}. A run has the same names in state each time."
        )
    for name, one in own.state.items():
        _load(name, one, state[name])
    own.position = Position(**saved["position"])
    own.order = saved["order"]
    own.own.update(saved.get("own", {}))
    own.watch = Watch(**saved["watch"]) if saved.get("watch") else None
    own.finished = saved.get("finished")


def best_on_all(own: OwnState, world: World) -> bool:
    """Return whether the epoch is the best so far; refuse ratings of some ranks only."""
    rated = world.gather(own.metric is not None)
    if len(set(rated)) > 1:
        ranks = listed([str(rank) for rank, has in enumerate(rated) if has])
        raise UserError(
            f"run.best was called on rank {ranks} of {len(rated)} in epoch {own.position.epoch}. "
            "All ranks save the best checkpoint together: call it on each, and ask run.is_main "
            "afterwards.",
            on_all_ranks=True,
        )
    return own.is_best


def load_best(own: OwnState, folder: Path, world: World) -> int:
    """Load the best checkpoint's weights into the modules of the state; return its epoch."""
    if own.watch is None:
        raise UserError("run.load_best: no epoch was rated. Call run.best(…) in each epoch.")
    entry = world.on_main(lambda: find_checkpoint(folder, "best"))
    saved = world.on_every(lambda: checkpoints.load(folder, entry))["state"]
    for name, one in own.state.items():
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


def _load(name: str, one: Stateful, saved: Any) -> None:
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
    """Refuse an order of samples other than that of the epoch before, or in the checkpoint.

    Each epoch may have data of its own, such as games played in it: `now` gets "changes" then. It
    `may_be_new` if this process trained the epoch before, or there was only one. `within`: whether
    the run goes on within the epoch.
    """
    if not before:
        return
    differs = any(before[name] != now[name] for name in _PER_EPOCH)
    if before.get("changes") or (may_be_new and differs):
        now["changes"] = True
    free = not within and (may_be_new or before.get("changes"))
    for name, value in now.items():
        if name == "changes" or (free and name in _PER_EPOCH):
            continue
        if before[name] != value:
            is_size = name != "data"
            what = f"{name} = {before[name]}, and now it is {value}" if is_size else "other data"
            raise UserError(
                f"{path} was begun with {what}: the order of the samples would change within the "
                "run. Take what it was before, or begin a run in another directory."
                + (_MADE_IN_EPOCHS if within and name in _PER_EPOCH else "")
            )


def sums_of(saved: list[Sums], world: World) -> Sums:
    """Return the sums that this rank resumes with; on another number of ranks, rank 0 takes all."""
    if len(saved) == world.world_size:
        return saved[world.rank]
    return added_up(saved) if world.is_main else {}


def check_held(state: Mapping[str, Stateful], trained: Sequence[Any]) -> set[int]:
    """Return the ids of all that is trained; refuse what checkpoints would not hold."""
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
