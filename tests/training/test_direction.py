"""A metric has a direction: what is best, what stops early, and what NaN does to either."""

import pytest

from samestep import Recipe, UserError
from samestep.run.index import find_checkpoint, read_index
from samestep.run.records import TAKEN_NAMES
from samestep.training.stopping import Watch
from tests.command_line import RECIPE, read_json, train_here
from tests.tiny import events

# The error grows from epoch to epoch, so the first checkpoint is the best.
GROWS = RECIPE.replace(
    "recipe = Recipe(",
    """
steps = 0
def error(outputs, targets):
    return torch.full((len(targets),), VALUES[min(steps // 6, len(VALUES) - 1)])

def counting(outputs, targets):
    global steps
    steps += torch.is_grad_enabled()
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


def test_a_metric_has_a_name_of_its_own():
    for name in TAKEN_NAMES:
        with pytest.raises(UserError, match=f"'{name}'"):
            Recipe(model=print, data=print, metrics={name: print})


@pytest.mark.parametrize(("lower", "says"), [("mae", r"\('mae',\)"), (("mea",), "'mea'.*'mae'")])
def test_a_direction_names_metrics_of_the_recipe(lower, says):
    with pytest.raises(UserError, match=says):
        Recipe(model=print, data=print, metrics={"mae": print}, lower_is_better=lower)
