"""Predict a class from the columns of a table.

    samestep train NAME.py                    # train; the run goes into a folder in runs/
    samestep verify NAME.py                   # is it the same training on 1, 2 and 3 ranks?
    samestep train NAME.py --nproc 2          # the same training, shared by two processes
    samestep train NAME.py --help             # the settings, such as --lr 0.01
    samestep predict runs/ID FILE.csv         # the class of each row, from the best checkpoint

It trains at once, on a table that it makes up. Change it from the top down.
"""

import csv
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep import Recipe, Splits

DATA_FILE: Path | None = None  # --- your data here --- such as Path("fish.csv")
COLUMNS = ("length", "width", "weight")  # what to predict from: names in the first line of the file
TARGET = "kind"  # the column that names the class
CLASSES = ("bass", "perch", "trout")
# A network learns best from numbers around 0, about as large as 1. These are the mean and the
# standard deviation of each column of the training data. `predict` needs them, too. With other
# data, training stops with the numbers to write here.
MEAN, DEVIATION = (30.0, 8.0, 1.0), (8.0, 2.0, 0.4)


def table() -> tuple[Tensor, Tensor]:
    """Return the columns (rows, columns), and for each row the place of its class (rows,)."""
    if DATA_FILE is not None:
        rows = TableRows(DATA_FILE, COLUMNS, torch.clone)
        numbers = torch.stack([rows[place] for place in range(len(rows))])
        return numbers, torch.tensor([class_of(row) for row in rows.rows])
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(len(CLASSES), (2000,), generator=generator)
    centres = torch.tensor([[34.0, 8.0, 1.3], [24.0, 9.0, 0.7], [32.0, 6.5, 0.9]])
    spread = torch.tensor([4.0, 1.0, 0.2])
    return centres[classes] + spread * torch.randn(2000, 3, generator=generator), classes


def class_of(row: dict[str, str]) -> int:
    if row.get(TARGET) not in CLASSES:
        raise ValueError(f"{TARGET} is {row.get(TARGET)!r} in {row}, none of {', '.join(CLASSES)}")
    return CLASSES.index(row[TARGET])


Ready = Callable[[Tensor], Tensor]


class TableRows(Dataset[Tensor]):
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


def check_scale(numbers: Tensor, ready: Tensor) -> None:
    """Refuse columns that the means and deviations of other data do not bring near 0."""
    if ready.mean(0).abs().max() > 2 or ready.std(0).max() > 4:
        fits = [", ".join(f"{n:.7g}" for n in of(0).tolist()) for of in (numbers.mean, numbers.std)]
        lines = "MEAN = {}; DEVIATION = {}".format(*fits)
        raise ValueError(f"MEAN and DEVIATION do not fit this data. Write: {lines}")


def data() -> Splits:
    """Hold out a tenth to choose the best epoch by, and a tenth to test the result once."""
    columns, targets = table()
    inputs = scaled(columns)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))
    test, validation, train = order.tensor_split([len(order) // 10, len(order) // 5])
    check_scale(columns[train], inputs[train])
    return Splits(
        train=(inputs[train], targets[train]),
        validation=(inputs[validation], targets[validation]),
        test=(inputs[test], targets[test]),
        classes=CLASSES,  # a test then counts each class
    )


def model() -> nn.Module:
    """One output per class; the largest is the answer."""
    return nn.Sequential(nn.Linear(len(COLUMNS), 32), nn.ReLU(), nn.Linear(32, len(CLASSES)))


# Without `loss` it is the cross-entropy, and without `metrics` the accuracy.
recipe = Recipe(
    model=model,
    data=data,
    read=lambda _, path: TableRows(path, COLUMNS, scaled),
    # Defaults of the flags. The batch counts over all ranks, so that their number changes nothing.
    settings={"epochs": 10, "batch_size": 32, "lr": 3e-3},
)
