"""Metric objects are reduced by their own state; metrics of the epoch are over all its samples."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from samestep import Recipe, Splits, UserError, read_records
from samestep.base.run.index import find_checkpoint, read_index
from samestep.base.run.records import TAKEN_NAMES
from samestep.core.data.order import share
from samestep.core.data.recipe_data import in_one_order
from samestep.core.recipe import find_recipe
from samestep.core.training.metrics import EpochMetrics, Objects, StepOutputs
from samestep.core.training.stopping import Watch
from samestep.launch.ranks.world import World
from tests import tiny
from tests.command_line import RECIPE, read_json, train_here
from tests.faults import Fault
from tests.tiny import events
from tests.training.stops import stop_all

CPU = torch.device("cpu")
COUNT = 23  # samples


class Median(torchmetrics.Metric):  # the median error: of all samples, not of means
    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.errors.append((outputs - targets).abs())

    def compute(self) -> Tensor:
        return dim_zero_cat(self.errors).median()


class Largest(torchmetrics.MaxMetric):  # a state that begins at what no sample has
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs)


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
    generator = torch.Generator().manual_seed(3)
    if name in ("f1", "calibration"):
        outputs = torch.rand(count, 3, generator=generator) * 1.1
        return outputs, torch.randint(3, (count,), generator=generator)
    outputs = torch.randn(count, generator=generator)
    if name in ("auroc", "logits"):
        outputs = outputs.sigmoid() if name == "auroc" else outputs.abs()
        return outputs, torch.arange(count) % 3 // 2
    return outputs, outputs + torch.randn(count, generator=generator)


class Gathered:  # ranks that have met: each is given what all of them have
    on_every = staticmethod(lambda function: function())
    broadcast = staticmethod(lambda value: value)

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
    world = Gathered(later)  # a user's code may compute something else on another rank
    world.broadcast = lambda _: {"of rank 0": 1.0}
    assert later[-1].values(world) == {"of rank 0": 1.0}


def test_metrics_that_cannot_be_are_refused():
    class Both(torchmetrics.SumMetric):
        def update(self, outputs, targets):
            f1 = torchmetrics.functional.classification.binary_f1_score
            super().update(f1(outputs, targets) + f1(outputs.sigmoid(), targets))

    outputs, targets = samples("logits", COUNT)
    objects = Objects({"both": Both()}, CPU)
    objects.update(outputs.clamp(0, 1), targets)
    with pytest.raises(UserError, match=r"'both'.*sigmoid"):
        objects.update(outputs, targets)
    for name in TAKEN_NAMES:
        with pytest.raises(UserError, match=f"'{name}'"):
            Recipe(model=print, data=print, metrics={name: print})


def measured(metrics, outputs: Tensor, targets: Tensor, batch: int) -> EpochMetrics:
    found = EpochMetrics(metrics, CPU)
    pieces = zip(outputs.split(batch), targets.split(batch), strict=True)
    found.add([StepOutputs(o, t, len(o)) for o, t in pieces])
    found.settle()
    return found


def test_metrics_of_an_epoch_do_not_depend_on_its_cuts_and_may_be_none():
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
    outputs, targets = samples("mse", 8)
    found = EpochMetrics({"error": lambda o, t: o - t}, CPU)
    found.add([StepOutputs(torch.tensor(2.0), t, 4) for t in targets.split(4)])
    found.settle()
    assert found.means(World(), 8)["error"] == pytest.approx(2 - float(targets.mean()), rel=1e-6)
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
    def update(self, outputs, targets): self.errors.append((outputs[:, 1] - targets).abs())
class Area(torchmetrics.classification.BinaryAUROC):
    def update(self, outputs, targets): super().update(outputs.softmax(1)[:, 1], targets)
class Seen(torchmetrics.SumMetric):  # ranks that added it up themselves would count twice
    def update(self, outputs, targets): super().update(torch.ones(len(targets)))
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


# Of files in a folder the order may differ from node to node.
SETS = """validation=dict([("unseen", (x[n:n + 37], y[n:n + 37])), ("seen", (x[:20], y[:20]))][
    ::-1 if __import__("os").environ.get("RANK") == "1" else 1])"""
STOPPED = Fault("before an evaluation", 4, signum=signal.SIGTERM)  # the second set of the second


def test_each_of_several_validation_sets_is_measured_and_any_is_monitored(
    uninterrupted, output_of, tmp_path
):
    text = tiny.RECIPE.replace("validation=(x[n:n + 37], y[n:n + 37])", SETS)
    recipe, one, two = tiny.write_recipe(tmp_path, text), tmp_path / "one", tmp_path / "two"
    tiny.trained(recipe, one, "--monitor", "seen/loss")
    found = [r for r in events(one, "evaluation") if r["split"] == "validation"]
    plain = [r for r in events(uninterrupted, "evaluation") if r["split"] == "validation"]
    for record, alone in zip(found, plain, strict=True):
        for name in ("loss", "accuracy"):
            assert record[name] == record[f"unseen/{name}"] == alone[name]
    best = tiny.read_index(one)["best"]["metric"]
    assert best == min(record["seen/loss"] for record in found) < found[0]["seen/loss"]
    space: dict = {"__file__": str(recipe)}
    exec(text, space)
    (x, y), net = space["data"](space["Options"]()).train, space["model"](space["Options"]())
    net.double().load_state_dict(tiny.last_state(one)["model"])
    loss = float(space["loss"](net(x[:20]), y[:20]).detach())
    assert found[-1]["seen/loss"] == pytest.approx(loss, 1e-12)
    how = "--checkpoint", "last", "--split", "validation", "--json"
    told = json.loads(output_of("evaluate", one, *how))
    names = [f"{of}/{name}" for of in ("unseen", "seen") for name in ("loss", "accuracy")]
    assert [told[name] for name in names] == [found[-1][name] for name in names]
    stopped = STOPPED, (recipe, "--run-dir", two, "--monitor", "seen/loss")
    stop_all([stopped], on=2, folder=tmp_path)
    tiny.resumed(two)
    tiny.assert_same_training(two, one)


def test_ranks_with_validation_sets_of_other_names_are_told_of_them(monkeypatch):
    monkeypatch.setattr(World, "gather", lambda _, names: [names, ["other"]])
    for sets, ours in (({"own": samples("mse", 8)}, "'own'"), (samples("mse", 8), "none")):
        with pytest.raises(UserError, match=f"Rank 1 .* 'other', and rank 0 has {ours}"):
            in_one_order(Splits(train=samples("mse", 8), validation=sets), World())


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ('{"a b": (x, y)}', "'a b'.* needs a name of letters"),
        ('{"a": None}', "'a'.*, and data"),
        ('{"a": (x, y), "b": (x[:, :3], y)}', "model failed.* 3"),
        ('{"a": (x, y), "b": []}', "validation/b data has no samples"),
    ],
)
def test_validation_sets_that_cannot_be_measured_are_refused_before_the_first_step(
    refused, tmp_path, sets, says
):
    text = tiny.RECIPE.replace("validation=(x[n:n + 37], y[n:n + 37])", f"validation={sets}")
    recipe = tiny.write_recipe(tmp_path, text)
    assert re.search(says, refused("train", str(recipe), "--run-dir", str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("alone")
    recipe = write(folder)
    tiny.trained(recipe, folder / "run", *EPOCHS)
    return recipe, folder / "run"


def test_metrics_are_the_same_on_any_ranks_and_none_of_an_earlier_versions_epoch(alone, tmp_path):
    (recipe, reference), run = alone, tmp_path / "run"
    tiny.trained(recipe, run, *EPOCHS, "--max-steps", "1")
    tiny.resumed(run, "--max-steps", "13", on=2)
    tiny.resumed(run, "--max-steps", "22")
    assert_same_metrics(run, reference)
    run = tmp_path / "earlier"
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


# The error grows from epoch to epoch, so the first checkpoint is the best.
GROWS = RECIPE.replace(
    "recipe = Recipe(",
    """
