"""The data, the network and the LightningModule, which the notebook and the ranks both import.

This is a file and not notebook cells because each rank is a separate process, and a process cannot
import from a notebook.
"""

import re
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
RECORD = 1 + 3 * 32 * 32  # bytes: the label, then red, green and blue, row by row
Batch = tuple[Tensor, Tensor]  # images (batch, 3, 32, 32) and labels (batch,)

# Per channel, over all pixels of the training images, scaled to 0 to 1. The widespread deviation
# 0.2023, 0.1994, 0.2010 is a slip: it is the mean of the deviations within each single image.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


# --- The files ----------------------------------------------------------------------------------


def read(folder: Path, names: tuple[str, ...]) -> Batch:
    """Return images (count, 3, 32, 32) and labels (count,) from files of the binary version.

    CIFAR-10's Python version is a pickle, and unpickling a file runs any code that is in it.
    """
    parts = []
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; cifar-10-binary.tar.gz has it.")
        content = np.fromfile(path, dtype=np.uint8)
        if content.size == 0 or content.size % RECORD:
            raise ValueError(f"{path} has {content.size} bytes, not a multiple of {RECORD}.")
        parts.append(content.reshape(-1, RECORD))
    records = torch.from_numpy(np.concatenate(parts))
    labels = records[:, 0].long()
    if int(labels.max()) >= len(CLASSES):
        raise ValueError(f"{folder} has label {int(labels.max())}; CIFAR-10 ends at 9.")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def write_made_up(folder: Path, num_train: int = 2000, num_test: int = 500, seed: int = 0) -> None:
    """Write the six files with made-up images: noise, plus one pattern per class."""
    generator = np.random.default_rng(seed)
    patterns = generator.integers(0, 2, (len(CLASSES), 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*TRAIN_FILES, *TEST_FILES):
        count = num_test if name in TEST_FILES else num_train // len(TRAIN_FILES)
        labels = generator.integers(0, len(CLASSES), count)
        images = 50 * patterns[labels] + generator.integers(0, 206, (count, 3, 32, 32))
        records = np.concatenate([labels[:, None], images.reshape(count, -1)], axis=1)
        (folder / name).write_bytes(records.astype(np.uint8).tobytes())


# --- From bytes to batches ----------------------------------------------------------------------


def crop_and_flip(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Pad each image by 4 pixels, take a random 32 x 32 crop, and mirror it half of the time.

    The whole batch is done at once, on the device that holds it: indexing picks other rows and
    columns for each image.
    """
    count, channels, height, width = images.shape
    device = images.device
    where = {"generator": generator, "device": device}
    rows = torch.randint(9, (count, 1), **where) + torch.arange(height, device=device)
    columns = torch.randint(9, (count, 1), **where) + torch.arange(width, device=device)
    flipped = torch.rand(count, 1, **where) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    return pad(images, (4, 4, 4, 4))[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def normalise(images: Tensor) -> Tensor:
    """Turn bytes into floats with a mean of 0 and a standard deviation of 1."""
    mean = torch.tensor(MEAN, device=images.device)[:, None, None]
    std = torch.tensor(STD, device=images.device)[:, None, None]
    return (images / 255 - mean) / std


class Shares(Sampler[Tensor]):
    """Yield one rank's batches, each a tensor of sample numbers.

    For training (with a seed), every rank draws the same order from seed and epoch. Each step takes
    the next `batch_size * world_size` samples of it, and each rank takes its part of these. A step
    therefore has the same samples on any number of ranks. The last samples, too few for a step, are
    left out of this epoch.

    For evaluation (without a seed), each sample is on exactly one rank, and all ranks have the same
    number of batches. Lightning's default, DistributedSampler, gives some samples out twice.
    """

    def __init__(
        self, count: int, batch_size: int, place: tuple[int, int], seed: int | None = None
    ) -> None:
        self.count, self.batch_size, self.seed, self.epoch = count, batch_size, seed, 0
        self.rank, self.world_size = place
        step = batch_size * self.world_size
        # To evaluate: rounded up, and then cut into nearly equal pieces, none of them empty.
        every = min(-(-count // step), count // self.world_size)
        self.steps = every if seed is None else count // step
        if count < self.world_size or not self.steps:
            raise ValueError(f"{count} images are too few: {self.world_size} ranks x {batch_size}.")

    def set_epoch(self, epoch: int) -> None:
        """Draw another order; Lightning calls this at the start of each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.arange(self.count)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.count, generator=generator)
            order = order[: self.steps * self.batch_size * self.world_size]
        pieces = order.tensor_split(self.steps * self.world_size)
        # A generator runs up to here at the first batch. When Lightning resumes a run it calls
        # `iter` before `set_epoch`: an order drawn at once would be that of epoch 0 again.
        yield from pieces[self.rank :: self.world_size]

    def __len__(self) -> int:
        return self.steps


class CIFAR10DataModule(L.LightningDataModule):
    """Training, validation and test images; `batch_size` is per rank.

    A tenth of the training images is held out for validation. `subset` uses only that many training
    images; 0 uses all. The images stay in memory as bytes.
    """

    def __init__(self, folder: str, subset: int = 0, batch_size: int = 128, seed: int = 42) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the files; every rank does so and draws the same split.

        Something that must happen once, such as a download, belongs in `prepare_data`, which
        Lightning calls on one rank per node only.
        """
        folder = Path(self.hparams.folder)
        if stage == "test":
            self.test = TensorDataset(*read(folder, TEST_FILES))
            return
        images, labels = read(folder, TRAIN_FILES)
        generator = torch.Generator().manual_seed(self.hparams.seed)
        chosen = torch.randperm(len(labels), generator=generator)
        chosen = chosen[: self.hparams.subset or None]
        held_out, rest = chosen[: len(chosen) // 10], chosen[len(chosen) // 10 :]
        self.validation = TensorDataset(images[held_out], labels[held_out])
        self.training = TensorDataset(images[rest], labels[rest])

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return this rank's part of each step, in a new order each epoch."""
        return self._loader(self.training, self.hparams.seed)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return this rank's share; each image is in exactly one share."""
        return self._loader(self.validation)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return this rank's share; each image is in exactly one share."""
        return self._loader(self.test)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalise the batch on its device; crop and mirror it only in training."""
        images, labels = batch
        if self.trainer.training:
            # Keyed by seed, step and rank: ranks draw different crops, and a resumed run draws
            # those that it would have drawn without the stop.
            key = 1000 * self.trainer.global_step + self.trainer.global_rank
            generator = torch.Generator(images.device).manual_seed(self.hparams.seed + key)
            images = crop_and_flip(images, generator)
        return normalise(images), labels

    def _loader(self, data: TensorDataset, seed: int | None = None) -> DataLoader[Batch]:
        place = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        shares = Shares(len(data), self.hparams.batch_size, place, seed)
        # With batch_size=None the sampler yields whole batches, and indexing the tensors gathers
        # one at once. No workers: sending a batch between processes takes longer than that.
        return DataLoader(
            data, batch_size=None, sampler=shares, pin_memory=torch.cuda.is_available()
        )


# --- The network --------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions whose result is added to the block's input."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Return maps (batch, channels, height / stride, width / stride)."""
        maps = torch.relu(self.bn1(self.conv1(images)))
        return torch.relu(self.bn2(self.conv2(maps)) + self.shortcut(images))


def resnet18(width: int = 64) -> nn.Sequential:
    """Return a ResNet-18 for 32 x 32 images; `width` is the number of channels of its first stage.

    torchvision's resnet18 starts with a 7 x 7 convolution of stride 2 and a max-pool, which shrink
    such an image to 8 x 8 at once. Here a 3 x 3 convolution keeps the size.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels_in = width
    for factor, stride in ((1, 1), (2, 2), (4, 2), (8, 2)):
        channels = factor * width
        layers += [Block(channels_in, channels, stride), Block(channels, channels, 1)]
        channels_in = channels
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, len(CLASSES)))
    return nn.Sequential(*layers, *head)


class LitResNet(L.LightningModule):
    """Train the ResNet with SGD; log loss and accuracy per epoch, over the images of all ranks.

    Each metric object keeps a sum and a count, adds up those of all ranks and divides once. A mean
    of the ranks' means would give more weight to images that are in a smaller batch.
    """

    def __init__(
        self,
        width: int = 64,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        schedule: Literal["onecycle", "cosine"] = "onecycle",
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()  # into every checkpoint: it can rebuild this module
        self.network = resnet18(width)
        parts = ("train", "val", "test")  # one metric each: their sums must not be mixed
        self.losses = nn.ModuleDict({f"{part}_loss": MeanMetric() for part in parts})
        self.accuracies = nn.ModuleDict(
            {
                f"{part}_accuracy": MulticlassAccuracy(len(CLASSES), average="micro")
                for part in parts
            }
        )
        self.confusion = MulticlassConfusionMatrix(len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        return self.network(images)

    def training_step(self, batch: Batch) -> Tensor:
        """Return the mean loss of this rank's batch; DDP averages its gradients over the ranks."""
        loss, _ = self._measure(batch, "train")
        # Rank 0's share only: adding up the ranks here would cost one more all-reduce per step.
        self.log("train_loss_step", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        """Update the validation metrics."""
        self._measure(batch, "val")

    def test_step(self, batch: Batch) -> None:
        """Update the test metrics and the confusion matrix."""
        _, logits = self._measure(batch, "test")
        self.confusion.update(logits, batch[1])

    def on_test_epoch_end(self) -> None:
        """Keep the counts (true class, predicted class) over the images of all ranks."""
        self.counts = self.confusion.compute().cpu()
        self.confusion.reset()

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD and its schedule, which ends exactly with the last step of the run."""
        values = self.hparams
        onecycle = values.schedule == "onecycle"
        optimizer = torch.optim.SGD(
            self.parameters(),
            values.learning_rate,
            momentum=0.9,
            nesterov=onecycle,
            weight_decay=values.weight_decay,
        )
        steps = int(self.trainer.estimated_stepping_batches)
        if onecycle:  # climb to the learning rate in the first 30% of the steps, then fall to zero
            schedule = OneCycleLR(optimizer, values.learning_rate, steps)
        else:  # start at the learning rate and fall to zero
            schedule = CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _measure(self, batch: Batch, part: str) -> Batch:
        """Return loss and logits of a batch, and add both to the metrics of this part."""
        images, labels = batch
        logits = self(images)
        loss = cross_entropy(logits, labels)
        mean_loss = self.losses[f"{part}_loss"]
        accuracy = self.accuracies[f"{part}_accuracy"]
        mean_loss.update(loss.detach(), weight=len(labels))
        accuracy.update(logits, labels)
        # Given metric objects, Lightning computes them at the end of the epoch over all ranks
        # together, and resets them.
        self.log_dict(
            {f"{part}_loss": mean_loss, f"{part}_accuracy": accuracy},
            on_step=False,
            on_epoch=True,
            batch_size=len(labels),
        )
        return loss, logits


# --- What training costs ------------------------------------------------------------------------


def peak_memory_mib(device: torch.device) -> dict[str, float]:
    """Return this rank's peaks: its GPU's memory, or its process's memory without a GPU."""
    if device.type == "cuda":
        # Allocated is what tensors used; reserved is what PyTorch took from the GPU to hold them.
        return {
            "allocated": torch.cuda.max_memory_allocated(device) / 2**20,
            "reserved": torch.cuda.max_memory_reserved(device) / 2**20,
        }
    if sys.platform == "darwin":
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    # Not ru_maxrss on Linux: a process that a notebook starts inherits the notebook's peak.
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {"resident": int(peak) / 1024}


class Performance(L.Callback):
    """Log images/s, times and memory of each epoch's training steps, over all ranks.

    The first steps of a run are left out if there are enough others: they allocate memory and
    choose algorithms. A GPU works behind the Python code, so a single step's time there is when it
    was queued; over an epoch the two agree.
    """

    warm_up = 3

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the list of all steps."""
        self.step_ms: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clocks."""
        self._begin()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Add the time this step waited for its batch."""
        self.waited += time.perf_counter() - self.last

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Note this step's time, counted from the end of the step before."""
        steps = trainer.num_training_batches
        if trainer.global_step == self.warm_up and steps > 2 * self.warm_up:
            self._begin()
            return
        if batch_idx + 1 == steps and pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.epoch_ms.append(1000 * (now - self.last))
        self.last, self.processor_end = now, time.process_time()
        self.images += len(batch[1])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the epoch; the validation after its last step is not included."""
        self.step_ms += self.epoch_ms
        seconds, steps = self.last - self.started, len(self.epoch_ms)
        processor_ms = 1000 * (self.processor_end - self.processor_started)
        step_ms = statistics.median(self.epoch_ms)
        # Images and memory are added up over the ranks; times are those of the slowest rank.
        add, most = {"reduce_fx": "sum"}, {"reduce_fx": "max"}
        for name, value, how in (
            ("images_per_s", self.images / seconds, add),
            ("memory_mib", max(peak_memory_mib(pl_module.device).values()), add),
            ("step_ms", step_ms, most),
            ("waiting_for_data_ms", 1000 * self.waited / steps, most),
            ("processor_ms_per_image", processor_ms / self.images, {"reduce_fx": "mean"}),
        ):
            pl_module.log(name, value, sync_dist=True, **how)

    def _begin(self) -> None:
        self.started = self.last = time.perf_counter()
        self.processor_started = time.process_time()
        self.waited, self.images = 0.0, 0
        self.epoch_ms: list[float] = []
