"""What a LightningModule chooses for its training: optimizer, scheduler, and type of weights."""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.settings import Settings
from samestep.bridges.lightning.logged import NTH, plain_name
from samestep.core.learner.optimizer import own_rate

_OF_WEIGHTS: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"precision": "fp64"},
    torch.bfloat16: {"precision": "bf16", "param_dtype": "bf16"},
}
"""Settings that keep the weights of a module in their type; by default they become float32."""


def settings_of_weights(module: nn.Module) -> dict[str, Any]:
    """Return the settings that keep weights in their type, where they have one that is known."""
    types = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return next((_OF_WEIGHTS[kind] for kind in _OF_WEIGHTS if kind in types), {})


def check_around_step(hooks: Collection[str], settings: Settings, where: str) -> None:
    """Refuse hooks around a step that would not get what the Trainer gives them."""
    if (seeing := {*hooks} - {"optimizer_step"}) and settings.strategy == "fsdp":
        raise UserError(
            f"With --strategy fsdp {listed(sorted(seeing))}{where} would see only a rank's parts "
            "of the weights.",
            remedy="Use --strategy ddp, or leave the hook out.",
        )
    if "optimizer_step" in hooks and settings.precision == "fp16":
        raise UserError(
            f"With --precision fp16 a step may be left out, and optimizer_step{where} with it.",
            remedy="Use --precision bf16, or a scheduler with the interval “step”.",
        )
    clipped = {"on_after_backward", "on_before_optimizer_step"}.intersection(hooks)
    if clipped and settings.clip_norm is not None:
        raise UserError(
            f"{listed(sorted(clipped))}{where} would see clipped gradients; the Trainer calls it "
            "before clipping.",
            remedy="Leave it out: `grad_norm` in the records is the norm before clipping.",
        )


def check_rate(optimizer: torch.optim.Optimizer, settings: Settings, where: str) -> None:
    """Refuse a --lr that reaches no group of a module's own optimizer."""
    if settings.lr != Settings.lr and own_rate(optimizer, settings.lr) is not None:
        raise UserError(
            f"--lr {settings.lr:g} changes nothing: configure_optimizers{where} sets the rate.",
            remedy="Leave --lr out, or make the rate an argument of the module.",
        )


