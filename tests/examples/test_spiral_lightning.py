"""The plain Lightning script: alone, under torchrun, from a file, with Comet offline."""

import csv
import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.examples.programs import ROOT, SPIRAL_LIGHTNING, epochs, forked, run
from tests.tracking.readers import comet_messages

# Their parts, 709, 151 and 153, are odd: two ranks cannot share them equally.
# A plain script of the handbook: it runs in the second target, as the commands of the pages do.
pytestmark = pytest.mark.slow
ODD = ("--num_samples", "1013")


@pytest.fixture
def modules(monkeypatch):
    names = ("datamodule", "model", "train")
    assert not set(names) & set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "spiral_lightning"))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def train(folder, *arguments, world_size=1, start=forked):
    done = start(SPIRAL_LIGHTNING, *arguments, folder=folder, world_size=world_size)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def logged(folder):
    """Return what metrics.csv has of each metric, in the order of the rows."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


WITHOUT_SAMESTEP = f"""
import runpy, sys
sys.modules["samestep"] = None
sys.argv[0] = {SPIRAL_LIGHTNING!r}
sys.path.insert(0, {str(Path(SPIRAL_LIGHTNING).parent)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_alone_it_learns_and_keeps_what_it_prints_and_needs_nothing_of_samestep(tmp_path):
    done = run("-c", WITHOUT_SAMESTEP, "--max_epochs", "5", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout
    first, *_, _, test, best = printed.splitlines()
    device = "gpu" if torch.cuda.is_available() else "cpu"
    assert device in first
    assert first.endswith(": 32 = 32 x 1")  # samples per step
    found = epochs(printed)
    assert [epoch[0] for epoch in found] == [1, 2, 3, 4, 5]
    assert found[-1][4] > 98
    assert float(re.fullmatch(r"Test - Avg Loss: .*, Accuracy: (.*)%", test)[1]) > 98
    kept = tmp_path / "runs" / "spiral" / "version_0"
    assert best.endswith(f" {(kept / 'checkpoints/best.ckpt').relative_to(tmp_path)}")
    assert {path.name for path in (kept / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    values = logged(kept)
    assert values["train_loss"] == pytest.approx([epoch[1] for epoch in found], abs=1e-6)
    assert values["val_loss"] == pytest.approx([epoch[3] for epoch in found], abs=1e-6)
    assert len(values["epoch_time_s"]) == 5


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """Train two ranks, with Comet but without a key; return the folder and what was printed."""
    if find_spec("comet_ml") is None:
        pytest.skip("not installed: comet_ml")
    folder = tmp_path_factory.mktemp("two")
    told = (*ODD, "--max_epochs", "2", "--comet_project", "spirals", "--experiment_name", "mine")
    nobody = {"COMET_API_KEY": "", "COMET_START_ONLINE": "", "HOME": str(folder)}
    done = run(SPIRAL_LIGHTNING, *told, folder=folder, world_size=2, **nobody)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done.stdout


@pytest.mark.xdist_group("trackers")
def test_two_ranks_print_once_and_measure_what_one_process_measures(on_two, modules):
    folder, printed = on_two
    lines = printed.splitlines()
    assert sum(line.startswith("Ranks: 2, nodes: 1, ") for line in lines) == 1
    assert len(epochs(printed)) == 2
    kept = folder / "runs" / "mine" / "version_0"
    values = logged(kept)
    state = torch.load(kept / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    model = modules("model").MLP()
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})
    model.eval()
    data = modules("datamodule").SpiralDataModule(num_samples=1013)
    data.setup("test")
    best = values["val_loss"].index(min(values["val_loss"]))
    for part, size, row, name in ((data.validation, 151, best, "val"), (data.test, 153, 0, "test")):
        points, labels = part.dataset[part.indices]
        assert len(labels) == size
        with torch.no_grad():
            logits = model(points)
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        accuracy = (logits.argmax(1) == labels).float().mean().item()
        assert values[f"{name}_loss"][row] == pytest.approx(loss, abs=1e-6)
        assert values[f"{name}_accuracy"][row] == pytest.approx(accuracy, abs=1e-7)


def test_the_file_sets_what_it_names_and_the_flags_win_over_it(tmp_path):
    (tmp_path / "spiral.toml").write_text(
        "max_epochs = 2\nnum_samples = 301\nhidden_dims = [8, 4]\nlearning_rate = 0.01\n"
        'experiment_name = "from_file"\nseed = 7\n'
    )
    from_file = train(tmp_path, "--config", "spiral.toml", "--hidden_dims", "16")
    flags = ("--max_epochs", "2", "--num_samples", "301", "--learning_rate", "0.01", "--seed", "7")
    by_hand = train(tmp_path, *flags, "--hidden_dims", "16")
    assert len(epochs(from_file)) == 2
    assert epochs(from_file) == epochs(by_hand)  # so the same seed trains the same, too
    kept = [tmp_path / "runs" / name / "version_0" for name in ("from_file", "spiral")]
    texts = [(folder / "hparams.yaml").read_text() for folder in kept]
    assert texts[0] == texts[1]
    assert {"- 16", "learning_rate: 0.01", "max_epochs: 2"} <= {*texts[0].splitlines()}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--hidden_dims"], "--hidden_dims"),
        (["--config", "a.toml"], "--speed"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_a_mistake_ends_with_exit_code_2(arguments, named, tmp_path, modules, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("speed = 9")
    with pytest.raises(SystemExit) as ended:
        modules("train").read_settings(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.xdist_group("trackers")
def test_without_a_key_comet_writes_offline_what_is_printed(on_two):
    folder, printed = on_two
    assert printed.count("COMET_API_KEY") == 1
    (kept,) = (folder / "runs" / "mine").glob("tracked-*")
    place = kept.relative_to(folder)
    assert printed.count(f"comet   offline: {place}/tracking/comet\n") == 1
    *_, last = printed.splitlines()
    assert last.endswith(f" samestep track {place} --to comet")
    ((about, messages),) = comet_messages(kept)
    assert about["project_name"] == "spirals"
    found = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    values = logged(folder / "runs" / "mine" / "version_0")
    names = ("train_loss", "val_loss", "train_loss_step", "epoch_time_s", "test_accuracy")
    for name in names:
        assert [m["metricValue"] for m in found if m["metricName"] == name] == values[name], name
