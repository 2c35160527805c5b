"""CIFAR-10, a ResNet-18 for it and its training in Lightning: what notebook and ranks share.

A rank is a process of its own, and a process cannot import from a notebook: so this is a file.
"""

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
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

# Of CIFAR-10's training images, by channel, with pixels from 0 to 1.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


# --- The files ----------------------------------------------------------------------------------


def read(folder: Path, names: tuple[str, ...]) -> Batch:
    """Return the images (count, 3, 32, 32) and labels (count,) of these files, as bytes.

    These are files of CIFAR-10's binary version. Its Python version is a pickle, and unpickling
    a file runs whatever code stands in it.
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
    """Write the six files with made-up images: noise, and a pattern for each class."""
    generator = np.random.default_rng(seed)
    patterns = generator.integers(0, 2, (len(CLASSES), 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*TRAIN_FILES, *TEST_FILES):
        count = num_test if name in TEST_FILES else num_train // len(TRAIN_FILES)
        labels = generator.integers(0, len(CLASSES), count)
        images = 50 * patterns[labels] + generator.integers(0, 206, (count, 3, 32, 32))
        records = np.concatenate([labels[:, None], images.reshape(count, -1)], axis=1)
        (folder / name).write_bytes(records.astype(np.uint8).tobytes())


# --- Images on their way to the network ---------------------------------------------------------


def crop_and_flip(images: Tensor) -> Tensor:
    """Cut each image out of itself with a border of 4 pixels, and mirror every other one.

    All images of the batch at once, where they are: each has its own rows and columns to take.
    """
    count, channels, height, width = images.shape
    device = images.device
    rows = torch.randint(9, (count, 1), device=device) + torch.arange(height, device=device)
    columns = torch.randint(9, (count, 1), device=device) + torch.arange(width, device=device)
    flipped = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    return pad(images, (4, 4, 4, 4))[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def normalise(images: Tensor) -> Tensor:
    """Turn bytes into numbers with a mean of 0 and a standard deviation of 1."""
    mean = torch.tensor(MEAN, device=images.device)[:, None, None]
    std = torch.tensor(STD, device=images.device)[:, None, None]
    return (images / 255 - mean) / std


class Shares(Sampler[Tensor]):
    """Give one rank, batch by batch, the numbers of the samples that are its own.

    To train, the order is drawn from seed and epoch and is the same on every rank; each step takes
    the next `batch_size * world_size` samples of it, and each rank its part of them. So a step has
    the same samples on any number of ranks, and the few that do not fill a step wait for another
    epoch. To evaluate, each sample comes once, on one rank, and all ranks have as many batches.

    With a DistributedSampler, the one that Lightning puts in by itself, some samples come twice.
    """

    def __init__(
        self, count: int, batch_size: int, place: tuple[int, int], seed: int | None = None
    ) -> None:
        self.count, self.batch_size, self.seed, self.epoch = count, batch_size, seed, 0
        self.rank, self.world_size = place
        step = batch_size * self.world_size
        # To evaluate, rounded up, into pieces as equal as can be: none is empty.
        every = min(-(-count // step), count // self.world_size)
        self.steps = every if seed is None else count // step
        if count < self.world_size or not self.steps:
            raise ValueError(f"{count} images are too few: {self.world_size} ranks x {batch_size}.")

    def set_epoch(self, epoch: int) -> None:
        """Draw another order; Lightning calls this at the start of every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.arange(self.count)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.count, generator=generator)
            order = order[: self.steps * self.batch_size * self.world_size]
        pieces = order.tensor_split(self.steps * self.world_size)
        return iter(pieces[self.rank :: self.world_size])

    def __len__(self) -> int:
        return self.steps


