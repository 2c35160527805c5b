"""A loss may be a sum, or several by name; what needs the model is measured in evaluations."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep import Recipe, Settings, UserError
from samestep.core.data.order import epoch_order
from samestep.core.learner.apply import parts_of, summed
from tests import tiny
from tests.command_line import train_here
from tests.faults import Fault
from tests.steps_by_hand import IN_A_GRAPH, assert_same, blocks, eager, learner, model, run, whole

RECIPE = """
import random
import torch
from torch import nn
from samestep import Recipe, Splits
def data():
    x = torch.randn(209, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return Splits(train=(x[:131], x[:131]), validation=(x[131:168], x[131:168]),
                  test=(x[168:], x[168:]))
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)
    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, dim=1)
        return self.decode(mean), mean, spread
def loss(outputs, targets):
    made, mean, spread = outputs
    kl = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
    return {"reconstruction": (made - targets).square().sum(), "kl": kl}
def measure(model, batch):
    inputs, targets = batch
    drawn = torch.rand(len(inputs), 3).to(inputs) + random.random()
    made = model.decode(model.encode(inputs)[:, :3] + drawn)
    assert not model.training and not made.requires_grad
    return {"worst": (made - targets).abs().amax(dim=1), "place": [1.0] * len(inputs)}
recipe = Recipe(
    model=VAE, data=data, loss=loss, reduction="sum", loss_weights={"kl": 0.1},
    settings={"epochs": 2, "batch_size": 12, "lr": 0.001, "precision": "fp64", "log_every": 1,
              "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "monitor": "kl"})
"""
MEASURED = RECIPE.replace("loss_weights", "evaluate_batch=measure, loss_weights")
MEANS = RECIPE.replace(".sum()", ".sum(1).mean()").replace('reduction="sum", ', "")
# Two of three samples have no terms: shares of nothing else have a loss and gradients of 0 / 0.
OF_TERMS = (
    RECIPE.replace(".sum()", ".mul(there).sum() / there.sum()")
    .replace("= outputs\n", "= outputs\n    there = (targets[:, :1] > 0.3).to(targets)\n")
    .replace('reduction="sum"', "loss_terms=lambda batch: (batch[1][:, 0] > 0.3).sum()")
)
# The model's first parameter is complex; numbers of terms need float64 all the same.
OF_COMPLEX = (
    OF_TERMS.replace("/ there.sum()", "/ (0.1 * there.sum())")
    .replace("0.3).sum()", "0.3).double().sum() * 0.1")
    .replace(
        "self.encode, ", "self.turn = nn.Parameter(torch.full((8,), 1j))\n        self.encode, "
    )
    .replace("self.encode(x)", "self.encode((x * self.turn).imag)")
)
JUDGED = RECIPE.replace('"kl"}', '"spread"}').replace(
    "recipe = Recipe(",
    """
def judge(outputs, targets, *, step):
    made, _, spread = outputs
    squares = (made - targets).square().sum()
    return {"reconstruction": squares, "spread": step * spread.square().sum()}
recipe = Recipe(evaluation_loss=judge,""",
)
# As of a set of texts, on each rank in another order.
TURNED = r"return dict([*\1.items()][:: -1 if __import__('os').environ.get('RANK') == '1' else 1])"
NAMES = ("reconstruction", "kl")
FLAGS = ("--schedule", "constant", "--lr", "0.003")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Give a function: the text of a recipe → its file, and the run of a single process."""
    runs: dict[str, tuple[Path, Path]] = {}

    def trained(text: str) -> tuple[Path, Path]:
        if text not in runs:
            folder = tmp_path_factory.mktemp("alone")
            recipe = tiny.write_recipe(folder, text)
            tiny.trained(recipe, folder / "run", *FLAGS)
            runs[text] = recipe, folder / "run"
        return runs[text]

    return trained


def test_a_sum_is_trained_its_parts_recorded_as_means_and_the_lowest_is_the_best(alone):
    _, path = alone(RECIPE)
    space: dict = {}
    exec(RECIPE, space)
    torch.manual_seed(Settings(batch_size=12, epochs=2).seed)
    net, splits = space["VAE"]().double(), space["data"]()
    x, steps = splits.train[0], iter(tiny.events(path, "step"))
    for epoch in range(2):
        order, sums = epoch_order(131, Settings(batch_size=12, epochs=2).seed, epoch), [0.0] * 3
        for places in order.split(12):
            parts = space["loss"](net(x[places]), x[places])
            total = parts["reconstruction"] + 0.1 * parts["kl"]
            gradients, record = torch.autograd.grad(total, [*net.parameters()]), next(steps)
            wanted = [float(w.detach()) for w in (total, *parts.values())]
            found = [record[name] for name in ("loss", *NAMES)]
            assert found == pytest.approx([w / len(places) for w in wanted], rel=1e-12)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
            sums = [s + w for s, w in zip(sums, wanted, strict=True)]
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter.sub_(0.003 * gradient)
        ended = tiny.events(path, "epoch")[epoch]
        found = [ended["loss"], *(ended["metrics"][name] for name in NAMES)]
        assert found == pytest.approx([s / 131 for s in sums], rel=1e-12)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(tiny.last_state(path)["model"][name], value, atol=1e-12, rtol=0)
    held_out = splits.validation[0]
    parts = space["loss"](net.requires_grad_(requires_grad=False)(held_out), held_out)
    last = [r for r in tiny.events(path, "evaluation") if r["split"] == "validation"][-1]
    assert [last[name] for name in NAMES] == pytest.approx([float(parts[n]) / 37 for n in NAMES])
    start = tiny.all_records(path)[0]
    assert (start["monitor"], start["lower_is_better"]) == ("kl", ["loss", *NAMES])
    found = [r["kl"] for r in tiny.events(path, "evaluation") if r["split"] == "validation"]
    best = json.loads((path / "result.json").read_text())["best"]
    assert (best["mode"], best["value"]) == ("min", min(found))


def test_sums_and_losses_by_name_are_the_same_on_any_ranks_and_in_micro_steps(alone, tmp_path):
    words, pairs = [], []
    whole, micro = (), ("--micro-batch-size", "3")
    for text, how in ((RECIPE, micro), (MEANS, whole), (OF_COMPLEX, whole), (OF_TERMS, micro)):
        recipe, reference = alone(text)
        path = tmp_path / str(len(pairs))
        words.append([recipe, "--run-dir", path, *FLAGS, *how])
        pairs.append((path, reference))
    tiny.train_all(words, on=3, folder=tmp_path)
    for path, reference in pairs:
        tiny.assert_same_training(path, reference, 1e-12)


def test_with_virtual_ranks_they_are_so_to_the_last_bit(alone, tmp_path):
    words, flags = [], (*FLAGS, "--virtual-ranks", "5", "--find-unused")
    texts = {"sum": RECIPE, "terms": OF_TERMS}
    for name, text in texts.items():
        recipe, reference = alone(text)
        tiny.trained(recipe, tmp_path / f"{name}-1", *flags)
        tiny.assert_same_training(tmp_path / f"{name}-1", reference, 1e-12)
        words.append([recipe, "--run-dir", tmp_path / f"{name}-2", *flags])
    tiny.train_all(words, on=2, folder=tmp_path)
    for name in texts:
        tiny.assert_same_training(tmp_path / f"{name}-2", tmp_path / f"{name}-1", 0)


def test_losses_by_name_of_epochs_that_were_stopped_are_of_all_of_them(alone, tmp_path):
    recipe, reference = alone(RECIPE)
    run = tmp_path / "run"
    for nth, more, ranks in ((1, (), 2), (12, ("--resume",), 1)):
        stop = Fault("after a step", nth, signal.SIGTERM, rank=None)
        tiny.struck(recipe, run, stop, *FLAGS, *more, on=ranks)
    assert tiny.last_state(run)["position"]["step"] == 13
    tiny.resumed(run, on=2)
    tiny.assert_same_training(run, reference, 1e-12)


def test_a_loss_by_name_that_the_recipe_gained_within_an_epoch_begins_with_the_next(tmp_path):
    recipe, path = tmp_path / "tiny.py", tmp_path / "run"
    text = RECIPE.replace('"kl"}', '"loss"}')
    recipe.write_text(text.replace('"kl": kl}', '"divergence": kl}').replace('{"kl": 0.1}', "None"))
    tiny.trained(recipe, path, *FLAGS, "--max-steps", "1")
    recipe.write_text(text)
    tiny.resumed(path, "--allow-change", "recipe", "--max-steps", "22")
    *_, first, second = tiny.events(path, "epoch")
    assert "metrics" not in first
    assert second["metrics"].keys() == {*NAMES}


def test_evaluations_measure_a_loss_of_their_own_and_the_training_stays_as_it_is(alone, tmp_path):
    """On any number of ranks, with virtual ones, and in Lightning."""
    (recipe, path), (_, plain) = alone(JUDGED), alone(RECIPE)
    weights = tiny.last_state(path)["model"]
    tiny.assert_close(dict(weights), dict(tiny.last_state(plain)["model"]), 0)
    space: dict = {}
    exec(JUDGED, space)
    net, x = space["VAE"]().double(), space["data"]().validation[0]
    net.load_state_dict(weights)
    with torch.no_grad():
        parts = {n: float(v) / 37 for n, v in space["judge"](net(x), x, step=21).items()}
    validations = [r for r in tiny.events(path, "evaluation") if r["split"] == "validation"]
    wanted = {"loss": sum(parts.values()), **parts}
    assert {n: validations[-1][n] for n in wanted} == pytest.approx(wanted, rel=1e-12)
    assert "kl" not in validations[-1]
    assert "spread" not in tiny.events(path, "step")[-1]
    start = tiny.all_records(path)[0]
    assert (start["monitor"], start["lower_is_better"]) == ("spread", ["loss", *NAMES, "spread"])
    best = min(validations, key=lambda record: record["spread"])
    again = samestep.evaluate(path, split="validation")
    assert [again[n] for n in wanted] == pytest.approx([best[n] for n in wanted], rel=1e-12)
    tiny.trained(recipe, tmp_path / "lightning", *FLAGS, "--engine", "lightning")
    words = [[recipe, "--run-dir", tmp_path / "two", *FLAGS]]
    words.append([recipe, "--run-dir", tmp_path / "virtual", *FLAGS, "--virtual-ranks", "3"])
    tiny.train_all(words, on=2, folder=tmp_path)
    for name in ("two", "virtual"):
        tiny.assert_same_training(tmp_path / name, path, 1e-12)
    records = (tiny.account(folder) for folder in (tmp_path / "lightning", path))
    tiny.assert_close_records(*records, 1e-12)


@pytest.mark.parametrize("loss", ["loss", "lambda o, t: o and loss(o, t)"])
def test_losses_that_a_model_has_only_in_training_need_no_evaluation(loss, tmp_path):
    text = RECIPE.replace("loss=loss", f"loss={loss}").replace(
        "validation=(x[131:168], x[131:168]),", ""
    )
    text = text.replace(" test=(x[168:], x[168:])", "").replace(', "monitor": "kl"', "")
    text = text.replace("return self.decode", "if self.training: return self.decode")
    tiny.trained(tiny.write_recipe(tmp_path, text), tmp_path / "run", "--max-steps", "3", *FLAGS)
    assert {*NAMES} < tiny.events(tmp_path / "run", "step")[-1].keys()


def test_what_a_model_is_asked_for_is_measured_over_all_samples_and_again_alike(tmp_path):
    """It draws, and gives the same in each evaluation of equal weights, also of a checkpoint."""
    recipe = tiny.write_recipe(tmp_path, MEASURED)
    flags = (*FLAGS, "--monitor", "worst", "--mode", "min", "--eval-batch-size", "8")
    tiny.trained(recipe, tmp_path / "run", *flags)
    *validations, test = tiny.events(tmp_path / "run", "evaluation")
    best = min(validations, key=lambda record: record["worst"])
    assert (best["place"], test["place"]) == (1.0, 1.0)
    assert 0 < best["worst"] != test["worst"] > 0
    for split, record in (("validation", best), ("test", test)):
        again = samestep.evaluate(tmp_path / "run", split=split)
        for name in ("worst", "place", *NAMES):
            assert again[name] == pytest.approx(record[name], rel=1e-12)
    text = re.sub(r"return (\{.*\})", TURNED, MEASURED.replace("+ drawn", ""))
    quiet = tiny.write_recipe(tmp_path, text, "quiet.py")
    for ranks in (1, 2):
        tiny.trained(quiet, tmp_path / f"quiet-{ranks}", *flags, on=ranks)
    tiny.assert_same_training(tmp_path / "quiet-2", tmp_path / "quiet-1", 1e-12)


@pytest.mark.parametrize("micro", [None, 4])
def test_whole_steps_of_a_sum_take_the_eager_trajectory(monkeypatch, micro):
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    settings = Settings(
        batch_size=6, epochs=9, precision="fp64", optimizer="sgd", micro_batch_size=micro
    )
    total = nn.CrossEntropyLoss(reduction="sum")
    ours, its = (replace(learner(model(), settings), loss=total, reduction="sum") for _ in "ab")
    data = blocks(settings, together=IN_A_GRAPH)
    ran, expected = run(whole(ours, settings), data), run(eager(its, settings), data)
    torch.testing.assert_close(ran.losses, expected.losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ran.norms, expected.norms, rtol=1e-12, atol=1e-12)
    assert_same(ours, its)


@pytest.mark.parametrize(
    "given",
    [
        {"reduction": "max"},
        {"reduction": "sum", "loss_terms": len},
        {"loss_weights": ["kl"]},
        {"loss_weights": {"kl": "0.1"}},
        {"loss_weights": {"kl": float("nan")}},
        {"evaluate_batch": 3},
        {"evaluation_loss": 3},
    ],
)
def test_what_a_recipe_says_of_its_loss_is_checked_where_it_is_made(given):
    with pytest.raises(UserError, match=next(iter(given))):
        Recipe(model=print, data=print, **given)


PARTS = '{"reconstruction": (made - targets).square().sum(), "kl": kl}'
MISTAKES = {
    "unknown weight": ('{"kl": 0.1}', '{"kk": 0.1}', "'kk'.*'kl'"),
    "taken": ('"reconstruction":', '"grad_norm":', "the name 'grad_norm'"),
    "taken by a metric": ('"place":', '"kl":', "'kl'"),
    "no name": ('"place":', "3:", "3"),
    "no scalar": (": kl}", ": kl.view(1)}", "'kl'"),
    "none": (PARTS, "{}", "at least one"),
    "weights of a scalar": (PARTS, "kl", "loss_weights"),
    "not one a sample": (".amax(dim=1)", ".amax()", "'worst' for 8 samples"),
    "no dict": ('return {"worst"', "return 3 or {'worst'", "evaluate_batch"),
    "fails": ("targets = batch", "targets, _ = batch", "evaluate_batch.*ValueError"),
    "better": ("loss=loss", 'loss=loss, lower_is_better=("wurst",)', "'wurst'.*'worst'"),
    "not monitored": ('"monitor": "kl"', '"monitor": "kk"', "monitor kk"),
    # The incomplete batch has 11 samples; the last of 37 that are evaluated has 5.
    "other names": ('"kl": kl}', '"kl" if len(targets) != 11 else "k": kl}', "reconstruction, k "),
    "other places": ('"place":', '"place" if len(inputs) == 8 else "p":', "evaluate_batch"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_anything_is_written(name, here, refused):
    old, new, says = MISTAKES[name]
    assert MEASURED.count(old) == 1
    Path("r.py").write_text(MEASURED.replace(old, new))
    assert re.search(says, refused("train", "r.py", "--run-dir", "r", "--eval-batch-size", "8"))
    assert name in ("other names", "other places") or not Path("r").exists()


def test_a_model_that_cannot_be_copied_returns_the_sum_and_forward_has_the_batch(here, refused):
    for text, named in ((RECIPE, "deepcopy"), (MEASURED, "evaluate_batch")):
        locked = text.replace("super().__init__()", "super().__init__(); self.lock = Lock()")
        locked = locked.replace(', "monitor": "kl"', "")
        Path("r.py").write_text("from threading import Lock\n" + locked)
        assert named in refused("train", "r.py", "--run-dir", named)
    text = MEASURED.replace("inputs, targets = batch", "inputs = targets = batch")
    text = text.replace("loss=loss", "loss=loss, forward=lambda model, batch: model(batch)")
    text = text.replace("    return Splits(", "    x = [*x]\n    return Splits(")
    for part in ("[:131]", "[131:168]", "[168:]"):
        text = text.replace(f"(x{part}, x{part})", f"x{part}")
    text = text.replace("forward=", "collate=torch.stack, forward=")
    Path("r.py").write_text(text)
    train_here("r.py", "--run-dir", "r", "--max-steps", "2")
    assert tiny.events(Path("r"), "evaluation")[-1]["place"] == 1.0


def test_a_part_that_weighs_nothing_is_told_and_not_trained():
    loss = summed(lambda outputs, _: {"a": outputs.sum(), "b": outputs.square().sum()}, {"b": 0})
    outputs = torch.tensor([1.0, 2.0], requires_grad=True)
    total = loss(outputs, None)
    total.backward()
    assert outputs.grad.tolist() == [1.0, 1.0]
    assert {name: float(part) for name, part in parts_of(total).items()} == {"a": 3.0, "b": 5.0}
