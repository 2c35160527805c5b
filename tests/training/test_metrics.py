"""Metric objects are reduced by their own state; metrics of the epoch are over all its samples."""

import signal
from pathlib import Path

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from samestep import read_records
from samestep.data.blocks import Batch
from samestep.data.order import share
from samestep.ranks.world import World
from samestep.recipe import find_recipe
from samestep.training.evaluation import Totals
from samestep.training.metrics import EpochMetrics, Objects, StepOutputs
from tests import tiny
from tests.faults import Fault
from tests.processes import run_ranks

CPU = torch.device("cpu")


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
    "f1": lambda: torchmetrics.classification.MulticlassF1Score(3, average="macro"),
    "median": Median,
    "mse": torchmetrics.MeanSquaredError,
    "largest": Largest,
    "correlation": torchmetrics.PearsonCorrCoef,  # its states are stacked, not summed
}


def samples(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Return outputs and targets that a metric takes."""
    generator = torch.Generator().manual_seed(3)
    if name == "f1":
        outputs = torch.randn(count, 3, generator=generator)
        return outputs, torch.randint(3, (count,), generator=generator)
    outputs = torch.randn(count, generator=generator)
    if name == "auroc":
        return outputs.sigmoid(), torch.arange(count) % 3 // 2
    return outputs, outputs + torch.randn(count, generator=generator)


class Gathered:
    """Ranks that have met: each is given what all of them have."""

    def __init__(self, ranks: list[Objects]) -> None:
        self._ranks = ranks

    def gather(self, _value):
        return [rank.states() for rank in self._ranks]


def updated(objects: Objects, pairs) -> Objects:
    for outputs, targets in pairs:
        objects.update(outputs, targets)
    return objects


def shares(name: str, count: int, world_size: int, batch: int = 4):
    """Return the batches of each rank."""
    outputs, targets = samples(name, count)
    found = []
    for rank in range(world_size):
        mine = share(range(count), rank, world_size)
        pieces = [mine[k : k + batch] for k in range(0, len(mine), batch)]
        found.append([(outputs[p.start : p.stop], targets[p.start : p.stop]) for p in pieces])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("empty", [0, 1], ids=["", "one more without samples"])
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_object_over_ranks_is_that_of_all_samples_in_one(name, world_size, empty):
    count = 23
    metric = METRICS[name]()
    metric.update(*samples(name, count))
    expected = float(metric.compute())
    parts = shares(name, count, world_size) + [()] * empty
    ranks = [updated(Objects({name: METRICS[name]()}, CPU), pairs) for pairs in parts]
    found = ranks[0].values(Gathered(ranks))
    assert found == {name: pytest.approx(expected, rel=1e-6, abs=1e-7)}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (3, 2), (2, 2)])
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_object_goes_on_from_the_states_of_any_number_of_ranks(name, before, after):
    outputs, targets = samples(name, 23)
    metric = METRICS[name]()
    metric.update(outputs, targets)
    first, second = (outputs[:11], targets[:11]), (outputs[11:], targets[11:])
    ranks = [Objects({name: METRICS[name]()}, CPU) for _ in range(before)]
    for rank, objects in enumerate(ranks):
        mine = share(range(11), rank, before)
        objects.update(first[0][mine.start : mine.stop], first[1][mine.start : mine.stop])
    saved = [objects.states() for objects in ranks]
    later = [Objects({name: METRICS[name]()}, CPU) for _ in range(after)]
    if before == after:
        for states, objects in zip(saved, later, strict=True):
            objects.load(states)
    else:
        later[0].load([one for states in saved for one in states])
    for rank, objects in enumerate(later):
        mine = share(range(12), rank, after)
        objects.update(second[0][mine.start : mine.stop], second[1][mine.start : mine.stop])
    found = later[0].values(Gathered(later))
    assert found == {name: pytest.approx(float(metric.compute()), rel=1e-6, abs=1e-7)}


def test_metrics_of_an_epoch_do_not_depend_on_how_its_steps_are_cut():
    outputs, targets = samples("mse", 300)
    metrics = {"mse": torchmetrics.MeanSquaredError(), "error": lambda o, t: (o - t).abs()}
    for batch in (1, 4, 7, 300):
        measured = EpochMetrics(metrics, CPU)
        pieces = zip(outputs.split(batch), targets.split(batch), strict=True)
        measured.add([StepOutputs(o, t, len(o)) for o, t in pieces])
        measured.settle()
        found = measured.means(World(), 300)
        assert found["mse"] == pytest.approx(float((outputs - targets).square().mean()), rel=1e-6)
        expected = float((outputs - targets).double().abs().mean())
        assert found["error"] == pytest.approx(expected, rel=1e-6)


def test_metrics_of_an_epoch_are_none_where_a_part_of_it_was_not_measured():
    """As where an earlier version began it."""
    outputs, targets = samples("mse", 8)
    measured = EpochMetrics({"mse": torchmetrics.MeanSquaredError()}, CPU)
    measured.load([])
    measured.add([StepOutputs(outputs, targets, 8)])
    measured.settle()
    assert measured.means(World(), 12) == {}
    assert measured.means(World(), 8).keys() == {"mse"}


def test_trees_of_outputs_are_measured_step_by_step():
    outputs, targets = samples("mse", 12)
    measured = EpochMetrics({"error": lambda o, t: (o["y"] - t["y"]).abs()}, CPU)
    for o, t in zip(outputs.split(3), targets.split(3), strict=True):
        measured.add([StepOutputs({"y": o, "steps": 3}, {"y": t}, 3)])
    measured.settle()
    expected = float((outputs - targets).abs().double().mean())
    assert measured.means(World(), 12)["error"] == pytest.approx(expected, rel=1e-6)


# --- with real ranks ---

RECIPE = """
import torchmetrics
from dataclasses import replace
from tests.training.test_metrics import Median

class Right(Median):
    def update(self, outputs, targets):
        self.errors.append((outputs[:, 1] - targets).abs())

class Area(torchmetrics.classification.BinaryAUROC):
    def update(self, outputs, targets):
        super().update(outputs.softmax(1)[:, 1], targets)

objects = {
    "auroc": Area(),
    "f1": torchmetrics.classification.MulticlassF1Score(2, average="macro"),
    "median": Right(),
}
recipe = replace(recipe, metrics=dict(recipe.metrics, **objects))
"""
FROZEN = """
recipe = replace(recipe, schedule=lambda step, total: 0.0)
"""
NAMES = ("accuracy", "auroc", "f1", "median")
EPOCHS = ("--epochs", "2", "--checkpoint-every-steps", "4")


def write(folder: Path) -> Path:
    return tiny.write_recipe(folder, tiny.RECIPE + RECIPE)


def write_frozen(folder: Path) -> Path:
    return tiny.write_recipe(folder, tiny.RECIPE + RECIPE + FROZEN)


def by_hand(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return what the metrics of the recipe are of all samples."""
    auroc = torchmetrics.functional.classification.binary_auroc
    f1 = torchmetrics.functional.classification.multiclass_f1_score
    found = {
        "accuracy": (outputs.argmax(dim=1) == targets).double().mean(),
        "auroc": auroc(outputs.softmax(1)[:, 1], targets),
        "f1": f1(outputs, targets, 2, average="macro"),
        "median": (outputs[:, 1] - targets).abs().median(),
    }
    return {name: float(value) for name, value in found.items()}


def epochs(run: Path) -> list[dict]:
    return tiny.events(run, "epoch")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> tuple[Path, Path]:
    """Give a recipe whose model never changes, and the run of a single process."""
    folder = tmp_path_factory.mktemp("frozen")
    recipe = write_frozen(folder)
    tiny.trained(recipe, folder / "run", *EPOCHS)
    return recipe, folder / "run"


def test_metrics_of_an_epoch_are_those_of_all_its_samples(frozen):
    recipe, run = frozen
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
    tiny.trained(recipe, tmp_path / "run", *EPOCHS, on=2)
    assert_same_metrics(tmp_path / "run", reference)


def assert_same_metrics(run: Path, reference: Path) -> None:
    assert len(epochs(run)) == len(epochs(reference)) == 2
    for mine, its in zip(epochs(run), epochs(reference), strict=True):
        assert mine["metrics"] == pytest.approx(its["metrics"], rel=1e-6)
    evaluations = [
        [{n: r[n] for n in NAMES} for r in read_records(path) if r["event"] == "evaluation"]
        for path in (run, reference)
    ]
    for mine, its in zip(*evaluations, strict=True):
        assert mine == pytest.approx(its, rel=1e-6)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_metrics_of_an_epoch_that_was_stopped_are_of_all_its_samples(
    alone, tmp_path, before, after
):
    recipe, reference = alone
    run = tmp_path / "run"
    # Ranks meet after the first step, and then twice a second.
    fault = Fault("after a step", nth=1, signum=signal.SIGTERM, rank=None)
    tiny.struck(recipe, run, fault, *EPOCHS, on=before)
    assert tiny.last_state(run)["position"]["step"] == 1
    tiny.resumed(run, on=after)
    assert_same_metrics(run, reference)


def test_an_epoch_that_an_earlier_version_began_has_no_metrics(alone, tmp_path):
    recipe, reference = alone
    run = tmp_path / "run"
    fault = Fault("after a step", nth=5, signum=signal.SIGTERM)
    tiny.struck(recipe, run, fault, *EPOCHS)
    without_measured(run)
    tiny.resumed(run)
    first, second = epochs(run)
    assert "metrics" not in first
    assert second["metrics"] == epochs(reference)[1]["metrics"]


def test_a_metric_that_the_recipe_gained_within_an_epoch_begins_with_the_next(tmp_path):
    """Also after a second stop in that epoch."""
    recipe, run = tmp_path / "tiny.py", tmp_path / "run"
    text = (tiny.RECIPE + RECIPE).replace('"f1"', '# "f1"')
    recipe.write_text(text.replace("recipe.metrics, **objects", "objects"))
    fault = Fault("after a step", nth=1, signum=signal.SIGTERM, rank=None)
    tiny.struck(recipe, run, fault, *EPOCHS)
    recipe.write_text(tiny.RECIPE + RECIPE)
    more = ("--resume", "--allow-change", "recipe", *EPOCHS)
    tiny.struck(recipe, run, fault, *more, on=2)
    tiny.trained(recipe, run, *more)
    first, second = epochs(run)
    assert first["metrics"].keys() == {"auroc", "median"}
    assert second["metrics"].keys() == set(NAMES)


def test_a_gained_metric_without_a_sample_is_not_computed():
    """A run may have been stopped between an epoch's last step and its record."""
    outputs, targets = samples("auroc", 8)
    earlier = EpochMetrics({"error": lambda o, t: (o - t).abs()}, CPU)
    earlier.add([StepOutputs(outputs, targets, 8)])
    earlier.settle()
    gained = {"error": lambda o, t: (o - t).abs(), "median": Median()}
    measured = EpochMetrics(gained, CPU)
    measured.load([earlier.state()])
    assert measured.means(World(), 8).keys() == {"error"}
    measured.reset()
    measured.add([StepOutputs(outputs, targets, 8)])
    measured.settle()
    assert measured.means(World(), 8).keys() == {"error", "median"}


def without_measured(run: Path) -> None:
    """Make a run's last checkpoint one of the version before."""
    index = tiny.read_index(run)
    path = run / "checkpoints" / index["last"]["path"]
    state = torch.load(path, weights_only=True)
    del state["measured"], state["terms"]
    torch.save(state, path)
    text = (run / "checkpoints" / "index.json").read_text()
    text = text.replace(index["last"]["sha256"], tiny.sha256(path))
    (run / "checkpoints" / "index.json").write_text(text)


def test_the_best_checkpoint_follows_the_direction_of_the_metric_object(tmp_path):
    run = tmp_path / "run"
    flags = ("--epochs", "4", "--monitor", "median", "--lr", "0.3")
    tiny.trained(write(tmp_path), run, *flags)
    found = [r["median"] for r in read_records(run) if r.get("split") == "validation"]
    assert len(set(found)) == 4
    assert tiny.read_index(run)["best"]["metric"] == min(found)


def counted_on_ranks() -> float:
    """Return what a metric that counts samples computes of two on each rank; runs on each."""
    import torchmetrics

    from samestep.ranks.world import find_world, join, leave

    world = find_world("cpu")
    join(world)
    objects = Objects({"n": torchmetrics.SumMetric()}, CPU)
    for metric in objects._metrics.values():
        metric.update(torch.ones(2))
    found = objects.values(world)["n"]
    leave(world)
    return found


def test_a_metric_object_counts_each_sample_once_among_processes(tmp_path):
    assert run_ranks(counted_on_ranks, 2, tmp_path) == [4.0] * 2


def test_a_metric_object_says_itself_which_way_is_better(tmp_path):
    assert find_recipe(str(write(tmp_path))).falling() == ("loss", "median")


def test_the_samples_of_a_rank_without_any_are_not_missed():
    """Totals of two batches, one of them on a rank whose share is empty."""
    outputs, targets = samples("mse", 6)
    totals = Totals(torch.nn.functional.mse_loss, {"mse": METRICS["mse"]()}, World())
    totals.add(outputs, Batch(outputs, targets, 6))
    empty = Totals(torch.nn.functional.mse_loss, {"mse": METRICS["mse"]()}, World())
    found = totals.objects.values(Gathered([totals.objects, empty.objects]))
    assert found["mse"] == totals.means()["mse"]
