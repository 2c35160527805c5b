"""From Python every verb computes what the command line does, whatever modes the caller is in."""

import contextlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch

import samestep
from tests.command_line import read_json, train_here

RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits

SCALE = torch.ones(4)  # made where the file is read: in the modes of the caller, if nobody minds

def data():
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(7)) * SCALE
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:60], y[:60]), validation=(x[60:75], y[60:75]), test=(x[75:], y[75:]))

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

recipe = Recipe(
    model=model, data=data, read=lambda _, file: [torch.arange(4.0), -torch.arange(4.0)],
    settings={"epochs": 5, "batch_size": 12, "lr": 0.05, "oversubscribe": True},
    accepts=("dropout",),
)
"""
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


AROUND = {
    "nothing": contextlib.nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "float64": lambda: default_dtype(torch.float64),
    "another device": lambda: torch.device("meta"),
}


@contextlib.contextmanager
def everything():
    with contextlib.ExitStack() as stack:
        for around in AROUND.values():
            stack.enter_context(around())
        yield


TOGETHER = {"nothing": contextlib.nullcontext, "everything": everything}


def modes() -> tuple:
    """Return the modes that are on, and how many contexts of autocast are open."""
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        *(torch.get_default_device(), torch.is_autocast_enabled("cpu")),
        *(torch.is_autocast_cache_enabled(), nesting()),
    )


def nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Return the run that the command line trains in a precision: its folder holds the recipe."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "small.py").write_text(RECIPE)
    (folder / "any.txt").write_text("")

    @cache
    def train(precision: str, *more: str) -> Path:
        path = folder / "-".join([precision, *more])
        flags = ("--precision", precision, "--run-dir", str(path), *more)
        train_here(str(folder / "small.py"), *flags)
        return path

    return train


def losses(path: Path) -> list[float]:
    return [r["loss"] for r in samestep.read_records(path) if r["event"] == "step"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_is_the_training_of_the_command_line_in_each_mode(precision, typed, tmp_path, output_of):
    path = typed(precision, "--log-every", "1")
    assert len(losses(path)) == 25
    file, expected = path.parent / "any.txt", read_json(path / "result.json")
    evaluated = json.loads(output_of("evaluate", path, "--json"))
    lines = output_of("predict", path, file, "--json").splitlines()
    predicted = [json.loads(line) for line in lines]
    saved = torch.load(path / "checkpoints" / evaluated["checkpoint"], weights_only=True)
    for mode, around in AROUND.items() if precision == "bf16" else TOGETHER.items():
        with around():
            before = modes()
            how = {"precision": precision, "log_every": 1, "run_dir": tmp_path / mode}
            trained = samestep.train(path.parent / "small.py", quiet=True, **how)
            assert modes() == before
            assert samestep.evaluate(path) == evaluated, mode
            assert samestep.predict(path, file) == predicted, mode
            model = samestep.load(path)
        assert losses(trained.path) == losses(path), mode
        for name in ("weights_sha256", "test", "best", "steps", "status"):
            assert trained.result[name] == expected[name], mode
        kept = [(run / "settings.toml").read_text() for run in (path, trained.path)]
        assert kept[0] == kept[1], mode
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, saved["model"][name]), mode
        assert all(p.requires_grad and not p.is_inference() for p in model.parameters())


def test_on_two_ranks_it_is_the_command_line_s_to_the_last_bit(typed, tmp_path):
    path = typed("bf16", "--virtual-ranks", "2")
    how = {"nproc": 2, "precision": "bf16", "virtual_ranks": 2, "run_dir": tmp_path / "two"}
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        trained = samestep.train(path.parent / "small.py", quiet=True, **how)
        assert samestep.compare(path, trained)["same_training"][0]["verdict"] == "equal"
    assert trained.result["weights_sha256"] == read_json(path / "result.json")["weights_sha256"]
