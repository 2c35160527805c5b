"""The parity experiment: would one process with the joined batch get the same gradient?

Each rank keeps its part of the first optimizer step: the weights before it, what the model and the
loss were called with, its own gradient, what the backward pass left after the ranks' exchange, and
what the optimizer was given. When the script has ended, rank 0 computes the gradient of all parts
at once, as one process would have, and compares. It is judged only where the same computation gives
rank 0's own gradient: a loss of several terms is not known.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from samestep.base.errors import LOST_PEER
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder, is_tracing
from samestep.scripts.hooks import tensors_of
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_BINARY_LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_LOSS = Probe(*((nn.functional, name) for name in (*_LOSSES, *_BINARY_LOSSES)))
_MOST_BYTES = 400 << 20
_SAME, _ROUGH = 1e-4, 2e-2


class _Unseen(Exception):  # noqa: N818 - a reason, not an error
    """Why the experiment cannot be made."""


@dataclass
class _Part:
    """What one rank did in its first step."""

    model: nn.Module | None = None
    calls: int = 0
    arguments: Any = None
    output: Any = None
    state: dict[str, Tensor] = field(default_factory=dict)
    loss_name: str = ""
    loss_arguments: Any = None
    from_output: Callable[[Any], Tensor] | None = None
    loss: Tensor | None = None
    """The last loss that the functions of PyTorch computed of the output."""
    rough: bool = False
    clipped: bool = False
    where: str = ""
    own: dict[str, Tensor] = field(default_factory=dict)
    """This rank's own gradient, before any exchange."""
    left: dict[str, Tensor] = field(default_factory=dict)
    """What the backward pass left, which with DDP is exchanged."""
    gradients: dict[str, Tensor] = field(default_factory=dict)  # what the optimizer was given
    unseen: str = ""


def watching(recorder: Recorder) -> AbstractContextManager[None]:
    """Keep this rank's part of the first step while inside; the comparison follows at the end."""
    first = _FirstStep(recorder)
    recorder.at_end.append(first.compare)
    return listening(
        (_LOSS, first.on_loss),
        (probes.CLIP, first.on_clip),
        (probes.UNSCALE, first.on_clip),
        (probes.BACKWARD, first.on_backward),
    )


