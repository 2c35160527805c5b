"""Schedules that know more than the step, and PyTorch's own schedulers as they are."""

import copy
import functools
import inspect
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from samestep import Recipe, Settings, Splits, evaluate
from samestep.core.data.order import epoch_order
from samestep.core.learner.optimizer import optimizer_of
from samestep.core.learner.scheduler import Scheduler
from samestep.core.plan import Plan, learning_rate, make_plan
from samestep.core.recipe import find_recipe
from samestep.core.training.steps import what_compiles
from samestep.launch.ranks.world import World
from tests import tiny
from tests.faults import Fault
from tests.training.stops import stop_all

EPOCHS, SEED, LR = 3, 42, 0.01
FLAGS = ("--epochs", str(EPOCHS))
SGD = ("--optimizer", "sgd", "--momentum", "0.8")

OWN = """
from dataclasses import replace
import numpy as np
from torch.optim.lr_scheduler import *
def groups(model, settings):
    body = {"params": model[0].parameters(), "lr": settings.lr / 10}
    return torch.optim.AdamW([body, {"params": model[2].parameters()}], lr=settings.lr)
def by_epoch(scheduler): return {"scheduler": scheduler, "interval": "epoch"}
def by_loss(plateau, name="loss"): return {"scheduler": plateau, "monitor": name}
def in_turn(optimizer):
    warmup = LinearLR(optimizer, 0.1, total_iters=4)
    return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, 30)], [4])
def two(model, settings):
    return [torch.optim.SGD(model[0].parameters(), settings.lr, momentum=0.8),
            torch.optim.Adam(model[2].parameters(), settings.lr / 4)]
def each(optimizer):
    first, second = optimizer
    return [by_epoch(StepLR(first, 1, 0.3)), OneCycleLR(second, 0.1, 33)]
def chained(optimizer):
    decay = LambdaLR(optimizer, lambda step: np.float64(0.9) ** step)
    return ChainedScheduler([decay, MultiStepLR(optimizer, [3, 20])])
"""


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, fused=True)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.8, fused=True)


# What the recipe says, and the optimizer of the loop by hand; None: the recipe's own.
SCHEDULERS: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "one cycle, betas too": (
        "lambda optimizer, plan: OneCycleLR(optimizer, 0.1, total_steps=plan.total_steps)",
        adam,
    ),
    "one cycle per group": (
        "lambda optimizer: OneCycleLR(optimizer, [0.01, 0.1], 33), optimizer=groups",
        None,
    ),
    "by epoch": ("lambda optimizer: by_epoch(StepLR(optimizer, 1, 0.3))", adam),
    "on a plateau": (
        "lambda optimizer: by_loss(ReduceLROnPlateau(optimizer, 'min', 0.3, 0, 0.1))",
        adam,
    ),
    "cycled with the momentum": (
        "lambda optimizer: CyclicLR(optimizer, 0.001, 0.1, step_size_up=4)",
        sgd,
    ),
    "one after the other": ("in_turn", adam),
    "chained, with NumPy's numbers": ("chained", sgd),
    "one for each of two optimizers": ("each, optimizer=two", None),
    "PyTorch's class itself": ("__import__('functools').partial(PolynomialLR)", adam),
}


def write(folder: Path, schedule: str, name: str = "tiny") -> Path:
    text = f"{tiny.RECIPE}{OWN}recipe = replace(recipe, schedule={schedule})\n"
    return tiny.write_recipe(folder, text, f"{name}.py")


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
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    schedulers = [
        (*one.values(),)
        if isinstance(one, dict)
        else (one, "validation" if isinstance(one, ReduceLROnPlateau) else "step")
        for one in (made if isinstance(made, list) else [made])
    ]
    rates = []
    for epoch in range(EPOCHS):
        for indices in epoch_order(131, SEED, epoch).split(12):
            model.zero_grad()
            recipe.loss(model(inputs[indices]), targets[indices]).backward()
            for one in optimizers:
                one.step()
            rates.append(optimizers[0].param_groups[0]["lr"])
            for scheduler, interval in schedulers:
                if interval == "step":
                    scheduler.step()
        with torch.no_grad():
            loss = float(recipe.loss(model(unseen), answers))
        for scheduler, interval in schedulers:
            if interval != "step":
                scheduler.step(*[loss] * (interval != "epoch"))
    groups = [group for one in optimizers for group in one.param_groups]
    return rates, [g["lr"] for g in groups], model.state_dict()


def rates_of(run: Path) -> list[float]:
    return [record["lr"] for record in tiny.events(run, "step")]


