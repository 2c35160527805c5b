"""The clock of a training, its window of losses, its FLOPs: the same on every rank. The phases of
its steps add up to its training time.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.base.errors import UserError
from samestep.base.phases import DevicePhases, Phases
from samestep.base.run.records import PHASES
from samestep.core.learner.device import ModelCost, count_flops
from samestep.core.training import loop, meter
from samestep.core.training.meter import Clock, Meter, Window
from samestep.core.training.work import Position, Sums
from samestep.launch.ranks.world import World, find_world, join, leave
from tests import tiny
from tests.processes import run_ranks


@pytest.fixture
def now(monkeypatch) -> SimpleNamespace:
    """A clock that a test sets: `now.s` is what it shows."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def test_seconds_add_up_without_pauses_and_a_bar_moves_a_few_times_a_second(now):
    position = Position(seconds=5.0, samples=1000)
    counted = Clock(position)
    assert counted.rate(position.samples)["samples_per_s"] == 0.0, "over no time"
    now.s += 2.0
    position.samples += 100
    assert counted.rate(position.samples) == {"seconds": 7.0, "samples_per_s": 50.0}
    counted.mark(position.samples)
    now.s += 1.0
    position.samples += 300
    assert counted.rate(position.samples) == {"seconds": 8.0, "samples_per_s": 300.0}
    position.seconds = counted.seconds()
    now.s += 100.0  # an evaluation and a checkpoint
    counted.resume(position)
    now.s += 31.0
    counted.leave_out(30.0)
    assert counted.seconds() == 9.0
    counted = Clock(Position())
    shown = 0
    for _ in range(1000):  # ten seconds
        now.s += 0.01
        shown += counted.shows()
    assert 10 <= shown <= 100


