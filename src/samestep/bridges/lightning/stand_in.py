"""What stands in for Lightning's Trainer where samestep calls a LightningModule's steps."""

import os
import sys
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.optim import SGD, Optimizer

from samestep.base.settings import Settings
from samestep.bridges.lightning.module_hooks import call

BEFORE_STEP = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
"""Hooks that are called before each step, in this order, once all ranks have the gradients."""
AFTER_STEP = "on_train_batch_end"
_OF_RANK = {"world_size": "WORLD_SIZE", "global_rank": "RANK", "local_rank": "LOCAL_RANK"}


class StandIn:
    """What stands in for Lightning's Trainer: what a step, or `configure_optimizers`, may ask."""

    def __init__(self) -> None:
        self.current_epoch = self.global_step = 0
        self.training = self.validating = self.testing = False
        self.sanity_checking = self.predicting = False
        self.datamodule: Any = None
        self.logger: Any = DummyLogger()  # takes any call
        self.loggers, self.progress_bar_callback = [self.logger], None
        self.callback_metrics: dict[str, Tensor] = {}
        self.max_epochs: int | None = None
        self.max_steps = -1
        self.samples, self.drops = 0, False
        self.newest: tuple[Any, Any, int] = ({}, None, 0)
        """What the newest `training_step` has returned, its batch, and its number."""
        self.model: Any
        self.steps_by(SGD([torch.zeros(1)]), {})  # where nothing is trained: steps may log a rate

    def train_as(self, settings: Settings) -> None:
        """Know how long the training is, where its data is known."""
        self.max_epochs, self.max_steps = settings.epochs, settings.max_steps or -1
        if self.samples and (batch := settings.batch_size):
            steps = self.samples // batch if settings.drop_last else -(-self.samples // batch)
            each = [steps * settings.epochs] if settings.epochs else []
            each += [settings.max_steps] if settings.max_steps else []
            self.num_training_batches = steps
            self.estimated_stepping_batches = min(each)

    def steps_by(self, optimizer: Any, scheduler: dict[str, Any]) -> None:
        """Know the optimizer and its scheduler, for those who log the rate."""
        self.optimizers = [optimizer]
        self.strategy = SimpleNamespace(_lightning_optimizers=[optimizer])
        self.lr_scheduler_configs = [SimpleNamespace(**scheduler)] if scheduler else []

    def call_around_steps(self, module: Any, optimizer: Optimizer, hooks: Collection[str]) -> None:
        """Let each step of the optimizer call those of the module's hooks."""
        before = [name for name in BEFORE_STEP if name in hooks]

        # Functions, not methods: a copy of the optimizer would have a copy of the module.
        def call_before(*_: Any) -> None:
            for name in before:
                call(module, name, *(() if name == "on_after_backward" else (optimizer,)))

        def call_after(*_: Any) -> None:
            self.global_step += 1
            call(module, AFTER_STEP, *self.newest)

        if before:
            optimizer.register_step_pre_hook(call_before)
        if AFTER_STEP in hooks:
            optimizer.register_step_post_hook(call_after)

    def nth(self, step: int) -> int:
        """Return the number of a step within its epoch."""
        return step % int(vars(self).get("num_training_batches", sys.maxsize))

    def __deepcopy__(self, _memo: Any) -> "StandIn":
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "is_global_zero":
            return self.global_rank == 0
        if name in _OF_RANK:
            return int(os.environ.get(_OF_RANK[name], name == "world_size"))
        raise AttributeError(
            f"The LightningModule asks its Trainer for {name!r}, which samestep does not have at "
            "this place."
        )
