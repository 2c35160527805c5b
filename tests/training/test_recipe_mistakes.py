"""What a recipe gets wrong is refused before or at the first step, in words, with exit code 2."""

import os
import re
from pathlib import Path

import pytest

from samestep import read_records
from tests.command_line import call, one_message, refusal
from tests.processes import run_ranks, samestep

GOOD = {
    "model": "def model():\n    return nn.Linear(4, 2)",
    "targets": "(x[:, 0] > 0).long()",
    "data": "Splits(train=(x[:48], y[:48]), validation=(x[48:], y[48:]))",
    "more": "",
    "epochs": "1",
    "batch_size": "8",
}
RECIPE = """
import gzip; from dataclasses import dataclass
import torch
from torch import nn
from samestep import Recipe, Splits

{model}

def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = {targets}
    return {data}

settings = {{"epochs": {epochs}, "batch_size": {batch_size}}}
recipe = Recipe(model=model, data=data, settings=settings{more})
"""


def write(folder, **wrong) -> Path:
    path = folder / "mine.py"
    path.write_text(RECIPE.format(**{**GOOD, **wrong}))
    return path


def run(folder, world_size=1, **wrong):
    command = ("train", str(write(folder, **wrong)), "--run-dir", str(folder / "run"))
    return samestep(*command, world_size=world_size, folder=folder / "output")


CHECKED = """
@dataclass(frozen=True)
class Own:
    hidden: int = 1

    def __post_init__(self):
        if self.hidden > 0:
            raise ValueError("hidden must be at most 0")

def model(own):
    return nn.Linear(4, 2)
"""
OPTIMIZER = """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        with torch.no_grad():
            """
MODEL = "\n\ndef model():\n    return nn.Linear(4, 2)"
OWN = ", optimizer=lambda model, settings: Own(model.parameters(), lr=0.1)"