def losses(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


def test_reading_gives_the_wanted_steps_and_all_samples_before_it_grows_without_end():
    window = Window(World())
    window.add(10, losses(1.0, 2.0), 4)
    window.add(12, losses(4.0), 3)
    total = Sums(100.0 + 4 * 1.0 + 4 * 2.0 + 3 * 4.0, 9.0 + 4 + 4 + 3)
    assert window.read(window.drain(), [11, 13], 0.1, Sums(100.0, 9.0)) == ([[1.0], [4.0]], total)
    assert window.read(window.drain(), [], 0.1, Sums(7.0)) == ([], Sums(7.0)), (
        "it is empty once it was read"
    )
    window.add(13, losses(5.0), 1)
    assert window.read(window.drain(), [14], 0.1, Sums()) == ([[5.0]], Sums(5.0, 1.0))
    window.add(14, losses(1.0, 2.0), 4, losses(10.0, 30.0))  # weighed by terms, not by samples
    assert window.read(window.drain(), [16], 0.1, Sums()) == (
        [[2.0]],
        Sums(1.0 * 10 + 2.0 * 30, 40.0),
    )
    window, added = Window(World()), 0
    while not window.full:
        window.add(added, losses(*[0.0] * 64), 1)
        added += 64
        assert added < 100_000
    window.read(window.drain(), [], 0.1, Sums())
    assert not window.full


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_bad_step_is_named_with_the_learning_rate(bad):
    window = Window(World())
    window.add(20, losses(1.0, bad, 1.0, bad), 4)
    with pytest.raises(UserError, match=r"step 22 .*0\.03") as error:
        window.read(window.drain(), [21], 0.03, Sums())
    assert error.value.on_all_ranks


def read_on_two_ranks():
    world = find_world("cpu")
    join(world, timeout_s=60)
    window = Window(world)
    window.add(0, losses(1.0 + world.rank, 10.0), 2)
    read = window.read(window.drain(), [1, 2], 0.1, Sums())
    window.add(2, losses(1.0, math.nan if world.rank else 1.0), 2)
    try:
        window.read(window.drain(), [], 0.1, Sums())
    except UserError as error:
        message = str(error)
    leave(world)
    return read, message


def test_ranks_add_up_their_parts_and_all_stop_where_one_meets_a_nan(tmp_path):
    (one, message), (other, same) = run_ranks(read_on_two_ranks, 2, tmp_path)
    assert one == ([[3.0], [20.0]], Sums(2 * 1.0 + 2 * 10.0, 4.0))
    assert other == ([[3.0], [20.0]], Sums(2 * 2.0 + 2 * 10.0, 4.0))
    assert message == same
    assert "step 4 " in message


def test_losses_read_behind_the_next_step_are_recorded_in_order(tmp_path, monkeypatch):
    """So it is on a GPU, which has the next step to compute while the host waits for the losses."""

    def records(name: str, *, lags: bool) -> list[dict[str, Any]]:
        monkeypatch.setattr(loop, "Meter", lambda work, state, **_: Meter(work, state, lags=lags))
        run = samestep.train(
            "spiral", run_dir=tmp_path / name, max_steps=30, epochs=2, batch_size=500,
            log_every=4, eval_every_steps=8, clip_norm=1.0, device="cpu", pictures=False,
        )  # fmt: skip
        return tiny.account(run.path)

    at_once = records("at once", lags=False)
    behind = records("behind", lags=True)
    assert behind == at_once
    assert [r["step"] for r in behind] == sorted(r["step"] for r in behind)
    assert sum(r["event"] == "step" for r in behind) == 28 // 4

    failing = tiny.RECIPE.replace("    time.sleep", "    assert step < 6, 'ended'\n    time.sleep")
    failing = failing.replace("def loss(outputs, targets)", "def loss(outputs, targets, step)")
    with pytest.raises(UserError, match="ended"):
        samestep.train(
            tiny.write_recipe(tmp_path, failing), run_dir=tmp_path / "failed", device="cpu"
        )
    assert [r["step"] for r in tiny.events(tmp_path / "failed", "step")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("model", "shape", "flops"),
    [
        (nn.Linear(5, 7), (3, 5), 2 * 3 * 5 * 7),
        (nn.Conv2d(2, 4, 3), (1, 2, 6, 6), 2 * 4 * 4 * 4 * 2 * 3 * 3),
        (nn.MultiheadAttention(8, 2), (3, 2, 8), 2 * 6 * 8 * 32 + 2 * 2 * 2 * 2 * 9 * 4),
        (nn.Sequential(nn.LSTM(4, 4)), (2, 1, 4), 0),  # no formula: a part would be no count
    ],
    ids=["linear", "convolution", "attention", "lstm"],
)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_a_forward_is_counted_whole_or_not_at_all(model, shape, flops, mode):
    x = torch.randn(shape)
    is_attention = isinstance(model, nn.MultiheadAttention)
    with mode():
        expected = model.eval()(*[x] * 3) if is_attention else model(x)
        found, counted = count_flops(lambda: model(*[x] * 3) if is_attention else model(x))
    torch.testing.assert_close(found, expected)
    assert counted == flops


def test_what_fails_only_while_counted_has_no_count_and_an_unknown_device_no_mfu():
    def forward():
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError
        return torch.ones(2, 2) @ torch.ones(2, 2)

    found, counted = count_flops(forward)
    assert found.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert counted == 0
    ragged = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged)
    assert count_flops(lambda: nn.Linear(3, 1)(ragged).shape[-1])[0] == 1
    assert ModelCost(peak_flops_per_s=1e12).rates(5.0) == {}
    assert ModelCost(flops_per_sample=100).rates(5.0) == {"flops_per_s": 500.0}
    known = ModelCost(flops_per_sample=100, peak_flops_per_s=2000.0)
    assert known.rates(5.0) == {"flops_per_s": 500.0, "mfu": 0.25}


def test_the_record_of_an_epoch_says_flops_and_memory(tmp_path):
    tiny.trained(tiny.write_recipe(tmp_path), tmp_path / "run", "--epochs", "1")
    (epoch,) = tiny.events(tmp_path / "run", "epoch")
    of_a_sample = 3 * 2 * (8 * 16 + 16 * 2)
    assert epoch["flops_per_s"] == pytest.approx(of_a_sample * epoch["samples_per_s"])
    assert epoch["peak_memory_bytes"] > 1 << 20
    assert "mfu" not in epoch


# 11 steps an epoch. The planted cause sleeps in the phase that it is named after.
SLOW = """
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        time.sleep(BACKWARD)
        return g
def loss(outputs, targets): return nn.functional.cross_entropy(Slow.apply(outputs), targets)
"""
ENGINES = ("native", "lightning")
# Lightning saves at the end of epochs alone.
TINY = tiny.RECIPE.replace('    "checkpoint_every_steps": 4,\n', "")


