"""A recipe's own optimizer and schedule, and branches that leave parameters unused."""

import shutil
import signal

import pytest
import torch
from torch import nn

from samestep import Recipe, Settings, Splits
from samestep.base.errors import UserError
from samestep.base.phases import make_phases
from samestep.core.learner.optimizer import Update, optimizer_of, set_lr
from samestep.core.learner.optimizer_state import groups_of, load_state, what_groups_keep
from samestep.core.plan import learning_rate, make_plan
from samestep.core.training.compiled import ModelStep
from samestep.core.training.steps import make_step, what_compiles
from samestep.core.training.work import Learner
from samestep.launch.ranks.world import World
from tests import tiny
from tests.faults import Fault

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def two_groups(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    body, head = model[0].parameters(), model[2].parameters()
    groups = [{"params": body, "lr": settings.lr / 10}, {"params": head, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, weight_decay=settings.weight_decay)


def recipe_of(**parts) -> Recipe:
    return Recipe(model=network, data=lambda: Splits(train=(torch.ones(1), torch.ones(1))), **parts)


def test_groups_keep_their_ratio_and_a_frozen_weight_may_be_missing():
    sizes = {"lr_scaling": "linear", "base_batch_size": 8, "batch_size": 32, "epochs": 3}
    settings = Settings(lr=0.1, weight_decay=0.3, warmup_steps=3, **sizes)
    plan, model = make_plan(settings, 128, 1), network()
    optimizer = optimizer_of(recipe_of(optimizer=two_groups), model, settings, plan.lr, CPU)
    optimizer.param_groups[0]["lr"] = held = torch.tensor(0.04)
    for step, scale in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        set_lr(optimizer, learning_rate(plan, settings, step))
        rates = [g["lr"] for g in optimizer.param_groups]
        assert rates == pytest.approx([0.04 * scale, 0.4 * scale])
    assert optimizer.param_groups[0]["lr"] is held
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]

    def schedule(step, total):
        assert step < total
        return 1 - (step + 1) / (total + 1)

    settings = Settings(lr=0.1, batch_size=8, epochs=1)
    plan = make_plan(settings, 48, 1, schedule=schedule)
    rates = [learning_rate(plan, settings, step) for step in (5, 6, 700)]
    assert rates == pytest.approx([0.1 / 7] * 3)
    model = network()
    model[0].requires_grad_(requires_grad=False)
    recipe = recipe_of(optimizer=lambda model, settings: torch.optim.SGD(model[2].parameters()))
    optimizer = optimizer_of(recipe, model, Settings(), 0.5, CPU)
    assert len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize(
    ("parts", "flags", "why"),
    [
        ({}, {}, None),
        ({"optimizer": two_groups}, {}, "optimizer"),
        ({"loss_terms": len, "collate": list}, {}, "collate, loss_terms"),
        ({"forward": nn.Module.__call__}, {}, "forward"),
        ({}, {"ema": 0.9}, "--ema"),
        ({}, {"precision": "fp16"}, "fp16"),
        ({}, {"precision": "bf16", "param_dtype": "bf16"}, "type"),
    ],
)
def test_why_whole_steps_are_not_compiled_is_said_by_name(parts, flags, why):
    settings = Settings(compile="on", batch_size=8, epochs=1, **flags)
    recipe, model, world = recipe_of(**parts), network(), World()
    compiles = what_compiles(settings, world, model, own=recipe.own_parts())
    optimizer = optimizer_of(recipe, model, settings, 0.1, CPU)
    how = {"scaler": None, "loss": nn.functional.cross_entropy, "own": recipe.own_parts()}
    modules = dict.fromkeys(("model", "applied", "wrapped"), model)
    learner = Learner(**modules, optimizer=optimizer, **how)
    plan = make_plan(settings, 48, 1)
    step = make_step(compiles, learner, settings, world, plan, 1, make_phases(CPU))
    assert isinstance(step, ModelStep) is (why is not None)
    if why is not None:
        assert why in step.what


OWN = """
from dataclasses import replace
def optimizer(model, settings):
    groups = [{"params": model[0].parameters(), "lr": settings.lr / 10, "betas": (0.8, 0.99)},
              {"params": model[2].parameters(), "weight_decay": 0.1}]
    return torch.optim.NAdam(groups, lr=settings.lr)
def schedule(step, total): return 1 - step / total
recipe = replace(recipe, optimizer=optimizer, schedule=schedule)
"""
FLAGS = ("--epochs", "2", "--warmup-steps", "3")

SEVERAL = """
from dataclasses import replace
def optimizers(model, settings):
    body, head = model[0].parameters(), [{"params": [p]} for p in model[2].parameters()]
    return (torch.optim.SGD(body, settings.lr, momentum=0.9), torch.optim.NAdam(head, 3e-3))
recipe = replace(recipe, optimizer=optimizers)
"""

# A sample in nine is of the kind that the second branch is for: some steps have none of them, and
# in others one rank has none.
BRANCHES = """
from dataclasses import replace
class Branches(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.often, self.seldom = nn.Linear(8, 2), nn.Linear(8, 2)
        self.mixed = nn.Linear(2, 2)
    def forward(self, x):
        kind = x[:, 2] > 1.25
        y = x.new_zeros(len(x), 2)
        for branch, rows in ((self.often, ~kind), (self.seldom, kind)):
            if rows.any(): y = y.index_put((rows.nonzero()[:, 0],), branch(x[rows]))
        return self.mixed(y)
recipe = replace(recipe, model=Branches)
"""


# A layer that no step uses, and one that is used twice.
SPARE = """
from dataclasses import replace
class Spare(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.spare = nn.Linear(8, 2)
    def forward(self, x): return self.last(self.again(self.again(self.first(x)).tanh()).tanh())
recipe = replace(recipe, model=Spare, loss_terms=lambda batch: 3.0 * len(batch[1]))
"""


def test_with_it_stopped_or_with_unused_branches_the_training_is_the_same_on_other_ranks(tmp_path):
    decay = ("--epochs", "2", "--weight-decay", "0.1", "--optimizer", "adamw")
    flags = {"own": FLAGS, "branches": decay, "spare": (*decay, "--clip-norm", "0.5")}
    recipes = {}
    for name, text in {"own": OWN, "branches": BRANCHES, "spare": SPARE}.items():
        recipes[name] = tiny.write_recipe(tmp_path, tiny.RECIPE + text, f"{name}.py")
        tiny.trained(recipes[name], tmp_path / name, *flags[name])
    stopped = [tmp_path / f"own, on {ranks}" for ranks in (1, 2)]
    tiny.struck(recipes["own"], stopped[0], Fault("after a step", signum=signal.SIGTERM), *FLAGS)
    shutil.copytree(*stopped)
    others = [
        [recipes[name], "--run-dir", tmp_path / f"{name}, on 2", *flags[name], more]
        for name, more in (("branches", "--find-unused"), ("spare", "--static-graph"))
    ]
    tiny.resumed(stopped[0])
    tiny.train_all([[stopped[1], "--resume"], *others], on=2, folder=tmp_path)
    tiny.assert_same_training(stopped[0], tmp_path / "own", 0.0)
    for name in recipes:
        tiny.assert_same_training(tmp_path / f"{name}, on 2", tmp_path / name)
    for run in stopped:
        groups = [
            tiny.last_state(one)["optimizer"]["param_groups"] for one in (run, tmp_path / "own")
        ]
        assert groups[0] == groups[1]


@pytest.mark.slow
def test_several_optimizers_take_one_step_whatever_the_ranks_strategy_and_engine(tmp_path):
    recipe = tiny.write_recipe(
        tmp_path, tiny.RECIPE.replace('"checkpoint_every_steps": 4,', "") + SEVERAL
    )
    flags = ("--epochs", "1", "--clip-norm", "0.05", "--schedule", "cosine")
    virtual = ("--virtual-ranks", "2")
    how = {"fsdp": ("--ema", "0.9", "--strategy", "fsdp"), "virtual": virtual}
    one, *others = (tmp_path / name for name in ("one", "lightning", "alone", "fsdp", "virtual"))
    tiny.trained(recipe, one, *flags, "--ema", "0.9")
    tiny.trained(recipe, others[0], *flags, "--engine", "lightning")
    tiny.trained(recipe, others[1], *flags, *virtual)
    words = [[recipe, "--run-dir", tmp_path / name, *flags, *more] for name, more in how.items()]
    tiny.train_all(words, on=2, folder=tmp_path)
    tiny.assert_same_training(others[2], one)
    tiny.assert_close(tiny.last_state(others[0])["model"], tiny.last_state(one)["model"], 1e-12)
    hashes = [tiny.last_state(run)["weights_sha256"] for run in (others[1], others[3])]
    assert hashes[0] == hashes[1]
    for record in tiny.events(one, "step"):
        assert record["lr_SGD"] == record["lr"]
        assert record["lr_NAdam"] == pytest.approx(0.3 * record["lr"])


def test_a_gradient_that_overflows_leaves_out_the_step_of_each_of_several_optimizers():
    model = network()
    parts = [torch.optim.SGD(model[0].parameters()), torch.optim.AdamW(model[2].parameters())]
    optimizer = optimizer_of(recipe_of(optimizer=lambda *_: parts), model, Settings(), 1e-3, CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    update = Update(optimizer, scaler)
    for factor in (float("inf"), 1.0):
        before = [p.clone() for p in model.parameters()]
        model.zero_grad()
        scaler.scale(model(torch.ones(2, 4).double()).sum()).backward()
        model[2].weight.grad.mul_(factor)
        update(1e-3)
        same = [
            torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)
        ]
        assert same == [factor != 1.0] * len(same)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (lambda m: [m[0], m], r"number 2, SGD, are both given 0\.weight, 0\.bias"),
        (lambda m: [m, nn.Linear(2, 2).requires_grad_(requires_grad=False)], "number 2, SGD,"),
        (lambda m: [m[0], m[2].weight], "not given 2.bias"),
        (lambda _: [], "empty list"),
        (lambda m: [m[0], None], "returned a NoneType"),
    ],
)
def test_several_optimizers_that_do_not_share_out_the_model_are_refused(parts, named):
    def optimizers(model, _):
        return [
            None
            if one is None
            else torch.optim.SGD(one.parameters() if isinstance(one, nn.Module) else [one])
            for one in parts(model)
        ]

    with pytest.raises(UserError, match=named):
        optimizer_of(recipe_of(optimizer=optimizers), network(), Settings(), 1e-3, CPU)


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused():
    layer = nn.Linear(2, 2)

    def of(kind):
        recipe = Recipe(model=lambda: layer, data=dict, optimizer=lambda m, _: kind(m.parameters()))
        return optimizer_of(recipe, layer, Settings(), 0.1, CPU)

    adam = of(torch.optim.AdamW)
    kept = what_groups_keep(adam, groups_of(adam))
    load_state(of(torch.optim.AdamW), adam.state_dict(), kept=kept)
    with pytest.raises(UserError):
        load_state(of(torch.optim.Adagrad), adam.state_dict(), kept=kept)
    several = of(lambda parameters: [torch.optim.AdamW([one]) for one in parameters])
    for one, other in ((several, adam), (adam, several)):
        with pytest.raises(UserError, match=r"the state of [12] optimizers?"):
            load_state(one, other.state_dict())