def check_batch(trainer: Any, settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse a batch of a script's datamodule that is not that of its loader, made by its setup."""
    taken, real = trainer.script.get("loaders_batch"), trainer.loaders_batch
    if taken in (None, real) or settings.batch_size != given["batch_size"]:
        return
    name = type(trainer.datamodule or trainer.of()).__name__
    micro = f" --micro-batch-size {real}" if "micro_batch_size" in given else ""
    size = f"{given['batch_size'] // taken * real}{micro}" if real else "N, the samples of a step"
    raise UserError(
        f"The training loader of {name} makes batches of {real or 'other'} samples, which samestep "
        "cannot know before setup() is called.",
        remedy=f"Add --batch-size {size}, or give {name} an attribute `batch_size`.",
    )


class Unchanged(LRScheduler):
    """Leaves the rates as they are: a hook of the module may set them."""

    def get_lr(self) -> list[Any]:
        """Return the rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]


class Stepped(LRScheduler):
    """Another scheduler, stepped at some of the times at which samestep steps this one."""

    def __init__(self, scheduler: Any, step: Callable[[int], None]) -> None:
        self.scheduler, self.optimizer, self.times = scheduler, scheduler.optimizer, 0
        self._step = step
        """Called with the number of the time, from 1."""

    def step(self, *_: Any) -> None:
        """Step it, if that is due."""
        self.times += 1
        self._step(self.times)

    def state_dict(self) -> dict[str, Any]:
        """Return its state, and how often this one was stepped."""
        return {"times": self.times, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""
        self.times = state_dict["times"]
        self.scheduler.load_state_dict(state_dict["scheduler"])


def stepped(part: dict[str, Any], trainer: Any, call: Callable[..., Any] | None) -> None:
    """Let a scheduler be stepped as the Trainer does; `call` is the module's lr_scheduler_step."""
    every, ends = part.pop("frequency", 1), part.pop("ends_epoch", False)
    scheduler, interval = part["scheduler"], part.get("interval")
    if call is not None and interval is None:
        raise UserError(
            f"lr_scheduler_step{defined_at(call)} would be called with ReduceLROnPlateau, which "
            "samestep steps itself.",
            remedy="Leave lr_scheduler_step out.",
        )
    if every == 1 and call is None and not ends:
        return
    if "sizes" not in vars(trainer):
        raise UserError(
            "A scheduler with a frequency, or with lr_scheduler_step, needs batch_size=…, not "
            "batch_size_per_rank or batch_tokens: the steps of an epoch must be known."
        )
    steps = trainer.sizes[0]

    def step(times: int) -> None:
        of_step = interval == "step" or ends
        epoch, in_epoch = divmod(times - 1, steps) if of_step else (times - 1, steps - 1)
        if ends and in_epoch + 1 < steps:
            return
        number = trainer.batches_before(in_epoch + 1) if interval == "step" else epoch + 1
        if number % every:
            return
        trainer.current_epoch = epoch
        trainer.global_step = epoch * steps + in_epoch + 1
        scheduler.step() if call is None else call(scheduler, None)

    part["scheduler"] = type(type(scheduler).__name__, (Stepped,), {})(scheduler, step)
    part["interval"] = "step" if ends else interval


def configured(module: Any, given: Any) -> Any:
    """Return what `configure_optimizers` does; LightningCLI's is one of the given module."""
    returned = module.configure_optimizers()
    if "configure_optimizers" not in vars(module) or not isinstance(given, nn.Module):
        return returned
    own = dict(module.named_parameters())
    return copy.deepcopy(returned, {id(p): own[name] for name, p in given.named_parameters()})


def unpack_optimizers(
    returned: Any, settings: Settings, where: str
) -> tuple[torch.optim.Optimizer, list[dict[str, Any]]]:
    """Return the optimizer of `configure_optimizers`, and its schedulers for `stepped`."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list):
        optimizers, schedulers = returned
        returned = {"optimizer": optimizers, "lr_scheduler": schedulers}
    if isinstance(returned, list | tuple) and any(isinstance(one, dict) for one in returned):
        returned = _only(returned, where)
    if not isinstance(returned, dict):
        returned = {"optimizer": returned}
    optimizer, schedulers = _only(returned.get("optimizer"), where), returned.get("lr_scheduler")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"configure_optimizers{where} returned no optimizer.",
            remedy="Return one: without it the Trainer changes no weights.",
        )
    several = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    given = [one if isinstance(one, dict) else {"scheduler": one} for one in several]
    monitor = {"monitor": returned.get("monitor")}  # Lightning takes it at both places
    parts = [_unpacked(monitor | one, settings, where) for one in given if one.get("scheduler")]
    if {None, "epoch"} <= {part.get("interval") for part in parts}:  # the first is a plateau's
        for part in parts:  # it is stepped before the validation, and the plateau's after it
            part["ends_epoch"] = part.get("interval") == "epoch"
    return optimizer, parts


def _unpacked(options: dict[str, Any], settings: Settings, where: str) -> dict[str, Any]:
    """Return a scheduler, and when it is stepped."""
    scheduler, every = options["scheduler"], options.get("frequency", 1)
    if not isinstance(scheduler, ReduceLROnPlateau):
        interval = options.get("interval", "epoch")
        return {"scheduler": scheduler, "interval": interval, "frequency": every}
    if options.get("interval") == "step":
        raise UserError(
            f"ReduceLROnPlateau{where} has the interval “step”; samestep steps it after each "
            "evaluation.",
            remedy="Leave the interval out. --eval-every 500steps evaluates within epochs.",
        )
    if every not in (1, settings.eval_every_epochs):
        raise UserError(
            f"ReduceLROnPlateau{where} has a frequency of {every}; samestep steps it after each "
            f"evaluation, which is every {settings.eval_every_epochs} epochs.",
            remedy=f"Leave the frequency out, or evaluate as often: --eval-every {every}epochs.",
        )
    own = options["monitor"] and {"monitor": _followed(options["monitor"], where)}
    return {"scheduler": scheduler, **(own or {})}


def _followed(monitor: str, where: str) -> str:
    """Return what a scheduler follows, as records call it."""
    name, _, loader = monitor.partition(f"/{NTH}")
    if monitor.lower().startswith("train"):
        raise UserError(
            f"ReduceLROnPlateau{where} has the monitor {monitor!r}, a value of the training.",
            remedy="Monitor a value that validation_step logs.",
        )
    return f"{NTH}{loader}/{plain_name(name)}" if loader else plain_name(name)


def _only(given: Any, where: str) -> Any:
    if not isinstance(given, list | tuple):
        return given
    if len(given) > 1:
        raise UserError(
            f"configure_optimizers{where} returns several optimizers; samestep trains with one. "
            "For several, write your own loop with samestep.open_run."
        )
    return given[0] if given else None
