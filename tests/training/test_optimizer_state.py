"""What optimizers gather in their groups or by a state_dict of their own comes back in a resume."""

import inspect
import random
import signal
from enum import IntEnum

import pytest
import torch
from torch import nn

from samestep import Recipe, Settings
from samestep.base.errors import UserError
from samestep.base.run.checkpoints import why_not_kept
from samestep.core.learner.kept_objects import packed, unpacked
from samestep.core.learner.optimizer import Update, optimizer_of
from samestep.core.learner.optimizer_state import Trial, groups_of, load_state, what_groups_keep
from samestep.core.session.trained_model import evaluate_run, open_checkpoint
from tests import tiny
from tests.command_line import read_json
from tests.faults import Fault

CPU = torch.device("cpu")


class Slowing(torch.optim.Optimizer):  # it counts in its groups, and has a mean of the weights
    def __init__(self, params, lr, weight_decay=0.0, **groups):
        more = {"weight_decay": weight_decay, "k": 0, "d": 1.0}
        super().__init__(params, {"lr": lr, **more, **groups})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group.setdefault("since", 0.5)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=p.float(), factors={"a": p.float() * 0})
                state["factors"]["a"].add_(p.grad)
                change = p.grad + state["factors"]["a"]
                p.mul_(1 - group["weight_decay"]).add_(change, alpha=-group["lr"] / group["k"])
                state["mean"].lerp_(p.float(), group["since"] / group["k"])


class Counting(Slowing):  # it counts in an attribute of its own
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        self._opened = self.steps
        super().step()


class Keeping(Slowing):
    """It keeps outside its state what each step changes, and fills a cache in the first."""

    def __init__(self, params, lr, kept, change):
        super().__init__(params, lr)
        self._kept, self._change = kept, change

    def step(self, closure=None):
        self._filled = torch.ones(3)
        self._change(self._kept)
        super().step()


KEPT = [
    ({"m": torch.zeros(2)}, lambda kept: kept["m"].add_(1)),
    (random.Random(3), lambda kept: kept.random()),
]


class Free(Slowing):  # with other weights to evaluate than to train, as schedule-free ones have
    def __init__(self, params, lr):
        super().__init__(params, lr, training=False)

    def step(self, closure=None):
        assert self.param_groups[0]["training"]
        self.state["steps"] = self.state.get("steps", torch.zeros(1)) + 1  # as MADGRAD has it
        super().step()

    @torch.no_grad()
    def _move(self, training, weight):
        for group in self.param_groups:
            if group["training"] != training:
                group["training"] = training
                for p in group["params"]:
                    if p in self.state:
                        p.lerp_(self.state[p]["mean"].to(p), weight)

    def train(self):
        self._move(True, 1 - 1 / 0.3)

    def eval(self):
        assert self.state, "like SPlus, it has nothing to evaluate before the first step"
        self._move(False, 0.7)


class Falling(Slowing):  # it lowers the rate that it is given, like SWATS
    def step(self, closure=None):
        (group,) = self.param_groups
        assert group["lr"] == pytest.approx({4: 0.05}.get(group["k"], group.get("next", 0.1)))
        super().step()
        group["next"] = group["lr"] = group["lr"] * 0.9


class Outer:  # around another one and of no class of PyTorch's, like a schedule-free wrapper
    def __init__(self, params, lr):
        self.base = Slowing(params, lr)

    param_groups, state, step, state_dict, load_state_dict = (
        property(lambda self, name=name: getattr(self.base, name))
        for name in ("param_groups", "state", "step", "state_dict", "load_state_dict")
    )


Kind = IntEnum("Kind", ["FIRST"])
Held = type("Held", (), {"factor": torch.ones(1)})  # as GaLore has projections


class Holding(Slowing):  # its state has an object; it may share the object
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            held = self.state[p].setdefault("held", Held())
            held.factor, held.kind = held.factor * 0.5, Kind.FIRST
            p.data.mul_(1 - held.factor)
            if "share" in self.param_groups[0]:
                self.state[p]["held"] = self.param_groups[0].setdefault("held", held)


class Relative(Slowing):  # it finds its learning rate itself, like Adafactor
    def __init__(self, params, lr):
        super().__init__(params, None)

    def step(self, closure=None):
        (group,) = self.param_groups
        assert group["lr"] == (1 / group["k"] if group["k"] else None), "nobody else has set it"
        group["lr"] = 1 / (group["k"] + 1)
        super().step()


