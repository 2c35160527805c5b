"""Train a small ConvNet on MNIST, with DistributedDataParallel written out by hand.

    python train_distributed.py --data-dir data/mnist                        # alone
    torchrun --nproc_per_node=2 train_distributed.py --data-dir data/mnist   # ranks of one machine
    sbatch run_distributed.slurm --data-dir data/mnist                       # several nodes

Each epoch prints the mean loss and the accuracy over the training images, as the model met them
(so with dropout, and while it learned), and below them those over a twelfth of the images that is
held out. After the last epoch come those of the test images. A checkpoint is written after each
epoch; started again with the same --checkpoint-dir, the script goes on after the newest.

The ranks use their GPUs and NCCL where there are GPUs, else CPUs and Gloo.
"""

import argparse
import gc
import gzip
import math
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

T = TypeVar("T")
Part = tuple[Tensor, Tensor]  # images (samples, 28, 28) and labels (samples,)

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, scaled to 0 … 1
SPLIT_SEED = 42
# What torchrun tells its ranks; a process that runs alone is rank 0 of 1, on any free port.
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


class ConvNet(nn.Module):
    """Map images (batch, 1, 28, 28) to logits (batch, 10) through two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        maps = self.conv2(self.conv1(images).relu()).relu()
        maps = self.dropout1(nn.functional.max_pool2d(maps, 2))
        return self.fc2(self.dropout2(self.fc1(maps.flatten(1)).relu()))


# --- The ranks --------------------------------------------------------------------------------


def join() -> torch.device:
    """Meet the other ranks, and return the device of this one."""
    if "RANK" not in os.environ:
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            # Else each task would train a model of its own and overwrite the others' checkpoints.
            refuse("srun started several tasks; start one torchrun a node: run_distributed.slurm.")
        os.environ.update(ALONE)
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def leave() -> None:
    """Part from the other ranks after success; the DDP model must be gone by now."""
    gc.collect()  # it is part of a cycle, so losing the last reference does not free it
    dist.barrier()  # no rank exits while another still talks to it
    dist.destroy_process_group()


def refuse(message: str) -> NoReturn:
    """End with exit code 2 and one message; all ranks call this, rank 0 prints."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"train_distributed.py: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        leave()
    sys.exit(2)


def on_every_rank(function: Callable[[], T]) -> T:
    """Return what a function returns; if it fails on any rank, end all of them together."""
    value, problem = None, None
    try:
        value = function()
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, pickle.PickleError) as error:
        problem = str(error)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text:
            refuse(text if all(problems) else f"[rank {rank}] {text}")
    return value  # type: ignore[return-value]


def means(sums: Tensor) -> tuple[float, float]:
    """Turn each rank's (sum of losses, correct, count) into mean loss and accuracy over all.

    Sums and counts are added up first and divided once: the mean of the ranks' means would be
    wrong wherever their counts differ.
    """
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return loss / count, correct / count


# --- The data ---------------------------------------------------------------------------------


def read_idx(folder: Path, name: str, axes: int) -> Tensor:
    """Return what an IDX file holds; `name` may also end in .gz, and lie in folder/raw.

    The format: two zero bytes, 8 for "unsigned bytes", the number of axes, their lengths as
    big-endian 32-bit numbers, the values.
    """
    places = [folder / sub / (name + end) for sub in ("", "raw") for end in ("", ".gz")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} holds no {name}[.gz]; name MNIST's folder: --data-dir.")
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        if content[:4] != bytes([0, 0, 8, axes]):
            raise ValueError(f"this is no IDX file of unsigned bytes with {axes} axes")
        shape = np.frombuffer(content, ">u4", axes, offset=4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} cannot be used: {error}. Download it again.") from error
    return torch.from_numpy(values.copy())


def load_data(folder: Path) -> tuple[Part, Part, Part]:
    """Return the images and labels to train on, those held out, and those of the test set."""
    parts = []
    for split in ("train", "t10k"):
        images = read_idx(folder, f"{split}-images-idx3-ubyte", axes=3)
        labels = read_idx(folder, f"{split}-labels-idx1-ubyte", axes=1).long()
        if images.shape[1:] != (28, 28) or len(images) != len(labels):
            raise ValueError(
                f"{folder}: the {split} images are {tuple(images.shape)} with {len(labels)} "
                "labels; there must be one label an image, and 28 x 28 pixels."
            )
        parts.append((images, labels))
    (images, labels), test = parts
    held_out = len(images) // 12
    if not held_out:
        raise ValueError(f"{folder} has {len(images)} training images; 12 are the least.")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    ours, theirs = order[held_out:], order[:held_out]
    return (images[ours], labels[ours]), (images[theirs], labels[theirs]), test


def normalise(images: Tensor) -> Tensor:
    """Turn stored images (batch, 28, 28) uint8 into what the model takes: (batch, 1, 28, 28)."""
    return images.unsqueeze(1).float().mul(1 / (255 * STD)).sub(MEAN / STD)


# --- Training ---------------------------------------------------------------------------------


