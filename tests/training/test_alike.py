"""What changes the weights draws the same on all ranks; weights that drift apart end a run."""

import random

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


def written(folder, more):
    text = tiny.RECIPE.replace('    "checkpoint_every_steps": 4,\n', "")
    return tiny.write_recipe(folder, text + more)


def test_an_optimizer_draws_on_two_ranks_what_it_draws_on_one(tmp_path):
    recipe = written(tmp_path, NOISY)
    tiny.trained(recipe, tmp_path / "alone", "--epochs", "1")
    engines = ("native", "lightning")
    words = [[recipe, "--run-dir", tmp_path / e, "--epochs", "1", "--engine", e] for e in engines]
    tiny.train_all(words, on=2, folder=tmp_path)
    for engine in engines:
        tiny.assert_same_training(tmp_path / engine, tmp_path / "alone", 1e-12)


OTHER = """
import os
R = int(os.environ.get("RANK", "0"))
recipe = replace(recipe, settings={**recipe.settings, "seed": 5 + R, "threads": 1 + R})
"""


def test_settings_that_differ_between_ranks_are_refused_before_a_run_begins(tmp_path):
    recipe, run = written(tmp_path, "from dataclasses import replace" + OTHER), tmp_path / "run"
    words = ("train", str(recipe), "--run-dir", str(run))
    told = refusal(*words, world_size=2, folder=tmp_path / "output")
    assert "differ between the ranks: seed is 5 on rank 0 and 6 on rank 1. See" in told
    assert not run.exists()


def test_weights_that_drift_apart_end_a_training_at_its_first_step(tmp_path):
    recipe, flags = written(tmp_path, DRIFTING), ("--run-dir", str(tmp_path / "run"))
    told = refusal("train", str(recipe), *flags, world_size=2, folder=tmp_path / "output")
    assert all(part in told for part in ("step 1, ", "0.weight", "generator")), told


LOOP = """
import random
import torch
from torch import nn
import samestep

data = torch.arange(80.0, dtype=torch.float64).view(40, 2) / 40
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
    folder.mkdir()
    path = folder / "loop.py"
    path.write_text(LOOP.replace(old, new))
    return path


def test_a_loop_of_ones_own_draws_after_its_backward_alike_on_all_ranks(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert scripts.run_here(loop(one)) == 0
    scripts.run(loop(two), world_size=2, folder=two)
    assert_same(two / "run", one / "run")


def test_weights_that_drift_apart_end_a_loop_of_ones_own(tmp_path):
    ours = "run.backward(loss, model, retain_graph=True)"
    script = loop(tmp_path / "loop", ours, "loss.backward(retain_graph=True)")
    told = scripts.refused(script, world_size=2, folder=tmp_path / "loop")
    assert all(part in told for part in ("model.weight", "step 1, ", "run.backward")), told


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
        lr = 0.1 * (rank + 1) if "lr" in kind else 0.1
        how = {"optimizers": [torch.optim.SGD(model.parameters(), lr=lr)]}
        try:
            check_weights(dict(model.named_parameters()), world, 7, "its hook", **how)
        except UserError as error:
            told.append(str(error))
        else:
            told.append("")
    dist.cleanup()
    return told


def test_one_weight_that_differs_in_its_last_bits_is_found_in_every_type(tmp_path):
    types = ("float64", "bfloat16", "complex64", "float32 frozen")
    kinds = ["float32", *(f"{kind} drift" for kind in types)]
    kinds += ["float32 lr drift"]
    for good, *drifted, frozen, by_lr in run_ranks(_found_on_ranks, 2, tmp_path / "o", kinds):
        assert not good
        assert all("step 7, 1.weight" in told and "ranks 0 and 1" in told for told in drifted)
        assert "0.weight" in frozen
        assert "It is not trained" in frozen
        assert "lr is 0.1 on rank 0 and 0.2 on rank 1" in by_lr
        assert "evaluate_batch" in drifted[0]


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
