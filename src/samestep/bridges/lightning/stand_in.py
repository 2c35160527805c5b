"""What stands in for Lightning's Trainer where samestep calls a LightningModule's steps."""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD, Optimizer

from samestep.base.errors import UserError, defined_at
from samestep.base.patches import patched
from samestep.base.settings import Settings
from samestep.bridges.lightning.logged import gathering_nothing
from samestep.bridges.lightning.module_hooks import call, call_callback
from samestep.core.data.order import share
from samestep.core.learner.optimizer_state import parameters_in

BEFORE_STEP = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
"""Hooks that are called before each step, in this order, once all ranks have the gradients."""
AFTER_STEP, OPTIMIZER_STEP = "on_train_batch_end", "optimizer_step"
AT_START = ("on_fit_start", "on_train_start")
AFTER_VALIDATION = ("on_validation_epoch_end", "on_validation_end")
NEWEST: ContextVar[tuple[Any, Any, int]] = ContextVar("newest", default=({}, None, 0))
"""What the newest `training_step` has returned, its batch, and its number.

It is in no attribute: those are compared between two steps, for what a module counts.
"""
_TAKEN: ContextVar[tuple[int, range, bool, int, Any]]
_TAKEN = ContextVar("taken", default=(0, range(0), False, -1, lambda: None))
"""Rows of the newest step that this rank has taken, of which ones, whether these are the epoch's
last, that step, and what returns its module."""
_OF_RANK = {"global_rank": "RANK", "local_rank": "LOCAL_RANK"}
_DECIDED: dict[str, Any] = {"should_stop": False, "max_epochs": None, "max_steps": -1}
_DECIDED |= {"gradient_clip_val": None, "accumulate_grad_batches": 1}
_DECIDED |= {"limit_train_batches": 1.0, "limit_val_batches": 1.0}
"""What a module may not set: the recipe's settings decide it."""
_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp64": "64-true"}


_NOT_PICKLED = ("of", "built")


def _let_step(
    trainer: "StandIn", module: Any, optimizer: Optimizer, after: Callable[[], Any]
) -> None:
    """Let a module's own `optimizer_step` take each step, and call `after` it."""
    update = optimizer.step

    def step(*_: Any) -> None:
        taken: list[Any] = []
        outputs, _, number = NEWEST.get()
        given = (trainer.current_epoch, number, optimizer, lambda: outputs.get("loss"))
        own = {"step": lambda *_, **__: taken.append(update()), "zero_grad": lambda *_, **__: None}
        with patched(*((optimizer, name, function) for name, function in own.items())):
            call(module, OPTIMIZER_STEP, *given)
        if len(taken) != 1:
            raise UserError(
                f"optimizer_step{defined_at(type(module).optimizer_step)} has stepped the "
                f"optimizer {len(taken)} times, not once.",
                remedy="Step it in each call; accumulate_grad_batches accumulates gradients.",
            )
        after()

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