def epochs(run):
    return tiny.events(run, "epoch")


def assert_adds_up(record, names=PHASES):
    assert tuple(record["phases"]) == tuple(names)
    assert all(seconds >= 0 for seconds in record["phases"].values())
    total = sum(record["phases"].values())
    assert total == pytest.approx(record["train_seconds"], rel=0.02, abs=1e-3)


def train_each(folder, flags, *, on, forward="0.0", backward="0.0"):
    """Train by both engines, with the planted causes; return the records of their epochs."""
    slow = SLOW.replace("FORWARD", forward).replace("BACKWARD", backward)
    recipe = tiny.write_recipe(folder, TINY.replace("\nrecipe = ", slow + "\nrecipe = "))
    runs = {engine: folder / engine for engine in ENGINES}
    words = [[recipe, "--run-dir", runs[e], "--engine", e, *flags] for e in ENGINES]
    tiny.train_all(words, on=on, folder=folder)
    return [epochs(run) for run in runs.values()]


def test_time_is_counted_to_the_phase_that_took_it_and_all_phases_add_up(tmp_path):
    flags = ("--epochs", "2")
    for records in train_each(tmp_path, flags, on=1, forward="0.02", backward="0.04"):
        for record in records:
            assert_adds_up(record)
            assert record["phases"]["all_reduce"] == 0
            assert "ranks" not in record
        _, record = records  # Lightning's first epoch has more to begin with
        *_, second, first = sorted(record["phases"], key=record["phases"].get)
        assert (first, second) == ("backward", "forward")
        assert record["phases"]["forward"] >= 0.22
        assert record["phases"]["backward"] >= 0.44


def test_a_rank_that_waits_for_a_slow_one_waits_in_all_reduce_and_the_slow_one_is_named(tmp_path):
    slow = "(0.04 if __import__('os').environ['RANK'] == '1' else 0)"
    flags = ("--epochs", "1", "--accumulate", "2")
    for (record,) in train_each(tmp_path, flags, on=2, backward=slow):
        assert_adds_up(record)
        assert record["phases"]["all_reduce"] >= 0.22
        assert [len(ranks) for ranks in record["ranks"].values()] == [2, 2, 2]
        compute, waited = record["ranks"]["compute"], record["ranks"]["all_reduce"]
        assert compute[1] >= 0.44
        assert compute[1] > compute[0]
        assert waited[0] > waited[1]


def test_a_run_that_stops_within_an_epoch_and_goes_on_still_adds_up(tmp_path):
    run = tmp_path / "run"
    tiny.trained(tiny.write_recipe(tmp_path), run, "--max-steps", "8")
    tiny.resumed(run, "--max-steps", "22")
    for record in epochs(run):
        assert_adds_up(record)
    timed = tiny.events(run, "evaluation", "checkpoint")
    assert {r["event"] for r in timed} == {"evaluation", "checkpoint"}
    assert all(r["seconds"] > 0 for r in timed)


def test_what_is_left_out_counts_to_no_phase_and_a_device_by_events():
    phases = Phases()
    phases.begin()
    phases.lap("forward")
    before = phases.seconds()["forward"]
    with phases.left_out():
        phases.lap("forward")
    assert phases.seconds()["forward"] == before
    phases = Phases(whole=True)
    phases.lap("step")
    phases.lap("forward")
    assert list(phases.total()) == ["data", "to_device", "step", "other"]
    assert phases.total()["step"] > 0
    phases = DevicePhases(Event)
    Event.made = 0
    for _ in range(10_000):
        phases.begin()  # what lies before is no training
        phases.lap("data")
        phases.lap("forward")
    seconds = phases.total()
    assert seconds["data"] == pytest.approx(10.0)
    assert seconds["forward"] == pytest.approx(10.0)
    assert sum(seconds.values()) == pytest.approx(20.0)
    assert Event.made <= 1024
    phases.clear()
    assert sum(phases.total().values()) == 0


class Event:  # an event of a device that takes a millisecond from one to the next
    clock = itertools.count()
    made = 0

    def __init__(self):
        Event.made += 1

    def record(self):
        self.at = next(Event.clock)

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(later.at - self.at)
