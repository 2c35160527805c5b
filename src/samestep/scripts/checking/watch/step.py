"""Watch what stands between the backward pass and the next one: gradients, clipping, schedules.

Notes "gradients" at each optimizer step {optimizer, optimizer_id, left: whether those of the step
before were still there when the backward pass began, cleared: line of a `zero_grad` after the last
backward pass, tensors, missing: tensors without a gradient, grown: what the script has multiplied
them by since the backward pass, 0 if it is not one number}; "reach" {leaves, parameters} of the
first losses; "average" {weight: of each summand in the loss, count: of them, by: the count it is
divided by, other: the product of its factors that are not counts}; "clip" {name, most, norm,
scaled, sizes, sums: of the gradients before it}; "scaler" {scale, skipped};
"scheduler" {scheduler, scheduler_id, total, inner} as one
is made, and "schedule" {scheduler_id, lr} as it is stepped; "scaled_step" {scale} for a step with
gradients that are still multiplied; "stale_autocast" for a second step within one autocast.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.base.patches import Patch, patched
from samestep.base.trees import leaves_of
from samestep.scripts.checking.recorder import Recorder, checksum
from samestep.scripts.checking.watch.weights import print_of
from samestep.scripts.hooks import step_closure, tensors_of

_SAMPLE = 4  # tensors of an optimizer whose gradients are looked at, the smallest first
_FIRST = 6  # backward passes of which the leaves are looked for
_MOST = 60  # events of a kind whose numbers cost a look at tensors
_CLIPS = 4  # of which the gradients are looked at
_SAME = 1e-5
_DEEPEST = 8  # factors of a loss
_CASTS = ("cpu", "cuda")  # kinds of devices with autocast
_LOSSES = (
    "NllLoss",
    "NllLoss2D",
    "MseLoss",
    "SmoothL1Loss",
    "HuberLoss",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
)


@dataclass
class _Held:
    """What is known of an optimizer's gradients since its last step."""

    sample: list[Tensor]
    left: dict[int, int] = field(default_factory=dict)
    """Checksums of the gradients that it stepped with, by place in the sample."""
    still_left: bool = False
    """Whether they were there at the beginning of every backward pass since then."""
    steps: int = 0
    backwards: int = 0
    cleared: str = ""
    scale: float = 1.0
    """What the loss of its gradients was multiplied by, and they still are."""

    exchanged: list[Tensor | None] = field(default_factory=list)
    """The gradients of the sample as they were last looked at."""
    grown: float = 1.0
    """What the script has multiplied them by since the backward pass; 0 for anything else."""

    def sums(self) -> list[int | None]:
        """Return a checksum of each gradient of the sample."""
        return [None if p.grad is None else checksum(p.grad) for p in self.sample]

    def look(self) -> None:
        """Keep the gradients of the sample in mind."""
        parts = (_part_of(p.grad) for p in self.sample)
        self.exchanged = [None if part is None else part.clone() for part in parts]

    def settle(self) -> None:
        """Count what they were multiplied by since they were last looked at."""
        now = ((g, _part_of(p.grad)) for g, p in zip(self.exchanged, self.sample, strict=False))
        both = [(g, n) for g, n in now if g is not None and n is not None and g.any()]
        some = [(g.double(), n.double()) for g, n in both if g.shape == n.shape]
        times = [float((n * g).sum() / g.square().sum()) for g, n in some]
        alike = all(float((n - times[0] * g).norm()) <= _SAME * float(n.norm()) for g, n in some)
        self.grown *= times[0] if times and alike else 0.0


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note gradients, clipping, scaling and schedules while inside."""
    with _Steps(recorder).installed():
        yield


class _Steps:
    """One rank's steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._held: weakref.WeakKeyDictionary[Optimizer, _Held] = weakref.WeakKeyDictionary()
        self._depth = 0
        self._schedules = 0  # calls into schedulers that are under way
        self._counts: dict[str, int] = {}
        self._wanted: weakref.WeakKeyDictionary[GradScaler, bool] = weakref.WeakKeyDictionary()
        self._scale = 0.0
        """What losses have been multiplied by since the scaler's last update, 0 for nothing."""
        self._scaled_loss: weakref.ref[Any] | None = None
        self._in_scaler = False
        self._unscaled: set[int] = set()
        self._taken = 0
        self._casts_dropped, self._casts_before = 0, -1
        """How often autocast has forgotten its casts of weights, and had at the last step."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch while inside."""
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        clip_grad = nn.utils.clip_grad
        patches: list[Patch] = [
            (torch.autograd, "backward", self._around_backward),
            (Optimizer, "zero_grad", self._around_zero_grad),
            (nn.Module, "zero_grad", self._around_zero_grad),
            (GradScaler, "__init__", self._around_new_scaler),
            (GradScaler, "scale", self._around_scale),
            (GradScaler, "unscale_", self._around_unscale),
            (GradScaler, "step", self._around_scaler_step),
            (GradScaler, "update", self._around_update),
            (torch, "clear_autocast_cache", self._around_clear),
            *(
                (place, name, self._around_clip)
                for place in (nn.utils, clip_grad)
                for name in ("clip_grad_norm_", "clip_grad_value_")
            ),
            *_schedulers("__init__", self._around_new_scheduler),
            *_schedulers("step", self._around_schedule),
        ]
        with patched(*patches):
            try:
                yield
            finally:
                before.remove()
                after.remove()

    def _first_times(self, kind: str, most: int = _MOST) -> bool:
        """Count a kind of event and return whether it is still one of the first."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return self._counts[kind] <= most

    # Gradients

    def _around_backward(
        self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._depth or self._recorder.quiet:  # a checkpointed block recomputes its part
            return original(tensors, *args, **kwargs)
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        with self._recorder.unwatched():
            for held in self._held.values():
                held.still_left &= _left(held)
            kinds: dict[str, dict[str, Any]] = {}
            if self._first_times("reach", _FIRST):
                leaves = list(leaves_of(loss))
                parameters = sum(isinstance(leaf, nn.Parameter) for leaf in leaves)
                kinds["reach"] = {"leaves": len(leaves), "parameters": parameters}
            if (average := _average(loss)) is not None and self._first_times("average", 200):
                kinds["average"] = average
            is_scaled = self._scaled_loss is not None and self._scaled_loss() is loss
            sums = [(held, held.sums()) for held in self._held.values() if is_scaled]
        for kind, facts in kinds.items():
            self._recorder.note(kind, **facts)
        self._depth += 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._depth -= 1
            with self._recorder.unwatched():
                for held, before in sums:
                    held.scale = self._scale if held.sums() != before else held.scale
                for held in self._held.values():
                    # Those that a pass does not add to are of tensors that no model has.
                    held.still_left &= not _left(held)
                    held.backwards += 1
                    held.cleared, held.grown = "", 1.0
                    held.look()

    def _around_zero_grad(
        self, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if torch.compiler.is_compiling() or self._recorder.quiet:
            return original(owner, *args, **kwargs)
        with self._recorder.unwatched():
            full = [held for held in self._held.values() if held.backwards and _any(held.sample)]
        value = original(owner, *args, **kwargs)
        with self._recorder.unwatched():
            emptied = [held for held in full if not _any(held.sample)]
        for held in emptied:
            held.cleared = self._recorder.where()
        return value

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = self._held.get(optimizer)
        if held is None:
            whole = tensors_of(optimizer)
            held = self._held[optimizer] = _Held(
                sorted((p for p in whole if p.requires_grad), key=Tensor.numel)[:_SAMPLE]
            )
            held.backwards = 1
        if step_closure(args, kwargs) is None:  # which would make the gradients
            self._note_gradients(optimizer, held)
        if held.scale > 1.0 and not self._in_scaler:
            self._recorder.once("scaled_step", scale=held.scale)
        kept = torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, _CASTS))
        if kept and self._casts_before == self._casts_dropped:
            self._recorder.once("stale_autocast")
        self._casts_before = self._casts_dropped if kept else -1

    def _note_gradients(self, optimizer: Optimizer, held: _Held) -> None:
        if not held.backwards:
            return
        held.steps += 1
        if held.steps > _MOST:
            held.sample, held.left = [], {}  # enough is known
            return
        with self._recorder.unwatched():
            held.settle()
            tensors = tensors_of(optimizer)
            missing = sum(tensor.grad is None for tensor in tensors)
            full = _any(held.sample)
        self._recorder.note(
            "gradients",
            optimizer=type(optimizer).__name__,
            optimizer_id=id(optimizer),
            left=bool(held.left) and held.still_left and full,
            cleared="" if full else held.cleared,
            tensors=len(tensors),
            missing=missing,
            grown=held.grown,
        )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._taken += 1
        held = self._held[optimizer]
        if step_closure(args, kwargs) is not None:
            self._note_gradients(optimizer, held)
        with self._recorder.unwatched():
            sums = {
                place: checksum(tensor.grad)
                for place, tensor in enumerate(held.sample)
                if tensor.grad is not None
            }
        held.left = {place: number for place, number in sums.items() if number}
        held.still_left, held.backwards, held.cleared, held.scale = True, 0, "", 1.0

    # Clipping

    def _around_clip(
        self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any
    ) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        first = not self._recorder.quiet and self._counts.get("clip", 0) < _CLIPS
        with self._recorder.unwatched():
            grads = [p.grad for p in parameters if p.grad is not None] if first else []
            sums = [print_of(grad) for grad in grads]
        with self._rescaling():
            norm = original(parameters, *args, **kwargs)
        most = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value", math.nan))
        # An infinite limit clips nothing: the norm is only read.
        if math.isfinite(most) and not self._recorder.quiet and self._first_times("clip"):
            clipped = [p for p in parameters if p.grad is not None]
            scaled = any(id(p) not in self._unscaled for p in clipped)
            with self._recorder.unwatched():
                facts: dict[str, Any] = {
                    "name": original.__name__,
                    "most": float(most),
                    "norm": float(norm) if type(norm) is Tensor else None,
                    "scaled": self._scale if scaled else 0.0,
                    "sizes": [p.numel() for p in clipped],
                    "sums": sums,
                }
            self._recorder.note("clip", **facts)
        return norm

    @contextmanager
    def _rescaling(self) -> Iterator[None]:
        """Leave out of `grown` what is done inside."""
        with self._recorder.unwatched():
            for held in self._held.values():
                held.settle()
        yield
        with self._recorder.unwatched():
            for held in self._held.values():
                held.look()

    # Scaling

    def _around_new_scaler(
        self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(scaler, *args, **kwargs)
        # One for a GPU switches itself off where there is none; the order of calls is the same.
        self._wanted[scaler] = bool(kwargs.get("enabled", args[5] if len(args) > 5 else True))

    def _around_scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        value = original(scaler, outputs)
        if self._wanted.get(scaler):
            # `get_scale` gives 1 where it is off.
            enabled = scaler.is_enabled()
            self._scale = scaler.get_scale() if enabled else 65536.0
            self._scaled_loss = weakref.ref(value) if isinstance(value, Tensor) else None
        return value

    def _around_unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> None:
        with self._rescaling():
            original(scaler, optimizer)
        self._unscaled |= {id(p) for p in tensors_of(optimizer)}
        if (held := self._held.get(optimizer)) is not None:
            held.scale = 1.0

    def _around_scaler_step(
        self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before, self._in_scaler = self._taken, True
        try:
            value = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._in_scaler = False
        if scaler.is_enabled():
            self._recorder.note("scaler", scale=scaler.get_scale(), skipped=self._taken == before)
        return value

    def _around_update(
        self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(scaler, *args, **kwargs)
        self._scale = 0.0
        self._unscaled.clear()

    def _around_clear(self, original: Callable[[], None]) -> None:
        original()
        self._casts_dropped += 1

    # Schedules

    @contextmanager
    def _scheduling(self) -> Iterator[None]:
        """Count how deep it is inside: a scheduler may be made of others, and step once as made."""
        self._schedules += 1
        try:
            yield
        finally:
            self._schedules -= 1

    def _around_new_scheduler(
        self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self._scheduling():
            original(scheduler, *args, **kwargs)
        if self._schedules:
            return
        inner = getattr(scheduler, "_schedulers", ())
        self._recorder.note(
            "scheduler",
            scheduler=type(scheduler).__name__,
            scheduler_id=id(scheduler),
            total=_total(scheduler),
            inner=[id(one) for one in inner],
        )

    def _around_schedule(
        self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self._scheduling():
            original(scheduler, *args, **kwargs)
        if not self._schedules:
            lr = scheduler.optimizer.param_groups[0]["lr"]
            self._recorder.note("schedule", scheduler_id=id(scheduler), lr=float(lr))


def _part_of(gradient: Tensor | None) -> Tensor | None:
    """Return this rank's part of a gradient, None for a sparse one."""
    part = getattr(gradient, "to_local", lambda: gradient)()
    return part if part is not None and part.layout == torch.strided else None


