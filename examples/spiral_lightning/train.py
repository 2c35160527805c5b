"""Train a small MLP to tell two spirals apart, with PyTorch Lightning.

    python train.py                              # one process
    torchrun --nproc_per_node=2 train.py         # two ranks on this machine
    sbatch train.sbatch                          # Slurm: one GPU, one node or several

Each epoch prints the mean loss and the accuracy on the training points, measured while the model
learns and with its dropout, and below them those on the validation points. At the end come those on
the test points, with the checkpoint that was best in validation. All output is in a new folder,
OUTPUT_DIR/EXPERIMENT_NAME/version_N. Ranks use GPUs and NCCL if there are GPUs, else CPUs and Gloo.
"""

import argparse
import gc
import logging
import os
import sys
import time
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import lightning as L
import torch
import torch.distributed as dist
from datamodule import SpiralDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from model import SpiralClassifier


@rank_zero_only
def say(line: str) -> None:
    """Print a line on rank 0, and flush it: a job's output file is read while the job runs."""
    print(line, flush=True)


def refuse(message: str) -> NoReturn:
    """End with exit code 2 and a message. Every rank says it: whichever ends first ends all."""
    print(f"train.py: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# --- The ranks --------------------------------------------------------------------------------


def find_ranks() -> tuple[ClusterEnvironment, int, int]:
    """Return who started this process, the number of nodes, and the ranks on each node."""
    told = os.environ
    if TorchElasticEnvironment.detect():  # torchrun
        here = int(told["LOCAL_WORLD_SIZE"])
        return TorchElasticEnvironment(), int(told["WORLD_SIZE"]) // here, here
    tasks = int(told.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1:  # python, or a batch script without srun
        return LightningEnvironment(), 1, 1
    nodes = int(told["SLURM_STEP_NUM_NODES"])  # srun
    if "," in told["SLURM_STEP_TASKS_PER_NODE"]:
        refuse("Lightning needs equally many tasks on each node: --ntasks-per-node.")
    # Lightning requires this variable, which `srun --ntasks` does not set.
    told["SLURM_NTASKS_PER_NODE"] = str(tasks // nodes)
    return SLURMEnvironment(auto_requeue=False), nodes, tasks // nodes


def leave() -> None:
    """Leave the process group after success."""
    gc.collect()  # the DDP model is part of a cycle; while it lives, leaving the group can hang
    if dist.is_initialized():
        dist.barrier()  # no rank exits while another still talks to it
        dist.destroy_process_group()


# --- Output -----------------------------------------------------------------------------------


class Report(L.Callback):
    """Print and time each epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print an epoch, its validation included."""
        seconds = time.perf_counter() - self.started
        pl_module.log("epoch_time_s", seconds, sync_dist=True, reduce_fx="max")  # the slowest rank
        found = trainer.callback_metrics
        for part, label in (("train", f"Epoch {trainer.current_epoch + 1}"), ("val", "  held out")):
            loss, accuracy = found[f"{part}_loss"], found[f"{part}_accuracy"]
            say(f"{label} - Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}")


def make_loggers(settings: argparse.Namespace) -> list[Logger]:
    """Return the loggers: a CSV file, and Comet if a project is named. Only rank 0 writes."""
    loggers: list[Logger] = [CSVLogger(settings.output_dir, name=settings.experiment_name)]
    if settings.comet_project:
        project, name = settings.comet_project, settings.experiment_name
        try:  # not Lightning's CometLogger, which loses metrics when there is no network
            from samestep import TrackerLogger  # noqa: PLC0415 - only for Comet

            comet = TrackerLogger(
                "comet", save_dir=settings.output_dir, name=name, project=project, say=say
            )
        except Exception as error:  # not installed, or a name that Comet refuses
            refuse(f"--comet_project: {error} It needs: pip install 'samestep[comet]'")
        loggers.append(comet)
    return loggers


# --- Settings and training --------------------------------------------------------------------


def read_settings(words: list[str]) -> argparse.Namespace:
    """Return the settings: flags win over the --config file, which wins over the defaults."""
    parser = argparse.ArgumentParser(description="Train an MLP on two spirals with Lightning.")
    add = parser.add_argument
    add("--batch_size", type=at_least(1), default=32, help="samples per rank and step")
    add("--max_epochs", type=at_least(1), default=50, help="passes over the training samples")
    add("--num_workers", type=at_least(0), default=0, help="processes per rank that load the data")
    add("--learning_rate", type=float, default=1e-3)
    add("--hidden_dims", type=at_least(1), nargs="+", default=[64, 32, 16], metavar="WIDTH")
    add("--dropout", type=float, default=0.1)
    add("--noise", type=float, default=0.2, help="standard deviation on each coordinate")
    add("--num_samples", type=at_least(20), default=10_000, help="points of both spirals")
    add("--seed", type=int, default=42, help="of points, split, weights, order and dropout")
    add("--comet_project", help="log to this project of Comet too")
    add("--experiment_name", default="spiral")
    add("--output_dir", type=Path, default=Path("runs"), help="must be the same on all nodes")
    add("--config", type=words_of, metavar="FILE.toml", help="settings by name; flags win over it")
    from_file = parser.parse_args(words).config or []
    settings = parser.parse_args([*from_file, *words])  # of two values, the later one counts
    if not (settings.learning_rate > 0 and settings.noise >= 0 and 0 <= settings.dropout < 1):
        parser.error("--learning_rate must be above 0, --noise not negative, --dropout 0 to 1")
    return settings


def words_of(path: str) -> list[str]:
    """Return what a TOML file of settings would be on the command line."""
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    lists = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return [word for name, value in lists.items() for word in (f"--{name}", *map(str, value))]


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of at least this."""

    def whole_number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return whole_number


def train(settings: argparse.Namespace) -> None:
    """Train, then measure the best checkpoint on the test samples."""
    environment, num_nodes, here = find_ranks()
    world_size = num_nodes * here
    device, gpus = "gpu" if torch.cuda.is_available() else "cpu", torch.cuda.device_count()
    if device == "gpu" and gpus < here:
        refuse(f"{here} ranks on a node, {gpus} visible GPUs. To use CPUs: CUDA_VISIBLE_DEVICES=")
    if int(settings.num_samples * 0.15) < world_size:
        refuse(f"--num_samples {settings.num_samples} leaves a rank without a validation sample.")
    say(
        f"Ranks: {world_size}, nodes: {num_nodes}, device: {device}, samples per step: "
        f"{settings.batch_size * world_size} = {settings.batch_size} x {world_size}"
    )
    L.seed_everything(settings.seed, verbose=False)  # the same initial weights on every rank
    data = SpiralDataModule(
        num_samples=settings.num_samples,
        noise=settings.noise,
        seed=settings.seed,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
    )
    model = SpiralClassifier(
        hidden_dims=settings.hidden_dims,
        dropout=settings.dropout,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
    )
    best = ModelCheckpoint(filename="best", monitor="val_loss", mode="min", save_last=True)
    ddp = DDPStrategy(
        find_unused_parameters=False,  # every parameter takes part in every step
        static_graph=True,  # and the graph is the same in every step
        gradient_as_bucket_view=True,  # keep gradients in the buffers that DDP sends
    )
    loggers = make_loggers(settings)
    for logger in loggers:  # beside the arguments of the two classes
        logger.log_hyperparams({"max_epochs": settings.max_epochs, "world_size": world_size})
    trainer = L.Trainer(
        accelerator=device,
        devices=here,
        num_nodes=num_nodes,
        strategy=ddp if world_size > 1 else "auto",
        plugins=[environment],
        use_distributed_sampler=False,  # SpiralDataModule splits the data itself
        max_epochs=settings.max_epochs,
        logger=loggers,
        log_every_n_steps=10,  # train_loss_step: reading a loss makes the CPU wait for the GPU
        callbacks=[best, Report()],
        num_sanity_val_steps=0,
        enable_progress_bar=False,  # a job's output is a file
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(model, datamodule=data)
    say(f"Trained for {time.perf_counter() - started:.2f} s")
    (found,) = trainer.test(model, datamodule=data, ckpt_path="best", verbose=False)
    say(f"Test - Avg Loss: {found['test_loss']:.6f}, Accuracy: {found['test_accuracy']:.2%}")
    say(f"Best checkpoint: {best.best_model_path}")
    for comet in loggers[1:]:
        comet.close()  # rank 0 sends what is left before the others end


def main() -> None:
    """Read the settings, train, leave the other ranks."""
    # Lightning describes devices and ranks on every rank, and warns of what is intended here.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*(many workers|logging interval|`srun` command|LeafSpec).*")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun has it: threads only slow a model this small down
    train(read_settings(sys.argv[1:]))
    leave()


if __name__ == "__main__":
    main()
