"""Train a ResNet-18 on CIFAR-10 with PyTorch Lightning, as one process or as a rank of several.

    python train.py FOLDER                                    # one process
    torchrun --standalone --nproc_per_node=2 train.py FOLDER  # two ranks of this machine

FOLDER holds the binary version: data_batch_1.bin ... data_batch_5.bin and test_batch.bin. The
notebook walkthrough.ipynb starts this script and explains it part by part.
"""

import argparse
import gc
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Literal

import lightning as L
import torch
import torch.distributed as dist
from cifar10 import TRAIN_FILES, CIFAR10DataModule, LitResNet, Performance, peak_memory_mib, read
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

# With another value of these, a resumed run would be another training.
KEPT = (
    "subset",
    "epochs",
    "width",
    "global_batch_size",
    "learning_rate",
    "schedule",
    "precision",
    "compress",
    "seed",
)


def say(line: str) -> None:
    """Print a line in one piece, newline included: else lines of unbuffered ranks would mix."""
    print(line + "\n", end="", flush=True)


def make_strategy(ranks: int, device: str) -> DDPStrategy | Literal["auto"]:
    """Return how the ranks keep equal weights; one process has nobody to agree with."""
    if ranks == 1:
        return "auto"
    return DDPStrategy(
        # What carries the messages. Without it, Lightning makes the same choice by the device.
        process_group_backend="nccl" if device == "gpu" else "gloo",
        # Every parameter takes part in every step, so DDP need not search for unused ones.
        find_unused_parameters=False,
        # And it does so in the same way each time: DDP plans its messages once, in the first step.
        static_graph=True,
        # Gradients live in the buffers that are sent and are not copied there. This saves as much
        # memory as the parameters take.
        gradient_as_bucket_view=True,
    )


class HalfGradients(Callback):
    """Send gradients as float16, which halves the bytes; weights and optimizer stay in float32.

    On GPUs `DDPStrategy(ddp_comm_hook=fp16_compress_hook)` does the same. On the CPU Lightning
    ignores that argument without a warning, so the hook is registered with DDP itself.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Register the hook before the first backward pass."""
        trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


def make_callbacks(folder: Path) -> list[Callback]:
    """Return what runs beside the training: checkpoints, early stopping, records."""
    return [
        ModelCheckpoint(
            folder / "checkpoints",
            filename="{epoch:02}-{val_accuracy:.4f}",
            monitor="val_accuracy",
            mode="max",
            save_top_k=3,
            save_last=True,  # last.ckpt, from which --resume continues
        ),
        EarlyStopping("val_accuracy", mode="max", min_delta=0.001, patience=10),
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
        strategy=make_strategy(ranks, device),
        # Named, because inside a Slurm allocation Lightning takes every process for one of srun's.
        plugins=[TorchElasticEnvironment() if ranks > 1 else LightningEnvironment()],
        use_distributed_sampler=False,  # CIFAR10DataModule shares the images out itself
        precision=precision,
        gradient_clip_val=5.0,  # the norm of all gradients together, after they are averaged
        gradient_clip_algorithm="norm",
        max_epochs=epochs,
        val_check_interval=1.0,  # validate after each whole epoch
        callbacks=make_callbacks(folder) if folder else [],
        logger=CSVLogger(folder, name="logs") if folder else False,
        log_every_n_steps=1,  # epochs are short here; on a GPU each row waits for the step to end
        fast_dev_run=trial_steps,
        enable_checkpointing=folder is not None,
        enable_progress_bar=sys.stdout.isatty(),  # in a file, each redrawing would be a line
        enable_model_summary=False,
    )


def describe(trainer: L.Trainer) -> str:
    """Return the Trainer's settings as it has understood them."""
    strategy = trainer.strategy
    options = getattr(strategy, "_ddp_kwargs", {})  # what DistributedDataParallel is given
    lines = {
        "accelerator": type(trainer.accelerator).__name__,
        "devices": f"{trainer.num_devices} on each of {trainer.num_nodes} node(s)",
        "strategy": type(strategy).__name__,
        "backend": getattr(strategy, "process_group_backend", None),
        **options,
        "precision": trainer.precision,
        "gradient_clip_val": trainer.gradient_clip_val,
        "max_epochs": trainer.max_epochs,
        "val_check_interval": trainer.val_check_interval,
        "log_every_n_steps": trainer.log_every_n_steps,
    }
    return "\n".join(f"  {name:<25}{value}" for name, value in lines.items())


def be_quiet() -> None:
    """Silence what Lightning says on every rank, and warnings that do not apply here."""
    for part in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(part).setLevel(logging.WARNING)
    for known in (
        ".*does not have many workers.*",  # whole batches come straight from memory
        ".*`srun` command is available.*",  # not needed on one machine
        ".*treespec, LeafSpec.*",  # Lightning 2.6 with a newer torch
        ".*exists and is not empty.*",  # --resume continues in the same folder
    ):
        warnings.filterwarnings("ignore", known)


class Report(L.Callback):
    """Print one line per epoch, on rank 0."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the step at which this start begins: not 0 after --resume."""
        self.first_step = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the epoch's results."""
        found = trainer.callback_metrics
        if trainer.is_global_zero:
            say(
                f"epoch {trainer.current_epoch + 1}: train loss {found['train_loss']:.4f}, "
                f"validation loss {found['val_loss']:.4f}, accuracy {found['val_accuracy']:.4f}, "
                f"{found['images_per_s']:.0f} images/s"
            )