RECIPE = f"""{tiny.RECIPE.replace('"checkpoint_every_steps": 4,', "")}
from dataclasses import replace
{inspect.getsource(Slowing)}
{inspect.getsource(Free)}
recipe = replace(recipe, optimizer=lambda model, settings: Free(model.parameters(), settings.lr))
"""


class Joint(torch.optim.Optimizer):
    """Two optimizers in one, with a state_dict of its own; it may lose the second's."""

    def __init__(self, params, lr, loses=False):
        first, *others = params
        self.parts = [Slowing([first], lr=lr), torch.optim.AdamW(others, lr=lr)]
        super().__init__([group for one in self.parts for group in one.param_groups], {})
        self.loses = loses

    def step(self, closure=None):
        for one in self.parts:
            one.step()

    def state_dict(self):
        return {"parts": [one.state_dict() for one in self.parts]}

    def load_state_dict(self, state):
        for one, saved in list(zip(self.parts, state["parts"], strict=True))[: 2 - self.loses]:
            one.load_state_dict(saved)
        self.param_groups = [group for one in self.parts for group in one.param_groups]


class Around(Joint):
    """As many a Lookahead, it has another's groups and calls no `super().__init__()`."""

    def __init__(self, params, lr):
        self.parts = [Slowing(params, lr=lr)]
        self.param_groups, self.state = self.parts[0].param_groups, self.parts[0].state
        self.loses = False
        self.shares = Slowing([nn.Parameter(torch.zeros(1))], lr)
        self.shares.state = self.state  # without the groups that its keys are of


