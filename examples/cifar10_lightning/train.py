"""Train a ResNet-18 on CIFAR-10 with PyTorch Lightning, as one process or as a rank of several.

    python train.py FOLDER                                    # one process
    torchrun --standalone --nproc_per_node=2 train.py FOLDER  # two ranks of this machine

FOLDER holds the binary version's data_batch_1.bin ... data_batch_5.bin and test_batch.bin. The
notebook walkthrough.ipynb starts this script and goes through it part by part.
"""

import argparse
import gc
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Literal

import lightning as L
import torch
import torch.distributed as dist
from cifar10 import CIFAR10DataModule, LitResNet, Performance
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy


def make_strategy(ranks: int) -> DDPStrategy | Literal["auto"]:
    """Return how the ranks keep the same weights; one process has nobody to agree with."""
    if ranks == 1:
        return "auto"
    return DDPStrategy(
        # Every parameter takes part in every step: no step need look for some that do not.
        find_unused_parameters=False,
        # And in the same way in every step: DDP plans its communication in the first, for all.
        static_graph=True,
        # Gradients live in the buffers that are sent, instead of being copied there: this saves
        # memory as large as the network.
        gradient_as_bucket_view=True,
    )


def make_callbacks(folder: Path) -> list[Callback]:
    """Return what happens beside the training: checkpoints, an early end, records."""
    return [
        ModelCheckpoint(
            folder / "checkpoints",
            filename="epoch{epoch:02}-accuracy{val_accuracy:.4f}",
            auto_insert_metric_name=False,
            monitor="val_accuracy",
            mode="max",
            save_top_k=2,  # the best two, and the last, to go on from
            save_last=True,
        ),
        EarlyStopping("val_loss", mode="min", patience=5, check_finite=True),
        LearningRateMonitor("step"),
        Performance(),
    ]


def make_trainer(
    folder: Path | None,
    *,
    ranks: int = 1,
    device: str = "cpu",
    epochs: int = 1,
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true",
    trial_steps: int = 0,
) -> L.Trainer:
    """Return the Trainer of this rank; without a folder nothing is kept."""
    return L.Trainer(
        accelerator=device,
        devices=ranks,
        num_nodes=1,
        strategy=make_strategy(ranks),
        # Named, since Lightning takes any process within a Slurm allocation for a task of srun.
        plugins=[TorchElasticEnvironment() if ranks > 1 else LightningEnvironment()],
        use_distributed_sampler=False,  # CIFAR10DataModule shares the images out itself
        precision=precision,
        gradient_clip_val=5.0,  # of the norm of all gradients, once they are averaged
        gradient_clip_algorithm="norm",
        max_epochs=epochs,
        callbacks=make_callbacks(folder) if folder else [],
        logger=CSVLogger(folder, name="", version="") if folder else False,
        log_every_n_steps=1,  # what is logged each step is the learning rate alone
        fast_dev_run=trial_steps,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def be_quiet() -> None:
    """Leave out what Lightning says on every rank, and warnings that are no use here."""
    for part in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(part).setLevel(logging.WARNING)
    for known in (
        ".*does not have many workers.*",  # a whole batch comes out of memory at once
        ".*`srun` command is available.*",  # so it is, and not needed on one machine
        ".*treespec, LeafSpec.*",  # between Lightning 2.6 and newer torch; nothing of ours
    ):
        warnings.filterwarnings("ignore", known)


class Report(L.Callback):
    """Print a line an epoch, on one rank."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print what the epoch has come to."""
        found = trainer.callback_metrics
        if trainer.is_global_zero:
            print(
                f"epoch {trainer.current_epoch + 1}: train loss {found['train_loss']:.4f}, "
                f"validation loss {found['val_loss']:.4f}, accuracy {found['val_accuracy']:.4f}, "
                f"{found['images_per_s']:.0f} images/s",
                flush=True,
            )


def same_everywhere(trainer: L.Trainer, model: LitResNet) -> bool:
    """Return whether all ranks have ended with the same weights, bit for bit."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = trainer.strategy.broadcast(weights)  # those of rank 0
    return trainer.strategy.reduce_boolean_decision(bool(torch.equal(weights, first)))


def train(settings: argparse.Namespace, ranks: int) -> None:
    """Train, and leave a record for the notebook to read."""
    L.seed_everything(settings.seed, verbose=False)  # the same initial weights on every rank
    data = CIFAR10DataModule(
        settings.folder, settings.subset, settings.global_batch_size // ranks, settings.seed
    )
    model = LitResNet(settings.width, settings.learning_rate, seed=settings.seed)
    trainer = make_trainer(
        settings.output,
        ranks=ranks,
        device=settings.device,
        epochs=settings.epochs,
        precision=settings.precision,
    )
    trainer.callbacks.insert(-1, Report())  # before ModelCheckpoint, which Lightning puts last
    started = time.perf_counter()
    trainer.fit(model, datamodule=data)
    seconds = time.perf_counter() - started
    equal = same_everywhere(trainer, model)
    if trainer.is_global_zero:
        (performance,) = (c for c in trainer.callbacks if isinstance(c, Performance))
        best = Path(trainer.checkpoint_callback.best_model_path)
        result = {
            "ranks": ranks,
            "threads": torch.get_num_threads(),
            "seconds": seconds,
            "steps": trainer.global_step,
            "same_weights": equal,
            "step_ms": performance.step_ms,
            "best": best.name,
            "best_accuracy": trainer.checkpoint_callback.best_model_score.item(),
        }
        (settings.output / "result.json").write_text(json.dumps(result))
        print(
            f"{trainer.global_step} steps in {seconds:.1f} s, validation included; "
            f"weights equal on all ranks: {'yes' if equal else 'NO'}; best: {best.name}",
            flush=True,
        )


def read_settings(ranks: int, rank: int) -> argparse.Namespace:
    """Return the settings; all ranks read the same ones."""
    parser = argparse.ArgumentParser(description="ResNet-18 on CIFAR-10 with Lightning.")
    add = parser.add_argument
    add("folder", help="where data_batch_1.bin and the others are")
    add("--output", type=Path, default=Path("runs/cifar10"), help="a new folder for this run")
    add("--subset", type=int, default=0, help="training images to use; 0: all")
    add("--epochs", type=int, default=20)
    add("--width", type=int, default=64, help="channels of the first stage")
    add("--global_batch_size", type=int, default=128, help="images a step, of all ranks together")
    add("--learning_rate", type=float, default=0.1)
    add("--device", choices=("cpu", "gpu"), default="gpu" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=("32-true", "bf16-mixed", "16-mixed"), default="32-true")
    add("--seed", type=int, default=42)
    settings = parser.parse_args()
    size = settings.global_batch_size
    if size % ranks:
        parser.error(f"--global_batch_size {size} cannot be shared by {ranks} ranks.")
    if rank == 0 and settings.output.exists():  # the one rank that writes there
        parser.error(f"--output {settings.output} is there already; each run needs a new folder.")
    return settings


def main() -> None:
    """Find out which rank this is, train, leave the other ranks."""
    # torchrun tells each process by the environment; started alone, a process is rank 0 of 1.
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    settings = read_settings(ranks, rank)
    be_quiet()
    print(
        f"rank {rank} of {ranks}: process {os.getpid()}, {torch.get_num_threads()} thread(s)",
        flush=True,
    )
    train(settings, ranks)
    gc.collect()  # the DDP model must be gone first; it is part of a cycle
    if dist.is_initialized():
        dist.barrier()  # no rank exits while another still talks to it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
