"""`--engine lightning`: a training of samestep's, driven by PyTorch Lightning's Trainer.

The run directory, its records and its checkpoints are those of samestep's own loop. A checkpoint
holds what either needs: Lightning goes on from it, and `samestep evaluate` reads it.
"""

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from samestep.errors import UserError
from samestep.lightning.data import LitData
from samestep.lightning.module import LitRecipe, check_recipe
from samestep.lightning.records import Records, Stopped
from samestep.ranks.world import World
from samestep.recipe import Recipe
from samestep.run import checkpoints
from samestep.run.index import read_index
from samestep.session.training_run import Engine, Task
from samestep.settings import Settings, flag_name
from samestep.training.loop import check_weights, checkpoint_name, stop_early
from samestep.training.optimizer import optimizer_of
from samestep.training.plan import Plan
from samestep.training.snapshot import capture
from samestep.training.work import Work

# What Lightning's loop has no place for; refused before anything is written.
_NATIVE_ONLY = (
    *("compile", "eval_every_steps", "checkpoint_every_steps", "checkpoint_every_minutes"),
    *("eval_every_epochs", "checkpoint_every_epochs", "ema"),
)


def check_settings(settings: Settings, recipe: Recipe) -> None:
    """Refuse what this engine cannot do.

    Raises:
        UserError: a setting, or a part of the recipe, needs the native engine.
    """
    check_recipe(recipe)
    for name in _NATIVE_ONLY:
        if getattr(settings, name) != getattr(Settings, name):
            raise UserError(
                f"--{flag_name(name)} {getattr(settings, name)} needs --engine native: Lightning's "
                "loop evaluates and saves at the end of every epoch, compiles no whole steps, and "
                "averages no weights."
            )
    if settings.ema is not None:
        raise UserError(
            f"--ema {settings.ema} needs --engine native: Lightning's loop evaluates the weights "
            "themselves, not their average."
        )


class _Module(LitRecipe):
    """A recipe whose checkpoints hold also what samestep's own loop goes on from."""

    def __init__(self, task: Task) -> None:
        request, work = task.request, task.work
        recipe = replace(request.recipe, loss=work.learner.loss, metrics=work.metrics)
        super().__init__(recipe, work.settings, request.options, model=work.learner.model)
        self._work, self._state = work, task.state

    def make_optimizer(self, plan: Plan) -> torch.optim.Optimizer:
        """Return the optimizer of the training that samestep has built."""
        return self._work.learner.optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the training; all ranks come here."""
        check_weights(self._work, self._state)
        checkpoint.update(capture(self._work, self._state, self.recipe.name))


class _Writer(CheckpointIO):
    """Write checkpoints whole or not at all, and announce them in the run's index."""

    def __init__(self, task: Task, records: Records) -> None:
        self._task, self._records = task, records

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *_: Any, **__: Any) -> None:
        """Write and announce; rank 0 alone comes here."""
        record = self._task.write(checkpoint, self._records.metric)
        seconds = time.perf_counter() - self._records.saving_began
        self._task.emit({**record, "seconds": seconds})

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Return a checkpoint; nothing in it is run."""
        folder = Path(path).parent
        for entry in read_index(folder).checkpoints:
            if entry.path == Path(path).name:
                return checkpoints.load(folder, entry)
        raise UserError(f"{path} is not among the checkpoints that {folder}/index.json names.")

    def remove_checkpoint(self, path: Any) -> None:
        """Do nothing: the index keeps the best and the last."""


class _Checkpoints(ModelCheckpoint):
    """A checkpoint at the end of each epoch, after its validation."""

    def __init__(self, task: Task) -> None:
        super().__init__(
            dirpath=task.session.path / "checkpoints",
            save_top_k=-1,
            enable_version_counter=False,
            save_on_train_epoch_end=task.work.validation is None,
        )
        self._state = task.state

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save where nothing is validated; within an epoch the last step has saved already."""
        if not self._state.position.step_in_epoch:
            super().on_train_epoch_end(trainer, pl_module)

    def format_checkpoint_name(self, *_: Any, **__: Any) -> str:
        """Return the path of a checkpoint of where the training stands."""
        return str(Path(cast("str", self.dirpath)) / checkpoint_name(self._state.position))


