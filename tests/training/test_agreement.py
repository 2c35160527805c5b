"""What changes the weights draws the same on all ranks; weights that drift apart end a run."""

import random

import pytest
import torch
from torch import nn

from samestep.core.learner import agreement
from tests import tiny
from tests.command_line import refusal
from tests.loops import scripts
from tests.loops.same import assert_same
from tests.processes import run_ranks
from tests.training.odd_models import RECIPE

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
KEEPS = {"get_extra_state": lambda own: {"most": own.most}}


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


def test_settings_that_differ_are_refused_and_weights_that_drift_end_a_training(tmp_path):
    recipe, run = written(tmp_path, "from dataclasses import replace" + OTHER), tmp_path / "run"
    words = ("train", str(recipe), "--run-dir", str(run))
    told = refusal(*words, world_size=2, folder=tmp_path / "output")
    assert "differ between the ranks: seed is 5 on rank 0 and 6 on rank 1. See" in told
    assert not run.exists()
    recipe, flags = written(tmp_path, DRIFTING), ("--run-dir", str(tmp_path / "run"))
    told = refusal("train", str(recipe), *flags, world_size=2, folder=tmp_path / "drifting")
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
            for p in model.parameters(): p.data.add_(torch.randn_like(p), alpha=0.01)
            run.log(loss=losses.sum().detach())
"""


def loop(folder, old="", new=""):
    assert old in LOOP
    folder.mkdir()
    path = folder / "loop.py"
    path.write_text(LOOP.replace(old, new))
    return path


def test_a_loop_of_ones_own_draws_alike_on_all_ranks_and_ends_if_weights_drift_apart(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert scripts.run_here(loop(one)) == 0
    scripts.run(loop(two), world_size=2, folder=two)
    assert_same(two / "run", one / "run")
    ours = "run.backward(loss, model, retain_graph=True)"
    script = loop(tmp_path / "loop", ours, "loss.backward(retain_graph=True)")
    told = scripts.refused(script, world_size=2, folder=tmp_path / "loop")
    assert all(part in told for part in ("model.weight", "step 1, ", "run.backward")), told


def _found_on_ranks(kinds: list[str]) -> list[str]:
    from samestep import UserError, dist

    rank, *_ = dist.setup_distributed(device="cpu")
    world, told = dist.current_world(), []
    for kind in kinds:
        model = type("Keeps", (nn.Sequential,), KEEPS)(nn.Linear(2, 3), nn.Linear(3, 2))
        model.most = torch.ones(1) + rank * ("extra" in kind)
        if "codes" in kind:
            model.register_buffer("codes", torch.ones(2, dtype=torch.int16))
        model.to(getattr(torch, kind.split()[0]))
        for p in model.parameters():
            nn.init.ones_(p)
        model[0].weight.requires_grad_(requires_grad=False)
        if "drift" in kind and rank:
            model[0 if "frozen" in kind else 1].weight.data[0, 1] += 0.01
        lr = 0.1 * (rank + 1) if "lr" in kind else 0.1
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        how = {"optimizers": [sgd], "modules": {"model": model}}
        try:
            agreement.check_same_model(model, world)
            agreement.check_weights(dict(model.named_parameters()), world, 7, "", **how)
        except UserError as error:
            told.append(str(error))
        else:
            told.append("")
    dist.cleanup()
    return told


def test_weights_are_compared_in_every_type_and_only_own_optimizers_draw(tmp_path):
    types = ("float64", "bfloat16", "complex64", "float32 frozen")
    kinds = ["float32", *(f"{kind} drift" for kind in types)]
    kinds += ["float32 lr drift", "float32 extra", "float32 codes"]
    for good, *drifted, frozen, by_lr, extra, codes in run_ranks(
        _found_on_ranks, 2, tmp_path / "o", kinds
    ):
        assert not good
        assert all("step 7, 1.weight" in told and "ranks 0 and 1" in told for told in drifted)
        assert "0.weight" in frozen
        assert "It is not trained" in frozen
        assert "lr is 0.1 on rank 0 and 0.2 on rank 1" in by_lr
        assert "evaluate_batch" in drifted[0]
        assert "model.get_extra_state() is {most: tensor([1.])} on rank 0 and" in extra
        assert "codes is a tensor of torch.int16" in codes
    assert [s for s in range(1, 40) if agreement.is_checked(s - 1, s)] == [1, 2, 4, 8, 16, 32]
    assert [s for s in range(5, 45, 5) if agreement.is_checked(s - 5, s)] == [5, 10, 20, 35]
    parameters = [nn.Parameter(torch.ones(2))]
    plain = torch.optim.Adam(parameters)
    assert not agreement.may_draw(plain)
    plain.register_step_post_hook(lambda *_: random.random())
    assert agreement.may_draw(plain)
    assert agreement.may_draw(type("Own", (torch.optim.SGD,), {})(parameters))


# Each of these trained without a word and had other weights on other numbers of ranks: lines of a
# forward, and what is named.
HIDDEN = {
    "a tensor in a plain attribute": (
        "self.mean = 0.9 * getattr(self, 'mean', 0.0) + 0.1 * x.detach().mean(0)",
        *("out = out + self.mean.sum()", "the model's mean"),
    ),
    "a tensor deep in a container": (
        "self.kept = getattr(self, 'kept', {'a': [torch.zeros(8)]})",
        *("self.kept['a'][0] += x[0].detach()", "the model's kept"),
    ),
    "a counter of forwards": ("self.n = getattr(self, 'n', 0) + 1", "the model's n"),
    "a generator": ("out = out + float(self.drawn.normal())", "the model's drawn"),
    "a torch.Generator": ("out = out + torch.rand(1, generator=self.torchs)", "the model's torchs"),
    "a list as memory bank": (
        "bank.append(out.detach().mean(0))",
        *("out = out - torch.stack(bank).mean(0)", "outside the model"),
    ),
    # The fraction alone: float32 does not tell apart two times of a long uptime within 4 ms.
    "the clock": ("out = out * (1 + time.perf_counter() % 1)", "clock"),
}
HARMLESS = """
        self.seen, self.shape = out.detach(), tuple(x.shape)
        self.cache = getattr(self, 'cache', None) or [torch.arange(8.0)]
        x.mul_(0.5)
