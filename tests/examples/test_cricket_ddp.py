"""The DDP trainer for cricket, by its checklist: alone, on ranks, killed, resumed, tested."""

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.programs import ROOT, defined, forked, kill_at, refusal, run
from tests.needs import needs
from tests.processes import launch_environment, run_ranks

# One worker trains `alone`, `on_two` and `watched`: each other would train them once more.
# A plain script of the handbook: it runs in the second target, as the commands of the pages do.
pytestmark = [needs("torch_geometric"), pytest.mark.xdist_group("cricket ddp"), pytest.mark.slow]

SCRIPT = str(ROOT / "examples" / "cricket_ddp" / "train.py")
# The test matches have 257 balls, which neither 2 nor 3 ranks share equally; a step takes 24.
MATCHES = ("--synthetic", "--synthetic-matches", "17")
FLAGS = (*MATCHES, "--balls-per-match", "24", "--width", "8", "--dropout", "0", "--epochs", "2")
PART = re.compile(
    r"^(validation|test) MAE (\S+)  RMSE (\S+)  R² (\S+)  \((\d+) balls\)$", re.MULTILINE
)


def script(folder, *flags, world_size=1, start=forked):
    """Run the script in a folder, on CPUs, to whatever end."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    return start(SCRIPT, *flags, folder=folder, world_size=world_size, **hidden)


def train(folder, *flags, world_size=1, start=forked):
    batch = ("--batch-size", str(24 // world_size))
    done = script(folder, *FLAGS, *batch, *flags, world_size=world_size, start=start)
    assert done.returncode == 0, done.stderr
    return done.stdout


def errors(printed, part):
    return [tuple(map(float, found[1:])) for found in PART.findall(printed) if found[0] == part]


def history(folder):
    return json.loads((folder / "runs" / "cricket_ddp" / "history.json").read_text())


def best_model(folder):
    return folder / "runs" / "cricket_ddp" / "best_model.pt"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, train(folder)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, train(folder, "--wandb-mode", "offline", world_size=2, start=run)


def test_a_single_process_works_and_prints_each_epoch_and_the_test(alone):
    folder, printed = alone
    lines = printed.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["1", "2"]
    assert len(errors(printed, "validation")) == 2
    ((*_, balls),) = errors(printed, "test")
    assert balls == 257
    left = {path.name for path in (folder / "runs" / "cricket_ddp").iterdir()}
    assert left == {"best_model.pt", "last.pt", "history.json"}


def test_on_two_ranks_rank_0_alone_prints_and_the_metrics_are_those_of_one_process(on_two, alone):
    assert len(on_two[1].splitlines()) == len(alone[1].splitlines())
    assert_same(*on_two, alone)


def assert_same(folder, printed, alone):
    for found, expected in zip(history(folder), history(alone[0]), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert errors(printed, "test")[0] == pytest.approx(errors(alone[1], "test")[0], abs=2e-4)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Train two ranks with a rate that grows; return the folder and what each rank did."""
    folder = tmp_path_factory.mktemp("watched")
    rate = ("--lr-scaling", "sqrt", "--lr", "0.001", "--base-batch-size", "6")  # of 24 per step
    words = [SCRIPT, *FLAGS, "--batch-size", "12", *rate, "--warmup-steps", "28"]
    return folder, run_ranks(_watched, 2, folder / "outputs", words, folder)


def test_rank_0_alone_writes_files_and_each_epoch_has_an_order_of_its_own(watched):
    (written, orders), (none, others) = watched[1]
    assert {"best_model.pt", "last.pt", "history.json"} <= written
    assert none == set()
    assert len(orders) == len(others) == 2
    assert orders[0] != orders[1]
    for mine, theirs in zip(orders, others, strict=True):
        assert len({*mine, *theirs}) == len(mine) + len(theirs) == 336  # each ball once


def test_on_two_ranks_a_warm_up_ends_at_the_rate_of_their_effective_batch(watched):
    rates = [epoch["lr"] for epoch in history(watched[0])]
    assert rates == pytest.approx([0.001, 0.002])  # 14 steps an epoch