def _drive(task: Task) -> None:
    """Train with a Trainer of Lightning's."""
    task = replace(task, work=_with_its_optimizer(task.work, task.request.recipe))
    work, state = task.work, task.state
    settings, watch, records = work.settings, state.watch, Records(task)
    callbacks: list[Any] = [records, LearningRateMonitor("step")]
    if settings.patience is not None:
        callbacks.append(
            EarlyStopping(
                f"val_{watch.metric}",
                settings.min_delta,
                settings.patience,
                mode=watch.mode,
                check_finite=False,
            )
        )
    callbacks.append(_Checkpoints(task))
    with _quietly():
        try:
            trainer = _trainer(task, callbacks, _Writer(task, records))
            trainer.fit(
                _Module(task),
                datamodule=LitData.of_work(work, task.request.recipe, task.request.options),
                ckpt_path=task.checkpoint,
                weights_only=True,
            )
        except Stopped:
            return
        except MisconfigurationException as error:
            raise UserError(f"Lightning refuses these settings: {error}") from error
    if state.position.step >= work.plan.total_steps:
        state.stop_reason = "finished"
    else:
        stop_early(work, state)
    if not state.stop_reason:
        raise RuntimeError(
            f"Lightning ended the training after step {state.position.step} of "
            f"{work.plan.total_steps}, and nobody had asked it to."
        )


def _with_its_optimizer(work: Work, recipe: Recipe) -> Work:
    """Return the work with an optimizer that Lightning's mixed precision can clip: not fused."""
    settings = work.settings
    if settings.precision not in ("bf16", "fp16"):
        return work
    model, device = work.learner.model, work.world.device
    optimizer = optimizer_of(recipe, model, settings, work.plan.lr, device, fuse=False)
    return replace(work, learner=replace(work.learner, optimizer=optimizer))


def _trainer(task: Task, callbacks: list[Any], writer: CheckpointIO) -> Trainer:
    work = task.work
    world, settings, plan = work.world, work.settings, work.plan
    plugins: list[Any] = [writer, _environment(world)]
    if settings.precision in ("bf16", "fp16"):
        mixed: Any = "bf16-mixed" if settings.precision == "bf16" else "16-mixed"
        plugins.append(MixedPrecision(mixed, world.device.type, work.learner.scaler))
    devices: Any = world.local_world_size
    if world.world_size == 1 and world.device.type == "cuda":
        devices = [world.device.index or 0]
    return Trainer(
        accelerator="gpu" if world.device.type == "cuda" else world.device.type,
        devices=devices,
        num_nodes=world.num_nodes,
        strategy=_strategy(world, plan.accumulate, settings),
        plugins=plugins,
        callbacks=callbacks,
        logger=CSVLogger(task.session.path, name="lightning"),
        max_epochs=plan.epochs,
        max_steps=plan.total_steps,
        accumulate_grad_batches=plan.accumulate,
        gradient_clip_val=settings.clip_norm,
        log_every_n_steps=plan.log_every,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _strategy(world: World, accumulate: int, settings: Settings) -> Any:
    if world.world_size == 1:
        return "auto"
    return DDPStrategy(
        find_unused_parameters=settings.find_unused,
        # DDP learns the graph in its first backward, and fails where that one sends nothing yet.
        static_graph=accumulate == 1 and not settings.find_unused,
        gradient_as_bucket_view=True,
        bucket_cap_mb=settings.bucket_cap_mb,
        # What is agreed on goes by Gloo from the CPU, and rank 0's buffers are shared before each
        # evaluation: as in samestep's own loop.
        process_group_backend="cpu:gloo,cuda:nccl" if world.backend == "nccl" else "gloo",
    )


def _environment(world: World) -> ClusterEnvironment:
    """Return how Lightning is to know of the ranks, who have met already."""
    if world.world_size == 1:
        return LightningEnvironment()  # also in the shell of an allocation
    if world.launcher not in ("srun", "torchrun"):
        raise UserError(
            f"--engine lightning cannot be started by {world.launcher}: Lightning does not know "
            "its ranks. Start with --nproc, torchrun or srun, or use --engine native."
        )
    if world.world_size != world.num_nodes * world.local_world_size:
        raise UserError(
            f"--engine lightning needs as many ranks on each node; of {world.world_size}, "
            f"{world.local_world_size} are on this one of {world.num_nodes} nodes. Start with "
            "--ntasks-per-node, or use --engine native."
        )
    if world.launcher == "torchrun":
        return TorchElasticEnvironment()
    # Lightning insists on this variable, which `srun --ntasks` does not set.
    os.environ["SLURM_NTASKS_PER_NODE"] = str(world.local_world_size)
    return SLURMEnvironment(auto_requeue=False)  # the job script requeues


@contextmanager
def _quietly() -> Iterator[None]:
    """Let samestep's screen speak alone: Lightning's hints are for those who write its scripts."""
    loggers = map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))
    levels = {logger: logger.level for logger in loggers}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


LIGHTNING = Engine(wrap=lambda model, *_: model, drive=_drive)  # the strategy wraps the model
