"""Metric objects are reduced by their own state; metrics of the epoch are over all its samples."""

from pathlib import Path

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from samestep import UserError, read_records
from samestep.data.order import share
from samestep.ranks.world import World
from samestep.recipe import find_recipe
from samestep.training.metrics import EpochMetrics, Objects, StepOutputs
from tests import tiny

CPU = torch.device("cpu")
COUNT = 23  # samples


class Median(torchmetrics.Metric):
    """The median error: of all samples, not of means."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.errors.append((outputs - targets).abs())

    def compute(self) -> Tensor:
        return dim_zero_cat(self.errors).median()


class Largest(torchmetrics.Metric):
    """The largest output: a state that begins at what no sample has."""

    higher_is_better = None

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.tensor(-torch.inf), dist_reduce_fx="max")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen = torch.maximum(self.seen, outputs.max())

    def compute(self) -> Tensor:
        return self.seen


METRICS = {
    "auroc": torchmetrics.classification.BinaryAUROC,
    "logits": torchmetrics.classification.BinaryF1Score,  # some batches have none outside [0, 1]
    "calibration": lambda: torchmetrics.classification.MulticlassCalibrationError(3),
    "f1": lambda: torchmetrics.classification.MulticlassF1Score(3, average="macro"),
    "median": Median,
    "mse": torchmetrics.MeanSquaredError,
    "largest": Largest,
    "correlation": torchmetrics.PearsonCorrCoef,  # its states are stacked, not summed
}


def samples(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Return outputs and targets that a metric takes."""
    generator = torch.Generator().manual_seed(3)
    if name in ("f1", "calibration"):
        outputs = torch.rand(count, 3, generator=generator) * 1.1
        return outputs, torch.randint(3, (count,), generator=generator)
    outputs = torch.randn(count, generator=generator)
    if name in ("auroc", "logits"):
        outputs = outputs.sigmoid() if name == "auroc" else outputs.abs()
        return outputs, torch.arange(count) % 3 // 2
    return outputs, outputs + torch.randn(count, generator=generator)


class Gathered:
    """Ranks that have met: each is given what all of them have."""

    def __init__(self, ranks: list[Objects]) -> None:
        self._ranks = ranks

    def gather(self, _value):
        return [rank.states() for rank in self._ranks]


def new_objects(name: str, ranks: int) -> list[Objects]:
    return [Objects({name: METRICS[name]()}, CPU) for _ in range(ranks)]


def update(ranks: list[Objects], name: str, steps: range) -> None:
    """Give each rank its share of some samples, in batches of 4."""
    outputs, targets = samples(name, COUNT)
    for rank, objects in enumerate(ranks):
        mine = share(steps, rank, len(ranks))
        for first in range(mine.start, mine.stop, 4):
            part = slice(first, min(first + 4, mine.stop))
            objects.update(outputs[part], targets[part])


def assert_as_in_one(name: str, ranks: list[Objects]) -> None:
    metric = METRICS[name]()
    metric.update(*samples(name, COUNT))
    found = ranks[0].values(Gathered(ranks))
    assert found == {name: pytest.approx(float(metric.compute()), rel=1e-6, abs=1e-7)}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("empty", [0, 1], ids=["", "one more without samples"])
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_object_over_ranks_is_that_of_all_samples_in_one(name, world_size, empty):
    ranks = new_objects(name, world_size)
    update(ranks, name, range(COUNT))
    assert_as_in_one(name, ranks + new_objects(name, empty))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 2)])
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_object_goes_on_from_the_states_of_any_number_of_ranks(name, before, after):
    ranks, later = new_objects(name, before), new_objects(name, after)
    update(ranks, name, range(11))
    saved = [objects.states() for objects in ranks]
    if before == after:
        for states, objects in zip(saved, later, strict=True):
            objects.load(states)
    else:
        later[0].load([one for states in saved for one in states])
    update(later, name, range(11, COUNT))
    assert_as_in_one(name, later)


