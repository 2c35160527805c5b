"""Memory that is used up, and operations without a deterministic form, are told once, in words."""

import gc
import weakref

import pytest
import torch
from torch import nn

import samestep
from samestep.base.errors import UserError, blame, device_error
from samestep.core.learner.prepare import place_loss
from samestep.core.session import build
from samestep.core.training.dry_run import Tried
from tests import tiny
from tests.command_line import RECIPE, read_json, refusal
from tests.tiny import all_records, write_recipe

# What torch 2.11 says on a GPU, shortened.
TOLD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 3.25 MiB is free. Of the allocated memory 138.00 GiB is allocated by PyTorch, and 0.50 "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
BACKWARD = (
    "scatter_cuda does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this"
)
HUNGRY = RECIPE.replace(
    "recipe = Recipe(",
    """
class Hungry(nn.Linear):
    seen = 0
    def forward(self, x):
        self.seen += self.training
        if WHEN:
            raise ERROR  # hungry
        return super().forward(x)
recipe = Recipe(""",
)
HUNGRY = HUNGRY.replace("model=model", "model=lambda: Hungry(4, 2)")
LINE = next(n for n, line in enumerate(HUNGRY.splitlines(), 1) if "# hungry" in line)
NO_MEMORY = f"torch.OutOfMemoryError({TOLD!r})"
IN_TRAINING, IN_EVALUATION = "self.seen == 3", "not self.training and self.seen > 3"


@pytest.fixture
def told_of(refused, tmp_path):
    def told_of(verb, when, error):
        text = HUNGRY.replace("WHEN", when).replace("ERROR", error)
        path = write_recipe(tmp_path, text, "hungry.py")
        return refused(verb, str(path), "--run-dir", str(tmp_path / verb), "--log-every", "1")

    return told_of


@pytest.mark.parametrize(
    ("when", "where", "steps"), [(IN_TRAINING, "at step 3", 2), (IN_EVALUATION, "(10, 4)", 6)]
)
def test_memory_that_is_used_up_gets_one_message(told_of, tmp_path, when, where, steps):
    message = told_of("train", when, NO_MEMORY)
    remedies = ("--micro-batch-size", "--eval-batch-size")
    for part in (where, "139.80 GiB", f"hungry.py:{LINE}", *remedies):
        assert part in message
    assert message.count("expandable_segments") == 1
    records = all_records(tmp_path / "train")
    assert sum(r["event"] == "step" for r in records) == steps
    assert records[-1]["event"] == "stop"
    # What is trained before an evaluation fails is kept.
    assert any(r["event"] == "checkpoint" for r in records) == (when == IN_EVALUATION)


def test_a_profile_tells_it_and_an_operation_without_a_deterministic_form_too(told_of):
    assert "--micro-batch-size" in told_of("profile", IN_TRAINING, NO_MEMORY)
    message = told_of("train", IN_TRAINING, f"RuntimeError({BACKWARD!r})")
    assert "--deterministic: " in message
    assert "scatter_cuda" in message
    assert "use_deterministic_algorithms" not in message


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ],
)
def test_memory_ends_in_several_words(text):
    told = device_error(RuntimeError(text))
    assert isinstance(told, UserError)
    assert text.splitlines()[0] in str(told)
    assert "asynchronously" not in str(told)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory")])
def test_other_errors_are_not_taken_for_it(error):
    assert device_error(error) is None


def test_what_a_failed_forward_held_is_freed():
    """A checkpoint may be written after a failed evaluation, and needs memory too."""

    found = []

    def forward():
        held = torch.nn.Identity()
        found.append(weakref.ref(held))
        raise torch.OutOfMemoryError(TOLD)

    def evaluate():
        try:
            forward()
        except RuntimeError as error:
            blame("The model failed", error)

    with pytest.raises(UserError) as raised:
        evaluate()
    gc.collect()
    assert raised.value is not None
    assert found[0]() is None