def train_epoch(
    model: nn.Module,
    batches: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> tuple[float, float]:
    """Train on every batch of this rank; return mean loss and accuracy over all ranks."""
    model.train()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for stored, stored_labels in batches:
        images, labels = normalise(stored.to(device)), stored_labels.to(device)
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of all ranks while this runs
        optimizer.step()
        # Sums stay on the device: reading one at every step would make the GPU wait.
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    return means(sums)


@torch.no_grad()
def evaluate(
    model: nn.Module, part: Part, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Return mean loss and accuracy over a part of the data, every image counted once.

    A DistributedSampler would fill up the ranks' shares with images it has already given out, so
    each rank takes every n-th image itself. Shares may be unequal: the model must be the bare
    one, since DDP's ranks wait for each other.
    """
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = (values[rank::world_size] for values in part)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for some, answers in zip(
        images.split(batch_size), labels.to(device).split(batch_size), strict=True
    ):
        logits = model(normalise(some.to(device)))
        sums[0] += nn.functional.cross_entropy(logits, answers, reduction="sum")
        sums[1] += (logits.argmax(1) == answers).sum()
        sums[2] += len(answers)
    return means(sums)


def save_checkpoint(
    folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint under another name first, so that its own name is always a whole file."""
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    temporary = folder / "checkpoint.tmp"
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / f"checkpoint_epoch_{epoch}.pt")


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of the latest epoch; make the folder if need be. For rank 0."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {path.stem.rpartition("_")[2]: path for path in folder.glob("checkpoint_epoch_*.pt")}
    return found[max(found, key=int)] if found else None


def resume(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Load the newest checkpoint if there is one; return the number of epochs it has seen."""
    # Rank 0 looks and tells the others, so that all load the same file.
    box = [on_every_rank(lambda: newest_checkpoint(folder) if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(box, src=0)
    path = box[0]
    if path is None:
        return 0

    def load() -> int:
        try:
            state = torch.load(path, map_location=device, weights_only=True)
            model.load_state_dict(state["model"])
            lrs = [group["lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state["optimizer"])
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr  # the one asked for now, not the one of then
            return int(state["epoch"])
        except (OSError, RuntimeError, KeyError, EOFError, pickle.PickleError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{path} cannot be loaded: {reason} Delete it to go on from the one before; all "
                "nodes must see the same --checkpoint-dir."
            ) from error

    epochs = on_every_rank(load)
    say(f"Resuming after epoch {epochs} from {path}")
    return epochs


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train for the epochs that are left, then measure on the test images."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, held_out, test = on_every_rank(lambda: load_data(arguments.data_dir))
    torch.manual_seed(arguments.seed)  # the same initial weights on every rank
    model = ConvNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    done = resume(arguments.checkpoint_dir, model, optimizer, device)
    wrapped = DistributedDataParallel(model)

    data = TensorDataset(*training)
    # Each rank gets its own part of the data, in another order every epoch. Where the ranks do
    # not divide the data, the sampler hands out a few images twice, so that all have equally many.
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=arguments.seed)
    batches = DataLoader(
        data, arguments.batch_size, sampler=sampler, pin_memory=device.type == "cuda"
    )
    for epoch in range(done, arguments.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the order of the first
        # Dropout differs on each rank and in each epoch, and is the same after resuming.
        torch.manual_seed(arguments.seed + 1 + epoch * world_size + rank)
        loss, accuracy = train_epoch(wrapped, batches, optimizer, device)
        say(f"Epoch {epoch + 1} - Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}")
        loss, accuracy = evaluate(model, held_out, arguments.batch_size, device)
        say(f"  held out - Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}")
        if rank == 0:
            save_checkpoint(arguments.checkpoint_dir, epoch + 1, model, optimizer)
        dist.barrier()  # no rank goes on before the checkpoint is there
    if done >= arguments.epochs:
        say(f"Nothing left to train: --epochs {arguments.epochs}, and {done} are done.")
    loss, accuracy = evaluate(model, test, arguments.batch_size, device)
    say(f"Test - Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}")


# --- The command line -------------------------------------------------------------------------


def say(line: str) -> None:
    """Print a line, on rank 0 alone and at once: a job's output file is read while it runs."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def rate(text: str) -> float:
    """Read a learning rate: finite and above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def parse_arguments() -> argparse.Namespace:
    """Read the command line. Every rank finds the same mistake in it; one of them says it."""
    parser = argparse.ArgumentParser(description="Train a ConvNet on MNIST with DDP.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--epochs", type=positive, default=5, help="passes over the data")
    parser.add_argument("--batch-size", type=positive, default=64, help="images a rank and step")
    parser.add_argument("--lr", type=rate, default=1e-3, help="learning rate of Adam")
    parser.add_argument("--data-dir", type=Path, default=Path("data/mnist"), help="IDX files")
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=Path("checkpoints"),
        help="checkpoints; training goes on after the newest here",
    )
    parser.add_argument("--seed", type=int, default=42, help="of weights, order and dropout")
    return parser.parse_args()


def main() -> None:
    """Join the other ranks, train, leave them."""
    device = join()
    world_size = dist.get_world_size()
    arguments = parse_arguments()
    units = "GPUs" if device.type == "cuda" else "CPU ranks"  # no GPU is here, or none is visible
    say(f"Starting distributed training on {world_size} {units}")
    say(f"Master node: {os.environ['MASTER_ADDR']}")
    train(arguments, device)
    leave()


if __name__ == "__main__":
    main()