def test_logits_and_probabilities_that_one_metric_gives_torchmetrics_are_refused():
    class Both(torchmetrics.SumMetric):
        def update(self, outputs, targets):
            f1 = torchmetrics.functional.classification.binary_f1_score
            super().update(f1(outputs, targets) + f1(outputs.sigmoid(), targets))

    outputs, targets = samples("logits", COUNT)
    objects = Objects({"both": Both()}, CPU)
    objects.update(outputs.clamp(0, 1), targets)
    with pytest.raises(UserError, match=r"'both'.*sigmoid"):
        objects.update(outputs, targets)


def measured(metrics, outputs: Tensor, targets: Tensor, batch: int) -> EpochMetrics:
    found = EpochMetrics(metrics, CPU)
    pieces = zip(outputs.split(batch), targets.split(batch), strict=True)
    found.add([StepOutputs(o, t, len(o)) for o, t in pieces])
    found.settle()
    return found


def test_metrics_of_an_epoch_do_not_depend_on_how_it_is_cut_and_may_be_of_trees():
    outputs, targets = samples("mse", 300)
    metrics = {"mse": torchmetrics.MeanSquaredError(), "error": lambda o, t: (o - t).abs()}
    for batch in (1, 4, 7, 300):
        found = measured(metrics, outputs, targets, batch).means(World(), 300)
        assert found["mse"] == pytest.approx(float((outputs - targets).square().mean()), rel=1e-6)
        expected = float((outputs - targets).double().abs().mean())
        assert found["error"] == pytest.approx(expected, rel=1e-6)
    outputs, targets = samples("mse", 12)
    found = EpochMetrics({"error": lambda o, t: (o["y"] - t["y"]).abs()}, CPU)
    for o, t in zip(outputs.split(3), targets.split(3), strict=True):
        found.add([StepOutputs({"y": o, "steps": 3}, {"y": t}, 3)])
    found.settle()
    expected = float((outputs - targets).abs().double().mean())
    assert found.means(World(), 12)["error"] == pytest.approx(expected, rel=1e-6)


def test_metrics_of_an_epoch_are_none_where_a_part_was_not_measured_or_nothing_was():
    """As where an earlier version began it."""
    outputs, targets = samples("mse", 8)
    found = measured({"mse": torchmetrics.MeanSquaredError()}, outputs, targets, 8)
    assert found.means(World(), 12) == {}
    assert found.means(World(), 8).keys() == {"mse"}
    outputs, targets = samples("auroc", 8)
    one = {"error": lambda o, t: (o - t).abs()}
    found = EpochMetrics({**one, "median": Median()}, CPU)
    found.load([measured(one, outputs, targets, 8).state()])
    assert found.means(World(), 8).keys() == {"error"}


MEASURES = """
import torchmetrics
from dataclasses import replace
from tests.training.test_metrics import Median

class Right(Median):
    def update(self, outputs, targets):
        self.errors.append((outputs[:, 1] - targets).abs())

class Area(torchmetrics.classification.BinaryAUROC):
    def update(self, outputs, targets):
        super().update(outputs.softmax(1)[:, 1], targets)

class Seen(torchmetrics.SumMetric):  # ranks that added it up themselves would count twice
    def update(self, outputs, targets):
        super().update(torch.ones(len(targets)))

objects = {
    "auroc": Area(),
    "f1": torchmetrics.classification.MulticlassF1Score(2, average="macro"),
    "median": Right(),
    "seen": Seen(),
}
recipe = replace(recipe, metrics=dict(recipe.metrics, **objects))
"""
FROZEN = """
recipe = replace(recipe, schedule=lambda step, total: 0.0)
"""
NAMES = ("accuracy", "auroc", "f1", "median", "seen")
EPOCHS = ("--epochs", "2", "--checkpoint-every-steps", "4")


def write(folder: Path) -> Path:
    return tiny.write_recipe(folder, tiny.RECIPE + MEASURES)