class CIFAR10DataModule(L.LightningDataModule):
    """Training, validation and test images; `batch_size` counts images of one rank and step.

    A tenth of the training images is held out to validate. `subset` takes so many of the training
    images, 0 all of them. Images stay in memory as bytes; a batch is cropped, mirrored and
    normalised at once, and on the GPU where there is one.
    """

    def __init__(self, folder: str, subset: int = 0, batch_size: int = 128, seed: int = 42) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the files; every rank reads them and draws the same split."""
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
        """Return this rank's part of each step, in another order every epoch."""
        return self._loader(self.training, self.hparams.seed)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return this rank's share; each image is in one share alone."""
        return self._loader(self.validation)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return this rank's share; each image is in one share alone."""
        return self._loader(self.test)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Make numbers of the bytes, on the device; crop and mirror to train alone."""
        images, labels = batch
        if self.trainer.training:
            images = crop_and_flip(images)
        return normalise(images), labels

    def _loader(self, data: TensorDataset, seed: int | None = None) -> DataLoader[Batch]:
        place = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        shares = Shares(len(data), self.hparams.batch_size, place, seed)
        # batch_size None: a sample of the sampler is a whole batch, which the tensors give at once.
        # That takes less than a worker process would to hand it over.
        return DataLoader(
            data, batch_size=None, sampler=shares, pin_memory=torch.cuda.is_available()
        )


# --- The network --------------------------------------------------------------------------------


class Block(nn.Module):
    """Add to the input what two convolutions make of it."""

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
    """Return a ResNet-18 for images of 32 x 32; `width` is the channels of its first stage.

    ImageNet's ResNet-18 begins with a 7 x 7 convolution of stride 2 and a max-pool, which leave
    8 x 8 of such an image. Here it is a 3 x 3 one that keeps the size.
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
    """Train the ResNet with SGD; log loss and accuracy of each epoch over the images of all ranks.

    Each metric keeps sums and counts, adds up those of all ranks and divides once. A mean of the
    batches' or ranks' means would count an image of a smaller batch more than others.
    """

    def __init__(
        self,
        width: int = 64,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = resnet18(width)
        parts = ("train", "val", "test")  # metrics of two parts must not add up
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

    def on_train_start(self) -> None:
        """Let crops differ between the ranks, which so far drew equal numbers."""
        torch.manual_seed(self.hparams.seed + 1 + self.global_rank)

    def training_step(self, batch: Batch) -> Tensor:
        """Return the mean loss of this rank's batch; DDP averages its gradients over the ranks."""
        return self._measure(batch, "train")[0]

    def validation_step(self, batch: Batch) -> None:
        """Measure."""
        self._measure(batch, "val")

    def test_step(self, batch: Batch) -> None:
        """Measure, and count what each class was taken for."""
        _, logits = self._measure(batch, "test")
        self.confusion.update(logits, batch[1])

    def on_test_epoch_end(self) -> None:
        """Keep the counts (true class, predicted class), of the images of all ranks."""
        self.counts = self.confusion.compute().cpu()
        self.confusion.reset()

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD, and a learning rate that climbs and falls within the steps of the run."""
        values = self.hparams
        optimizer = torch.optim.SGD(
            self.parameters(),
            values.learning_rate,
            momentum=0.9,
            nesterov=True,
            weight_decay=values.weight_decay,
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, values.learning_rate, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _measure(self, batch: Batch, part: str) -> Batch:
        images, labels = batch
        logits = self(images)
        loss = cross_entropy(logits, labels)
        mean_loss = self.losses[f"{part}_loss"]
        accuracy = self.accuracies[f"{part}_accuracy"]
        mean_loss.update(loss.detach(), weight=len(labels))
        accuracy.update(logits, labels)
        # Given the metrics themselves, Lightning computes them at the end of the epoch, on all
        # ranks together, and resets them.
        self.log_dict(
            {f"{part}_loss": mean_loss, f"{part}_accuracy": accuracy},
            on_step=False,
            on_epoch=True,
            batch_size=len(labels),
        )
        return loss, logits


# --- What training costs ------------------------------------------------------------------------


class Performance(L.Callback):
    """Log, for each epoch's training steps, images/s, times and memory of all ranks together.

    The first steps of a run are left out, where it has enough of them: they allocate memory and
    choose algorithms. On a GPU a single step's time is when it was handed over, not when it was
    done; over an epoch both come to the same.
    """

    warm_up = 3

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the list of all steps."""
        self.step_ms: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the clocks."""
        self._begin()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Count how long this step has waited for its batch."""
        self.waited += time.perf_counter() - self.last

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Note this step's time, from the end of the one before."""
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
        """Log; the validation that has run since the last step is in none of these."""
        self.step_ms += self.epoch_ms
        seconds, steps = self.last - self.started, len(self.epoch_ms)
        processor_ms = 1000 * (self.processor_end - self.processor_started)
        step_ms = statistics.median(self.epoch_ms)
        # What each rank has is added up, the others are those of the slowest.
        add, most = {"reduce_fx": "sum"}, {"reduce_fx": "max"}
        for name, value, how in (
            ("images_per_s", self.images / seconds, add),
            ("memory_mib", self._memory_mib(pl_module.device), add),
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

    @staticmethod
    def _memory_mib(device: torch.device) -> float:
        """Return the most that tensors took of the GPU, or the process of the computer's memory."""
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