class StandIn:
    """What stands in for Lightning's Trainer: what a step, or `configure_optimizers`, may ask.

    It is that of one process, as its batches are: rates and lengths must not grow with the ranks.
    """

    def __init__(self) -> None:
        self.current_epoch = self.global_step = 0
        self.training = self.validating = self.testing = False
        self.sanity_checking = self.predicting = self.fast_dev_run = False
        self.world_size = self.num_devices = self.num_nodes = 1
        self.datamodule: Any = None
        self.logger: Any = DummyLogger()  # takes any call
        self.loggers, self.callbacks = [self.logger], list[Any]()
        self.hooks_of: list[tuple[Any, list[str]]] = []
        """A script's own callbacks, and which of their hooks are called."""
        self.progress_bar_callback = self.checkpoint_callback = self.early_stopping_callback = None
        self.callback_metrics: dict[str, Tensor] = {}
        self.state = SimpleNamespace(fn="fit", status="running")
        vars(self).update(_DECIDED)
        self.samples, self.drops, self.told = 0, False, False
        self.script: dict[str, Any] = {}
        """What a script's Trainer says of its batches, where the module comes from one."""
        self.clip_value: float | None = None
        """The most that a gradient's number may be; a script's Trainer says it."""
        self.loaders_batch: int | None = None
        self.of: Callable[[], Any] = lambda: None
        """Returns the module that was called last, if it is still there; `built` the first."""
        self.built, self.ended = self.of, dict[str, str]()
        """Names of what the hook at the end of an evaluation logs: in records → as logged."""
        self.steps_by(SGD([torch.zeros(1)]), [])  # where nothing is trained: steps may log a rate

    def train_as(self, settings: Settings, micro_batch: int | None) -> None:
        """Know how the training is, and where its data is known, how long.

        `micro_batch` is what the recipe says; the settings' may be what one of several ranks takes.
        """
        own = vars(self)
        own.update(max_epochs=settings.epochs, max_steps=settings.max_steps or -1)
        self.eval_every_epochs = settings.eval_every_epochs
        clip = settings.clip_norm or self.clip_value
        own.update(gradient_clip_val=clip, log_every_n_steps=settings.log_every)
        in_bf16 = settings.param_dtype == "bf16"
        self.precision = "bf16-true" if in_bf16 else _PRECISIONS[settings.precision]
        if self.samples and (batch := settings.batch_size):
            steps = self.samples // batch if settings.drop_last else -(-self.samples // batch)
            each = [steps * settings.epochs] if settings.epochs else []
            each += [settings.max_steps] if settings.max_steps else []
            micro = micro_batch or batch
            own["accumulate_grad_batches"] = -(-batch // micro)
            self.sizes = steps, batch, micro
            self.num_training_batches = self.batches_before(steps)
            self.train_dataloader = range(self.num_training_batches)  # for its length
            self.estimated_stepping_batches = min(each)

    def steps_by(self, optimizer: Any, schedulers: Sequence[dict[str, Any]]) -> None:
        """Know the optimizer and its schedulers, for those who log the rate."""
        self.optimizers = [optimizer]
        self.strategy = SimpleNamespace(_lightning_optimizers=[optimizer])
        self.lr_scheduler_configs = [SimpleNamespace(**one) for one in schedulers]

    def call_around_steps(self, module: Any, optimizer: Optimizer, hooks: Collection[str]) -> None:
        """Let each step of the optimizer call those of the callbacks' and the module's hooks."""
        of_any = {*hooks}.union(*(names for _, names in self.hooks_of))
        takes_step = OPTIMIZER_STEP in hooks
        before = [name for name in BEFORE_STEP if name in of_any]

        def call_all(name: str, *given: Any) -> None:
            self.call_callbacks(module, (name,), *given)
            if name in hooks:
                call(module, name, *given)

        # Functions, not methods: a copy of the optimizer would have a copy of the module.
        def call_before(*_: Any) -> None:
            for name in before:
                call_all(name, *(() if name == "on_after_backward" else (optimizer,)))
            if self.clip_value is not None:
                clip_grad_value_(parameters_in(optimizer), self.clip_value)

        def call_after(*_: Any) -> None:
            self.global_step += 1
            with (
                nullcontext() if "stepped" in vars(self) else gathering_nothing(module, AFTER_STEP)
            ):
                call_all(AFTER_STEP, *NEWEST.get())
            vars(self)["stepped"] = True

        if before or self.clip_value is not None or takes_step:
            optimizer.register_step_pre_hook(call_before)
        if takes_step:
            _let_step(self, module, optimizer, call_after if AFTER_STEP in of_any else int)
        elif AFTER_STEP in of_any:
            optimizer.register_step_post_hook(call_after)

    def call_callbacks(self, module: Any, names: Collection[str], *given: Any) -> None:
        """Call these hooks of the script's callbacks."""
        for name in names:
            for callback, hooks in self.hooks_of:
                if name in hooks:
                    call_callback(callback, name, self, module, *given)

    def tell_in_training(self, module: Any, name: str, *given: Any) -> None:
        """Call a hook of the script's callbacks, unless the module is a copy that is tried."""
        if module is self.built():
            self.call_callbacks(module, (name,), *given)

    def set_up(self, module: Any) -> None:
        """Call `setup` of the module, and before a training that of callbacks."""
        self.call_callbacks(module, ("setup",) if self.samples else ())
        module.setup("fit")

    def begin(self, module: Any) -> None:
        """Call the hooks before a training, not where one is only loaded."""
        for name in AT_START if self.samples else ():
            self.call_callbacks(module, (name,))
            getattr(module, name)()

    def end_epoch(self, module: Any, epoch: int, step: int) -> None:
        """Tell callbacks of the end of an epoch, from 1, and of its validation."""
        self.current_epoch, self.global_step = epoch - 1, step
        validated = bool(self.callback_metrics) and epoch % self.eval_every_epochs == 0
        self.call_callbacks(module, (*AFTER_VALIDATION * validated, "on_train_epoch_end"))

    def batches_before(self, step: int) -> int:
        """Return the number of a step's first batch in the epoch, or where it ends of all."""
        _, batch, micro = self.sizes
        whole, rest = divmod(min(step * batch, self.samples), batch)
        return whole * -(-batch // micro) + -(-rest // micro)

    def nth(self, step: int, rows: int) -> tuple[int, int]:
        """Return the number, in its epoch, of the batch that these rows of a step are in.

        It is the same on any number of ranks; the second one is that of the step's last batch.
        """
        if "sizes" not in vars(self):
            return step, step
        steps, batch, micro = self.sizes
        in_epoch, of = step % steps, self.of()
        rows_before, mine, _, before, by = _TAKEN.get()
        again = before == step and by() is of  # another one is a copy that is tried
        size = min(batch, self.samples - in_epoch * batch)
        if not again:
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            mine = share(range(size), self.global_rank, ranks)
        taken = rows_before if again and rows_before < len(mine) else 0  # or it is repeated
        last = in_epoch + 1 == steps and taken + rows >= len(mine)
        _TAKEN.set((taken + rows, mine, last, step, self.of))
        first = self.batches_before(in_epoch)
        return first + min(mine.start + taken, size - 1) // micro, first + (size - 1) // micro

    def __getstate__(self) -> dict[str, Any]:
        """Return what a loader's worker gets: all but the module and the data."""
        kept = {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}
        return kept | {"callbacks": [], "hooks_of": []}

    def __deepcopy__(self, _memo: Any) -> "StandIn":
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _DECIDED:
            raise UserError(
                f"A module or a callback sets its Trainer's {name}, a setting in samestep.",
                remedy="Use --patience to stop early; page “Bring what you have” has the other "
                "flags.",
            )
        vars(self)[name] = value

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "lightning_module") and "of" in vars(self):
            return self.of()
        if name == "logged_metrics":
            return self.callback_metrics
        if name == "is_last_batch":
            return _TAKEN.get()[2]
        if name == "is_global_zero":
            return self.global_rank == 0
        if name in _OF_RANK:
            return int(os.environ.get(_OF_RANK[name], "0"))
        raise AttributeError(
            f"A module or a callback asks its Trainer for {name!r}, which samestep does not "
            "provide here."
        )