def _any(sample: Sequence[Tensor]) -> bool:
    """Whether any of the tensors has a gradient other than 0."""
    return any(tensor.grad is not None and checksum(tensor.grad) for tensor in sample)


def _left(held: _Held) -> bool:
    """Whether the gradients of the last step are still there."""
    kept = ((held.sample[place].grad, number) for place, number in held.left.items())
    return all(grad is not None and checksum(grad) == number for grad, number in kept)


def _average(loss: Tensor) -> dict[str, float] | None:
    """Return what each summand of a loss counts for, as its graph shows; None if it does not."""
    node: Any = loss.grad_fn
    weight = by = other = 1.0
    for _ in range(_DEEPEST):
        name = type(node).__name__
        factor = getattr(node, "_saved_other", None)
        if name in ("DivBackward0", "MulBackward0"):
            if not isinstance(factor, Tensor) or factor.numel() != 1:
                return None
            number = float(factor)
            if not number or not math.isfinite(number):
                return None
            weight = weight / number if name == "DivBackward0" else weight * number
            if not number.is_integer():
                other *= number
            elif name == "DivBackward0":
                by *= number
            node = node.next_functions[0][0]
            continue
        count = _count(node, name)
        return (
            None
            if count is None
            else {"weight": weight / count, "by": by * count, "other": other, "count": count}
        )
    return None


