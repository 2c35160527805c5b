"""What changes the weights draws the same on all ranks; weights that drift apart end a run."""

import random

import pytest
import torch
from torch import nn

from samestep.training.alike import check_weights, is_checked, may_draw
from tests import tiny
from tests.command_line import refusal
from tests.processes import run_ranks
from tests.session import scripts
from tests.session.same import assert_same

# The noise comes from all three generators, as those of SGLD, DP-SGD and PCGrad do.
NOISY = """
import os, random
import numpy as np
from dataclasses import replace

own = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))

class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        found = super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                noise = random.random() + np.random.rand()
                weight.add_(torch.randn_like(weight) * noise, alpha=0.01)
        return found

recipe = replace(recipe, model=lambda o: nn.Sequential(*model(o)[:2], nn.Dropout(0.0),
                                                       nn.Linear(o.hidden, 2)),
                 optimizer=lambda model, s: Noisy(model.parameters(), lr=s.lr))
"""
DRIFTING = NOISY.replace("torch.randn_like(weight)", "torch.randn(weight.shape, generator=own)")
ENGINES = {"native": (), "lightning": ("--engine", "lightning")}


def written(folder, more):
    text = tiny.RECIPE.replace('    "checkpoint_every_steps": 4,\n', "")
    return tiny.write_recipe(folder, text + more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    tiny.trained(written(folder, NOISY), folder / "run", "--epochs", "1")
    return folder / "run"


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_an_optimizer_draws_on_two_ranks_what_it_draws_on_one(tmp_path, alone, engine):
    tiny.trained(written(tmp_path, NOISY), tmp_path / "run", "--epochs", "1", *engine, on=2)
    tiny.assert_same_training(tmp_path / "run", alone, 1e-12)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_weights_that_drift_apart_end_a_training_at_its_first_step(tmp_path, engine):
    recipe, flags = written(tmp_path, DRIFTING), ("--run-dir", str(tmp_path / "run"), *engine)
    told = refusal("train", str(recipe), *flags, world_size=2, folder=tmp_path / "output")
    assert "step 1, " in told
    assert "0.weight" in told
    assert "generator" in told


LOOP = """
import os, random
import torch
from torch import nn
import samestep

data = torch.arange(80.0, dtype=torch.float64).view(40, 2) / 40
own = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
with samestep.open_run("run") as run:
    model = run.place(nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in run.epochs(2, state={"model": model, "optimizer": optimizer}):
        for batch in run.batches(data, 6):
            losses = model(batch.data).square().mean(dim=0)
            tasks = []
            for loss in losses:
                optimizer.zero_grad()
                run.backward(loss, model, retain_graph=True)
                tasks.append([p.grad.clone() for p in model.parameters()])
            random.shuffle(tasks)  # as PCGrad does before it projects them
            for p, one, two, three in zip(model.parameters(), *tasks):
                p.grad = one + 0.5 * two + 0.25 * three
            optimizer.step()
            for p in model.parameters():
                p.data.add_(torch.randn_like(p), alpha=0.01)
            run.log(loss=losses.sum().detach())
"""


def loop(folder, old="", new=""):
    assert old in LOOP
    path = folder / "loop.py"
    path.write_text(LOOP.replace(old, new))
    return path


def test_a_loop_of_ones_own_draws_after_its_backward_alike_on_all_ranks(tmp_path):
    runs = []
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        scripts.run(loop(folder), world_size=world_size, folder=folder)
        runs.append(folder / "run")
    assert_same(*runs)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("torch.randn_like(p)", "torch.randn(p.shape, generator=own)", "generator"),
        (
            "run.backward(loss, model, retain_graph=True)",
            "loss.backward(retain_graph=True)",
            "run.backward",
        ),
    ],
)
def test_weights_that_drift_apart_end_a_loop_of_ones_own(tmp_path, old, new, named):
    told = scripts.refused(loop(tmp_path, old, new), world_size=2, folder=tmp_path)
    assert "model.weight" in told
    assert "step 1, " in told
    assert named in told


def _found_on_ranks(kinds: list[str]) -> list[str]:
    from samestep import UserError, dist

    rank, *_ = dist.setup_distributed(device="cpu")
    world, told = dist.current_world(), []
    for kind in kinds:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        model.to(getattr(torch, kind.split()[0]))
        for p in model.parameters():
            nn.init.ones_(p)
        model[0].weight.requires_grad_(requires_grad=False)
        if "drift" in kind and rank:
            model[0 if "frozen" in kind else 1].weight.data[0, 1] += 0.01
        try:
            check_weights(dict(model.named_parameters()), world, 7, "its hook")
        except UserError as error:
            told.append(str(error))
        else:
            told.append("")
    dist.cleanup()
    return told


def test_one_weight_that_differs_in_its_last_bits_is_found_in_every_type(tmp_path):
    kinds = [
        "float32",
        "float64 drift",
        "bfloat16 drift",
        "complex64 drift",
        "float32 frozen drift",
    ]
    for good, *drifted, frozen in run_ranks(_found_on_ranks, 2, tmp_path / "output", kinds):
        assert not good
        assert all("step 7, 1.weight" in told and "ranks 0 and 1" in told for told in drifted)
        assert "0.weight" in frozen
        assert "It is not trained" in frozen


def test_weights_are_compared_at_first_steps_and_however_many_are_taken_at_once():
    assert [s for s in range(1, 40) if is_checked(s - 1, s)] == [1, 2, 4, 8, 16, 32]
    assert [s for s in range(5, 45, 5) if is_checked(s - 5, s)] == [5, 10, 20, 35]


def test_only_an_optimizer_of_ones_own_may_draw():
    parameters = [nn.Parameter(torch.ones(2))]
    plain = torch.optim.Adam(parameters)
    assert not may_draw(plain)
    plain.register_step_post_hook(lambda *_: random.random())
    assert may_draw(plain)

    class Own(torch.optim.SGD):
        pass

    assert may_draw(Own(parameters))