# What is wrong, and what the message says of it beside the recipe's file.
MISTAKES = {
    "no splits": ({"data": "(x, y)"}, "Splits("),
    "a built model": ({"model": "model = nn.Linear(4, 2)"}, "function"),
    "a model of arguments": (
        {"model": "def model(hidden):\n    return nn.Linear(4, 2)"},
        "model()",
    ),
    "no weights": ({"model": "def model():\n    return nn.ReLU()"}, "parameters"),
    "a sparse buffer": (
        {
            "model": "def model():\n    built = nn.Linear(4, 2)\n"
            "    built.register_buffer('graph', torch.eye(4).to_sparse())\n    return built"
        },
        "graph",
    ),
    "a model of other inputs": ({"model": "def model():\n    return nn.Linear(5, 2)"}, "(8, 4)"),
    "labels out of range": ({"targets": "(x[:, 0] > 0).long() + 1"}, "0 to 1"),
    "one label out of range": (
        {"targets": "(torch.arange(64) == 40).long() * 9"},
        "Target 9 of the training sample 40",
    ),
    "labels of a wrong type": ({"targets": "x[:, 0]"}, "targets.long()"),
    "a loss a sample": ({"more": ", loss=nn.CrossEntropyLoss(reduction='none')"}, "scalar"),
    "a loss of one row": ({"more": ", loss=lambda o, t: o.mean().view(1)"}, "(1,)"),
    "a loss that is a float": ({"more": ", loss=lambda o, t: 0.5"}, "float"),
    "no loss": ({"more": ", loss=lambda o, t: None"}, "None"),
    "a loss that raises": ({"more": ", loss=lambda o, t: o.nothing"}, "mine.py:16"),
    "a loss of all pairs, nothing validated": (
        {
            "model": "def model():\n    return nn.Linear(4, 1)",
            "targets": "x[:, 0]",
            "data": "Splits(train=(x, y))",
            "more": ", loss=lambda o, t: (o - t).square().mean(), metrics={}",
        },
        "(8, 1)",
    ),
    "a loss of all pairs": (
        {
            "model": "def model():\n    return nn.Linear(4, 1)",
            "targets": "x[:, 0]",
            "more": ", loss=lambda o, t: (o - t).square().mean()",
        },
        "outputs are (8, 1) and targets (8,)",
    ),
    "a loss without gradient": (
        {"more": ", loss=lambda o, t: nn.functional.cross_entropy(o.detach(), t)"},
        "gradient",
    ),
    "a mean as a metric": ({"more": ", metrics={'mean': lambda o, t: o.mean()}"}, "sample"),
    "a metric of one row": ({"more": ", metrics={'f1': lambda o, t: o.mean().view(1)}"}, "(1,)"),
    "a metric of columns": ({"more": ", metrics={'f1': lambda o, t: o[:, :1]}"}, "(8, 1)"),
    "a short metric": ({"more": ", metrics={'f1': lambda o, t: o[1:, 0]}"}, "(7,)"),
    "a metric that is a float": ({"more": ", metrics={'f1': lambda o, t: 0.5}"}, "float"),
    "no metric": ({"more": ", metrics={'f1': lambda o, t: None}"}, "None"),
    "a metric that raises": ({"more": ", metrics={'f1': lambda o, t: o.nothing}"}, "mine.py:16"),
    "a transform of nothing": ({"more": ", transform=lambda x: None"}, "None"),
    "a transform of fewer": ({"more": ", transform=lambda x: x[1:]"}, "(7, 4)"),
    "a transform that raises": ({"more": ", transform=lambda x: x / nothing"}, "mine.py:16"),
    "an augment of nothing": ({"more": ", augment=lambda x, keys: None"}, "None"),
    "sparse inputs": ({"data": "Splits(train=(x.to_sparse(), y))"}, "to_dense()"),
    "a number as inputs": ({"data": "Splits(train=(x.sum(), y))"}, "row"),
    "data that raises": ({"targets": "gzip.open(__file__).read()"}, "mine.py:12"),
    "a setting of a wrong type": ({"epochs": '"one"'}, "epochs"),
    "an option without default": (
        {
            "model": "@dataclass\nclass Own:\n    hidden: int\n\n"
            "def model(own):\n    return nn.Linear(4, 2)",
            "more": ", options=Own",
        },
        "'hidden'",
    ),
    "no model": ({"model": "def model():\n    nn.Linear(4, 2)"}, "return"),
    "a model that is a class": ({"model": "def model():\n    return nn.Linear"}, "class Linear"),
    "a frozen model": (
        {"model": "def model():\n    return nn.Linear(4, 2).requires_grad_(False)"},
        "frozen",
    ),
    "a model without numbers": (
        {"model": "def model():\n    return nn.Linear(4, 2, device='meta')"},
        "meta",
    ),
    "a complex model": (
        {"model": "def model():\n    return nn.Linear(4, 2, dtype=torch.complex64)"},
        "complex",
    ),
    "a model without a word": ({"model": "def model():\n    raise ValueError"}, "ValueError"),
    "a model that raises what has no text": (
        {
            "model": "class Bad(Exception):\n    def __str__(self):\n        raise TypeError\n\n"
            "def model():\n    raise Bad"
        },
        "Bad",
    ),
    "a model that raises half a letter": (
        {"model": "def model():\n    raise ValueError('\\udcff')"},
        "\\udcff",
    ),
    "a model that returns a dict": (
        {
            "model": "class Model(nn.Linear):\n    def forward(self, x):\n"
            "        return {'logits': super().forward(x)}\n\ndef model():\n    return Model(4, 2)"
        },
        "a dict where a tensor is needed",
    ),
    "labels in columns": ({"targets": "(x[:, :1] > 0).long()"}, "targets.squeeze(1)"),
    "labels that are bool": ({"targets": "x[:, 0] > 0"}, "targets.long()"),
    "no data": ({"data": "Splits(train=(x[:0], y[:0]))"}, "training data has no samples"),
    "no data to validate on": (
        {"data": "Splits(train=(x, y), validation=(x[:0], y[:0]))"},
        "validation data has no samples",
    ),
    "a tensor as data": ({"data": "Splits(train=x)"}, "a Tensor"),
    "classes that are letters": ({"data": "Splits(train=(x, y), classes='abc')"}, "'abc'"),
    "classes that are numbers": ({"data": "Splits(train=(x, y), classes=(0, 1))"}, "(0, 1)"),
    "a loss that is a word": ({"more": ", loss='mse'"}, "'mse'"),
    "a loss that is a class": ({"more": ", loss=nn.CrossEntropyLoss"}, "CrossEntropyLoss(…)"),
    "an optimizer that is a class": ({"more": ", optimizer=torch.optim.SGD"}, "(model, settings)"),
    "a list of metrics": ({"more": ", metrics=[lambda o, t: o[:, 0]]"}, "dict"),
    "a metric named in colour": ({"more": r", metrics={'\x1b[31m': lambda o, t: o}"}, r"\x1b[31m"),
    "a metric that is a word": ({"more": ", metrics={'f1': 'f1'}"}, "'f1'"),
    "a metric of another shape": (
        {"more": ", metrics={'f1': __import__('torchmetrics').F1Score('binary')}"},
        "shape",
    ),
    "a metric that is a class": (
        {"more": ", metrics={'f1': __import__('torchmetrics').F1Score}"},
        "F1Score(…)",
    ),
    "a schedule of nothing": ({"more": ", schedule=lambda step, total: None"}, "None at step 0"),
    "a complex schedule": ({"more": ", schedule=lambda step, total: 1j"}, "1j at step 0"),
    "a schedule of several": (
        {"more": ", schedule=lambda step, total: torch.ones(2)"},
        "at step 0 of 6",
    ),
    "options that refuse themselves": ({"model": CHECKED, "more": ", options=Own"}, "at most 0"),
    "options that a flag spoils": (
        {"model": CHECKED.replace("1", "0"), "more": ", options=Own", "flags": "--hidden 2"},
        "at most 0",
    ),
    "an optimizer that fails": (
        {"model": OPTIMIZER + "raise ValueError('no step')" + MODEL, "more": OWN},
        "no step",
    ),
    "an optimizer that fails within torch": (
        {
            "model": OPTIMIZER + "self.param_groups[0]['params'][0].add_(torch.ones(77))" + MODEL,
            "more": OWN,
        },
        "77",
    ),
    "an optimizer that no checkpoint holds": (
        {"model": OPTIMIZER + "self.state[0]['own'] = lambda: 0" + MODEL, "more": OWN},
        "checkpoint",
    ),
    "a loss without gradient in Lightning": (
        {"more": ", loss=lambda o, t: o.detach().mean()", "flags": "--engine lightning"},
        "gradient",
    ),
    "state that no checkpoint holds": (
        {
            "model": "class Model(nn.Linear):\n    def get_extra_state(self):\n"
            "        return Model\n\ndef model():\n    return Model(4, 2)"
        },
        "_extra_state",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_recipe_is_told_in_words_with_its_line(refused, tmp_path, wrong, message):
    flags = wrong.get("flags", "").split()
    file = str(write(tmp_path, **wrong))
    told = refused("train", file, "--run-dir", str(tmp_path / "run"), *flags)
    assert message in told
    if "epochs" not in wrong:  # of a setting its name is enough
        assert re.search(r"mine\.py:\d+", told)


# One that a rank finds before the others are met, and one that it finds with them.
PLACES = ("no splits", "a loss without gradient")


@pytest.mark.parametrize("name", PLACES)
def test_two_ranks_tell_of_a_mistake_as_one(tmp_path, name):
    wrong, message = MISTAKES[name]
    ranks = run(tmp_path, 2, **wrong)
    assert [p.exitcode for p in ranks.processes] == [2, 2], ranks.output()
    assert message in ranks.printed(0)
    assert "Traceback" not in ranks.output()


SAMPLES = """
class Samples(torch.utils.data.Dataset):
    def __init__(self, x, y, first=100):
        self.x, self.y, self.first = x, y, first
    def __len__(self):
        return {length}
    def __getitem__(self, i):
        x, y = self.x[i], self.y[i]
        return ({sample}) if i >= self.first else (x, y)
"""
# What __getitem__ returns from one sample on, and what the message says.
SAMPLE_MISTAKES = {
    "strings": ("'a cat', y", "a str"),
    "nothing": ("None", "None"),
    "no target": ("x, None", "None"),
    "triples": ("x, y, y", "3 values"),
    "dicts": ("{'image': x, 'label': y}", "'image', 'label'"),
    "changing shapes": ("x[:i % 3], y", "shape"),
    "a sample that raises": ("x / 'broken', y", "failed at sample"),
}


def faulty(sample: str, *, length: str = "len(self.x)", first: int = 20) -> dict[str, str]:
    """Return a recipe whose training samples are wrong from one on."""
    samples = SAMPLES.replace("{length}", length).replace("{sample}", sample)
    return {
        "model": samples + GOOD["model"],
        "data": f"Splits(train=Samples(x[:48], y[:48], {first}), validation=(x[48:], y[48:]))",
    }


@pytest.mark.parametrize(("sample", "message"), SAMPLE_MISTAKES.values(), ids=list(SAMPLE_MISTAKES))
def test_a_wrong_sample_is_told_with_the_line_of_its_data_set(refused, tmp_path, sample, message):
    path = write(tmp_path, **faulty(sample))
    told = refused("train", str(path), "--run-dir", str(tmp_path / "run"))
    assert message in told
    assert "mine.py:" in told


def test_a_data_file_that_is_missing_is_named_with_the_line_that_opens_it(refused, tmp_path):
    path = write(tmp_path, data="open('/no/such.csv')")
    told = refused("train", str(path), "--run-dir", str(tmp_path / "run"))
    assert "/no/such.csv" in told
    assert "mine.py:" in told
    assert "Error" not in told


@pytest.mark.parametrize(
    ("length", "message"),
    [("60", "of 60: IndexError"), ("-5", "__len__() should return >= 0")],
    ids=["longer", "negative"],
)
def test_a_data_set_whose_length_is_wrong_is_told(refused, tmp_path, length, message):
    path = write(tmp_path, **faulty("x, y", length=length))
    told = refused("train", str(path), "--run-dir", str(tmp_path / "run"))
    assert message in told


def test_a_label_out_of_range_that_comes_late_is_told_with_its_step(refused, tmp_path):
    path = write(tmp_path, **faulty("x, y + 7", first=47))
    told = refused("train", str(path), "--run-dir", str(tmp_path / "run"))
    assert re.search(r"at step [1-6], with inputs \(8, 4\)", told) or "first batch" in told
    assert "mine.py:" in told


def _each_with_a_worker(folder: Path) -> dict[str, tuple[int, str]]:
    """Train on each kind of wrong samples, read by a worker; return exit codes and messages."""
    told = {}
    for name, (sample, _) in SAMPLE_MISTAKES.items():
        place = folder / name.replace(" ", "_")
        place.mkdir()
        with (place / "output").open("w+") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            path = str(write(place, **faulty(sample)))
            code = call("train", path, "--run-dir", str(place / "run"), "--num-workers", "1")
            file.seek(0)
            told[name] = code, file.read()
    return told


def test_a_loader_worker_tells_of_a_wrong_sample_as_the_process_itself_does(tmp_path):
    (told,) = run_ranks(_each_with_a_worker, 1, tmp_path / "output", tmp_path)
    for name, (_, message) in SAMPLE_MISTAKES.items():
        assert message in one_message(*told[name]), name


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "triples" else pytest.mark.slow) for n in SAMPLE_MISTAKES],
)
def test_two_ranks_tell_of_a_wrong_sample(tmp_path, name):
    sample, message = SAMPLE_MISTAKES[name]
    path = write(tmp_path, **faulty(sample, first=0))
    train = ("train", str(path), "--run-dir", str(tmp_path / "run"))
    told = refusal(*train, world_size=2, folder=tmp_path / "output")
    assert message in told


