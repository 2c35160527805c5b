"""A loss may name the step; what it counts itself, and state that gets lost or grows, are told."""

import inspect

import pytest
import torch
from torch import nn

import samestep
from samestep.core.learner import unkept
from samestep.launch.ranks.world import World
from tests import tiny

BEFORE = """
from dataclasses import replace
ce = nn.functional.cross_entropy
"""
AFTER = """
recipe = replace(recipe, loss=loss() if isinstance(loss, type) else loss)
"""
NAMES_IT = """
def loss(outputs, targets, step, *, epoch=-1): return 0 * ce(outputs, targets) + step + 100 * epoch
"""


def write(folder, loss: str):
    return tiny.write_recipe(folder, tiny.RECIPE + BEFORE + loss + AFTER, "counts.py")


def losses(run, event: str) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in tiny.events(run, event)]


@pytest.mark.parametrize("flags", [(), ("--virtual-ranks", "3")], ids=["", "virtual ranks"])
def test_a_loss_is_given_the_step_and_the_epoch_that_it_names(tmp_path, flags):
    """Also once resumed; an evaluation has those of the newest step of the weights."""
    run = tmp_path / "run"
    tiny.trained(write(tmp_path, NAMES_IT), run, *flags, "--epochs", "2", "--max-steps", "14")
    tiny.resumed(run, "--max-steps", "22")
    expected = [(step, step - 1 + 100 * ((step - 1) // 11)) for step in range(1, 23)]
    assert losses(run, "step") == [(step, pytest.approx(loss)) for step, loss in expected]
    # After the first epoch, at the stop and at the end, where the best one is tested.
    ended = [(11, 10), (14, 113), (22, 121), (22, 10)]
    assert losses(run, "evaluation") == [(step, pytest.approx(loss)) for step, loss in ended]
    found = [samestep.evaluate(run, name)["loss"] for name in ("best", "last")]
    assert found == pytest.approx([10, 121])


# A loss → what it keeps that decides its value, or may do so later.
KEPT = {
    "class loss:\n n = 0\n def __call__(s, o, t): s.n += 1; return ce(o, t) * max(1, s.n - 9)": "n",
    "def made(n=0):\n def loss(o, t): nonlocal n; n += o.requires_grad; return ce(o, t) * n / 20\n"
    " return loss\nloss = made()": "n",
    "seen = 0\ndef loss(o, t): global seen; seen += 1; return ce(o, t) * min(1, seen / 20)": "seen",
    "def loss(o, t): loss.n = getattr(loss, 'n', 0) + 1; return ce(o, t) * min(1, loss.n / 9)": "n",
    """
class loss(nn.Module):
    def __init__(self): super().__init__(); self.register_buffer("centre", torch.zeros(2))
    def forward(self, o, t):
        self.centre.mul_(0.9).add_(o.detach().mean(0), alpha=0.1)
        return ce(o - self.centre, t, label_smoothing=0.1) + self.centre.sum()
""": "centre",
    """
class loss:
    def __init__(self): self.log = []
    def __call__(self, o, t):
        self.log.append(len(t)); self.last, self.size = o.detach().mean(), len(o)
        return ce(o, t)
""": "",
}
# The same, each counting by what it is given before `loss`.
COUNTED = {
    "import itertools\nsteps = itertools.count(1)": ("steps", "next(steps)"),
    "steps = torch.zeros(())": ("steps", "steps.add_(1).item()"),
    "class Steps:\n    n = 0\n    def __call__(self):\n        self.n += 1\n        return self.n\n"
    "annealed = Steps()": ("annealed", "annealed()"),
    "box = [0]\ndef count():\n    box[0] += 1\n    return box[0]": ("box", "count()"),
    "steps = (n for n in range(1, 1000))": ("steps", "next(steps)"),
    "import random\nrng = random.Random(0)": ("rng", "rng.random()"),
}
for before, (kept, counted) in COUNTED.items():
    KEPT[f"{before}\ndef loss(o, t):\n    return ce(o, t) * min(1.0, {counted} / 20)\n"] = kept
KEPT["class loss:\n n = 0\n def __call__(self, o, t): loss.n += 1; return ce(o, t) * loss.n"] = "n"
KEPT["def loss(o, t, n=[0]): n[0] += 1; return ce(o, t) * min(1.0, n[0] / 20)"] = "n"
IDS = ("attribute", "closure", "global", "attribute of a function", "buffer", "harmless")
IDS += ("itertools", "tensor", "object", "helper", "generator", "random", "class", "default")


@pytest.mark.parametrize(("loss", "named"), KEPT.items(), ids=IDS)
def test_a_loss_that_counts_its_calls_is_told_and_not_resumed(tmp_path, refused, loss, named):
    run = tmp_path / "run"
    tiny.trained(write(tmp_path, loss), run, "--max-steps", "2")
    told = [note for note in tiny.events(run, "start")[0]["notes"] if "from call to call" in note]
    assert [f" {named} " in note for note in told] == [True] * bool(named)
    if named:
        said = refused("train", str(run), "--resume", "--max-steps", "4")
        assert f" {named} " in said
        assert "counts.py:" in said
    tiny.resumed(run, "--max-steps", "4", *["--no-self-check"] * bool(named))


PACKED = "lambda x: nn.utils.rnn.pack_sequence([a[: int(9 + a.sum()) % 7 + 1] for a in x], False)"
MASKED = "lambda x: torch.tensor([float(random.random() > 0.2) for _ in x])"
PADDED = "lambda x: torch.rand(len(x), int(99 * x[0].abs().sum()))"
BESIDE = "data=kept, forward=lambda m, b: m(b[0]), loss=lambda o, b: mean(o, b[1]), metrics={}"
# Fields of a recipe → what a note says of them, if anything.
DRAWN = {
    "data=lambda: replace(data(Options()), train=Rows())": "data set Rows (",
    "batch_transform=lambda x, y: (x * rng.random(), y)": "batch_transform (",
    "augment=lambda x, keys: x * rng.random(), transform=abs": "augment (",
    "augment=lambda x, keys: x + torch.randn_like(x)": "",
    "augment=lambda x, keys: x + samestep.uniform(keys, 8)": None,
    f"{BESIDE}, collate=partial(pairs, {PADDED})": "",
    f"{BESIDE}, collate=partial(pairs, {MASKED})": "",
    f"{BESIDE}, collate=partial(pairs, {PACKED})": None,
    f"{BESIDE}, collate=partial(pairs, lambda x: 3 * torch.arange(len(x)))": None,
    f"{BESIDE}, collate=partial(pairs, list)": None,
    "loss=partial(mean, weight=torch.tensor([1.0, 3.0]).double())": None,
}


@pytest.mark.parametrize(("fields", "named"), DRAWN.items(), ids=range(11))
def test_what_gives_other_samples_when_asked_again_is_told(tmp_path, fields, named):
    text = """
import samestep, random
from functools import partial
rng = random.Random(0)
def pairs(of, rows): x, y = zip(*rows); return torch.stack(x), torch.stack(y), of(x)
mean = nn.functional.cross_entropy
def kept():
    splits = data(Options())
    rows = torch.utils.data.TensorDataset(*splits.train)
    return Splits(train=rows, validation=rows)
class Rows(list):
    def __len__(self): return 30
    def __getitem__(self, i): return torch.full((8,), i + rng.random()).double(), i % 2
"""
    text = f"{tiny.RECIPE}{BEFORE}{text}recipe = replace(recipe, {fields})\n"
    run = tmp_path / "run"
    few = ("--max-steps", "1", "--micro-batch-size", "2")
    tiny.trained(tiny.write_recipe(tmp_path, text, "draws.py"), run, *few)
    told = " ".join(tiny.events(run, "start")[0]["notes"])
    assert ("or is drawn for all of them" in told) == (named == "")
    assert ("when it is asked again" in told) == bool(named)
    assert f"recipe's {named or ''}" in told or named is None
    assert ("is not the mean of" in told) == ("weight=" in fields)


class Buffers(nn.Module):
    """A model with buffers that training changes, or that come back by themselves."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("codes", torch.zeros(2))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("drift", torch.zeros(2), persistent=False)
        self.register_buffer("places", None, persistent=False)

    def forward(self, x):
        self.places = torch.arange(len(x))
        self.codes = 0.9 * self.codes + 0.1 * x.mean(0)
        self.steps += 1
        self.drift += 1
        return self.norm(x)


def test_buffers_that_are_lost_or_made_of_a_ranks_own_samples_are_told(tmp_path):
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))

    def found(**world: int):
        model = Buffers()
        return unkept.of_buffers(model, lambda rows: model(x[:rows]), 8, World(**world))

    by_call = ("codes", "steps", "drift")
    assert found() == {"lost": ("drift",), "of_rank": (), "by_call": by_call}
    own = {"lost": ("drift",), "of_rank": ("codes",), "by_call": by_call}
    assert found(world_size=2) == own
    assert found(world_size=2, virtual_ranks=4)["of_rank"] == ()

    text = (
        "\nclass Drifts(nn.Linear):\n    def forward(self, x):\n"
        "        self.drift += self.training\n        return super().forward(x) + self.drift\n\n"
        "def drifts():\n    model = Drifts(8, 2)\n"
        "    model.register_buffer('drift', torch.zeros(2), persistent=False)\n"
        "    model.weight.register_hook(torch.neg)\n    return model\n"
        "class Loss(nn.PReLU):\n    def forward(self, o, t): return nn.functional.nll_loss(o, t)\n"
        "from dataclasses import replace\nrecipe = replace(recipe, model=drifts, loss=Loss())\n"
    )
    recipe = tiny.write_recipe(tmp_path, tiny.RECIPE + text)
    tiny.trained(recipe, tmp_path / "run", "--max-steps", "1", "--micro-batch-size", "1")
    told = " ".join(tiny.events(tmp_path / "run", "start")[0]["notes"])
    named = ["drift", "Each forward changes the model's buffer drift", "persistent=True"]
    named += ["Hooks of weight", "The loss's weight"]
    assert [name for name in named if name not in told] == []


class Counts(nn.Linear):  # it counts its calls, and has filled a cache after the first
    n, cache = 0, None

    def forward(self, x):
        self.n += self.training
        self.cache = self.cache or [1.0]
        return super().forward(x) * self.n / 20


class Keeps(Counts):
    def get_extra_state(self):
        return {"n": self.n}

    def set_extra_state(self, state):
        self.n = state["n"]


def test_a_model_that_counts_its_calls_is_told_and_not_resumed_unless_its_state_has_it(tmp_path):
    x, calls = torch.ones(8, 2), [0]

    def found(model, function=None):
        applied = function or (lambda model, x: model(x))
        return unkept.of_forward(model, function, lambda rows: applied(model, x[:rows]), 2)

    def counting(model, x):
        calls[0] += 1
        return model(x) * calls[0]

    assert found(Counts(2, 2)) == {"forward": ("n",)}
    assert found(nn.Sequential(nn.Dropout(), Counts(2, 2))) == {"forward": ("1.n",)}
    assert found(Counts(2, 2), lambda model, x: 0 * model(x)) == {"counts": ("n",)}
    assert found(Counts(2, 2), lambda model, x: (0 * model(x), model.n)) == {"forward": ("n",)}
    assert not any((found(Keeps(2, 2)) | found(nn.BatchNorm1d(2))).values())
    assert found(nn.Linear(2, 2), counting) == {"forward": ("forward's calls",)}

    text = inspect.getsource(Counts).replace("self.n / 20", "min(1.0, self.n / 20)")
    text += "\nfrom dataclasses import replace\n"
    text += "recipe = replace(recipe, model=lambda options: Counts(8, 2))\n"
    run = tmp_path / "run"
    tiny.trained(tiny.write_recipe(tmp_path, tiny.RECIPE + text), run, "--max-steps", "1")
    assert " changes n," in tiny.events(run, "start")[0]["notes"][0]
    with pytest.raises(samestep.UserError, match="changes n from call to call"):
        samestep.train(run, resume=True, max_steps=2, quiet=True)


GROWS = """
class Grows(nn.Linear):
    def __init__(self):
        super().__init__(8, 2)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("none", None)
        self.layers = nn.ModuleList()
        self.calls = 0
    LOADING
    def get_extra_state(self): return {"calls": self.calls}
    def set_extra_state(self, state): self.calls = state["calls"]
    def forward(self, x):
        if self.training:
            self.calls += 1
            FORWARD
        return super().forward(x) + self.seen.sum()
recipe = replace(recipe, model=lambda: Grows().double())
"""
GROWING = "self.seen = torch.cat([self.seen, self.seen.new_full((1,), 1e-3 * self.calls)])"
MAKES_ROOM = """
    def _load_from_state_dict(self, state, prefix, *others):
        self.seen = torch.zeros_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *others)
"""


def write_growing(folder, forward: str, loading: str = "", **other: str):
    text = GROWS.replace("FORWARD", forward).replace("    LOADING", loading)
    for old, new in other.items():
        text = text.replace(old, new)
    imports = "from dataclasses import dataclass"
    return tiny.write_recipe(
        folder, tiny.RECIPE.replace(imports, f"{imports}, replace") + text, "grows.py"
    )


def test_a_buffer_for_which_its_module_makes_room_resumes_to_the_last_bit(tmp_path):
    recipe = write_growing(tmp_path, GROWING, MAKES_ROOM, **PACKS)
    tiny.trained(recipe, tmp_path / "whole", "--max-steps", "13")
    tiny.trained(recipe, tmp_path / "stopped", "--max-steps", "9")
    tiny.resumed(tmp_path / "stopped", "--max-steps", "13")
    one, other = (tiny.last_state(tmp_path / name)["model"] for name in ("stopped", "whole"))
    assert one["_extra_state"].tolist() == [1] * 13 == [1] * len(one["seen"])
    torch.testing.assert_close(one, other, rtol=0, atol=0)


PACKS = {'{"calls": self.calls}': "torch.ones(self.calls, dtype=torch.uint8)"}
PACKS['state["calls"]'] = "len(state.numpy())"
KEPT_APART = {"self.calls = state": "self.kept = state"}
GROWN = "seen has shape (1,), the model (0,)"
# What a forward does, with a change of the model, and what is then told.
LOST = {
    "grows": (GROWING, {}, GROWN),
    "grows in step 2": (f"if self.calls == 2: {GROWING}", {}, GROWN),
    "another type": ("self.seen = self.seen.float()", {}, "seen'] is a float32 tensor (0,), and"),
    "begins as None": ("self.none = x[:1].detach()", {}, "none is not in the model"),
    "gets layers": ("self.layers.append(nn.Linear(2, 2))", {}, "layers.0.weight is not in"),
    "extra state": ("pass", KEPT_APART, "['_extra_state']['calls'] is 1, and 0"),
}


@pytest.mark.parametrize(("forward", "other", "named"), LOST.values(), ids=LOST)
def test_state_that_no_checkpoint_leads_back_to_is_named_after_the_step(
    tmp_path, refused, forward, other, named
):
    recipe, run = write_growing(tmp_path, forward, **other), tmp_path / "run"
    told = refused("train", str(recipe), "--run-dir", str(run), "--checkpoint-every-steps", "1")
    assert named in told
    assert f"{recipe.name}:" in told
    assert len(list(run.rglob("*.pt"))) <= 1
