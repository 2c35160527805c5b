"""Train a small MLP to tell two spirals apart, with PyTorch Lightning.

    python train.py                                                       # alone
    torchrun --nproc_per_node=2 train.py                                  # ranks of one machine
    srun --nodes=2 --ntasks-per-node=4 --kill-on-bad-exit=1 python train.py   # a task a rank

Each epoch prints the mean loss and the accuracy over the training points, as the model met them
(so with dropout, and while it learned), below them those over the validation points, and the
seconds it took. At the end come those of the test points, by the checkpoint that was best on the
validation points. Everything is kept in a new folder, OUTPUT_DIR/EXPERIMENT_NAME/version_N.

The ranks use their GPUs and NCCL where there are GPUs, else CPUs and Gloo.
"""

import argparse
import gc
import logging
import math
import os
import re
import sys
import time
import tomllib
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import lightning as L
import torch
import torch.distributed as dist
from datamodule import SpiralDataModule, part_sizes
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

RANK_0_SPEAKS_WITHIN_S = 30.0


@rank_zero_only
def say(line: str) -> None:
    """Print a line, on rank 0 alone and at once: a job's output file is read while it runs."""
    print(line, flush=True)


def refuse(message: str) -> NoReturn:
    """End with exit code 2 and one message; all ranks call this, rank 0 prints."""
    if rank_zero_only.rank == 0:
        print(f"train.py: {message}", file=sys.stderr, flush=True)
    else:
        # When a rank ends, the launcher ends the others, and rank 0 may not have come so far yet.
        time.sleep(RANK_0_SPEAKS_WITHIN_S)
    sys.exit(2)


# --- The ranks --------------------------------------------------------------------------------


def find_ranks() -> tuple[ClusterEnvironment, int, int]:
    """Return who started this rank, the number of nodes, and the number of ranks on each.

    Lightning finds its launcher by itself too, but not well enough: it has to be told devices and
    nodes all the same, takes a batch script that forgot srun for a task of srun and waits for
    ranks that never come, and takes the tasks of `srun` in an `salloc` for processes of their own,
    each of which would train another model.
    """
    if TorchElasticEnvironment.detect():
        world_size, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if world_size % here:
            refuse("the nodes have unequal numbers of ranks; Lightning needs equal ones.")
        return TorchElasticEnvironment(), world_size // here, here
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return LightningEnvironment(), 1, 1
    # The tasks on each node as srun writes them: 2, or 2(x3) for three nodes, or 2(x3),1.
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", tasks)
    if found is None:
        refuse(
            f"srun put {tasks or 'unknown numbers of'} tasks on the nodes; Lightning needs as "
            "many on each: srun --nodes=N --ntasks-per-node=M."
        )
    here, num_nodes = int(found[1]), int(found[2] or 1)
    # Lightning insists on this variable, which `srun --ntasks` does not set, and which in a step of
    # its own size would be that of the job.
    os.environ["SLURM_NTASKS_PER_NODE"] = str(here)
    if num_nodes == 1:
        # Else the ranks look for each other by the node's name, which need not resolve.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # A job that has to be requeued is the matter of its script.
    return SLURMEnvironment(auto_requeue=False), num_nodes, here