# All that a forward can change beside the weights, and all that it can draw from.
RESTLESS = """
import random
import numpy as np
import torch
from torch import nn
from samestep import Recipe, Splits
class Restless(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.count = [], 0
    def forward(self, x):
        self.calls = self.calls + 1
        self.count += 1
        self.seen.append(len(x))
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        scale = 1 + 0.01 * float(self.calls) + 0.001 * self.count + 0.0001 * len(self.seen)
        return self.last(self.drop(self.norm(self.first(x)))) * scale + 0.01 * noise
class Samples(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i] + torch.rand(()) * random.random(), self.y[i]
def data():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:40], y[:40]), validation=Samples(x[40:], y[40:]))
recipe = Recipe(model=Restless, data=data,
                settings={"epochs": 2, "batch_size": 8, "log_every": 1})
"""


def test_a_training_is_equal_to_the_last_bit_after_a_dry_run(tmp_path, monkeypatch):
    recipe, calls = tiny.write_recipe(tmp_path, RESTLESS), []
    tiny.trained(recipe, tmp_path / "tried")

    def untried(_model, _loss, _judged, recipe, *_):
        calls.append(1)
        return Tried(recipe.metrics)

    monkeypatch.setattr(build, "dry_run", untried)
    tiny.trained(recipe, tmp_path / "not tried")
    assert calls
    tiny.assert_same_training(tmp_path / "tried", tmp_path / "not tried", tolerance=0)


# A metric that fails on some sample that is not among those that are tried.
BROKEN = tiny.RECIPE.replace(
    "    return outputs.argmax(dim=1) == targets",
    "    if pace.with_suffix('.broken').exists() and len(targets) < 5:\n"
    "        raise KeyError('lost')\n"
    "    return outputs.argmax(dim=1) == targets",
)


def test_an_evaluation_that_fails_on_two_ranks_loses_no_step(uninterrupted, tmp_path):
    recipe, folder = tiny.write_recipe(tmp_path, BROKEN), tmp_path / "run"
    recipe.with_suffix(".broken").touch()
    train = ("train", str(recipe), "--run-dir", str(folder), "--checkpoint-every-steps", "100")
    told = refusal(*train, world_size=2, folder=tmp_path / "output")
    assert "KeyError" in told
    assert "tiny.py:" in told
    assert tiny.newest_announced(folder) == tiny.STEPS_PER_EPOCH
    recipe.with_suffix(".broken").unlink()
    tiny.resumed(folder, "--checkpoint-every-steps", "4")
    tiny.assert_same_training(folder, uninterrupted)


def test_an_evaluation_takes_the_training_s_micro_batch_or_what_is_asked_for(tmp_path):
    text = tiny.RECIPE.replace(
        "    return outputs.argmax(dim=1) == targets",
        "    with pace.with_suffix('.sizes').open('a') as file:\n"
        "        print(len(targets), file=file)\n"
        "    return outputs.argmax(dim=1) == targets",
    )
    recipe = tiny.write_recipe(tmp_path, text)
    sizes = recipe.with_suffix(".sizes")
    train = ("--max-steps", "11")
    tiny.trained(recipe, tmp_path / "own", *train)
    seen = " ".join(sizes.read_text().split())  # those of what is trained come between
    assert seen.startswith("8 ")
    assert " 12 12 12 1 " in seen
    sizes.unlink()
    tiny.trained(recipe, tmp_path / "asked", *train, "--eval-batch-size", "30")
    assert " 30 7 " in " ".join(sizes.read_text().split())


WEIGHTED = """
from dataclasses import replace
recipe = replace(recipe, loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
"""


def test_what_a_loss_holds_is_where_the_model_is(tmp_path):
    run_dir = tmp_path / "run"
    tiny.trained(tiny.write_recipe(tmp_path, tiny.RECIPE + WEIGHTED), run_dir, "--epochs", "1")
    test = read_json(run_dir / "result.json")["test"]
    assert samestep.evaluate(run_dir)["loss"] == test["loss"]
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    assert place_loss(loss, torch.device("meta"), torch.float64).weight.device.type == "meta"
    assert loss.weight.device.type == "cpu", "the recipe's own stays as it is"
