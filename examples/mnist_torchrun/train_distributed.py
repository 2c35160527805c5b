"""Train a small ConvNet on MNIST, with DistributedDataParallel written out by hand.

    python train_distributed.py --data-dir data/mnist                        # one process
    torchrun --nproc_per_node=2 train_distributed.py --data-dir data/mnist   # two on this machine
    sbatch run_distributed.slurm --data-dir data/mnist                       # several nodes

Each process ("rank") uses one GPU, over NCCL. Without GPUs the ranks use CPUs, over Gloo.
A checkpoint is written after every epoch. Run the same command again to continue from the newest.
"""

import argparse
import gc
import gzip
import math
import os
import sys
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset, TensorDataset

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, scaled to 0 … 1


class ConvNet(nn.Module):
    """Map images (batch, 1, 28, 28) to logits (batch, classes).

    Replace it with your own model: nothing else in this file depends on what is inside.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        maps = self.conv2(self.conv1(images).relu()).relu()
        maps = self.dropout1(nn.functional.max_pool2d(maps, 2))
        return self.fc2(self.dropout2(self.fc1(maps.flatten(1)).relu()))


# --- The ranks --------------------------------------------------------------------------------


def setup_distributed() -> torch.device:
    """Join the process group; return the device of this rank."""
    if "RANK" not in os.environ:  # started with python, not torchrun
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            refuse("srun started several tasks, and each would train its own model. Start torchrun")
        one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ.update(one_rank, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    ranks_here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if 0 < gpus < ranks_here:  # every rank says so: torchrun kills the others when one has ended
        told = f"{ranks_here} ranks on a node, {gpus} visible GPUs. For CPUs: CUDA_VISIBLE_DEVICES="
        print(f"train_distributed.py: {told}", file=sys.stderr, flush=True)
        sys.exit(2)
    if torch.cuda.is_available():
        # Not RANK: rank 8 is the first rank of the second node, which has no GPU number 8.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def cleanup_distributed() -> None:
    """Leave the process group, once no rank needs it and the DDP model is gone."""
    gc.collect()  # the DDP model is part of a cycle: losing its last name does not free it
    dist.barrier()  # the first rank to exit would abort those that still talk to it
    dist.destroy_process_group()


def say(line: str) -> None:
    """Print a line on rank 0 only, at once: people follow a job's log while it runs."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def refuse(message: str) -> NoReturn:
    """End with exit code 2 and one message. All ranks must call this."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"train_distributed.py: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        cleanup_distributed()
    sys.exit(2)


def averages(sums: Tensor) -> tuple[float, float]:
    """Turn each rank's (sum of losses, correct, count) into mean loss and accuracy over all.

    Add first, divide once: a mean of the ranks' means is wrong where their counts differ.
    """
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return loss / count, correct / count


# --- The data ---------------------------------------------------------------------------------


def read_idx(folder: Path, name: str) -> Tensor:
    """Read a file of MNIST's: 3 bytes, the number of axes, their lengths, the values."""
    ends = [f"{place}{name}{end}" for place in ("", "raw/", "MNIST/raw/") for end in ("", ".gz")]
    path = next((folder / end for end in ends if (folder / end).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"--data-dir {folder} holds no {name}[.gz] and no train/CLASS/")
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        shape = np.frombuffer(content, ">u4", content[3], offset=4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}. Download it again.") from error
    return torch.from_numpy(values.copy())


class ImageFolder(Dataset):
    """The images of FOLDER/CLASS/*.png or *.jpg, grey and 28 x 28, each read when it is needed."""

    def __init__(self, folder: Path, classes: list[str]) -> None:
        self.samples = [
            (path, number)
            for number, name in enumerate(classes)
            for path in sorted((folder / name).glob("*"))
            if path.suffix.lower() in (".png", ".jpg", ".jpeg")
        ]
        if not self.samples:
            raise ValueError(f"{folder} holds no CLASS/*.png or CLASS/*.jpg")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image  # noqa: PLC0415 - MNIST's own files need no Pillow

        path, number = self.samples[index]
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("L").resize((28, 28)))), number