class _FirstStep:
    """Watches one rank until its first optimizer step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._part = recorder, _Part()
        self._folder = Path(recorder.job.folder)
        self._depth = 0
        self._open = True
        # PyTorch's own hooks: they can be removed after the first step.
        self._hooks = ExitStack()
        hooks = nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(self._before_module),
            hooks.register_module_forward_hook(
                self._after_module, with_kwargs=True, always_call=True
            ),
        ):
            self._hooks.callback(handle.remove)
        self._hooks.enter_context(probes.BEFORE_STEP.heard_by(self._before_step))

    def _before_module(self, module: nn.Module, _arguments: Any) -> None:
        if next(module.parameters(), None) is None:  # a loss or an activation
            return
        self._depth += 1
        wanted = module.training and torch.is_grad_enabled() and not self._recorder.quiet
        if self._depth > 1 or not wanted or is_tracing():
            return
        part = self._part
        part.calls += 1
        if part.model is not None:
            return
        part.model = _without_wrappers(module)
        self._random = torch.get_rng_state()
        part.rough = torch.is_autocast_enabled("cpu")
        size = sum(p.nbytes for p in part.model.state_dict().values() if isinstance(p, Tensor))
        if size > _MOST_BYTES:
            part.unseen = "the model is too large to be computed twice"
            return
        if any(hasattr(p, "to_local") for p in part.model.parameters()):
            part.unseen = "each rank has a part of the weights"
            return
        with self._recorder.unwatched():
            part.state = {
                name: value.detach().clone()
                for name, value in part.model.state_dict().items()
                if isinstance(value, Tensor)
            }
        norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if any(isinstance(m, norms) and m.training for m in part.model.modules()):
            part.unseen = "BatchNorm makes each sample's gradient depend on its batch"

    def _after_module(
        self, module: nn.Module, arguments: Any, named: dict[str, Any], output: Any
    ) -> None:
        if next(module.parameters(), None) is None:
            return
        self._depth = max(0, self._depth - 1)
        part = self._part
        if self._depth or part.model is not _without_wrappers(module) or part.calls != 1:
            return
        part.output = output
        part.arguments = _copied((arguments, named))
        if not torch.equal(self._random, torch.get_rng_state()):
            part.unseen = part.unseen or "the model draws random numbers (dropout?)"

    def on_loss(self, call: ProbedCall) -> Around:
        loss = yield
        part = self._part
        if self._open and part.output is not None and call.args and not self._depth:
            derived = _derivation(part.output, call.args[0])
            if derived is not None:
                part.loss, part.from_output = loss, derived
                part.loss_name = call.name
                part.loss_arguments = _copied((call.args[1:], call.kwargs))

    def on_clip(self, _call: ProbedCall) -> None:
        self._part.clipped = True

    def on_backward(self, _call: ProbedCall) -> Around:
        part = self._part
        if not self._open or part.output is None or self._depth or part.unseen:
            return
        assert part.model is not None
        part.where = self._recorder.where()
        if part.loss is None:  # it may be a part of the output
            place = _scalar_of(part.output)
            if place is not None:
                part.loss, part.from_output = place(part.output), place
        named = dict(part.model.named_parameters())
        # A hook of a parameter is called before DDP's, which exchanges the gradients.
        handles = [
            p.register_hook(partial(self._keep_own, name))  # type: ignore[no-untyped-call]
            for name, p in named.items()
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            with self._recorder.unwatched():
                part.left = _gradients_of(named)

    def _keep_own(self, name: str, gradient: Tensor) -> None:
        if gradient.layout == torch.strided:
            own, new = self._part.own, gradient.detach()
            own[name] = own[name] + new if name in own else new.clone()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        part = self._part
        if not self._open or part.model is None:
            return
        self._open = False
        self._hooks.close()
        held = {id(p) for p in tensors_of(optimizer)}
        with self._recorder.unwatched():
            named = part.model.named_parameters()
            part.gradients = _gradients_of({name: p for name, p in named if id(p) in held})
            part.unseen = part.unseen or _why_unseen(part)
            part.output = part.loss = None
            kept = {"arguments": part.arguments, "loss": part.loss_arguments, "own": part.own}
            path = self._folder / f"part-{self._recorder.rank}.pt"
            whole = path.with_suffix(".whole")
            try:
                torch.save({"unseen": part.unseen} | ({} if part.unseen else kept), whole)
            except Exception as error:
                torch.save({"unseen": str(error)}, whole)
            whole.rename(path)

    def compare(self, world_size: int) -> None:
        """On rank 0, when all is over: compute the joined gradient and note how it differs."""
        part, recorder = self._part, self._recorder
        if recorder.rank or world_size < 2 or self._open or part.model is None:
            return
        with recorder.unwatched():
            try:
                event = _compared(part, self._folder, world_size)
            except _Unseen as reason:
                event = ev.GradientCompared(not_seen=str(reason))
            except Exception as error:
                why = f"the model could not be called again: {error}"
                if LOST_PEER.search(str(error)):
                    why = "the model itself exchanges tensors with other ranks"
                event = ev.GradientCompared(not_seen=why)
        recorder.note(event, where=part.where)


def _without_wrappers(module: nn.Module) -> nn.Module:
    """Return a model that exchanges nothing: when it is called again, the other ranks are gone."""
    while True:
        inside = getattr(module, "_forward_module", None)  # Fabric's
        if "Parallel" in type(module).__name__:
            inside = module.module
        if not isinstance(inside, nn.Module):
            return module
        module = inside


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), tree)


def _derivation(output: Any, given: Any) -> Callable[[Any], Tensor] | None:
    """Return the function from the model's output to a loss's input, if it is of a known kind."""
    if not isinstance(given, Tensor) or not given.requires_grad:
        return None
    leaves = pytree.tree_leaves(output)
    tensors = [(n, leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place, leaf in tensors:
        if leaf is given:
            return lambda out, place=place: pytree.tree_leaves(out)[place]  # type: ignore[misc]
    for place, leaf in tensors:
        if leaf.numel() == given.numel() and torch.equal(
            leaf.detach().reshape(-1), given.detach().reshape(-1)
        ):
            rest = tuple(given.shape[1:])
            return lambda out, place=place, rest=rest: (  # type: ignore[misc]
                pytree.tree_leaves(out)[place].reshape(-1, *rest)
            )
    return None


def _scalar_of(output: Any) -> Callable[[Any], Tensor] | None:
    """Return how to find the only number with a gradient in a model's output: its own loss."""
    leaves = pytree.tree_leaves(output)
    places = [
        n
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel() == 1
    ]
    if len(places) != 1:
        return None
    return lambda out: pytree.tree_leaves(out)[places[0]]


def _why_unseen(part: _Part) -> str:
    if part.calls > 1:
        return "the model is called several times in the first step"
    if part.from_output is None:
        return "how the loss came from the model's output is not known"
    if not part.gradients:
        return "the optimizer holds no gradients of the model"
    return ""


