"""The examples that are recipes, those of the guide by task, and a loop of one's own: short, the
same on any number of ranks, resumed, and learning.
"""

import re
import runpy
import signal
import textwrap
from pathlib import Path

import pytest
import torch

from samestep import read_records
from samestep.shell.cli import main
from tests import tiny
from tests.faults import Fault
from tests.loops import scripts
from tests.loops.same import account
from tests.loops.scripts import EXAMPLES, run
from tests.needs import needs
from tests.verification.forked import assert_nothing_to_accept, check, verified, verified_loop

BY_TASK = EXAMPLES / "by_task"
RECIPES = {
    # What is measured by its validation, and what it has to beat.
    "classification": ("accuracy", 0.5),
    "contrastive": ("loss", 3.0),  # 4.8 of 64 pairs by chance
    "detection": ("f1", 0.3),
    "diffusion": ("error", 0.7),  # 1 of no noise
    "distillation": ("accuracy", 0.4),
    "fine_tuning_frozen": ("accuracy", 0.6),
    "fine_tuning_lora": ("right", 0.4),
    "graph": ("accuracy", 0.75),  # 0.69 of a node without its neighbours
    "language_model": ("right", 0.5),  # of pairs of words
    "multi_task": ("error", 0.5),  # 1 of the mean
    "regression": ("error", 2.0),  # of a straight line
    "segmentation": ("iou", 0.6),
    "seq2seq": ("right", 0.5),
    "text_classification": ("accuracy", 0.7),
    "vae": ("error", 0.1),  # 0.16 of the mean image
}
FALLING = ("contrastive", "diffusion", "multi_task", "regression", "vae")
LOOPS = {"gan": 1e-6, "reinforcement_learning": 1e-9, "time_series": 1e-6}
"""Own loops, and what rounding of 1e-16 grows to in their training: each multiplies it."""


def script(name: str) -> Path:
    return BY_TASK / f"{name}.py"


def marked(quick=()):
    """Return all recipes, of which these alone run by default."""
    needed = {"graph": [needs("torch_geometric")]}
    slow = {name: [] if name in quick else [pytest.mark.slow] for name in RECIPES}
    return [pytest.param(n, marks=[*slow[n], *needed.get(n, [])]) for n in RECIPES]


FLAGS = ("--virtual-ranks", "2", "--log-every", "1", "--seed", "0", "--threads", "1")


def test_every_file_is_listed_here_and_on_the_page_and_has_at_most_60_lines():
    files = {path.stem: path.read_text() for path in BY_TASK.glob("*.py")}
    assert files.keys() == RECIPES.keys() | LOOPS.keys()
    assert max(text.count("\n") for text in files.values()) <= 60
    page = (EXAMPLES.parent / "docs" / "how-to" / "by-task.md").read_text()
    assert all(f"../examples/by_task/{name}.py" in page for name in files)


@pytest.mark.parametrize("name", marked())
def test_verify_finds_the_same_training_on_one_and_three_ranks(name, tmp_path):
    found = verified(script(name), folder=tmp_path, sizes=(1, 3), lightning=False)
    assert found.same, [(row.name, row.cause) for row in found.checks if not row.passed]
    by_status = {row.status: set() for row in found.checks}
    for row in found.checks:
        by_status[row.status].add(row.name)
    by_status["skipped"] -= {"lightning"}
    by_status.pop("same")
    # Outputs are one per node, or a loss is made over the batch: parts of it say nothing.
    expected = {"skipped": {"loss"} if name in ("contrastive", "graph") else set()}
    assert by_status == expected | ({"accepted": {"dropout"}} if "text" in name else {})


@pytest.mark.parametrize("name", marked(("fine_tuning_lora", "regression")))
def test_a_recipe_learns(name, tmp_path):
    tiny.trained(script(name), tmp_path / "run", *FLAGS)
    metric, baseline = RECIPES[name]
    *_, last = (r for r in read_records(tmp_path / "run") if r["event"] == "evaluation")
    assert (last[metric] < baseline) == (name in FALLING), last


def test_killed_on_two_ranks_a_recipe_that_draws_goes_on_alone_to_the_same_bits(tmp_path):
    recipe, flags = script("vae"), (*FLAGS, "--max-steps", "12")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    tiny.trained(recipe, whole, *flags)
    kill = Fault("after a step", 7, rank=None)
    tiny.struck(recipe, stopped, kill, *flags, "--checkpoint-every-steps", "2", on=2)
    assert 0 < tiny.newest_announced(stopped) < 8
    tiny.resumed(stopped)
    tiny.assert_same_training(stopped, whole, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_verify_finds_the_same_loop_on_one_and_three_ranks(name, tmp_path):
    found = verified_loop(script(name), folder=tmp_path, sizes=(1, 3), quick=False)
    assert found.same, [(row.name, row.cause) for row in found.checks if not row.passed]


SLOW = ("gan", "reinforcement_learning")


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in LOOPS]
)
def loop(request, tmp_path_factory) -> tuple[str, Path]:
    """Give the name of a loop and the run that a single process made of it."""
    folder = tmp_path_factory.mktemp(request.param)
    run(script(request.param), "run", folder=folder)
    return request.param, folder / "run"


