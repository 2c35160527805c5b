"""Compiled steps take the eager trajectory, for every optimizer, and say what was compiled."""

import os
from dataclasses import dataclass

import pytest
import torch

from samestep import Settings
from samestep.core.plan import make_plan
from samestep.core.training.compiled import _steps_per_graph
from tests import tiny
from tests.processes import run_ranks
from tests.steps_by_hand import IN_A_GRAPH, blocks, learner, model, run, settings_of, whole

# One worker trains all of them: a second would compile the same once more.
pytestmark = pytest.mark.xdist_group("compiled")

# A sleep cannot be compiled; and with nothing due by steps, a graph may hold as many as it likes.
SMALL = tiny.RECIPE.replace(tiny.SLEEP, "").replace('    "checkpoint_every_steps": 4,\n', "")
# BatchNorm has buffers that the graph must bring up to date; one layer is frozen.
FROZEN = """
def frozen(options):
    net = model(options)
    net[0].requires_grad_(False)
    return net
def loss("""
NORMALISED = (
    SMALL.replace("nn.Tanh()", "nn.BatchNorm1d(options.hidden), nn.Tanh()")
    .replace("\ndef loss(", FROZEN)
    .replace("Recipe(model=model", "Recipe(model=frozen")
)
# What a graph of whole steps would train otherwise: AdamW decays a weight whose gradient is zero,
# and a buffer that is put in another's place is not the one that the graph knows.
ODD = """
class Odd(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.inner = model(options)
        {init}
    def forward(self, x):
        {forward}
        return self.inner(x)
recipe = Recipe(model=Odd, """
UNUSED = SMALL.replace(
    "\nrecipe = Recipe(model=model, ",
    ODD.format(init="self.unused = nn.Linear(8, 2)", forward="pass"),
)
REASSIGNED = SMALL.replace(
    "\nrecipe = Recipe(model=model, ",
    ODD.format(
        init='self.register_buffer("calls", torch.zeros(()))', forward="self.calls = self.calls + 1"
    ),
)


@dataclass(frozen=True)
class Case:
    flags: str
    steps_per_graph: int
    tolerance: float = 1e-12
    recipe: str = "tiny.py"
    small: bool = True
    """Whether the weights are packed, as those of a small model are."""


SGD = "--precision fp32 --optimizer sgd --momentum 0.9 --weight-decay 0.1 --clip-norm 0.3 --lr 0.1"
SGD += " --schedule cosine --warmup-steps 9"
ADAMW = "--optimizer adamw --weight-decay 0.2 --clip-norm 0.05"
CUT = "--batch-size 12 --accumulate 2"
CASES = {
    "adam": Case("--weight-decay 0.1 --clip-norm 0.05 --lr 0.03", 2),
    "sgd": Case(f"{SGD} {CUT}", 2, tolerance=1e-5, recipe="normalised.py"),
    "large": Case(f"{ADAMW} {CUT}", 1, recipe="normalised.py", small=False),
}
FALLS_BACK = {
    "unused": Case("--optimizer adamw --weight-decay 0.2 --max-steps 24", 4, recipe="unused.py"),
    "reassigned": Case("--max-steps 24", 4, recipe="reassigned.py"),
}


def _train_all(folder, cases):
    """Train each case eagerly and compiled, and the first also switching twice between them."""
    # No pool of compiling processes, which would outlive this one's need of them.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    from torch._dynamo.utils import counters

    from samestep.core.training import compiled, step_graph
    from samestep.shell.cli import main

    is_small = step_graph.is_small
    drawn, graphs = _steps_with_dropout(), {}
    for number, (name, case) in enumerate(cases.items()):
        compiled._STEPS_PER_GRAPH = case.steps_per_graph
        for module in (compiled, step_graph):
            module.is_small = is_small if case.small else lambda _: False
        flags, target = case.flags.split(), str(folder / case.recipe)
        torch._dynamo.reset()
        counters.clear()
        for kind in ("off", "on"):
            run = str(folder / f"{name} {kind}")
            assert main(["train", target, "--run-dir", run, "--compile", kind, *flags]) == 0
        graphs[name] = counters["stats"]["unique_graphs"]
        if number == 0:
            run = str(folder / "switching")
            start = ["train", target, "--run-dir", run, "--max-steps", "15", *flags]
            assert main([*start, "--compile", "on"]) == 0
            for last, kind in (("30", "off"), ("66", "on")):
                resume = ["train", run, "--resume", "--max-steps", last, "--compile", kind]
                assert main(resume) == 0
    return graphs, drawn