def _count(node: Any, name: str) -> float | None:
    """Return over how many values a node takes the mean: 1 for a sum, None for another node."""
    if name == "SumBackward0":
        return 1.0
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)  # noqa: SLF001 - there is no public place
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (1, 2) or not name.removesuffix("Backward0").endswith(_LOSSES):
        return None
    if reduction == 2:
        return 1.0
    total = getattr(node, "_saved_total_weight", None)  # of targets that are not ignored
    if total is None:
        return float(node._saved_self.numel())  # noqa: SLF001 - as above
    number = float(total)
    return number if number and number.is_integer() else None  # else classes have weights


def _schedulers(name: str, around: Callable[..., Any]) -> list[Patch]:
    """Return a patch for each class of schedulers that has this method itself."""
    places = (*vars(lr_scheduler).values(), swa_utils.SWALR)
    classes = {c for c in places if isinstance(c, type) and issubclass(c, LRScheduler)}
    return [(one, name, around) for one in classes if name in vars(one)]


def _total(scheduler: Any) -> int | None:
    """Return for how many steps a schedule was made, as far as it says."""
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(number := getattr(scheduler, name, None), int):
            return number
    for one in getattr(scheduler, "lr_lambdas", ()):
        number = getattr(one, "keywords", {}).get("num_training_steps")
        if isinstance(number, int):
            return number
    return None