def by_hand(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return what the metrics of the recipe are of all samples."""
    auroc = torchmetrics.functional.classification.binary_auroc
    f1 = torchmetrics.functional.classification.multiclass_f1_score
    found = {
        "accuracy": (outputs.argmax(dim=1) == targets).double().mean(),
        "auroc": auroc(outputs.softmax(1)[:, 1], targets),
        "f1": f1(outputs, targets, 2, average="macro"),
        "median": (outputs[:, 1] - targets).abs().median(),
        "seen": len(targets),
    }
    return {name: float(value) for name, value in found.items()}


def epochs(run: Path) -> list[dict]:
    return tiny.events(run, "epoch")


def test_metrics_of_an_epoch_are_those_of_all_its_samples(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path, tiny.RECIPE + MEASURES + FROZEN), tmp_path / "run"
    tiny.trained(recipe, run, *EPOCHS)
    space: dict = {"__file__": str(recipe)}
    exec(recipe.read_text(), space)
    x, y = space["data"](space["Options"]()).train
    model = space["model"](space["Options"]()).double()
    model.load_state_dict(tiny.last_state(run)["model"])
    with torch.no_grad():
        outputs = model(x)
        expected, loss = by_hand(outputs, y), torch.nn.functional.cross_entropy(outputs, y)
    for record in epochs(run):
        assert record["metrics"] == pytest.approx(expected, rel=1e-6)
    assert list(epochs(run)[0]["metrics"]) == list(NAMES)
    assert epochs(run)[0]["loss"] == pytest.approx(float(loss), rel=1e-12)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("alone")
    recipe = write(folder)
    tiny.trained(recipe, folder / "run", *EPOCHS)
    return recipe, folder / "run"


def test_metrics_of_epochs_and_evaluations_are_the_same_on_any_ranks(alone, tmp_path):
    recipe, reference = alone
    run = tmp_path / "run"
    tiny.trained(recipe, run, *EPOCHS, "--max-steps", "1")
    tiny.resumed(run, "--max-steps", "13", on=2)
    tiny.resumed(run, "--max-steps", "22")
    assert_same_metrics(run, reference)


def assert_same_metrics(run: Path, reference: Path) -> None:
    mine, its = (
        {
            (r["event"], r["step"], r.get("split")): {n: r.get("metrics", r)[n] for n in NAMES}
            for r in tiny.events(path, "epoch", "evaluation")
        }
        for path in (run, reference)
    )
    assert len(its) == 2 + 3
    for place, values in its.items():  # each stop adds some
        assert mine[place] == pytest.approx(values, rel=1e-6)


def test_an_epoch_that_an_earlier_version_began_has_no_metrics(alone, tmp_path):
    recipe, reference = alone
    run = tmp_path / "run"
    tiny.trained(recipe, run, *EPOCHS, "--max-steps", "5")
    last = tiny.read_index(run)["last"]
    path, index = run / "checkpoints" / last["path"], run / "checkpoints" / "index.json"
    state = torch.load(path, weights_only=True)
    del state["measured"], state["terms"]
    torch.save(state, path)
    index.write_text(index.read_text().replace(last["sha256"], tiny.sha256(path)))
    tiny.resumed(run, "--max-steps", "22")
    *_, first, second = epochs(run)
    assert "metrics" not in first
    assert second["metrics"] == epochs(reference)[1]["metrics"]


def test_a_metric_that_the_recipe_gained_within_an_epoch_begins_with_the_next(tmp_path):
    recipe, run = tmp_path / "tiny.py", tmp_path / "run"
    text = (tiny.RECIPE + MEASURES).replace('"f1"', '# "f1"')
    recipe.write_text(text.replace("recipe.metrics, **objects", "objects"))
    tiny.trained(recipe, run, *EPOCHS, "--max-steps", "1")
    recipe.write_text(tiny.RECIPE + MEASURES)
    tiny.resumed(run, "--allow-change", "recipe", "--max-steps", "2")
    tiny.resumed(run, "--max-steps", "22")
    *_, first, second = epochs(run)
    assert first["metrics"].keys() == {"auroc", "median", "seen"}
    assert second["metrics"].keys() == set(NAMES)


def test_the_best_checkpoint_follows_the_direction_of_the_metric_object(tmp_path):
    recipe, run = write(tmp_path), tmp_path / "run"
    assert find_recipe(str(recipe)).falling() == ("loss", "median")
    tiny.trained(recipe, run, "--epochs", "4", "--monitor", "median", "--lr", "0.3")
    found = [r["median"] for r in read_records(run) if r.get("split") == "validation"]
    assert len(set(found)) == 4
    assert tiny.read_index(run)["best"]["metric"] == min(found)