def _steps_with_dropout():
    """Return what a graph of whole steps gave that moved no weight, so that masks alone differ."""
    settings = settings_of()
    step = whole(learner(model(dropout=0.5), settings), settings)
    return run(step, blocks(settings, together=IN_A_GRAPH)[:3], lr=0.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of all runs, how many graphs each compiled run made, steps with dropout."""
    folder = tmp_path_factory.mktemp("compiled")
    tiny.write_recipe(folder, SMALL)
    tiny.write_recipe(folder, NORMALISED, "normalised.py")
    tiny.write_recipe(folder, UNUSED, "unused.py")
    tiny.write_recipe(folder, REASSIGNED, "reassigned.py")
    (found,) = run_ranks(_train_all, 1, folder / "output", folder, {**CASES, **FALLS_BACK})
    return folder, *found


def assert_close(one, other, tolerance):
    for ours, theirs in zip(tiny.account(one), tiny.account(other), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("loss", "grad_norm", "lr", "accuracy", "samples", "step", "epoch"):
            if key in ours:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance), (key, ours, theirs)
    mine, its = tiny.last_state(one), tiny.last_state(other)
    assert mine["optimizer"]["param_groups"][0]["lr"] == mine["schedule"]["next_lr"]
    for name, value in its["model"].items():
        torch.testing.assert_close(mine["model"][name], value, rtol=tolerance, atol=tolerance)
    assert_same_optimizer(mine["optimizer"], its["optimizer"], tolerance)


def assert_same_optimizer(one, other, tolerance):
    """Same parameters, same kinds of state of the same types, close values."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in other["state"].items():
        pair = (one["state"][number], state)
        mine, its = ({k: v for k, v in found.items() if v is not None} for found in pair)
        assert mine.keys() == its.keys()
        for key, value in its.items():
            torch.testing.assert_close(mine[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_steps_take_the_eager_trajectory(trained, name):
    """Records, weights, buffers and the optimizer's state; also the steps that run eagerly."""
    folder, graphs, _ = trained
    assert graphs[name] == 1
    assert_close(folder / f"{name} on", folder / f"{name} off", CASES[name].tolerance)
    (note,) = tiny.events(folder / f"{name} on", "compile")
    assert note["steps_per_graph"] == CASES[name].steps_per_graph
    assert "optimizer" in note["what"]
    assert note["seconds"] > 0
    assert not tiny.events(folder / f"{name} off", "compile")


@pytest.mark.slow
@pytest.mark.parametrize("name", FALLS_BACK)
def test_where_whole_steps_would_train_something_else_the_model_alone_is_compiled(trained, name):
    folder, *_ = trained
    assert_close(folder / f"{name} on", folder / f"{name} off", 1e-12)
    (note,) = tiny.events(folder / f"{name} on", "compile")
    assert note["steps_per_graph"] == 0
    assert {"unused": "unused.weight", "reassigned": "calls"}[name] in note["what"]


@pytest.mark.slow
def test_a_run_may_change_between_compiled_and_eager_and_compiling_is_no_training(trained):
    folder, *_ = trained
    runs = [folder / name for name in ("switching", "adam off")]
    for ours, theirs in zip(*(tiny.events(path, "step") for path in runs), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12)
    compiles = [
        r["event"]
        for r in tiny.all_records(folder / "switching")
        if r["event"] in ("start", "compile")
    ]
    assert compiles == ["start", "compile", "start", "start", "compile"]
    mine, its = map(tiny.last_state, runs)
    assert_same_optimizer(mine["optimizer"], its["optimizer"], 1e-12)
    (compiling,) = tiny.events(folder / "adam on", "compile")
    training = tiny.events(folder / "adam on", "step")[-1]
    assert training["seconds"] < compiling["seconds"] / 2


@pytest.mark.slow
def test_on_several_ranks_the_model_is_compiled_and_the_steps_are_the_same(tmp_path):
    recipe = tiny.write_recipe(tmp_path, SMALL)
    flags = ("--max-steps", "24", "--clip-norm", "0.05", "--batch-size", "33")  # 17 and 16
    run = tmp_path / "run"
    tiny.trained(recipe, tmp_path / "eager", *flags)
    tiny.trained(recipe, run, "--compile", "on", *flags, on=2)
    assert_close(run, tmp_path / "eager", 1e-12)
    (note,) = tiny.events(run, "compile")
    assert note["steps_per_graph"] == 0
    assert "forward" in note["what"]
    assert "not compiled" in note["what"]


@pytest.mark.parametrize(
    ("told", "num_samples", "steps_per_block", "expected"),
    [
        ({}, 1000, 64, 8),
        ({}, 1000, 4, 4),  # larger samples: a gather holds fewer steps
        ({}, 1000, 1, 1),  # a DataLoader yields steps one by one
        ({}, 59, 64, 4),  # five full steps an epoch, and an incomplete one
        ({}, 7, 64, 1),
        ({"max_steps": 3}, 1000, 64, 2),
        ({"eval_every_steps": 5}, 1000, 64, 4),
        ({"eval_every_steps": 50, "checkpoint_every_steps": 1}, 1000, 64, 1),
    ],
)
def test_a_graph_holds_the_steps_that_are_in_a_row(told, num_samples, steps_per_block, expected):
    """Else no group of steps would ever be full, and --compile on would compile nothing."""
    settings = Settings(batch_size=10, epochs=None if "max_steps" in told else 5, **told)
    plan = make_plan(settings, num_samples, 1)
    assert _steps_per_graph(settings, plan, steps_per_block) == expected


@pytest.mark.slow
def test_dropout_in_a_graph_of_whole_steps_keeps_some_values_of_each_step(trained):
    """The compiler could use a mask before it was drawn: no input reached the loss any more."""
    *_, ran = trained
    (note,) = ran.notes
    assert note["steps_per_graph"] == IN_A_GRAPH
    # With nothing but the last bias, a loss would depend on the number of targets of a class alone.
    assert len(set(ran.losses.tolist())) == 3 * IN_A_GRAPH