def same_everywhere(trainer: L.Trainer, model: LitResNet) -> bool:
    """Return whether all ranks ended with the same weights, bit for bit."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = trainer.strategy.broadcast(weights)  # those of rank 0
    return trainer.strategy.reduce_boolean_decision(bool(torch.equal(weights, first)))


def train(settings: argparse.Namespace, ranks: int) -> None:
    """Train, and leave result.json for the notebook."""
    L.seed_everything(settings.seed, verbose=False)  # the same initial weights on every rank
    data = CIFAR10DataModule(
        settings.folder, settings.subset, settings.global_batch_size // ranks, settings.seed
    )
    model = LitResNet(
        settings.width, settings.learning_rate, schedule=settings.schedule, seed=settings.seed
    )
    trainer = make_trainer(
        settings.output,
        ranks=ranks,
        device=settings.device,
        epochs=settings.epochs,
        precision=settings.precision,
    )
    if settings.compress:
        trainer.callbacks.append(HalfGradients())
    report = Report()
    trainer.callbacks.append(report)
    if trainer.is_global_zero:
        say(describe(trainer))
    if trainer.is_global_zero and not settings.resume:
        settings.output.mkdir(parents=True, exist_ok=True)
        kept = {name: getattr(settings, name) for name in KEPT}
        (settings.output / "settings.json").write_text(json.dumps(kept))
    last = settings.output / "checkpoints" / "last.ckpt"
    started = time.perf_counter()
    trainer.fit(model, datamodule=data, ckpt_path=last if settings.resume else None)
    seconds = time.perf_counter() - started
    equal = same_everywhere(trainer, model)
    peaks = peak_memory_mib(trainer.strategy.root_device)
    told = ", ".join(f"{peak:.0f} MiB {kind}" for kind, peak in peaks.items())
    say(f"rank {trainer.global_rank}: peak memory {told}")
    (performance,) = (c for c in trainer.callbacks if isinstance(c, Performance))
    if trainer.is_global_zero and not performance.step_ms:
        say(f"Nothing left to train: --epochs {settings.epochs} are done.")
    elif trainer.is_global_zero:
        best = Path(trainer.checkpoint_callback.best_model_path)
        result = {
            "ranks": ranks,
            "threads": torch.get_num_threads(),
            "seconds": seconds,
            "steps": trainer.global_step - report.first_step,
            "same_weights": equal,
            "step_ms": performance.step_ms,
            "best": best.name,
            "best_accuracy": trainer.checkpoint_callback.best_model_score.item(),
        }
        (settings.output / "result.json").write_text(json.dumps(result))
        say(
            f"{result['steps']} steps in {seconds:.1f} s, validation included; "
            f"weights equal on all ranks: {'yes' if equal else 'NO'}; best: {best.name}"
        )


def read_settings(ranks: int, rank: int) -> argparse.Namespace:
    """Return the settings; all ranks read the same ones."""
    parser = argparse.ArgumentParser(description="ResNet-18 on CIFAR-10 with Lightning.")
    add = parser.add_argument
    add("folder", help="the folder with data_batch_1.bin and the other files")
    add("--output", type=Path, default=Path("runs/cifar10"), help="the folder of this run")
    add("--resume", action="store_true", help="continue the run in --output from its last.ckpt")
    add("--subset", type=int, default=0, help="training images to use; 0: all")
    add("--epochs", type=int, default=50)
    add("--width", type=int, default=64, help="channels of the first stage")
    add("--global_batch_size", type=int, default=128, help="images per step, over all ranks")
    add("--learning_rate", type=float, default=0.1)
    add("--schedule", choices=("onecycle", "cosine"), default="onecycle")
    add("--compress", action="store_true", help="send gradients as float16")
    enough = torch.cuda.device_count() >= ranks  # each rank needs a GPU of its own
    add("--device", choices=("cpu", "gpu"), default="gpu" if enough else "cpu")
    add("--precision", choices=("32-true", "bf16-mixed", "16-mixed"), default="32-true")
    add("--seed", type=int, default=42)
    settings = parser.parse_args()
    size, output = settings.global_batch_size, settings.output
    if size % ranks:
        parser.error(f"--global_batch_size {size} cannot be shared equally by {ranks} ranks.")
    if settings.compress and ranks == 1:
        parser.error("--compress needs ranks that send gradients; start several with torchrun.")
    if settings.resume and not (output / "checkpoints" / "last.ckpt").exists():
        parser.error(f"--output {output} has no checkpoints/last.ckpt to resume from.")
    if settings.resume:
        for name, value in json.loads((output / "settings.json").read_text()).items():
            if value != getattr(settings, name):
                parser.error(f"--{name} was {value} when this run started; give the same again.")
    if rank == 0 and output.exists() and not settings.resume:  # only rank 0 writes there
        last = output / "checkpoints" / "last.ckpt"
        other = "--resume to continue it" if last.exists() else "delete it: it has no checkpoint"
        parser.error(f"--output {output} exists; use a new folder, or {other}.")
    try:
        read(Path(settings.folder), TRAIN_FILES)  # before the run's folder is made
    except (OSError, ValueError) as problem:
        archive = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
        parser.error(f"{problem} Unpack {archive} there.")
    return settings


def main() -> None:
    """Find out which rank this is, train, and leave the process group."""
    # torchrun sets these variables for each process; without them this is the only process.
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    settings = read_settings(ranks, rank)
    be_quiet()
    threads = torch.get_num_threads()
    say(f"rank {rank} of {ranks}: process {os.getpid()}, {threads} thread(s)")
    train(settings, ranks)
    gc.collect()  # free the DDP model, which is part of a reference cycle, before the group
    if dist.is_initialized():
        dist.barrier()  # no rank exits while another still talks to it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
