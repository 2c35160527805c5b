"""Watch what stands between the backward pass and the next one: gradients, clipping, schedules."""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from samestep.base.trees import leaves_of, real_parts
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder, checksum
from samestep.scripts.checking.samples import some_of
from samestep.scripts.checking.watch.losses import average_of
from samestep.scripts.checking.watch.weights import print_of
from samestep.scripts.hooks import loss_of, step_closure, tensors_of
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

_ZERO_GRAD_OF_MODULE = Probe((nn.Module, "zero_grad"))
_SCALE = Probe((GradScaler, "scale"))
_SCALER_STEP = Probe((GradScaler, "step"))
_SCALER_UPDATE = Probe((GradScaler, "update"))
_CLEAR_AUTOCAST = Probe((torch, "clear_autocast_cache"))
_SCHEDULERS = {
    kind
    for kind in (*vars(lr_scheduler).values(), swa_utils.SWALR)
    if isinstance(kind, type) and issubclass(kind, LRScheduler)
}
# Each class that has the method itself.
_SCHEDULER_MADE, _SCHEDULER_STEP = (
    Probe(*((kind, name) for kind in _SCHEDULERS if name in vars(kind)))
    for name in ("__init__", "step")
)
_SAMPLE = 4  # tensors of an optimizer whose gradients are looked at, the smallest first
_FIRST = 6  # backward passes of which the leaves are looked for
_MOST = 60  # events of a kind whose numbers cost a look at tensors
_CLIPS = 4  # of which the gradients are looked at
_SAME = 1e-5
_CASTS = ("cpu", "cuda")  # kinds of devices with autocast


@dataclass(eq=False)
class _Held:
    """What is known of an optimizer's gradients since its last step."""

    sample: list[Tensor]
    largest: Tensor
    left: dict[int, int] = field(default_factory=dict)
    """Checksums of the gradients that it stepped with, by place in the sample."""
    still_left: bool = False
    """Whether every backward pass since then has added to them."""
    added_up: list[int | None] = field(default_factory=list)
    """Checksums after the last pass that has."""
    steps: int = 0
    backwards: int = 0
    cleared: str = ""
    lost: tuple[Counter[str], int, str] | None = None
    """The passes of which a `zero_grad` threw the gradients away, how many by then, and where."""
    weights: list[int | None] = field(default_factory=list)
    """Checksums of the sample's own values in the last pass."""
    scale: float = 1.0
    """What the loss of its gradients was multiplied by, and they still are."""

    stepped: Tensor = field(default_factory=lambda: torch.empty(0))  # of the largest, after a step
    exchanged: list[Tensor | None] = field(default_factory=list)
    """The gradients of the sample as they were last remembered."""
    grown: float = 1.0
    """What the script has multiplied them by since the backward pass; 0 for anything else."""
    changes: list[tuple[float, float]] = field(default_factory=list)
    """A number that is linear in them, where they were remembered and when that was settled."""
    against: tuple[float, str] = (0.0, "")
    """The cosine of the last pass's part and what an older pass, of this line, had left."""

    def sums(self) -> list[int | None]:
        return [None if p.grad is None else checksum(p.grad) for p in self.sample]

    def is_left(self) -> bool:
        """Whether the gradients of the last step are still there."""
        sums = self.sums() if self.left else []
        return all(sums[place] == number for place, number in self.left.items())

    def has_unused(self) -> bool:
        """Whether there are gradients that no step was taken with."""
        return self.backwards > 0 and any(self.sums()) and not (self.left and self.is_left())

    def remember(self) -> None:
        parts = (_part_of(p.grad) for p in self.sample)
        self.exchanged = [None if part is None else part.clone() for part in parts]

    def settle(self) -> None:
        """Count what they were multiplied by since they were last remembered."""
        self.changes.append((_linear_in(self.exchanged), _linear_in(p.grad for p in self.sample)))
        now = ((g, _part_of(p.grad)) for g, p in zip(self.exchanged, self.sample, strict=False))
        both = [(g, n) for g, n in now if g is not None and n is not None and g.any()]
        some = [(g.double(), n.double()) for g, n in both if g.shape == n.shape]
        times = [float((n * g).sum() / g.square().sum()) for g, n in some]
        is_one = all(float((n - times[0] * g).norm()) <= _SAME * float(n.norm()) for g, n in some)
        self.grown *= times[0] if times and is_one else 0.0

    def cosine(self) -> float:
        """Return that of the gradients last remembered and what has been added since."""
        now = ((g, _part_of(p.grad)) for g, p in zip(self.exchanged, self.sample, strict=False))
        pairs = ((g, n) for g, n in now if g is not None and n is not None)
        both = [(g, n - g) for g, n in pairs if g.shape == n.shape]
        if not both:
            return 0.0
        old, new = (torch.cat([*map(torch.ravel, own)]).double() for own in zip(*both, strict=True))
        return float(nn.functional.cosine_similarity(old, new, dim=0))