FLAGS = {
    "momentum": ("--optimizer", "sgd", "--momentum", "2"),
    "run-dir": ("--run-dir", ""),
    "global batch": ("--batch-size", "100000000000000000000"),
    "eval-batch-size": ("--eval-batch-size", "0"),
}


@pytest.mark.parametrize(("name", "flags"), FLAGS.items(), ids=FLAGS)
def test_a_flag_that_no_training_can_have_is_named(refused, here, name, flags):
    assert name in refused("train", str(write(here)), *flags)
    assert not (here / "runs").exists()


def test_a_global_batch_larger_than_the_data_is_told(tmp_path):
    ranks = run(tmp_path, batch_size="100")
    assert [p.exitcode for p in ranks.processes] == [0], ranks.output()
    assert "48 training samples" in " ".join(ranks.printed(0).split())


REGRESSION = {
    "model": "def model():\n    return nn.Linear(4, 1)",
    "targets": "x[:, :1] * 2",
    "more": ", loss=nn.MSELoss()",
}
SOFT = {"targets": "nn.functional.one_hot((x[:, 0] > 0).long(), 2).float()"}


@pytest.mark.parametrize("wrong", [REGRESSION, SOFT], ids=["own loss", "float targets"])
def test_there_is_no_accuracy_by_default_where_targets_are_no_classes(tmp_path, wrong):
    ranks = run(tmp_path, **wrong)
    assert [p.exitcode for p in ranks.processes] == [0], ranks.output()
    (evaluated,) = (r for r in read_records(tmp_path / "run") if r["event"] == "evaluation")
    assert "loss" in evaluated
    assert "accuracy" not in evaluated