def rewound(run: Path, copy: Path, step: int) -> Path:
    shutil.copytree(run, copy)
    file = copy / "checkpoints" / "index.json"
    table = json.loads(file.read_text())
    table["checkpoints"] = [one for one in table["checkpoints"] if one["step"] <= step]
    table["last"] = next(one for one in table["checkpoints"] if one["step"] == step)
    file.write_text(json.dumps(table))
    return copy


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_gives_the_rates_and_weights_of_a_loop_by_hand_and_goes_on(tmp_path, name):
    schedule, make = SCHEDULERS[name]
    path, run = write(tmp_path, schedule), tmp_path / "run"
    tiny.trained(path, run, *FLAGS, *(SGD if make is sgd else ()))
    rates, last, weights = by_hand(path, make)
    assert rates_of(run) == rates
    assert len({*rates}) > 1
    state = tiny.last_state(run)
    saved = state["optimizer"].get("optimizers", [state["optimizer"]])
    assert [group["lr"] for one in saved for group in one["param_groups"]] == last
    assert all(torch.equal(state["model"][key], value) for key, value in weights.items())
    by_epoch = "by_epoch" in schedule or "Plateau" in schedule or "each" in schedule
    again = rewound(run, tmp_path / "again", 22 if by_epoch else 12)
    tiny.resumed(again)
    tiny.assert_same_training(again, run, 0.0)
    assert tiny.last_state(again)["scheduler"] == state["scheduler"]


def test_stopped_and_resumed_on_other_ranks_the_rates_and_weights_are_the_same_bits(tmp_path):
    stop = Fault("before an evaluation", signum=signal.SIGTERM)
    faults = {
        "one cycle per group": replace(stop, point="after a step", nth=18),
        "on a plateau": replace(stop, nth=2),
        "by epoch": replace(stop, nth=3),  # at the end of an epoch, which is not closed yet
    }
    more = ("--virtual-ranks", "2", "--eval-every", "1epoch,5steps")
    words = {name: (write(tmp_path, SCHEDULERS[name][0], name), *FLAGS, *more) for name in faults}
    stops = [(faults[name], (*words[name], "--run-dir", tmp_path / name)) for name in faults]
    stop_all(stops, on=1, folder=tmp_path)
    tiny.train_all([[tmp_path / name, "--resume"] for name in faults], on=2, folder=tmp_path)
    for name, (recipe, *flags) in words.items():
        run, reference = tmp_path / name, tmp_path / f"{name}, whole"
        tiny.trained(recipe, reference, *flags)
        assert rates_of(run) == rates_of(reference)
        assert len({*rates_of(run)}) > 2
        mine, its = (tiny.last_state(one) for one in (run, reference))
        assert mine["weights_sha256"] == its["weights_sha256"]
        assert mine["scheduler"] == its["scheduler"]


ASKING = """
def schedule(step, total, *, epoch, steps_per_epoch, metrics=None):
    assert steps_per_epoch == 11 and epoch == step // 11, (step, epoch, steps_per_epoch)
    return [1.0, metrics.get("loss", 0.5)] if GROUPS else metrics.get("loss", 0.5)
"""


@pytest.mark.parametrize("groups", [False, True])
def test_a_schedule_that_reads_metrics_follows_the_last_validation(tmp_path, groups):
    how = "schedule=schedule, optimizer=groups" if groups else "schedule=schedule"
    text = f"{tiny.RECIPE}{OWN}GROUPS = {groups}\n{ASKING}recipe = replace(recipe, {how})\n"
    path, run = tiny.write_recipe(tmp_path, text), tmp_path / "run"
    tiny.trained(path, run, *FLAGS, "--warmup-steps", "2", "--eval-every", "1epoch,5steps")
    expected, newest, number = [], 0.5, 0
    for record in tiny.events(run, "step", "evaluation"):
        if record["event"] == "step":
            number += 1
            expected.append(LR * min(1.0, number / 3) * (1.0 if groups else newest))
        elif record["split"] == "validation":
            newest = record["loss"]
    assert rates_of(run) == expected
    state = tiny.last_state(run)
    if groups:
        rates = [LR / 10, LR * newest]
        assert [g["lr"] for g in state["optimizer"]["param_groups"]] == pytest.approx(rates)
    again = rewound(run, tmp_path / "again", 16)  # the evaluation before was after step 15
    tiny.resumed(again)
    tiny.assert_same_training(again, run, 0.0)


