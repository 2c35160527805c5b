"""Train SimpleModel on MNIST for five epochs, and profile the second one.

    python single_gpu_train.py --num_workers 4     # writes trace_single_gpu_workers_4.json
    python single_gpu_train.py --num_workers 0     # writes trace_single_gpu_workers_0.json
    python per_step.py trace_single_gpu_workers_*.json

It trains on the GPU if there is one, else on the CPU. The trace is written into the current
directory; open it on https://ui.perfetto.dev or in chrome://tracing.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from dataloader import get_mnist_dataloader
from model import SimpleModel
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

PROFILED_EPOCH = 2  # the first one also starts the workers and warms everything up
PRINT_EVERY = 100


def train_epoch(
    model: nn.Module,
    batches: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    epoch: int,
    profiler: profile | None,
    profile_steps: int,
) -> None:
    """Train on every batch; the profiler, if there is one, has begun and ends after its last step.

    The names given with `record_function` are what to look for in the trace. Waiting for the next
    batch has one already: `enumerate(DataLoader)#…`; so has `Optimizer.step#Adam.step`.
    """
    loss_of = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for step, (stored, stored_labels) in enumerate(batches, start=1):
        with record_function("to device"):
            images = stored.to(device, non_blocking=True)
            labels = stored_labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        with record_function("forward"):
            loss = loss_of(model(images), labels)
        with record_function("backward"):
            loss.backward()
        optimizer.step()
        if step % PRINT_EVERY == 0:
            # .item() waits for the GPU, so it stands here and not in every step.
            print(f"Epoch {epoch}, batch {step}/{len(batches)}: loss {loss.item():.4f}", flush=True)
        if profiler is not None and step == profile_steps:
            profiler.stop()
    if profiler is None:  # else much of the time went into profiling
        seconds = time.perf_counter() - started
        print(
            f"Epoch {epoch} took {seconds:.2f} s, {1000 * seconds / len(batches):.3f} ms a step",
            flush=True,
        )


def train(arguments: argparse.Namespace) -> None:
    """Train, with the profiler on during epoch 2, and export what it saw."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    batches = get_mnist_dataloader(arguments.batch_size, arguments.num_workers, arguments.data_dir)
    model = SimpleModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    print(
        f"{len(batches):,} batches of {arguments.batch_size} images an epoch, "
        f"{arguments.num_workers} workers, {device}",
        flush=True,
    )
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profile_steps = min(arguments.profile_steps or len(batches), len(batches))
    for epoch in range(1, arguments.epochs + 1):
        profiler = profile(activities=activities) if epoch == PROFILED_EPOCH else None
        if profiler is not None:
            profiler.start()
            profiler.add_metadata_json("batch_size", str(arguments.batch_size))
        train_epoch(model, batches, optimizer, device, epoch, profiler, profile_steps)
        if profiler is not None:
            trace = Path(f"trace_single_gpu_workers_{arguments.num_workers}.json")
            export(profiler, trace)
            print(f"Epoch {epoch}: {profile_steps:,} profiled steps are in {trace}", flush=True)


def export(profiler: profile, path: Path) -> None:
    """Write the trace under another name first, so that its own name is always a whole file."""
    temporary = path.with_suffix(".tmp")
    try:
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        refuse(f"{path} could not be written: {error}. Start this where you may write.")


def refuse(message: str) -> NoReturn:
    """End with exit code 2 and one message."""
    print(f"single_gpu_train.py: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def at_least(least: int) -> Any:
    """Return what reads a whole number from the command line."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return read


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Profile the training of a small model on MNIST.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--num_workers", type=at_least(0), default=4, help="loader processes")
    parser.add_argument("--batch_size", type=at_least(1), default=32, help="images a step")
    parser.add_argument(
        "--epochs",
        type=at_least(PROFILED_EPOCH),
        default=5,
        help="passes over the data; the second one is profiled",
    )
    parser.add_argument(
        "--profile_steps",
        type=at_least(1),
        default=None,
        help="steps of epoch 2 in the trace; by default all of them",
    )
    parser.add_argument(
        "--data_dir",
        type=Path,
        default=None,
        help="folder of MNIST's IDX files; by default data/mnist",
    )
    parser.add_argument("--seed", type=int, default=42, help="of weights and order")
    arguments = parser.parse_args()
    try:
        train(arguments)
    except (FileNotFoundError, ValueError) as error:
        refuse(str(error))


if __name__ == "__main__":
    main()
