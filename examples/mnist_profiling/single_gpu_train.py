"""Train SimpleModel on MNIST for five epochs and profile the second one.

    python single_gpu_train.py --num_workers 4     # writes trace_single_gpu_workers_4.json
    python single_gpu_train.py --num_workers 0     # writes trace_single_gpu_workers_0.json
    python per_step.py trace_single_gpu_workers_*.json

It trains on the GPU if there is one, else on the CPU. The trace is written to the current folder;
open it at https://ui.perfetto.dev.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from dataloader import MnistDataset, get_mnist_dataloader
from model import SimpleModel
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

PROFILED_EPOCH = 2  # the first one also starts the workers and warms everything up
PRINT_EVERY = 100


def train(
    epochs: int = 5,
    batch_size: int = 32,
    num_workers: int = 4,
    profile_steps: int | None = None,
    record_shapes: bool = False,
    with_stack: bool = False,
    data_dir: Path | None = None,
    augment: bool = False,
) -> None:
    """Train, write a trace of the profiled epoch, and predict one image."""
    try:
        batches = get_mnist_dataloader(batch_size, num_workers, data_dir, augment)
    except (FileNotFoundError, ValueError) as error:
        refuse(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # a model this small is fastest on one; the workers need the others
    torch.manual_seed(42)
    model = SimpleModel().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    print(f"{len(batches):,} batches of {batch_size}, {num_workers} workers, {device}", flush=True)

    profile_steps = min(profile_steps or len(batches), len(batches))
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for epoch in range(1, epochs + 1):
        if epoch != PROFILED_EPOCH:
            train_epoch(model, batches, criterion, optimizer, device, epoch)
            continue
        print(f"Epoch {epoch}: profiling {profile_steps:,} steps", flush=True)
        profiler = profile(
            activities=activities, record_shapes=record_shapes, with_stack=with_stack
        )
        profiler.start()
        profiler.add_metadata_json("batch_size", str(batch_size))  # per_step.py reads it
        train_epoch(model, batches, criterion, optimizer, device, epoch, profiler, profile_steps)
        export(profiler, Path(f"trace_single_gpu_workers_{num_workers}.json"))
    predict_one(model, batches, device, data_dir)


def train_epoch(
    model: nn.Module,
    batches: DataLoader[Any],
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    epoch: int,
    profiler: profile | None = None,
    profile_steps: int = 0,
) -> None:
    """Train on every batch once; stop a running profiler after `profile_steps` steps.

    `record_function` names a span of the trace. Two spans have a name already: waiting for the
    next batch is `enumerate(DataLoader)#…`, the update is `Optimizer.step#Adam.step`.
    """
    model.train()
    started = time.perf_counter()
    for step, (host_images, host_labels) in enumerate(batches, start=1):
        with record_function("to device"):
            images = host_images.to(device, non_blocking=True)
            labels = host_labels.to(device, non_blocking=True)
        optimizer.zero_grad()  # backward() adds to the gradients that are there
        with record_function("forward"):
            loss = criterion(model(images), labels)
        with record_function("backward"):
            loss.backward()
        optimizer.step()
        if step % PRINT_EVERY == 0:
            # .item() waits for the GPU, so not in every step.
            print(f"Epoch {epoch}, batch {step}/{len(batches)}: loss {loss.item():.4f}", flush=True)
        if profiler is not None and step == profile_steps:
            profiler.stop()
            print(f"Epoch {epoch}: profiler stopped after {step:,} steps", flush=True)
    if profiler is None:  # the profiler slows its epoch down
        seconds = time.perf_counter() - started
        per_step = 1000 * seconds / len(batches)
        print(f"Epoch {epoch} took {seconds:.2f} s, {per_step:.3f} ms per step", flush=True)


def export(profiler: profile, path: Path) -> None:
    """Write the trace under a temporary name first, so that its own name is never half a file."""
    temporary = path.with_suffix(".tmp")
    try:
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        refuse(f"{path} could not be written: {error}. Run this in a folder you may write to.")
    print(f"Trace written: {path}, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def predict_one(
    model: nn.Module, batches: DataLoader[Any], device: torch.device, data_dir: Path | None
) -> None:
    """Print what the model sees in the first test image, beside that image's label."""
    try:
        dataset, kind = MnistDataset(data_dir, "t10k"), "test"
    except (FileNotFoundError, ValueError) as error:
        print(f"No test image: {error}")
        dataset, kind = batches.dataset, "training"
    image, label = dataset[0]
    model.eval()
    with torch.no_grad():
        logits = model(image.unsqueeze(0).to(device))  # a batch of one
    probabilities = logits.softmax(dim=1)[0]
    digit = int(probabilities.argmax())
    print(
        f"First {kind} image: predicted {digit} with probability {probabilities[digit]:.4f}, "
        f"label {label}"
    )


def refuse(message: str) -> NoReturn:
    """End with exit code 2 and one message."""
    print(f"single_gpu_train.py: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Profile the training of a small model on MNIST.")
    parser.add_argument("--num_workers", type=int, default=4, help="loader processes")
    parser.add_argument("--batch_size", type=int, default=32, help="images per step")
    parser.add_argument("--epochs", type=int, default=5, help="the second one is profiled")
    parser.add_argument("--profile_steps", type=int, help="profile only the first N steps")
    parser.add_argument("--record_shapes", action="store_true", help="put tensor shapes in it")
    parser.add_argument("--with_stack", action="store_true", help="put Python functions in it")
    parser.add_argument("--augment", action="store_true", help="costlier samples")
    parser.add_argument("--data_dir", type=Path, help="folder of the files; default: data/mnist")
    arguments = parser.parse_args()
    if arguments.epochs < PROFILED_EPOCH:
        parser.error(f"--epochs {arguments.epochs}: at least {PROFILED_EPOCH}, the profiled one")
    if arguments.profile_steps is not None and arguments.profile_steps < 1:
        parser.error(f"--profile_steps {arguments.profile_steps}: at least 1")
    train(**vars(arguments))


if __name__ == "__main__":
    main()