def _watched(words: list[str], folder: Path) -> tuple[set[str], list[list[int]]]:
    """Run the script; return the files that it opened for writing or renamed to, and its orders."""
    from torch.utils.data import DistributedSampler

    written: set[str] = set()
    orders: list[list[int]] = []
    iterate = DistributedSampler.__iter__

    def noted(sampler):
        orders.append(list(iterate(sampler)))
        return iter(orders[-1])

    def note(event, details):
        if event == "os.rename":
            written.add(Path(details[1]).name)
        elif event == "open" and isinstance(details[0], str | Path):
            inside = Path(details[0]).absolute().is_relative_to(folder)
            if inside and details[2] & (os.O_WRONLY | os.O_RDWR):
                written.add(Path(details[0]).name)

    os.chdir(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.addaudithook(note)
    DistributedSampler.__iter__ = noted
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")
    # What Python keeps of compiled modules is not the script's.
    return {name for name in written if not name.endswith(".pyc")}, orders


def test_the_best_checkpoint_serves_one_device_and_the_test_counts_each_ball_once(on_two):
    from samestep.core.recipes.cricket import recipe as cricket
    from samestep.core.recipes.cricket.graphs import collate

    saved = torch.load(best_model(on_two[0]), weights_only=True)
    options = cricket.CricketOptions(**saved["options"])
    network, balls = cricket.model(options).eval(), cricket.data(options).test
    network.load_state_dict(saved["network"])
    graphs = collate([balls[k] for k in range(len(balls))])
    with torch.no_grad():
        error = (network(graphs) - graphs["query"].y).double()
    ((mae, rmse, _, count),) = errors(on_two[1], "test")
    assert count == len(balls)
    assert mae == pytest.approx(float(error.abs().mean()), abs=1e-4)
    assert rmse == pytest.approx(float(error.square().mean().sqrt()), abs=1e-4)
    assert saved["best"] == min(history(on_two[0]), key=lambda epoch: epoch["mae"])


def test_test_only_gives_the_metrics_of_the_final_test(alone):
    done = script(alone[0], *MATCHES, "--test-only", world_size=3)
    assert done.returncode == 0, done.stderr
    assert errors(done.stdout, "test") == errors(alone[1], "test")
    assert not errors(done.stdout, "validation")


def test_rank_0_alone_opens_a_run_of_wandb(on_two):
    folder = on_two[0] / "runs" / "cricket_ddp" / "wandb"
    (of_run,) = [path for path in folder.glob("offline-run-*") if path.is_dir()]
    (sent,) = of_run.glob("*.wandb")
    logged = sent.read_bytes()
    for name in ("epoch", "train/loss", "train/lr", "val/mae", "val/rmse", "val/r2", "val/balls"):
        assert name.encode() in logged, name


def test_killed_and_resumed_on_two_ranks_it_ends_where_it_would_have(alone, tmp_path):
    # The first epoch is saved, the second is being validated.
    words = (SCRIPT, *FLAGS, "--batch-size", "24", "--resume")
    kill_at("epoch 2", *words, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    printed = train(tmp_path, "--resume", world_size=2)
    assert re.findall(r"^epoch (\d)", printed, re.MULTILINE) in (["2"], [])
    assert_same(tmp_path, printed, alone)


@pytest.fixture(scope="module")
def functions():
    return defined(SCRIPT)


def test_a_mac_with_several_ranks_trains_on_the_cpu_and_warns(functions, monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name, value in launch_environment(rank=0, world_size=2, port=0).items():
        monkeypatch.setenv(name, value)
    assert functions["setup_distributed"](600.0).device.type == "cpu"
    assert capsys.readouterr().out.startswith("warning: ")


# Arguments, and words of the message.
MISTAKES = [
    ("--data-dir nowhere", "nowhere"),
    ("--epochs 0", "--epochs"),
    ("--lr nan", "--lr"),
    ("--base-batch-size 0", "--base-batch-size"),
    ("--speed 9", "--speed 9"),
    (f"{' '.join(MATCHES)} --test-only", "best_model.pt"),
    (f"{' '.join(MATCHES)} --batch-size 9999999", "--batch-size"),
    (f"{' '.join(MATCHES)} --width 9", "width"),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES)
def test_a_mistake_gets_one_message_and_exit_code_2(tmp_path, arguments, named):
    assert named in refusal(SCRIPT, *arguments.split(), folder=tmp_path)


def test_a_training_is_neither_overwritten_nor_continued_with_another_network(alone):
    before = best_model(alone[0]).read_bytes()
    assert "--resume" in refusal(SCRIPT, *FLAGS, folder=alone[0])
    assert "--width" in refusal(SCRIPT, *FLAGS, "--resume", "--width", "10", folder=alone[0])
    assert best_model(alone[0]).read_bytes() == before