def load_data(folder: Path) -> tuple[Dataset, Dataset, Dataset, int]:
    """Return the samples to train on, those held out, the test samples and the number of classes.

    Put your own data here. A sample is (image, label): uint8 (28, 28), and a class number.
    """
    classes = sorted(path.name for path in (folder / "train").glob("*") if path.is_dir())
    if classes:
        train, test = (ImageFolder(folder / split, classes) for split in ("train", "test"))
    else:
        classes, parts = list("0123456789"), []
        for split in ("train", "t10k"):
            images = read_idx(folder, f"{split}-images-idx3-ubyte")
            labels = read_idx(folder, f"{split}-labels-idx1-ubyte")
            if len(images) != len(labels):
                raise ValueError(f"{folder}: {len(images)} {split} images, {len(labels)} labels")
            parts.append(TensorDataset(images, labels.long()))
        train, test = parts
    # A twelfth is held out. Its seed is fixed: every rank must hold out the same images.
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(42)).tolist()
    num_held_out = max(1, len(train) // 12)
    held_out, ours = Subset(train, order[:num_held_out]), Subset(train, order[num_held_out:])
    return ours, held_out, test, len(classes)


def load_on_every_rank(args: argparse.Namespace) -> tuple[Dataset, Dataset, Dataset, int]:
    """Return load_data's result. If a rank cannot have it, all ranks end: none waits for ever."""
    loaded = problem = None
    try:
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        loaded = load_data(args.data_dir)
    except (OSError, ValueError) as error:
        problem = f"[rank {dist.get_rank()}] {error}"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        refuse(next(filter(None, problems)))
    return loaded


def normalise(images: Tensor) -> Tensor:
    """Turn stored images (batch, 28, 28) uint8 into what the model takes: (batch, 1, 28, 28)."""
    return images.unsqueeze(1).float().mul(1 / (255 * STD)).sub(MEAN / STD)


def loader(data: Dataset, args: argparse.Namespace, sampler: Sampler | None = None) -> DataLoader:
    """Return batches of the data. Worker processes prepare them while the model computes."""
    return DataLoader(
        data,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,  # else they start again in every epoch
        pin_memory=torch.cuda.is_available(),  # copies to the GPU need not wait
        generator=torch.Generator(),  # so that workers do not change the dropout masks
    )


# --- Training ---------------------------------------------------------------------------------


def train_epoch(
    model: nn.Module,
    batches: DataLoader,
    optimizer: torch.optim.Optimizer,
    autocast: torch.autocast,
    scaler: torch.amp.GradScaler,
    device: torch.device,
) -> tuple[float, float]:
    """Train on every batch of this rank; return mean loss and accuracy over all ranks."""
    model.train()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for stored, stored_labels in batches:
        images = normalise(stored.to(device, non_blocking=True))
        labels = stored_labels.to(device, non_blocking=True)
        with autocast:  # with --amp: matrix products and convolutions in 16 bits
            logits = model(images)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # DDP averages the gradients of all ranks while this runs
        scaler.step(optimizer)  # skips the step if a gradient overflowed
        scaler.update()
        # Sums stay on the device: reading one in every step would make the CPU wait for the GPU.
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    return averages(sums)


@torch.no_grad()
def evaluate(
    model: nn.Module, share: DataLoader, autocast: torch.autocast, device: torch.device
) -> tuple[float, float]:
    """Return mean loss and accuracy over the shares of all ranks. All ranks must call this.

    It takes the bare model: DDP's forward may wait for all ranks, and shares may differ by a batch.
    """
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for stored, stored_labels in share:
        labels = stored_labels.to(device)
        with autocast:
            logits = model(normalise(stored.to(device)))
        sums[0] += nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    return averages(sums)


def save_checkpoint(folder: Path, epoch: int, parts: dict[str, Any]) -> None:
    """Write under another name, then rename: a checkpoint's own name is always a whole file."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"epoch": epoch, **state}, folder / "checkpoint.tmp")
    (folder / "checkpoint.tmp").replace(folder / f"checkpoint_epoch_{epoch}.pt")


def resume(folder: Path, parts: dict[str, Any], device: torch.device) -> int:
    """Load the newest checkpoint, if there is one; return the number of finished epochs."""
    epochs = [int(path.stem.split("_")[-1]) for path in folder.glob("checkpoint_epoch_*.pt")]
    newest = [max(epochs, default=0)]
    dist.broadcast_object_list(newest, src=0)  # all ranks load what rank 0 sees
    if newest == [0]:
        return 0
    path = folder / f"checkpoint_epoch_{newest[0]}.pt"
    state = torch.load(path, map_location=device, weights_only=True)
    for name, part in parts.items():
        if state[name]:  # the scaler's is empty if --amp was off
            part.load_state_dict(state[name])
    say(f"Resuming after epoch {state['epoch']} from {path}")
    return state["epoch"]


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train for the epochs that are left, then measure on the test images."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, held_out, test, num_classes = load_on_every_rank(args)

    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = ConvNet(num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    autocast = torch.autocast(device.type, half, enabled=args.amp)
    # float16 has a narrow range: the loss is scaled up so that small gradients do not become 0.
    # bfloat16 has the range of float32 and needs no scaler; a disabled one changes nothing.
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and half is torch.float16)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    done = resume(args.checkpoint_dir, parts, device)
    for group in optimizer.param_groups:
        group["lr"] = args.lr  # the one asked for now, not the one in the checkpoint
    ddp_model = DistributedDataParallel(model)

    # Each rank trains on its own part of the data, shuffled anew in every epoch.
    sampler = DistributedSampler(training, seed=args.seed)
    batches = loader(training, args, sampler)
    # To evaluate, rank r takes samples r, r + world_size, …: each sample counts exactly once.
    held_out_share, test_share = (
        loader(Subset(part, range(rank, len(part), world_size)), args) for part in (held_out, test)
    )
    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the order of the first
        # Dropout differs by rank and by epoch, and is the same after resuming.
        torch.manual_seed(args.seed + 1 + epoch * world_size + rank)
        loss, accuracy = train_epoch(ddp_model, batches, optimizer, autocast, scaler, device)
        say(f"Epoch {epoch + 1} - Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}")
        loss, accuracy = evaluate(model, held_out_share, autocast, device)
        say(f"  held out - Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}")
        if rank == 0:
            save_checkpoint(args.checkpoint_dir, epoch + 1, parts)
        dist.barrier()  # no rank continues, or ends, before the checkpoint is there
    if done >= args.epochs:
        say(f"Nothing left to train: --epochs {args.epochs}, and {done} are done")
    loss, accuracy = evaluate(model, test_share, autocast, device)
    say(f"Test - Avg Loss: {loss:.6f}, Accuracy: {accuracy:.2%}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a ConvNet on MNIST with DDP.")
    parser.error = refuse  # all ranks find the same mistake, rank 0 prints it
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of Adam")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes per rank")
    parser.add_argument("--amp", action="store_true", help="compute in 16 bits where it is safe")
    parser.add_argument("--data-dir", type=Path, default="data/mnist", help="files or folders")
    parser.add_argument("--checkpoint-dir", type=Path, default="checkpoints", help="on all nodes")
    parser.add_argument("--seed", type=int, default=42, help="of weights, order and dropout")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or args.num_workers < 0 or not 0 < args.lr < math.inf:
        parser.error("--epochs, --batch-size and --lr must be above 0, --num-workers not below 0")
    return args


def main() -> None:
    """Join the other ranks, train, leave them."""
    device = setup_distributed()
    args = parse_arguments()
    units = "GPUs" if device.type == "cuda" else "CPU ranks"
    say(f"Starting distributed training on {dist.get_world_size()} {units}")
    say(f"Master node: {os.environ['MASTER_ADDR']}")
    train(args, device)
    cleanup_distributed()


if __name__ == "__main__":
    main()