"""


def with_forward(folder, lines, name="odd.py"):
    text = RECIPE.replace(
        "import torch, torchmetrics",
        "import os, time\nimport numpy as np\nimport torch, torchmetrics\nbank = []",
    )
    text = text.replace(
        "        self.kind, self.head",
        "        self.drawn = np.random.default_rng(0)\n"
        "        self.torchs = torch.Generator()\n        self.kind, self.head",
    ).replace(
        '        if self.kind == "counts":', f'        {lines}\n        if self.kind == "counts":'
    )
    return tiny.write_recipe(folder, text, name)


@pytest.mark.parametrize("what", HIDDEN)
def test_state_outside_of_buffers_is_named_before_the_first_update(here, refused, what):
    *lines, named = HIDDEN[what]
    recipe = with_forward(here, "\n            ".join(("if self.training:", *lines)))
    assert named in refused("train", str(recipe), "--run-dir", "run")


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("renormed", "the model's parameter words.weight"),
        ("teacher", "the model's parameter teacher.weight"),
        ("most", "the model's buffer most is infinite"),
        ("synchronised", "the model's norm is a SyncBatchNorm"),
    ],
)
def test_what_a_forward_writes_and_nobody_can_put_together_is_named(here, refused, kind, named):
    recipe = tiny.write_recipe(here, RECIPE, "odd.py")
    assert named in refused("train", str(recipe), "--kind", kind, "--run-dir", "run")


def test_state_of_a_loss_is_named(here, refused):
    recipe = with_forward(here, "pass")
    text = recipe.read_text()
    closure = (
        "def made():\n    kept = []\n    def loss(o, t):\n"
        "        kept.append(o.detach().mean())\n"
        "        return nn.functional.cross_entropy(o, t) * (1 + torch.stack(kept).mean())\n"
        "    return loss\n\nrecipe ="
    )
    recipe.write_text(
        text.replace("recipe =", closure).replace("loss=Scaled(False)", "loss=made()")
    )
    assert "the loss's kept" in refused("train", str(recipe), "--run-dir", "run")
    recipe.write_text(text.replace("Scaled(False)", "Scaled(True)"))
    assert "the loss's buffer scale" in refused("train", str(recipe), "--run-dir", "run2")


def test_a_loss_times_the_number_of_ranks_is_named_on_two_ranks(tmp_path):
    number = "int(os.environ['WORLD_SIZE'])"
    recipe = with_forward(tmp_path, f"out = out * {number} if self.training else out")
    words = ("train", str(recipe), "--run-dir", str(tmp_path / "run"))
    told = refusal(*words, world_size=2, folder=tmp_path / "output")
    assert "number of ranks" in told


def test_what_forward_only_writes_is_no_state_and_what_is_may_be_let_pass(here):
    tiny.trained(with_forward(here, HARMLESS.strip()), here / "run", "--max-steps", "3")
    recipe = with_forward(here, HIDDEN["a counter of forwards"][0])
    tiny.trained(recipe, here / "run2", "--max-steps", "3", "--no-self-check")