def test_data_drawn_from_numpy_and_random_is_the_same_on_every_rank(tmp_path):
    model = """
import random
import numpy as np

def drawn(x):
    y = torch.tensor(np.random.rand(64)) > random.random()
    print("drawn", "".join(str(int(v)) for v in y))
    return y.long()
"""
    ranks = run(tmp_path, 2, targets="drawn(x)", model=model + GOOD["model"])
    assert [p.exitcode for p in ranks.processes] == [0, 0], ranks.output()
    shown = ranks.printed(0), (tmp_path / "run" / "rank-1.log").read_text()
    first, second = ([w for w in text.splitlines() if w.startswith("drawn")] for text in shown)
    assert first
    assert first == second


def test_steps_due_at_the_end_of_an_epoch_are_not_forgotten(tmp_path):
    ranks = samestep(
        *("train", str(write(tmp_path)), "--run-dir", str(tmp_path / "run"), "--epochs", "4"),
        *("--checkpoint-every-steps", "6", "--checkpoint-every-epochs", "100"),
        *("--eval-every-steps", "6", "--eval-every-epochs", "100"),
        folder=tmp_path / "output",
    )
    assert [p.exitcode for p in ranks.processes] == [0], ranks.output()
    names = {p.name for p in (tmp_path / "run" / "checkpoints").glob("*.pt")}
    assert names == {f"checkpoint_epoch_{n}.pt" for n in (1, 2, 3, 4)}
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count('"split": "validation"') == 4


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"x = 1\0", "UTF-8"), (b"x = = 1", "mine.py:1"), (b"", "recipe = Recipe")],
)
def test_a_file_that_is_no_recipe_is_told(refused, here, content, told):
    (here / "mine.py").write_bytes(content)
    assert told in refused("train", "mine.py")


def test_a_name_that_no_file_can_have_is_told(refused, here):
    assert "too long" in refused("train", "n" * 300)
    assert "too long" in refused("report", "n" * 300)
    assert "too long" in refused("evaluate", "n" * 300)


def test_a_target_that_no_metric_can_reach_is_told(refused, here):
    assert "--target nan" in refused("report", "runs/a", "runs/b", "--target", "nan")
    assert "--target inf" in refused("compare", "runs/a", "runs/b", "--target", "inf")