steps = 0
def error(outputs, targets):
    return torch.full((len(targets),), VALUES[min(steps // 6, len(VALUES) - 1)])
def counting(outputs, targets, *, step):
    global steps
    steps = step + 1
    return nn.functional.cross_entropy(outputs, targets)
VALUES = [0.0, 0.5, 0.7, 0.9]
recipe = Recipe(loss=counting, metrics={"error": error}, lower_is_better=("error",),""",
)


def test_the_lowest_error_is_the_best_its_checkpoint_is_kept_and_growth_stops_early(here):
    (here / "grows.py").write_text(GROWS)
    flags = ("--monitor", "error", "--epochs", "4", "--patience", "2", "--keep-top-k", "1")
    train_here("grows.py", *flags, "--run-dir", "r")
    result = read_json(here / "r" / "result.json")
    assert (result["reason"], result["epochs"]) == ("early stopping", 3)
    assert result["best"] == {"metric": "error", "mode": "min", "value": 0.5, "epoch": 1}
    assert result["test"]["checkpoint"] == "checkpoint_epoch_1.pt"
    index = read_index(here / "r" / "checkpoints")
    assert [entry.epoch for entry in index.checkpoints] == [1, 3]
    (start,) = events(here / "r", "start")
    assert (start["monitor"], start["lower_is_better"]) == ("error", ["loss", "error"])


@pytest.mark.parametrize("said", ["", "error.higher_is_better = True\n"])
def test_the_user_is_told_where_the_highest_counts_as_the_best_by_default(here, said):
    text = GROWS.replace('lower_is_better=("error",),', "").replace("recipe = ", f"{said}recipe = ")
    (here / "grows.py").write_text(text)
    train_here("grows.py", "--monitor", "error", "--epochs", "1", "--run-dir", "r")
    (start,) = events(here / "r", "start")
    assert any("lower_is_better" in note for note in start["notes"]) == (not said)


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')"])
def test_a_metric_that_is_not_finite_ranks_last_and_the_run_goes_on(here, value):
    (here / "bad.py").write_text(GROWS.replace("0.5, 0.7, 0.9", f"{value}, 0.7, 0.6, {value}"))
    flags = ("--monitor", "error", "--run-dir", "r", "--epochs", "3")
    assert "warning" in train_here("bad.py", *flags)
    index = read_json(here / "r" / "checkpoints" / "index.json")  # refuses NaN and Infinity
    first, *others = (entry["metric"] for entry in index["checkpoints"])
    assert first is None
    assert others == pytest.approx([0.7, 0.6])
    assert index["best"]["epoch"] == 3
    train_here("r", "--resume", "--epochs", "4")
    assert len(read_json(here / "r" / "checkpoints" / "index.json")["checkpoints"]) == 4


def test_where_no_checkpoint_is_finite_the_last_is_best_also_of_an_earlier_index(here, tmp_path):
    (here / "bad.py").write_text(GROWS.replace("0.5, 0.7, 0.9", "float('nan')"))
    train_here("bad.py", "--monitor", "error", "--run-dir", "r")
    assert find_checkpoint(here / "r" / "checkpoints", "best").epoch == 2
    result = read_json(here / "r" / "result.json")
    assert result["best"]["value"] is None
    assert result["test"]["error"] is None
    one = '{"path": "checkpoint_step_%d.pt", "step": %d, "epoch": 1, "sha256": "0", "metric": %s}'
    entries = ", ".join(one % (n, n, metric) for n, metric in enumerate(("NaN", "0.5", "Infinity")))
    (tmp_path / "index.json").write_text(f'{{"mode": "max", "checkpoints": [{entries}]}}')
    index = read_index(tmp_path)
    assert [entry.metric for entry in index.checkpoints] == [None, 0.5, None]
    assert index.best.step == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_finite_is_no_improvement(mode, value):
    watch = Watch(metric="error", mode=mode).after(value, 1, 0.0)
    assert (watch.best, watch.reference, watch.evaluations_since) == (None, None, 1)
    assert watch.after(0.5, 2, 0.0).best == 0.5


@pytest.mark.parametrize(("lower", "says"), [("mae", r"\('mae',\)"), (("mea",), "'mea'.*'mae'")])
def test_a_direction_names_metrics_of_the_recipe(lower, says):
    with pytest.raises(UserError, match=says):
        Recipe(model=print, data=print, metrics={"mae": print}, lower_is_better=lower)