def _compared(part: _Part, folder: Path, world_size: int) -> ev.GradientCompared:
    parts = []
    for rank in range(world_size):
        path = folder / f"part-{rank}.pt"
        if not path.exists():
            raise _Unseen(f"rank {rank} took no step")
        parts.append(torch.load(path, weights_only=True))
    if unseen := next((p["unseen"] for p in parts if p["unseen"]), ""):
        raise _Unseen(unseen)
    assert part.model is not None
    model = part.model.train()
    model.load_state_dict(part.state, strict=False)
    again = _replayed(part, model, parts[0]["arguments"], parts[0]["loss"])
    names = [name for name in again if name in part.gradients and name in part.own]
    flat = partial(_flat, names=names)
    own, times = flat(part.own), _along(flat(part.own), flat(again))
    rest = (part.own.keys() & part.gradients.keys()).difference(names)
    if rest or _residual(own, flat(again) * times) > _SAME:
        raise _Unseen("its last loss by itself does not give a rank's own gradient")
    model.load_state_dict(part.state, strict=False)
    arguments = _joined([p["arguments"] for p in parts])
    wanted = _replayed(part, model, arguments, _joined([p["loss"] for p in parts]))
    joint, left, given = flat(wanted), flat(part.left), flat(part.gradients)
    if torch.equal(left, own):  # not DDP: the script exchanges them itself, if at all
        added = torch.stack([flat(p["own"]) for p in parts]).sum(0)
        if not torch.equal(given, own) and _difference(given, added) > _SAME:
            raise _Unseen("the gradients are changed between their exchange and the step")
    elif part.clipped or abs(_along(given, left) - world_size) > _SAME * world_size:
        given = left  # what the script does to them later is its own affair
    along = _along(given, joint)
    # What a sum is divided by, for a batch of this size, does not show in one step.
    free = part.clipped and given is not left
    if free or (parts[0]["loss"] or [{}])[-1].get("reduction") == "sum":
        factor = along
    else:  # that of the loss, unless it was this rank's share of the batch: shares are added up
        factor = min(times, 1.0, key=lambda known: abs(along - known))
    compared = part.left if given is left else part.gradients
    apart = (n for n in names if _residual(compared[n], wanted[n] * factor) > _ROUGH)
    return ev.GradientCompared(
        residual=_residual(given, joint * factor),
        direction=_difference(given, joint),
        scale=along / factor,
        first=next(apart, ""),
        averaged=abs(along - times) < _ROUGH * times,
        sizes=[_rows(p["arguments"]) for p in parts],
        rough=part.rough,
    )


def _gradients_of(named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: p.grad.detach().clone()
        for name, p in named.items()
        if p.grad is not None and p.grad.layout == torch.strided
    }


def _flat(gradients: Mapping[str, Tensor], names: list[str]) -> Tensor:
    whole = torch.cat([gradients[name].double().reshape(-1) for name in names])
    if not 0 < float(whole.norm()) < math.inf:
        raise _Unseen("a gradient is 0 or not finite")
    return whole


def _along(gradient: Tensor, other: Tensor) -> float:
    """Return the factor with which the other gradient comes closest to the first."""
    return float(gradient @ other) / float(other @ other)


def _residual(gradient: Tensor, wanted: Tensor) -> float:
    return float((gradient - wanted).norm()) / max(float(wanted.norm()), 1e-12)


def _difference(gradient: Tensor, other: Tensor) -> float:
    """Return the relative difference in direction of two gradients."""
    return float((gradient - other * _along(gradient, other)).norm()) / float(gradient.norm())


def _rows(tree: Any) -> int:
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim)
    return next((len(leaf) for leaf in leaves), 0)


def _joined(trees: list[Any]) -> Any:
    """Return the trees of all ranks as one: tensors joined along the batch."""
    flat = [pytree.tree_flatten(tree) for tree in trees]
    if any(spec != flat[0][1] for _, spec in flat):
        raise _Unseen("the ranks call the model with different arguments")
    sizes = [_rows(tree) for tree in trees]
    joined = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(leaves[0], Tensor):
            if any(leaf != leaves[0] for leaf in leaves):
                raise _Unseen("the ranks call the model with different arguments")
            joined.append(leaves[0])
        elif all(
            leaf.ndim and len(leaf) % size == 0 for leaf, size in zip(leaves, sizes, strict=True)
        ):
            joined.append(torch.cat(list(leaves)))
        elif all(torch.equal(leaf, leaves[0]) for leaf in leaves):
            joined.append(leaves[0])
        else:
            raise _Unseen("an argument of the model has no batch dimension")
    return pytree.tree_unflatten(joined, flat[0][1])


def _replayed(
    part: _Part, model: nn.Module, arguments: Any, loss_arguments: Any
) -> dict[str, Tensor]:
    assert part.from_output is not None
    model.zero_grad(set_to_none=True)
    with torch.enable_grad(), torch.autocast("cpu", enabled=part.rough):
        positional, named = arguments
        derived = part.from_output(model(*positional, **named))
        loss = derived
        if part.loss_name:
            rest, options = loss_arguments
            loss = getattr(nn.functional, part.loss_name)(derived, *rest, **options)
    loss.backward()  # type: ignore[no-untyped-call]
    return _gradients_of(dict(model.named_parameters()))