def check(settings: argparse.Namespace, world_size: int, here: int) -> None:
    """Refuse what cannot work on these ranks, before anything is started."""
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and gpus < here:
        refuse(
            f"a rank sees {gpus} GPUs, and {here} ranks run on its node; each must see those "
            "of all: srun --gpus-per-node, not --gpus-per-task."
        )
    sizes = part_sizes(settings.num_samples)
    if min(sizes) < world_size:
        refuse(
            f"--num_samples {settings.num_samples} makes {sizes[0]} samples to train, "
            f"{sizes[1]} to validate and {sizes[2]} to test; each of {world_size} ranks needs "
            "one of each."
        )
    if rank_zero_only.rank == 0:  # the one rank that writes
        try:
            (settings.output_dir / settings.experiment_name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse(f"--output_dir {settings.output_dir} cannot be used: {error}")


def leave() -> None:
    """Part from the other ranks after success."""
    gc.collect()  # the DDP model must be gone first; it is part of a cycle
    if dist.is_initialized():
        dist.barrier()  # no rank exits while another still talks to it
        dist.destroy_process_group()


# --- What is reported -------------------------------------------------------------------------


class Report(L.Callback):
    """Print a few lines an epoch, and log the seconds of each epoch and of all."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the clock."""
        self.started = time.perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the clock."""
        self.epoch_started = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print and log an epoch, its validation included."""
        seconds = time.perf_counter() - self.epoch_started
        # As all metrics: one value for all ranks, here that of the slowest.
        pl_module.log("epoch_time_s", seconds, sync_dist=True, reduce_fx="max")
        found = trainer.callback_metrics
        say(
            f"Epoch {trainer.current_epoch + 1} - Avg Loss: {found['train_loss']:.6f}, "
            f"Accuracy: {found['train_accuracy']:.2%}"
        )
        say(
            f"  held out - Avg Loss: {found['val_loss']:.6f}, Accuracy: {found['val_accuracy']:.2%}"
        )
        say(f"  took {found['epoch_time_s']:.2f} s")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print and log the time of all epochs."""
        seconds, epochs = time.perf_counter() - self.started, trainer.current_epoch
        for logger in trainer.loggers:
            logger.log_metrics({"total_time_s": seconds}, step=trainer.global_step)
        say(f"Trained for {seconds:.2f} s, {seconds / epochs:.2f} s an epoch")


def make_loggers(settings: argparse.Namespace) -> list[Logger]:
    """Return the loggers: a CSV file, and Comet if a project is named; rank 0 alone writes."""
    csv = CSVLogger(settings.output_dir, name=settings.experiment_name)
    if settings.comet_project is None:
        return [csv]
    missing = [name for name in ("samestep", "comet_ml") if find_spec(name) is None]
    if missing:
        say(
            f"{missing[0]} is not installed (pip install 'samestep[comet]'): no Comet, the metrics "
            "go to the CSV file alone."
        )
        return [csv]
    # Not CometLogger: without a network it drops what it is given, and offline Lightning 2.6 and
    # before write nothing at all (Lightning's issue 21617). With this one Comet is in a process of
    # its own, and whatever becomes of it, the metrics are kept and can be sent later.
    from samestep import TrackerLogger, UserError  # noqa: PLC0415 - needed for Comet alone

    try:
        comet = TrackerLogger(
            "comet",
            save_dir=settings.output_dir,
            name=settings.experiment_name,
            project=settings.comet_project,
            workspace=settings.comet_workspace,
            say=say,
        )
    except UserError as error:
        refuse(str(error))
    return [csv, comet]


# --- The settings -----------------------------------------------------------------------------


def whole(at_least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least so much."""

    def read(text: str) -> int:
        # The most that a seed may be; of all else nobody wants more.
        if not text.isdecimal() or not at_least <= int(text) < 2**32:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number of {at_least} or more, and below 2^32"
            )
        return int(text)

    return read


def number(words: str, accept: Callable[[float], bool]) -> Callable[[str], float]:
    """Return what reads a number that is acceptable; `words` say which are."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {words}")
        return value

    return read


def name(text: str) -> str:
    """Read a name: not empty, and as a folder's below another one."""
    if not text or Path(text).is_absolute() or ".." in Path(text).parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


def make_parser() -> argparse.ArgumentParser:
    """Return what reads the command line, and the words that a --config file stands for."""
    parser = argparse.ArgumentParser(
        description="Train an MLP on two spirals with Lightning.", allow_abbrev=False
    )
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--batch_size", type=whole(1), default=32, help="samples a rank and step")
    add("--max_epochs", type=whole(1), default=30, help="passes over the training samples")
    add("--num_workers", type=whole(0), default=0, help="processes a rank that load the data")
    add("--learning_rate", type=number("above 0", lambda v: 0 < v < math.inf), default=1e-3)
    add("--hidden_dims", type=whole(1), nargs="+", default=[64, 32, 16], metavar="WIDTH")
    add("--dropout", type=number("of 0 or more and below 1", lambda v: 0 <= v < 1), default=0.1)
    add(
        "--noise",
        type=number("of 0 or more", lambda v: 0 <= v < math.inf),
        default=0.2,
        help="standard deviation of the noise on each coordinate",
    )
    add("--num_samples", type=whole(1), default=10_000, help="points of both spirals")
    add("--seed", type=whole(0), default=42, help="of points, split, weights, order and dropout")
    add("--comet_project", help="log to this project of Comet too")
    add("--comet_workspace", help="Comet's workspace; the account's default if not given")
    add("--experiment_name", type=name, default="spiral")
    add("--output_dir", type=Path, default=Path("runs"), help="must be the same on all nodes")
    add("--config", type=Path, metavar="FILE.toml", help="settings by name; flags win over it")
    return parser


