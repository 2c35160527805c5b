"""Rows streamed from shard files, more than fit into memory: each rank opens its own files alone.

    samestep train examples/streaming.py --folder my_shards

Without a folder of .jsonl files it writes a few small ones.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from samestep import Recipe, Splits

ROWS = (43, 61, 20, 57, 45, 38, 52, 60)
"""Of the shards that are made up; the last one is for validation."""
MADE_UP = tempfile.TemporaryDirectory()
"""Where each process writes them; it goes away with the process."""


@dataclass(frozen=True)
class Options:
    folder: str = ""
    """Shards: files of JSON lines {"x": [4 numbers], "y": number}; by default they are made up."""
    hidden: int = 32


class Shards(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows of files, one file after the other: (x (4,), y (1,)).

    `num_shards` and `shard` are what lets ranks read different files.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> "Shards":
        return Shards(self.files[index::num_shards])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for file in self.files:
            with file.open() as lines:
                for line in lines:
                    row = json.loads(line)
                    yield torch.tensor(row["x"]), torch.tensor([row["y"]])


def write_shards(folder: Path) -> None:
    """Write shards of different length."""
    generator = torch.Generator().manual_seed(0)
    for number, rows in enumerate(ROWS):
        x = torch.randn(rows, 4, generator=generator)
        y = x[:, 0] * x[:, 1] + x[:, 2]
        lines = [
            json.dumps({"x": one, "y": other})
            for one, other in zip(x.tolist(), y.tolist(), strict=True)
        ]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))


def data(options: Options) -> Splits:
    folder = Path(options.folder)
    if not options.folder:
        folder = Path(MADE_UP.name)
        write_shards(folder)
    files = sorted(folder.glob("*.jsonl"))
    return Splits(train=Shards(files[:-1]), validation=Shards(files[-1:]))


def model(options: Options) -> nn.Module:
    return nn.Sequential(nn.Linear(4, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 1))


recipe = Recipe(
    model=model,
    data=data,
    options=Options,
    loss=nn.functional.mse_loss,
    settings={"epochs": 3, "batch_size": 32, "shuffle_buffer": 64, "lr": 1e-2},
)