@pytest.mark.slow
def test_a_loop_stopped_on_two_ranks_goes_on_alone_to_the_same_losses(loop, tmp_path):
    name, alone = loop
    stop = {"strike": scripts.Strike(3, signal.SIGTERM), "code": 128 + signal.SIGTERM}
    run(script(name), "run", world_size=2, folder=tmp_path, **stop)
    assert tiny.newest_announced(tmp_path / "run") >= 3
    run(script(name), "run", folder=tmp_path)
    for one, other in zip(account(tmp_path / "run"), account(alone), strict=True):
        assert one == pytest.approx(other, rel=0, abs=LOOPS[name])


def test_a_loop_learns(loop):
    name, alone = loop
    epochs = [r for r in account(alone) if r["event"] == "epoch"]
    if name == "reinforcement_learning":
        assert epochs[-1]["steps"] > 2 * epochs[0]["steps"]
    elif name == "time_series":
        assert epochs[-1]["loss"] < 0.1 * epochs[0]["loss"]
        *_, held_out = (r for r in account(alone) if r["event"] == "evaluation")
        assert held_out["loss"] < 0.1 * held_out["as_before"]
    else:
        made = runpy.run_path(str(script(name)))
        generator, discs = made["generator"]().double(), made["discs"](500).mean(dim=0)
        off = []
        for state in (generator.state_dict(), scripts.weights(alone)["g"]):
            generator.load_state_dict(state)
            with torch.no_grad():
                drawn = generator(torch.randn(500, made["NOISE"], dtype=torch.float64))
            off.append(float((drawn.mean(dim=0) - discs).abs().mean()))
        assert off[1] < 0.3 * off[0]


SMALL = {
    "char_gpt": ("--dim", "8", "--heads", "2", "--layers", "1"),
    "csv_regression": ("--hidden", "8"),
    "graphs": ("--num-graphs", "60", "--width", "4"),
    "huggingface": ("--num-reviews", "60", "--width", "8", "--layers", "1"),
    "padded_text": ("--num-sentences", "60", "--width", "8"),
}
# Their loss is a mean over samples, so Lightning's Trainer takes them, too.
IN_LIGHTNING = ("csv_regression", "graphs", "huggingface")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_verify_finds_the_same_training_and_nothing_to_accept(name, tmp_path):
    lightning = name in IN_LIGHTNING
    recipe, ranks = EXAMPLES / f"{name}.py", tmp_path / "ranks"
    found = verified(recipe, *SMALL[name], folder=ranks, lightning=lightning)
    assert_nothing_to_accept(found, "2 ranks")
    assert check(found, "lightning").status == ("same" if lightning else "skipped")


SCRIPT = EXAMPLES / "own_loop.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    ranks = run(SCRIPT, "run", folder=folder)
    assert "samestep:" not in ranks.output()
    return folder / "run"


def test_the_records_are_of_all_samples_and_a_finished_run_is_left_as_it_is(alone, tmp_path):
    (start,) = (r for r in read_records(alone) if r["event"] == "start")
    assert (start["num_samples"], start["global_batch_size"], start["steps_per_epoch"]) == (
        *(1000, 64),
        16,
    )
    epochs = [r for r in account(alone) if r["event"] == "epoch"]
    assert [(r["epoch"], r["step"], r["samples"]) for r in epochs] == [
        (n, 16 * n, 1000) for n in range(1, 6)
    ]
    assert epochs[-1]["loss"] < 0.1 * epochs[0]["loss"]
    records = (alone / "events.jsonl").read_bytes()
    run(SCRIPT, str(alone), folder=tmp_path)
    assert (alone / "events.jsonl").read_bytes() == records


def programs_of_the_page() -> tuple[str, str, str]:
    """Return the three programs of "Port your loop", and the plain one in samestep's order."""
    page = (EXAMPLES.parent / "docs" / "how-to" / "port-your-loop.md").read_text()
    plain, own, recipe, ordered = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:4]
    head, _, body = plain.partition("    model.train()\n")
    plain = f"{head}{textwrap.indent(ordered, '    ')}    model.train()\n{body}"
    return plain, own, recipe


def test_the_three_programs_of_the_handbook_have_the_same_losses(tmp_path, monkeypatch, capsys):
    plain, own, recipe = programs_of_the_page()
    assert len(plain.splitlines()) <= 70
    found = {}
    for name, size, text in (("plain", 1, plain), ("own", 2, own)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ported.py").write_text(text)
        how = {"world_size": size, "folder": tmp_path / name}
        said = run(tmp_path / name / "ported.py", **how).output()
        found[name] = [
            float(text) for text in re.findall(r"^epoch .* loss (.*)", said, re.MULTILINE)
        ]
        assert "best" in said
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").write_text(recipe)
    precise = ["--precision", "fp64"]  # as the scripts are run here
    torch.set_default_dtype(torch.float64)
    try:
        assert main(["train", "recipe.py", "--run-dir", "recipe", "--device", "cpu", *precise]) == 0
    finally:
        torch.set_default_dtype(torch.float32)
    found["recipe"] = [r["loss"] for r in read_records("recipe") if r["event"] == "evaluation"]
    assert 5 < len(found["plain"]) < 30
    for name in ("own", "recipe"):
        assert found[name] == pytest.approx(found["plain"], abs=1e-5), name