def watching(recorder: Recorder) -> AbstractContextManager[None]:
    """Note gradients, clipping, scaling and schedules while inside."""
    steps = _Steps(recorder)
    return listening(
        (probes.BEFORE_STEP, steps.before_step),
        (probes.AFTER_STEP, steps.after_step),
        (probes.BACKWARD, steps.on_backward),
        (probes.ZERO_GRAD, steps.on_zero_grad),
        (_ZERO_GRAD_OF_MODULE, steps.on_zero_grad),
        (probes.SCALER_MADE, steps.on_scaler_made),
        (_SCALE, steps.on_scale),
        (probes.UNSCALE, steps.on_unscale),
        (_SCALER_STEP, steps.on_scaler_step),
        (_SCALER_UPDATE, steps.on_scaler_update),
        (_CLEAR_AUTOCAST, steps.on_clear_autocast),
        (probes.CLIP, steps.on_clip),
        (_SCHEDULER_MADE, steps.on_scheduler_made),
        (_SCHEDULER_STEP, steps.on_scheduler_step),
    )


class _Steps:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._held: weakref.WeakKeyDictionary[Optimizer, _Held] = weakref.WeakKeyDictionary()
        self._schedules = 0  # calls into schedulers that are under way
        self._counts: Counter[str] = Counter()
        self._wanted: weakref.WeakKeyDictionary[GradScaler, bool] = weakref.WeakKeyDictionary()
        self._scale = 0.0
        """What losses have been multiplied by since the scaler's last update, 0 for nothing."""
        self._scaled_loss: weakref.ref[Any] | None = None
        self._in_scaler = False
        self._scaled: set[int] = set()
        """Tensors that scaled losses have reached: no optimizer of theirs may be known by then."""
        self._unscaled: set[int] = set()
        self._passes: Counter[str] = Counter()
        """Where the backward passes since the last step of any optimizer began."""
        self._taken = self._taken_at_pass = 0
        self._last_pass = ""
        self._casts_dropped, self._casts_before = 0, -1
        """How often autocast has forgotten its casts of weights, and had at the last step."""

    def _first_times(self, kind: str, most: int = _MOST) -> bool:
        """Count a kind of event and return whether it is still one of the first."""
        self._counts[kind] += 1
        return self._counts[kind] <= most

    # Gradients

    def on_backward(self, call: ProbedCall) -> Around:
        if self._recorder.quiet:
            return
        loss = loss_of(call)
        events: list[ev.Event] = []
        is_scaled = self._scaled_loss is not None and self._scaled_loss() is loss
        # Line searches and sharpness-aware steps begin anew at other weights; in a GAN the other
        # optimizer keeps its gradients of a pass.
        anew = self._recorder.hooks.closure > 1
        with self._recorder.unwatched():
            unused = [held for held in self._held.values() if held.has_unused()]
            anew |= bool(unused)
            # Another optimizer has stepped meanwhile, and is done with the pass that made these.
            left = unused if self._taken > self._taken_at_pass else []
            for held in self._held.values():
                held.remember()
                held.still_left &= held.is_left() or held.sums() == held.added_up
                if held.cleared and (anew or held.weights != [*map(checksum, held.sample)]):
                    held.lost = None
            if self._first_times("reach", _FIRST):
                events.append(self._reach(loss, is_scaled=is_scaled))
            if (average := average_of(loss)) is not None and self._first_times("average", 200):
                events.append(average)
            sums = [(held, held.sums()) for held in self._held.values() if is_scaled]
        before, self._last_pass = self._last_pass, self._recorder.where()
        self._taken_at_pass = self._taken
        for event in events:
            self._recorder.note(event)
        self._passes[self._recorder.where()] += 1
        try:
            yield
        finally:
            with self._recorder.unwatched():
                for held, earlier in sums:
                    held.scale = self._scale if held.sums() != earlier else held.scale
                for held in left:
                    held.against = held.cosine(), before
                for held in self._held.values():
                    # Those that a pass does not add to are of tensors that no model has.
                    held.still_left &= not held.is_left()
                    held.added_up = now if held.still_left and any(now := held.sums()) else []
                    held.backwards += 1
                    held.cleared, held.grown, held.changes = "", 1.0, []
                    held.weights = [*map(checksum, held.sample)]
                    held.remember()

    def _reach(self, loss: Tensor, *, is_scaled: bool) -> ev.LossReach:
        leaves = list(leaves_of(loss))
        reached = set(map(id, leaves))
        self._scaled = self._scaled | reached if is_scaled else self._scaled - reached
        parameters = sum(isinstance(leaf, nn.Parameter) for leaf in leaves)
        plain = loss.numel() == 1 and loss.is_floating_point() and not loss.is_meta
        value = float(loss) if plain and loss.isfinite() else None
        return ev.LossReach(value, leaves=len(leaves), parameters=parameters)

    def on_zero_grad(self, _call: ProbedCall) -> Around:
        if self._recorder.quiet:
            return
        with self._recorder.unwatched():
            full = [held for held in self._held.values() if held.backwards and any(held.sums())]
            unused = [held for held in full if held.has_unused()]
        yield
        where = self._recorder.where()
        with self._recorder.unwatched():
            for held in (held for held in full if not any(held.sums())):
                held.cleared, held.scale, held.against = where, 1.0, (0.0, "")
                held.lost = (self._passes, self._passes.total(), where) if held in unused else None

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = self._held.get(optimizer)
        if held is None:
            whole = tensors_of(optimizer)
            held = self._held[optimizer] = _Held(
                sorted((p for p in whole if p.requires_grad), key=Tensor.numel)[:_SAMPLE],
                max(whole, key=Tensor.numel),
            )
            held.backwards = 1
            if not self._scaled.isdisjoint({id(p) for p in whole} - self._unscaled):
                held.scale = self._scale
        if step_closure(args, kwargs) is None:  # which would make the gradients
            self._note_gradients(optimizer, held)
        if held.scale > 1.0 and not self._in_scaler:
            self._recorder.once(ev.ScaledStep(held.scale))
        caches = torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, _CASTS))
        if caches and self._casts_before == self._casts_dropped:
            self._recorder.once(ev.AutocastKept())
        self._casts_before = self._casts_dropped if caches else -1

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
            full = any(held.sums())
            now, then = real_parts(some_of(held.largest)), held.stepped
            same = now.shape == then.shape
            times = float((now * then).sum() / then.square().sum()) if same else 1.0
        # Gradients that are put together from several passes' are not those of the last.
        alone = full and held.grown and len(self._passes) == 1
        passes, lost, lost_at = held.lost or (None, 0, "")
        lost = lost if alone and passes is self._passes else 0
        self._recorder.note(
            ev.GradientsUsed(
                type(optimizer).__name__,
                id(optimizer),
                left=bool(held.left) and held.still_left and full,
                cleared=(lost_at if lost else "") if full else held.cleared,
                lost=lost,
                tensors=len(tensors),
                missing=missing,
                grown=held.grown,
                weights_grown=times,
                changes=held.changes,
                against=held.against[0],
                leaked=held.against[1],
            )
        )

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._taken += 1
        held = self._held[optimizer]
        if step_closure(args, kwargs) is not None:
            self._note_gradients(optimizer, held)
        with self._recorder.unwatched():
            held.left = {place: number for place, number in enumerate(held.sums()) if number}
            if held.steps <= _MOST:
                held.stepped = real_parts(some_of(held.largest)).clone()
        held.still_left, held.backwards, held.cleared, held.scale = True, 0, "", 1.0
        held.against = 0.0, ""
        self._passes = Counter()

    # Clipping

    def on_clip(self, call: ProbedCall) -> Around:
        given = call.argument(0, "parameters")
        parameters = [given] if isinstance(given, Tensor) else list(given)
        if call.args:
            call.args = (parameters, *call.args[1:])
        else:
            call.kwargs["parameters"] = parameters
        first = not self._recorder.quiet and self._counts["clip"] < _CLIPS
        with self._recorder.unwatched():
            grads = [p.grad for p in parameters if p.grad is not None] if first else []
            sums = [print_of(grad) for grad in grads]
        with self._rescaling():
            norm = yield
        limit = call.argument(1, "max_norm", call.kwargs.get("clip_value", math.nan))
        # An infinite limit clips nothing: the norm is only read.
        if math.isfinite(limit) and not self._recorder.quiet and self._first_times("clip"):
            clipped = [p for p in parameters if p.grad is not None]
            scaled = any(id(p) not in self._unscaled for p in clipped)
            with self._recorder.unwatched():
                event = ev.GradientsClipped(
                    call.name,
                    limit=float(limit),
                    norm=float(norm) if type(norm) is Tensor else None,
                    scaled=self._scale if scaled else 0.0,
                    sizes=[p.numel() for p in clipped],
                    sums=sums,
                )
            self._recorder.note(event)

    @contextmanager
    def _rescaling(self) -> Iterator[None]:
        """Leave out of `grown` what is done inside."""
        with self._recorder.unwatched():
            for held in self._held.values():
                held.settle()
        yield
        with self._recorder.unwatched():
            for held in self._held.values():
                held.remember()

    # Scaling

    def on_scaler_made(self, call: ProbedCall) -> Around:
        yield
        # One for a GPU switches itself off where there is none; the order of calls is the same.
        self._wanted[call.args[0]] = bool(call.argument(6, "enabled", default=True))

    def on_scale(self, call: ProbedCall) -> Around:
        scaler = call.args[0]
        value = yield
        if self._wanted.get(scaler):
            # `get_scale` gives 1 where it is off.
            self._scale = scaler.get_scale() if scaler.is_enabled() else 65536.0
            self._scaled_loss = weakref.ref(value) if isinstance(value, Tensor) else None

    def on_unscale(self, call: ProbedCall) -> Around:
        optimizer = call.argument(1, "optimizer")
        with self._rescaling():
            yield
        self._unscaled |= {id(p) for p in tensors_of(optimizer)}
        if (held := self._held.get(optimizer)) is not None:
            held.scale = 1.0

    def on_scaler_step(self, call: ProbedCall) -> Around:
        before = self._taken
        self._in_scaler = True
        try:
            yield
        finally:
            self._in_scaler = False
        scaler = call.args[0]
        if scaler.is_enabled():
            skipped = self._taken == before
            self._passes = Counter()
            self._recorder.note(ev.ScalerStep(scaler.get_scale(), skipped=skipped))

    def on_scaler_update(self, _call: ProbedCall) -> Around:
        self._recorder.once(ev.ScaleUpdated())  # it fails if the scaler took no step
        yield
        self._scale = 0.0
        self._scaled.clear()
        self._unscaled.clear()

    def on_clear_autocast(self, _call: ProbedCall) -> None:
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

    def on_scheduler_made(self, call: ProbedCall) -> Around:
        scheduler = call.args[0]
        with self._scheduling():
            yield
        if not self._schedules:
            self._recorder.note(
                ev.SchedulerMade(
                    type(scheduler).__name__,
                    id(scheduler),
                    total=_total(scheduler),
                    inner=[id(part) for part in getattr(scheduler, "_schedulers", ())],
                    lr=float(scheduler.optimizer.param_groups[0]["lr"]),
                )
            )

    def on_scheduler_step(self, call: ProbedCall) -> Around:
        scheduler = call.args[0]
        with self._scheduling():
            yield
        if not self._schedules:
            lr = float(scheduler.optimizer.param_groups[0]["lr"])
            replaced = self._is_replaced(scheduler.optimizer)
            follows = isinstance(scheduler, ReduceLROnPlateau)
            metric = float(call.argument(1, "metrics", math.inf)) if follows else math.inf
            self._recorder.note(
                ev.SchedulerStep(
                    id(scheduler),
                    lr=lr,
                    replaced=replaced,
                    metric=metric if math.isfinite(metric) else None,
                )
            )

    def _is_replaced(self, optimizer: Optimizer) -> bool:
        """Whether its weights are stepped, and only by optimizers that share no group with it."""
        groups = [group for taken in self._held for group in taken.param_groups]
        stepped = {id(p) for group in groups for p in group["params"]}
        shared = {*map(id, groups)} & {*map(id, optimizer.param_groups)}
        return not shared and any(id(p) in stepped for p in tensors_of(optimizer))


def _part_of(gradient: Tensor | None) -> Tensor | None:
    """Return this rank's part of a gradient, None for a sparse one."""
    part = getattr(gradient, "to_local", lambda: gradient)()
    return part if part is not None and part.layout == torch.strided else None


def _linear_in(gradients: Iterable[Tensor | None]) -> float:
    """Return a number that is the sum of those of other gradients if these are their sum."""
    parts = [part.double().flatten() for g in gradients if (part := _part_of(g)) is not None]
    number = sum(float(part @ torch.arange(len(part)).double().cos()) for part in parts)
    return number if math.isfinite(number) else 0.0


def _total(scheduler: Any) -> int | None:
    """Return for how many steps a schedule was made, as far as it says."""
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(number := getattr(scheduler, name, None), int):
            return number
    for function in getattr(scheduler, "lr_lambdas", ()):
        number = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(number, int):
            return number
    return None
