"""Predict a number from the columns of a table.

    samestep train NAME.py                    # train; the run goes into a folder in runs/
    samestep verify NAME.py                   # is it the same training on 1, 2 and 3 ranks?
    samestep train NAME.py --nproc 2          # the same training, shared by two processes
    samestep train NAME.py --help             # the settings, such as --lr 0.01
    samestep predict runs/ID FILE.csv         # a number for each row, from the best checkpoint

It trains at once, on a table that it makes up. Change it from the top down.
"""

import csv
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep import Recipe, Splits

DATA_FILE: Path | None = None  # --- your data here --- such as Path("houses.csv")
COLUMNS = ("area", "rooms", "age")  # what to predict from: names in the first line of the file
TARGET = "price"  # what to predict
# A network learns best from numbers around 0, about as large as 1. These are the mean and the
# standard deviation of each column of the training data, and of what to predict. `predict` needs
# them, too. With other data, training stops with the numbers to write here.
MEAN, DEVIATION = (105.0, 3.5, 40.0), (43.0, 1.7, 23.0)
TARGET_MEAN, TARGET_DEVIATION = 345.0, 137.0


def table() -> tuple[Tensor, Tensor]:
    """Return the columns (rows, columns) and what to predict (rows, 1)."""
    if DATA_FILE is not None:
        rows = Rows(DATA_FILE, (*COLUMNS, TARGET), torch.clone)
        numbers = torch.stack([rows[place] for place in range(len(rows))])
        return numbers[:, :-1], numbers[:, -1:]
    drawn = torch.rand(2000, 4, generator=torch.Generator().manual_seed(0))
    area, rooms, age = 30 + 150 * drawn[:, 0], 1 + (6 * drawn[:, 1]).floor(), 80 * drawn[:, 2]
    price = 3 * area + 20 * rooms - 0.01 * age * area + 20 * (drawn[:, 3] - 0.5)
    return torch.stack([area, rooms, age], dim=1), price.unsqueeze(1)


Ready = Callable[[Tensor], Tensor]


class Rows(Dataset[Tensor]):
    """The numbers in these columns of a CSV file, row by row; `ready` prepares each."""

    def __init__(self, path: Path, names: tuple[str, ...], ready: Ready) -> None:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            missing = set(names) - set(rows.fieldnames or ())
            if missing:
                raise ValueError(f"it has no column {', '.join(sorted(missing))}")
            self.rows, self.names, self.ready = list(rows), names, ready

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Tensor:
        row = self.rows[place]
        try:  # `predict` shows what is wrong with a row, and continues with the next
            return self.ready(torch.tensor([float(row[name]) for name in self.names]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {place + 1}: {error}") from None


def scaled(columns: Tensor) -> Tensor:
    return (columns - torch.tensor(MEAN)) / torch.tensor(DEVIATION)


def check_scale(numbers: Tensor, ready: Tensor, *names: str) -> None:
    """Refuse columns that the means and deviations of other data do not bring near 0."""
    if ready.mean(0).abs().max() > 2 or ready.std(0).max() > 4:
        fits = [", ".join(f"{n:.7g}" for n in of(0).tolist()) for of in (numbers.mean, numbers.std)]
        lines = "; ".join(f"{name} = {fit}" for name, fit in zip(names, fits, strict=True))
        raise ValueError(f"{' and '.join(names)} do not fit this data. Write: {lines}")


def data() -> Splits:
    """Hold out a tenth to choose the best epoch by, and a tenth to test the result once."""
    columns, numbers = table()
    order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(1))
    test, validation, train = order.tensor_split([len(order) // 10, len(order) // 5])
    inputs, targets = scaled(columns), (numbers - TARGET_MEAN) / TARGET_DEVIATION
    check_scale(columns[train], inputs[train], "MEAN", "DEVIATION")
    check_scale(numbers[train], targets[train], "TARGET_MEAN", "TARGET_DEVIATION")
    return Splits(
        train=(inputs[train], targets[train]),
        validation=(inputs[validation], targets[validation]),
        test=(inputs[test], targets[test]),
    )


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(len(COLUMNS), 32), nn.ReLU(), nn.Linear(32, 1))


def error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return how far off the number is, for each row; samestep takes the mean over all ranks."""
    return TARGET_DEVIATION * (outputs - targets).abs().squeeze(1)


def show(outputs: Tensor, _: Tensor | None) -> list[dict[str, float]]:
    """Return what `samestep predict` shows of each row."""
    return [{TARGET: TARGET_MEAN + TARGET_DEVIATION * float(output)} for output in outputs]


recipe = Recipe(
    model=model,
    data=data,
    loss=nn.functional.mse_loss,
    metrics={"error": error},
    lower_is_better=("error",),
    read=lambda _, path: Rows(path, COLUMNS, scaled),
    show=show,
    # Defaults of the flags. The batch counts over all ranks, so that their number changes nothing.
    settings={"epochs": 10, "batch_size": 32, "lr": 3e-3, "monitor": "error"},
)