def read_config(path: Path, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the settings of a file, read as the flags of the same names would be."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        refuse(f"--config {path} cannot be read: {error}")
    valid = sorted(set(vars(parser.parse_args([]))) - {"config"})
    words = []
    for key, value in values.items():
        if key not in valid:
            refuse(f"{path}: there is no setting {key!r}; there are {', '.join(valid)}.")
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in several):
            refuse(f"{path}: {key} cannot be {value!r}.")
        # With "=", a value may begin with a minus sign.
        words += [f"--{key}", *map(str, value)] if value is several else [f"--{key}={value}"]
    parser.error = lambda message: refuse(f"{path}: {message}")  # type: ignore[method-assign]
    settings = parser.parse_args(words)
    parser.error = refuse  # type: ignore[method-assign]
    return settings


def read_settings(words: list[str]) -> argparse.Namespace:
    """Return the settings: defaults, over them those of the --config file, over them the flags.

    Every rank finds the same mistake in them; one of them says it.
    """
    parser = make_parser()
    settings = parser.parse_args(words)
    if settings.config is not None:
        # Defaults do not replace what a namespace already has.
        settings = parser.parse_args(words, read_config(settings.config, parser))
    return settings


def train(settings: argparse.Namespace) -> None:
    """Train, then measure the best checkpoint on the test samples."""
    environment, num_nodes, here = find_ranks()
    world_size = num_nodes * here
    check(settings, world_size, here)
    device = "gpu" if torch.cuda.is_available() else "cpu"
    say(
        f"Ranks: {world_size}, nodes: {num_nodes}, device: {device}, samples a step: "
        f"{settings.batch_size * world_size} = {settings.batch_size} x {world_size}"
    )
    L.seed_everything(settings.seed, workers=True)  # the same initial weights on every rank
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
    loggers = make_loggers(settings)
    for logger in loggers:
        logger.log_hyperparams({"max_epochs": settings.max_epochs, "world_size": world_size})
    trainer = L.Trainer(
        accelerator=device,
        devices=here,
        num_nodes=num_nodes,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if world_size > 1 else "auto",
        plugins=[environment],
        use_distributed_sampler=False,  # SpiralDataModule gives out each sample once
        max_epochs=settings.max_epochs,
        logger=loggers,
        log_every_n_steps=1,  # whatever is logged, and here that is nothing but epochs
        callbacks=[best, Report()],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    (found,) = trainer.test(model, datamodule=data, ckpt_path="best", verbose=False)
    say(f"Test - Avg Loss: {found['test_loss']:.6f}, Accuracy: {found['test_accuracy']:.2%}")
    say(f"Best checkpoint: {best.best_model_path}")
    for comet in loggers[1:]:
        comet.close()  # else rank 0 would still be sending while the others end


def main() -> None:
    """Read the settings, train, leave the other ranks."""
    # Lightning says on every rank which devices there are and how the ranks have met.
    for part in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(part).setLevel(logging.WARNING)
    for known in (
        ".*does not have many workers.*",  # they would cost such small samples more than they give
        ".*`srun` command is available.*",  # so it is, and needed on a cluster alone
        ".*treespec, LeafSpec.*",  # between Lightning 2.6 and newer torch; nothing of ours
    ):
        warnings.filterwarnings("ignore", known)
    if "OMP_NUM_THREADS" not in os.environ:
        # As torchrun has it. Threads that share a step of microseconds wait for each other, and
        # beside other programs on the same cores that makes the training ten times slower.
        torch.set_num_threads(1)
    train(read_settings(sys.argv[1:]))
    leave()


if __name__ == "__main__":
    main()
