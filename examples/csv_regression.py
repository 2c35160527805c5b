"""A table with numbers and a category, read from CSV: dict inputs reach the model by their names.

    samestep train examples/csv_regression.py --data-file houses.csv
    samestep predict runs/ID more_houses.csv

Without a file it makes a table of its own.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep import Recipe, Splits

NUMBERS, CATEGORY, TARGET = ["area", "rooms", "age"], "district", "price"
DISTRICTS = ["north", "south", "harbour"]


@dataclass(frozen=True)
class Options:
    data_file: str = ""
    """CSV with the columns area, rooms, age, district, price; by default a table is made up."""
    hidden: int = 32


class Houses(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Rows of a table: ({"numbers": (3,), "district": ()}, price (1,))."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.numbers = torch.tensor([[float(row[name]) for name in NUMBERS] for row in rows])
        self.numbers = self.numbers / torch.tensor([100.0, 3.0, 30.0])
        self.district = torch.tensor([DISTRICTS.index(row[CATEGORY]) for row in rows])
        self.price = torch.tensor([[float(row[TARGET])] for row in rows]) / 100.0

    def __len__(self) -> int:
        return len(self.price)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs = {"numbers": self.numbers[index], "district": self.district[index]}
        return inputs, self.price[index]


class Price(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.district = nn.Embedding(len(DISTRICTS), 4)
        self.net = nn.Sequential(nn.Linear(7, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, numbers: Tensor, district: Tensor) -> Tensor:
        return self.net(torch.cat([numbers, self.district(district)], dim=1))


def made_up(number: int) -> list[dict[str, str]]:
    drawn = torch.rand(number, 4, generator=torch.Generator().manual_seed(0))
    rows = []
    for size, parts, years, place in drawn.tolist():
        area, rooms, age = 30 + 150 * size, 1 + int(6 * parts), int(80 * years)
        district = DISTRICTS[int(place * 3)]
        price = 3 * area + 20 * rooms - age + 100 * (district == "harbour")
        row = {"area": area, "rooms": rooms, "age": age, "district": district, "price": price}
        rows.append({name: str(value) for name, value in row.items()})
    return rows


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        missing = {*NUMBERS, CATEGORY, TARGET} - set(rows.fieldnames or ())
        if missing:
            raise ValueError(f"it has no column {', '.join(sorted(missing))}")
        return list(rows)


def data(options: Options) -> Splits:
    rows = read_rows(Path(options.data_file)) if options.data_file else made_up(1009)
    for_validation = len(rows) // 10
    return Splits(train=Houses(rows[for_validation:]), validation=Houses(rows[:for_validation]))


def error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return by how much each price is wrong, in percent."""
    return 100 * ((outputs - targets) / targets).abs().squeeze(1)


def optimizer(model: Price, settings: object) -> torch.optim.Optimizer:
    """Let the embedding learn faster, and decay weights of the network alone."""
    groups = [
        {"params": model.district.parameters(), "lr": 5 * settings.lr, "weight_decay": 0.0},
        {"params": model.net.parameters()},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, weight_decay=0.01)


def show(outputs: Tensor, targets: Tensor) -> list[dict[str, float]]:
    pairs = (100 * torch.cat([outputs, targets], dim=1)).tolist()
    return [{"price": price, "actual": actual} for price, actual in pairs]


recipe = Recipe(
    model=lambda options: Price(options.hidden),
    data=data,
    options=Options,
    loss=nn.functional.mse_loss,
    metrics={"error_percent": error},
    lower_is_better=("error_percent",),
    read=lambda _, path: Houses(read_rows(path)),
    show=show,
    optimizer=optimizer,
    schedule=lambda step, total: 1 - step / total,
    settings={"epochs": 5, "batch_size": 32, "lr": 3e-3},
)