def planned(schedule: Callable[..., Any], **more: Any) -> Plan:
    return make_plan(Settings(lr=1.0, batch_size=8, epochs=2, **more), 24, 1, schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (lambda step, total: 1 - step / total, [1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (lambda step, total, epoch: 1 / (1 + epoch), [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]),
        (lambda s, t, *, steps_per_epoch: s % steps_per_epoch, [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]),
        # A default of one's own stays, as in recipes written before.
        (lambda step, total, epoch=3: epoch, [3.0] * 6),
        (functools.partial(lambda step, total, epoch: epoch, epoch=5), [5.0] * 6),
        (lambda step, total, *, power=2, **more: step**power, [0.0, 1.0, 4.0, 9.0, 16.0, 25.0]),
        (max, [6.0] * 6),
    ],
)
def test_a_schedule_is_told_what_it_names(schedule, expected):
    plan = planned(schedule)
    rates = [learning_rate(plan, Settings(lr=1.0), step) for step in range(6)]
    assert rates == pytest.approx(expected)


def test_with_a_scheduler_compile_takes_the_model_and_a_skipped_step_warns_of_nothing():
    recipe = Recipe(model=dict, data=dict, schedule=lambda optimizer: None)
    settings, layer = Settings(compile="on", batch_size=8, epochs=1), torch.nn.Linear(2, 2)
    assert what_compiles(settings, World(), layer, own=recipe.own_parts()) == "model"
    own = Recipe(model=dict, data=dict, schedule=lambda step, total: 1.0).own_parts()
    assert what_compiles(settings, World(), layer, own=own) == "step"
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    scheduler = Scheduler(planned(lambda optimizer: StepLR(optimizer, 1)), optimizer)
    scheduler.after("step", 1)
    assert scheduler.next_lr == 0.05


def test_scaled_with_the_batch_the_scheduler_begins_at_the_scaled_rate(tmp_path):
    path = write(tmp_path, "lambda optimizer, plan: ConstantLR(optimizer, 0.5), optimizer=groups")
    flags = ("--lr-scaling", "linear", "--base-batch-size", "3", "--max-steps", "2")
    tiny.trained(path, tmp_path / "run", *flags)
    assert rates_of(tmp_path / "run") == pytest.approx([LR / 10 * 4 * 0.5] * 2)


STEPS = """
class Steps(StepLR):
    def step(self):
        if getattr(self, "_step_count", 0) > 2: self.optimizer.step()
        super().step()
class Keeps(StepLR):
    def __init__(self, optimizer):
        self.own = lambda: 0
        super().__init__(optimizer, 1)
def other(optimizer): return StepLR(torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1), 1)
def nested(optimizer): return ChainedScheduler([other(optimizer)])
"""
PLATEAU = "lambda optimizer: ReduceLROnPlateau(optimizer)"
EACH = "lambda optimizer: StepLR(optimizer, 1)"
WITH = "{'scheduler': StepLR(optimizer, 1),"
READS = "lambda step, total, *, metrics: 1.0"
# A schedule, and what is said of it.
MISTAKES: dict[str, tuple[str, ...]] = {
    "an unknown name": ("lambda step, total, epochs: 1.0", "'epoch'", "steps_per_epoch"),
    "an unknown name beside the optimizer": ("lambda optimizer, p: None", "asks for p"),
    "a factor below 0": ("lambda step, total: [1.0, -1.0], optimizer=groups", "-1.0"),
    "too many factors": ("lambda step, total: [1.0] * 3, optimizer=groups", "3 factors"),
    "metrics not there yet": ("lambda step, total, metrics: metrics['loss']", "KeyError", "empty"),
    "no scheduler": ("lambda optimizer: optimizer", "torch.optim.lr_scheduler"),
    "a class": ("StepLR", "StepLR(optimizer"),
    "a scheduler that fails": ("lambda optimizer: StepLR(optimizer)", "step_size"),
    "a scheduler that ends too soon": (
        "lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=5)",
        "OneCycleLR",
        "after step 6",
    ),
    "of another optimizer": ("other", "another optimizer"),
    "two of one optimizer": ("lambda optimizer: [StepLR(optimizer, 1)] * 2", "SequentialLR"),
    "none of several": ("lambda optimizer: [], optimizer=two", "empty list"),
    "of another optimizer within": ("nested", "another optimizer"),
    "a step later": ("lambda optimizer: Steps(optimizer, 1)", "steps the optimizer"),
    "what no checkpoint holds": ("lambda optimizer: Keeps(optimizer)", "checkpoint"),
    "another key": (f"lambda optimizer: {WITH} 'monitor': 'x'}}", "'monitor'", "--monitor"),
    "another interval": (f"lambda optimizer: {WITH} 'interval': 'day'}}", "'day'"),
    "a plateau by epoch": (PLATEAU.replace(": ", ": by_epoch(") + ")", "--eval-every"),
    "an unknown metric": (PLATEAU.replace(": ", ": by_loss(") + ", 'x')", "monitor 'x'"),
    "a plateau the other way": (PLATEAU, "mode='min'", "mode='max'"),
    "a plateau of nothing": (f"{PLATEAU}, data=unvalidated", "validation"),
    "metrics of nothing": (f"{READS}, data=unvalidated", "validation"),
    "a warm-up of samestep's": (EACH, "--warmup-steps"),
    "a schedule of samestep's": (EACH, "--schedule"),
    "a scheduler in Lightning": (EACH, "--engine native"),
    "metrics in Lightning": (READS, "--engine native"),
}
MORE_FLAGS = {
    "a plateau the other way": ("--monitor", "accuracy"),
    "a warm-up of samestep's": ("--warmup-steps", "3"),
    "a schedule of samestep's": ("--schedule", "cosine"),
    "a scheduler in Lightning": ("--engine", "lightning"),
    "metrics in Lightning": ("--engine", "lightning"),
}
UNVALIDATED = "\ndef unvalidated(options):\n    return Splits(train=data(options).train)\n"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_schedule_is_one_message(refused, tmp_path, name):
    schedule, *parts = MISTAKES[name]
    text = tiny.RECIPE.replace('    "checkpoint_every_steps": 4,\n', "")
    text += f"{OWN}{STEPS}{UNVALIDATED}recipe = replace(recipe, schedule={schedule})\n"
    monitor = () if "unvalidated" in schedule else ("--monitor", "loss")
    words = (str(tiny.write_recipe(tmp_path, text)), "--run-dir", str(tmp_path / "run"))
    told = refused("train", *words, *monitor, *MORE_FLAGS.get(name, ()))
    assert [part for part in parts if part not in told] == [], told


def test_a_scheduler_does_not_follow_another_learning_rate_on_resume(refused, tmp_path):
    path, run = write(tmp_path, "lambda optimizer: StepLR(optimizer, 9)"), tmp_path / "run"
    tiny.trained(path, run, "--max-steps", "3")
    again = ("train", str(run), "--resume", "--max-steps", "5")
    told = refused(*again, "--lr", "0.5", "--allow-change", "lr")
    assert "0.01" in told
    assert "0.5" in told
    tiny.resumed(run, "--max-steps", "11")
    assert rates_of(run) == [LR] * 9 + [LR * 0.1] * 2


@pytest.mark.parametrize("patience", [("--patience", "20"), ()])
def test_early_stopping_always_has_the_best_weights_also_between_checkpoints(tmp_path, patience):
    path, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    often = ("--eval-every", "1epoch,3steps", "--checkpoint-every", "1epoch,60steps")
    # The loss falls, so that the best is an early one.
    tiny.trained(path, run, "--monitor", "loss:max", "--epochs", "2", *often, *patience)
    seen = [r["loss"] for r in tiny.events(run, "evaluation") if r["split"] == "validation"]
    kept = tiny.read_index(run)["best"]
    assert (kept["metric"] == max(seen)) is bool(patience)
    tested = json.loads((run / "result.json").read_text())["test"]["checkpoint"]
    assert tested == kept["path"]
    assert kept["step"] < tiny.last_state(run)["position"]["step"]
    assert evaluate(run, split="validation")["loss"] == pytest.approx(kept["metric"], rel=1e-12)


def test_a_tensor_that_is_the_rate_of_all_groups_is_cut_once_by_a_plateau():
    model = nn.Linear(2, 1)

    def two_groups(model, _settings):
        return torch.optim.SGD([{"params": [p]} for p in model.parameters()], torch.tensor(0.8))

    recipe = Recipe(model=lambda: model, data=Splits, optimizer=two_groups)
    settings = Settings(epochs=1, batch_size=1, lr=0.8)
    optimizer = optimizer_of(recipe, model, settings, 0.8, torch.device("cpu"))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 2.0):
        plateau.step(loss)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.4, 0.4])


def test_a_rate_that_is_a_tensor_goes_on_from_a_checkpoint_and_again_from_its_own():
    def made() -> Scheduler:
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), torch.tensor(0.5))
        return Scheduler(planned(lambda optimizer: StepLR(optimizer, 1)), optimizer)

    scheduler = made()
    for step, rate in ((1, 0.05), (2, 0.005)):
        scheduler.after("step", step)
        saved, scheduler = copy.deepcopy(scheduler.state()), made()
        scheduler.load(saved)
        assert scheduler.next_lr == pytest.approx(rate)