def made(kind, weights, **how):
    """Return a model, its optimizer, the step and what the groups held."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3).to(weights)
    recipe = Recipe(
        model=lambda: model, data=dict, optimizer=lambda m, s: kind(m.parameters(), lr=s.lr, **how)
    )
    optimizer = optimizer_of(recipe, model, Settings(lr=0.1), 0.1, CPU)
    return model, optimizer, Update(optimizer), groups_of(optimizer)


def take(model, update, steps):
    for step in steps:
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(inputs.to(model.weight.dtype)).square().mean().backward()
        update(0.1 / (step // 4 + 1))


def test_a_run_with_an_optimizer_around_another_goes_on_from_its_own_form_of_state(tmp_path):
    kinds = "\n".join(map(inspect.getsource, (Slowing, Joint, Around)))
    made = "recipe = replace(recipe, optimizer=lambda m, s: Around(m.parameters(), s.lr))\n"
    text = f"{tiny.RECIPE}\nfrom dataclasses import replace\n{kinds}\n{made}"
    recipe = tiny.write_recipe(tmp_path, text)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    tiny.trained(recipe, straight, "--max-steps", "9")
    tiny.trained(recipe, stopped, "--max-steps", "6")
    tiny.resumed(stopped, "--max-steps", "9")
    one, other = (tiny.last_state(run)["model"] for run in (straight, stopped))
    assert all(torch.equal(one[name], other[name]) for name in one)


def several(params, lr):
    """Return one with a state_dict of its own form, and one that counts in its groups."""
    first, second = params
    return [Around([first], lr), Slowing([second], lr)]


KINDS = {"groups": Slowing, "joint": Joint, "around": Around, "several": several, "rate": Relative}
KINDS |= {"falls": Falling, "objects": Holding, "outer": Outer}


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_resume_is_the_same_to_the_last_bit(kind, weights):
    straight, first, _, _ = whole = made(kind, weights)
    take(straight, whole[2], range(6))
    before, optimizer, update, groups = made(kind, weights)
    take(before, update, range(3))
    saved, kept = packed(optimizer), what_groups_keep(optimizer, groups)
    assert why_not_kept(saved) == ""
    model, optimizer, update, groups = made(kind, weights)
    model.load_state_dict(before.state_dict())
    load_state(optimizer, saved, groups, kept)
    take(model, update, range(3, 6))
    assert torch.equal(model.weight, straight.weight)
    assert torch.equal(model.bias, straight.bias)
    assert groups_of(optimizer) == groups_of(first)


def test_settings_are_todays_and_what_was_gathered_is_the_checkpoints():
    model, optimizer, update, groups = made(Slowing, torch.float32, weight_decay=0.5)
    take(model, update, range(3))
    kept = what_groups_keep(optimizer, groups)
    _, now, _, groups = made(Slowing, torch.float32, weight_decay=0.25)
    load_state(now, optimizer.state_dict(), groups, kept)
    found = {"lr": 0.1, "lr_ratio": 1.0, "weight_decay": 0.25, "k": 3, "d": 1.0, "since": 0.5}
    assert groups_of(now) == [found]


def test_an_optimizer_that_a_checkpoint_would_not_bring_back_is_told_in_the_first_step():
    model, _, update, _ = made(Joint, torch.float32, loses=True)
    with pytest.raises(UserError, match=r"\['parts'\]\[1\]\['state'\]\[0\].* missing"):
        take(model, update, range(1))
    model, _, update, _ = made(
        lambda p, lr: [Slowing([next(p)], lr), Counting(p, lr)], torch.float32
    )
    with pytest.raises(
        UserError, match=r"Slowing \+ Counting.* attribute steps, .*--no-self-check"
    ):
        take(model, update, range(1))
    model, optimizer, update, _ = made(Holding, torch.float32, share=True)
    for other in (UserError, torch.Tensor):  # a file may name what the module only imports
        with pytest.raises(UserError, match="of another package"):
            unpacked({"object of": f"{__name__}:{other.__name__}", "holds": {}}, optimizer)
    with pytest.raises(UserError, match=r"Holding.* cannot: objects of .*\.Held"):
        take(model, update, range(1))
    for kept, change in KEPT:
        model, _, update, _ = made(Keeping, torch.float32, kept=kept, change=change)
        take(model, update, range(1))
        with pytest.raises(UserError, match=r"its attribute _kept, .*--no-self-check"):
            take(model, update, range(1, 2))
    model, optimizer, update, _ = made(Slowing, torch.float32)
    update._sharded, optimizer.step = True, lambda: getattr(model, "DTensor. Please say more")
    with pytest.raises(UserError, match=r"no attribute 'DTensor at .* Use --strategy ddp"):
        take(model, update, range(1))
    optimizer.step = lambda: torch.autograd.grad(model.weight.grad.sum(), model.weight)
    with pytest.raises(UserError, match="create_graph"):
        take(model, update, range(1))


def test_what_it_has_for_evaluations_is_evaluated_and_changes_no_bit_of_the_training(tmp_path):
    recipe = tiny.write_recipe(tmp_path, RECIPE)
    runs = straight, stopped, often = [tmp_path / name for name in ("straight", "stopped", "often")]
    flags = ("--epochs", "2")
    tiny.trained(recipe, straight, *flags)
    tiny.trained(recipe, often, *flags, "--eval-every", "5steps")
    tiny.struck(recipe, stopped, Fault("after a step", nth=6, signum=signal.SIGTERM), *flags)
    tiny.resumed(stopped)
    tiny.assert_same_training(stopped, straight, 0.0)
    ends = [tiny.last_state(run) for run in runs]
    for end in ends:
        assert end["optimizer"]["param_groups"] == ends[0]["optimizer"]["param_groups"]
        assert all(torch.equal(end["ema"][n], ends[0]["ema"][n]) for n in end["ema"])
        assert all(torch.equal(end["model"][n], ends[0]["model"][n]) for n in end["model"])
    state, opened = ends[0], open_checkpoint(straight, "last", device="cpu").model
    mean = state["optimizer"]["state"][0]["mean"]
    by_hand = state["model"]["0.weight"].lerp(mean.double(), 0.7)
    assert torch.equal(opened[0].weight, by_hand)
    assert not torch.equal(by_hand, state["model"]["0.weight"])
    found = evaluate_run(straight, "last", split="validation")["loss"]
    assert found == pytest.approx(tiny.events(straight, "evaluation")[1]["loss"], rel=1e-12)
    tiny.trained(recipe, tmp_path / "lightning", "--epochs", "1", "--engine", "lightning")
    validated = (
        tiny.events(tmp_path / n, "evaluation")[0]["loss"] for n in ("lightning", "straight")
    )
    assert next(validated) == pytest.approx(next(validated), rel=1e-12)
    tested = evaluate_run(straight, "best", split="test")["loss"]
    assert read_json(straight / "result.json")["test"]["loss"] == pytest.approx(tested, rel=1e-12)


def test_step_counts_that_torch_loads_as_float32_are_not_lost():
    """Those of a fused optimizer are float64 where that is the default type, as in `verify`."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    trial, weight.grad = Trial(optimizer), torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = state["state"][0]["step"].double()
    assert trial.why_lost(optimizer, state) == ""
