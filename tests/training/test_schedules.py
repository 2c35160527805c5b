"""Schedules that know more than the step, and PyTorch's own schedulers as they are."""

import inspect
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep import Settings
from samestep.data.order import epoch_order
from samestep.recipe import find_recipe
from samestep.training.plan import Plan, learning_rate, make_plan
from tests import tiny
from tests.faults import Fault

EPOCHS, SEED, LR = 3, 42, 0.01
FLAGS = ("--epochs", str(EPOCHS), "--monitor", "loss")
SGD = ("--optimizer", "sgd", "--momentum", "0.8")

OWN = """
from dataclasses import replace

import numpy as np
from torch.optim.lr_scheduler import *

def groups(model, settings):
    body = {"params": model[0].parameters(), "lr": settings.lr / 10}
    return torch.optim.AdamW([body, {"params": model[2].parameters()}], lr=settings.lr)

"""


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, fused=True)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.8, fused=True)


# What the recipe says, the flags, and the optimizer of the loop by hand; None: the recipe's own.
SCHEDULERS: dict[str, tuple[str, tuple[str, ...], Callable[[Any], Any] | None]] = {
    "one cycle, betas too": (
        "lambda optimizer, plan: OneCycleLR(optimizer, 0.1, total_steps=plan.total_steps)",
        (),
        adam,
    ),
    "one cycle per group": (
        "lambda optimizer, plan: OneCycleLR(optimizer, [0.01, 0.1], plan.total_steps), "
        "optimizer=groups",
        (),
        None,
    ),
    "warm restarts": (
        "lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2)",
        (),
        adam,
    ),
    "by epoch": (
        "lambda optimizer: {'scheduler': StepLR(optimizer, 1, 0.3), 'interval': 'epoch'}",
        (),
        adam,
    ),
    "by epoch, of groups": (
        "lambda optimizer: {'scheduler': StepLR(optimizer, 2), 'interval': 'epoch'}, "
        "optimizer=groups",
        (),
        None,
    ),
    "on a plateau": (
        "lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.1)",
        (),
        adam,
    ),
    "cycled with the momentum": (
        "lambda optimizer: CyclicLR(optimizer, 0.001, 0.1, step_size_up=4)",
        SGD,
        sgd,
    ),
    "one after the other": (
        "lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=4), "
        "CosineAnnealingLR(optimizer, 30)], [4])",
        (),
        adam,
    ),
    "chained, with NumPy's numbers": (
        "lambda optimizer: ChainedScheduler([LambdaLR(optimizer, lambda n: np.float64(0.9) ** n),"
        " MultiStepLR(optimizer, [3, 20])])",
        SGD,
        sgd,
    ),
    "PyTorch's class itself": ("__import__('functools').partial(PolynomialLR)", (), adam),
}


def write(folder: Path, schedule: str) -> Path:
    return tiny.write_recipe(
        folder, f"{tiny.RECIPE}{OWN}recipe = replace(recipe, schedule={schedule})\n"
    )


def by_hand(
    path: Path, make: Callable[[Any], Any] | None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train as a script would: return each step's first rate, the last rates, and the weights."""
    recipe = find_recipe(str(path))
    options = recipe.make_options()
    (inputs, targets), (unseen, answers) = (
        (pair[0], pair[1])
        for data in [recipe.with_options(options).load_data(options)]
        for pair in (data.train, data.validation)
    )
    torch.manual_seed(SEED)
    model = recipe.build_model(options).double()
    optimizer = make(model) if make else recipe.optimizer(model, Settings(lr=LR))
    plan = make_plan(Settings(lr=LR, batch_size=12, epochs=EPOCHS), 131, 1)
    takes_plan = "plan" in inspect.signature(recipe.schedule).parameters
    made = recipe.schedule(optimizer, plan) if takes_plan else recipe.schedule(optimizer)
    scheduler, interval = (*made.values(),) if isinstance(made, dict) else (made, "step")
    on_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    rates = []
    for epoch in range(EPOCHS):
        for indices in epoch_order(131, SEED, epoch).split(12):
            optimizer.zero_grad()
            recipe.loss(model(inputs[indices]), targets[indices]).backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if interval == "step" and not on_plateau:
                scheduler.step()
        with torch.no_grad():
            loss = float(recipe.loss(model(unseen), answers))
        if on_plateau:
            scheduler.step(loss)
        elif interval == "epoch":
            scheduler.step()
    return rates, [g["lr"] for g in optimizer.param_groups], model.state_dict()


def rates_of(run: Path) -> list[float]:
    return [record["lr"] for record in tiny.events(run, "step")]


def rewound(run: Path, copy: Path, step: int) -> Path:
    """Return a copy of a run whose newest checkpoint is that of a step."""
    shutil.copytree(run, copy)
    file = copy / "checkpoints" / "index.json"
    table = json.loads(file.read_text())
    table["checkpoints"] = [one for one in table["checkpoints"] if one["step"] <= step]
    table["last"] = next(one for one in table["checkpoints"] if one["step"] == step)
    file.write_text(json.dumps(table))
    return copy


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_gives_the_rates_and_weights_of_a_loop_by_hand_and_goes_on(tmp_path, name):
    schedule, flags, make = SCHEDULERS[name]
    path, run = write(tmp_path, schedule), tmp_path / "run"
    tiny.trained(path, run, *FLAGS, *flags)
    rates, last, weights = by_hand(path, make)
    assert rates_of(run) == rates
    assert len({*rates}) > 1
    state = tiny.last_state(run)
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == last
    assert all(torch.equal(state["model"][key], value) for key, value in weights.items())
    for step in (12, 22):  # within an epoch, and at the end of one
        again = rewound(run, tmp_path / f"again-{step}", step)
        tiny.resumed(again)
        tiny.assert_same_training(again, run, 0.0)
        assert tiny.last_state(again)["scheduler"] == state["scheduler"]
