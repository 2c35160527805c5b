"""A loop of one's own is verified, and so are the recipes that come with samestep."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.base.errors import UserError
from samestep.prove.verification import causes
from samestep.prove.verification.loop_on_rank import few_steps
from samestep.prove.verification.trace import ROUNDING
from tests.cifar_files import write_binary
from tests.idx_files import write_mnist
from tests.image_files import write_images
from tests.tiny import changed
from tests.verification.forked import check, differing, verified, verified_loop

LOOP = """
import argparse
import torch
from torch import nn
import samestep
def loss_of(outputs, targets, batch, run): return nn.functional.mse_loss(outputs, targets)
def averaged(model):
    for parameter in model.parameters():
        parameter.grad = samestep.dist.reduce_tensor(parameter.grad, "mean")
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    args = parser.parse_args()
    with samestep.open_run("runs/mine", resume=True, settings=vars(args)) as run:
        x = torch.randn(100, 6)
        y = x.sum(dim=1, keepdim=True) ** 2
        model = run.place(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in run.epochs(args.epochs, state={"model": model, "optimizer": optimizer}):
            for batch in run.batches((x, y), 11):
                inputs, targets = batch.data
                noise = 0
                loss = loss_of(model(inputs + noise), targets, batch, run)
                optimizer.zero_grad()
                run.backward(loss, model)
                optimizer.step()
                run.log(loss=loss)
            model.eval()
            with torch.no_grad():
                for batch in run.validation((x, y), 50):
                    inputs, targets = batch.data
                    run.log(loss=loss_of(model(inputs), targets, batch, run))
            model.train()
main()
"""
MSE = "return nn.functional.mse_loss(outputs, targets)"
MASKED = "kept = targets > 1; return (kept * (outputs - targets) ** 2).sum() / kept.sum()"
OF_BATCH = "return (outputs @ outputs.T - targets @ targets.T).abs().mean()"
BACKWARD, OPTIMIZER = "run.backward(loss, model)", "optimizer = torch"
BATCHES = "run.batches((x, y), 11)"
BY_RANK = "run.batches([*zip([*x[:9], *(x[9:] + run.rank)], y)], 11)"
OWN_WEIGHTS = "torch.seed(); nn.init.normal_(model[0].weight); optimizer = torch"
COUNTED = (
    "seen = vars(loss_of).setdefault('seen', []); seen.append(len(outputs)); "
    f"{MSE} * (1 + sum(seen[:-1]) / 100)"
)
DRAWN = (
    "run.batches(type('Drawn', (), {'__len__': lambda _: 100, '__getitem__': "
    "lambda _, i, own=__import__('random').Random(0): (x[i] + own.random(), y[i])})(), 11)"
)
# What is wrong → the text of the clean loop, the text in its place, and the cause of the 2 ranks.
BUGS = {
    "loss.backward": (BACKWARD, "loss.backward()", "gradients that are not added up"),
    "averaged": (BACKWARD, "loss.backward(); averaged(model)", "mean of the ranks' means"),
    "a masked mean": (MSE, MASKED, "loss that is not a mean over samples"),
    "a sum": (MSE, f"{MSE} * len(outputs)", "loss that is not a mean over samples"),
    "other data": ("torch.randn(100, 6)", "torch.randn(100, 6) + run.rank", None),
    "divided": (MSE, f"{MSE} / run.world_size", "loss that is divided by the number of ranks"),
    "a loss over the batch": (MSE, OF_BATCH, "the loss is made over the batch"),
    "data by rank": (BATCHES, BY_RANK, "data that depends on the rank"),
    "own weights": (OPTIMIZER, OWN_WEIGHTS, "initial weights that differ per process"),
    "batch": (", 11)", ", 11 * run.world_size)", "batch that depends on the number of ranks"),
    "a rate per rank": ("lr=0.01", "lr=0.01 * (1 + run.rank)", causes.OPTIMIZER_SETTINGS.name),
    "a count of samples": (MSE, COUNTED, causes.SCALED.name),
    "a data set that draws": (BATCHES, DRAWN, causes.UNKEYED["dataset"].name),
}

# What differs with the ranks by itself → the change, and the row that has it.
BY_ITSELF = {
    "batchnorm": ("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh()", "BatchNorm"),
    "noise": ("noise = 0", "noise = torch.randn_like(inputs)", "dropout"),
    "state": ("noise = 0", "noise = random.random()", "state"),
}


def write(folder, *changes):
    script = folder / "loop.py"
    script.write_text(changed(LOOP, *changes))
    return script


def test_a_clean_loop_is_the_same_and_its_own_runs_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path)
    found = verified_loop(
        script, "--epochs", "1", folder=tmp_path / "ranks", sizes=(1, 2, 3), quick=False
    )
    assert found.same, [(c.name, c.cause, c.failure) for c in found.checks if not c.passed]
    assert found.precisions == ("fp64", "fp32")
    assert {row.status for row in found.checks} == {"same"}
    assert {row.name for row in found.checks} == {
        *("one process", "2 ranks", "3 ranks", "fp32", "BatchNorm", "dropout", "state"),
        *("order", "processes", "gradients", "loss", "evaluation", "one writer"),
    }
    assert check(found, "3 ranks").difference < 1e-12
    assert (found.facts.size.steps, found.facts.size.rest) == (4, 10)
    assert not (tmp_path / "runs").exists()


@given(st.integers(1, 200), st.integers(1, 80), st.booleans(), st.integers(1, 8))
def test_the_samples_that_are_used_end_with_an_uneven_batch(total, batch, drop_last, most_ranks):
    size = few_steps(torch.zeros(total), batch, drop_last, most_ranks)
    if drop_last and total < batch:
        assert size.num_samples == total, "which is refused, with all of the numbers"
        return
    assert size.num_samples == size.full * batch + size.rest <= total
    assert size.rest < batch
    assert 2 <= size.steps <= 4
    if total >= 2 * batch > 2 and not drop_last:
        assert size.rest > 0 < size.full


@pytest.mark.parametrize(("old", "new", "cause"), BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_told_with_its_cause(old, new, cause, tmp_path):
    found = verified_loop(write(tmp_path, (old, new)), "--epochs", "1", folder=tmp_path / "ranks")
    assert not found.same
    assert differing(found)["2 ranks"] == cause


@pytest.mark.parametrize("kind", BY_ITSELF)
def test_what_differs_by_itself_is_held_still_and_told_in_its_own_row(kind, tmp_path):
    old, new, row = BY_ITSELF[kind]
    script = write(tmp_path, (old, new), ("import argparse", "import argparse, random"))
    found = verified_loop(script, "--epochs", "1", folder=tmp_path / "ranks")
    assert [*differing(found)] == [row]
    assert check(found, row).first_step == 1
    assert check(found, "2 ranks").difference < 1e-10


# It has no one answer where the gradient of 16 × 16 weights is of 11 samples.
ORTHOGONAL = """
class Orthogonal(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.dim() > 1:
                u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                p.grad = (u @ v).type("torch.BFloat16Tensor").to(p)
        super().step()
def loss_of"""
ORTHOGONALISES = (
    ("\ndef loss_of", ORTHOGONAL),
    ("Linear(6, 8)", "Linear(6, 16), nn.Linear(16, 16)"),
    ("Linear(8, 1)", "Linear(16, 1)"),
    ("torch.optim.Adam(", "Orthogonal("),
)


def test_what_an_optimizer_makes_of_a_rounding_is_measured_and_hides_no_wrong_loss(tmp_path):
    script = write(tmp_path, *ORTHOGONALISES)
    found = verified_loop(script, "--epochs", "1", folder=tmp_path / "ranks")
    assert differing(found) == {}
    assert check(found, "2 ranks").difference > 1e-4
    assert check(found, "optimizer").cause.name == causes.OPTIMIZER_ROUNDS.name
    assert "bfloat16" in check(found, "optimizer").cause.why
    script = write(tmp_path, *ORTHOGONALISES, (MSE, MASKED))
    found = verified_loop(script, "--epochs", "1", folder=tmp_path / "wrong")
    assert {*differing(found).values()} == {causes.NOT_A_MEAN.name}


@pytest.mark.slow
def test_an_optimizer_that_only_rounds_much_in_float32_is_measured_there(tmp_path, monkeypatch):
    monkeypatch.setitem(ROUNDING, "fp32", 1e-6)  # less than it makes of what is rounded
    svd = "u, _, v = torch.linalg.svd(p.grad, full_matrices=False)"
    steps = (
        "for _ in range(11): u = 3.4445 * u - 4.775 * u @ u.T @ u + 2.0315 * u @ u.T @ u @ u.T @ u"
    )
    muon = f"u, v = p.grad / p.grad.norm(), torch.eye(p.shape[1])\n{' ' * 16}{steps}"
    script = write(
        tmp_path,
        *ORTHOGONALISES,
        (svd, muon),
        ("lr=0.01", "lr=0.3"),
        ('.type("torch.BFloat16Tensor")', ""),
    )
    found = verified_loop(script, "--epochs", "1", folder=tmp_path / "ranks", quick=False)
    assert differing(found) == {}
    assert check(found, "2 ranks").tolerance == ROUNDING["fp64"]
    assert check(found, "fp32").tolerance == check(found, "optimizer").tolerance > 1e-6
    assert "float32" in check(found, "optimizer").cause.why


def test_a_validation_that_draws_is_told(tmp_path):
    script = write(tmp_path, ("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.3)"), ("model.eval()", ""))
    found = verified_loop(script, "--epochs", "1", folder=tmp_path / "ranks", accept=("dropout",))
    assert differing(found) == {"evaluation": "draws in the validation"}


@pytest.mark.slow
def test_a_loop_that_cannot_compute_in_float64_is_compared_by_its_losses(tmp_path):
    numpy = "from_numpy(np.random.rand(6).astype('f'))"
    script = write(
        tmp_path,
        ("import torch\n", "import numpy as np, torch\nFIXED = torch." + numpy + "[:, None]\n"),
        ("x.sum(dim=1, keepdim=True)", "(x.float() @ FIXED)"),
        ("loss_of(model(inputs + noise)", "loss_of(model(inputs) + inputs @ FIXED"),
    )
    found = verified_loop(script, "--epochs", "1", folder=tmp_path / "ranks")
    assert found.precisions == ("fp32",)
    assert check(found, "rounding").status == "same"


DATA = "y = x.sum"
MISTAKES = {
    "a missing argument": ((), (), "--epochs"),
    "a script that opens nothing": (("1",), ("main()\n", "\n"), "open_run"),
    "a question": (("1",), ("def main():", "def main():\n    input()"), "input"),
    "no steps": (("1",), ("for epoch in run.epochs", "for epoch in [] and run.epochs"), "no step"),
    "its own error": (("1",), ("nn.Linear(6, 8)", "nn.Linear(5, 8)"), "loop.py"),
    "an error on one rank": (("1",), (DATA, f"1 / (1 - run.rank)\n        {DATA}"), "ZeroDivision"),
    "a rank that leaves": (("1",), (DATA, f"run.rank and exit()\n        {DATA}"), r"exit\(\)"),
}


@pytest.mark.parametrize(("epochs", "change", "named"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_checked_is_one_message(epochs, change, named, tmp_path):
    script = write(tmp_path, *[change] if change else [])
    arguments = [word for number in epochs for word in ("--epochs", number)]
    with pytest.raises(UserError, match=named):
        verified_loop(script, *arguments, folder=tmp_path / "ranks")


def folder_for(name: str, folder) -> tuple[str, ...]:
    """Write a little data; return the flags that name it."""
    if name == "mnist":
        return ("--data-dir", str(write_mnist(folder / "mnist")))
    small = ("--width", "4")
    if name == "cifar10":
        return ("--data-dir", str(write_binary(folder / "cifar10")), *small)
    if name == "images":
        root = write_images(folder / "photos", "train", count=30, classes=("bird", "ship"))
        return ("--data-dir", str(root), *small)
    return ()


@pytest.mark.parametrize(
    ("name", "flags", "sizes", "accepted"),
    [("spiral", (), (1, 3), {"dropout"}), ("mnist", ("--precision", "bf16"), (1, 2), set())],
    ids=["spiral", "mnist"],
)
def test_it_is_the_same_but_for_what_the_recipe_accepts(name, flags, sizes, accepted, tmp_path):
    lightning = name == "spiral"
    words, ranks = (*folder_for(name, tmp_path), *flags), tmp_path / "ranks"
    report = verified(name, *words, folder=ranks, sizes=sizes, lightning=lightning)
    assert report.same, [(c.name, c.cause.why) for c in report.checks if not c.passed]
    assert {c.name for c in report.checks if c.status == "accepted"} == accepted
    assert {c.status for c in report.checks} <= {"same", "accepted", "skipped"}
    for row in (*(f"{size} ranks" for size in sizes[1:]), "accumulation", "stop and resume"):
        assert check(report, row).difference < ROUNDING["fp64"] / 1000
    assert report.precisions == ("fp64", "fp32" if lightning else "bf16")
    assert check(report, "last batch").status == "same"
    assert check(report, "lightning").status == ("same" if lightning else "skipped")
    if lightning:
        assert check(report, "lightning").difference < 1e-12


# As quick as it gets: how a training is stopped, resumed and accumulated is one code for all.
@pytest.mark.parametrize(
    ("name", "flags", "accepted"),
    [
        pytest.param(
            *("mnist", ("--model", "convnet", "--precision", "fp64"), "dropout"),
            id="convnet",
            marks=pytest.mark.slow,
        ),
        pytest.param("cifar10", (), "BatchNorm", marks=pytest.mark.slow),
        ("images", ("--precision", "fp64", "--image-size", "16", "--drop-last"), "BatchNorm"),
    ],
)
def test_with_convolutions_it_is_so_too(name, flags, accepted, tmp_path):
    words, ranks = (*folder_for(name, tmp_path), *flags), tmp_path / "ranks"
    report = verified(name, *words, folder=ranks, quick=True)
    assert report.same, [(c.name, c.cause.why) for c in report.checks if not c.passed]
    assert [c.name for c in report.checks if c.status == "accepted"] == [accepted]
    assert check(report, "2 ranks").difference < ROUNDING["fp64"] / 1000
    assert (check(report, "last batch").status == "skipped") is ("--drop-last" in flags)
