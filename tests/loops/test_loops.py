"""What a script may do with its loops, in this process: leave them early, draw, look at means."""

import contextlib
import json
import signal
import tomllib

import pytest
import torch
from torch import nn

import samestep
from samestep import read_records
from samestep.core.data.order import Ordering, epoch_order
from tests.loops.same import account, assert_close, assert_same
from tests.loops.scripts import Strike, run, run_here, weights
from tests.tiny import all_records, read_index


class Training:
    def __init__(self, path, **more):
        self.run = samestep.open_run(path, name="tiny", device="cpu", **more)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.data = torch.arange(20.0).view(10, 2) / 20

    def step(self, batch):
        loss = self.model(batch.data).square().mean()
        self.optimizer.zero_grad()
        self.run.backward(loss, self.model)
        self.optimizer.step()
        self.run.log(loss=loss)

    def train(self, epochs, size=5):
        """Train to the end; return the epochs that were still to be trained."""
        left = []
        with self.run as run:
            for epoch in run.epochs(epochs, state=self.state):
                left.append(epoch)
                for batch in run.batches(self.data, size):
                    self.step(batch)
        return left


def test_each_sample_comes_once_in_an_epoch_and_brings_its_own_numbers(tmp_path):
    found = {}
    for size in (3, 10):
        t = Training(tmp_path / f"run-{size}")
        epochs = []
        with t.run as run:
            for _ in run.epochs(2, state=t.state):
                drawn = {}
                for batch in run.batches(t.data, size):
                    t.step(batch)
                    numbers = [batch.uniform(2), batch.normal(2), batch.normal(2)]
                    together = torch.cat([*numbers, batch.keys[:, None] % 1000], dim=1)
                    assert torch.equal(batch.data, t.data[batch.indices])
                    drawn |= dict(zip(batch.indices.tolist(), together.tolist(), strict=True))
                assert sorted(drawn) == list(range(10))
                epochs.append(drawn)
        found[size] = epochs
    assert found[3] == found[10]  # whatever else is in their batch
    first, second = found[3]
    assert len({x for drawn in (first, second) for row in drawn.values() for x in row[:6]}) == 120


def test_the_order_of_a_loop_is_that_of_a_recipe_and_stays(tmp_path, capfd):
    weights = torch.arange(10.0)
    orders = {"columns": {}, "weighted": {"weights": lambda data: data[:, 0] * 10}}
    for name, more in orders.items():
        ordering = Ordering(order=name, weights=weights.double() if more else None)
        wanted = [epoch_order(10, 0, k, ordering, global_batch=4)[0:10].tolist() for k in (0, 1)]
        found: list[int] = []
        for taken in (4, 6):  # of the steps; each epoch has 3
            how = {"resume": True, "seed": 0, "checkpoint_every_steps": 1}
            t = Training(tmp_path / name, **how)
            with contextlib.suppress(KeyboardInterrupt), t.run as run:
                for _ in run.epochs(2, state=t.state):
                    for batch in run.batches(t.data, 4, order=name, **more):
                        if batch.step == taken:
                            raise KeyboardInterrupt
                        t.step(batch)
                        found += batch.indices.tolist()
        assert found == wanted[0] + wanted[1]
    t = Training(tmp_path / "columns", resume=True, seed=0)
    with pytest.raises(SystemExit):
        t.train(3, size=4)
    assert "order = columns" in capfd.readouterr().err


def test_left_by_break_the_run_saves_and_goes_on_with_the_next_epoch(tmp_path):
    t = Training(tmp_path / "run")
    with t.run as run:
        for epoch in run.epochs(5, state=t.state):
            for batch in run.batches(t.data, 3):
                t.step(batch)
                if batch.step == 1:
                    break
            assert (run.means == {}) == (epoch == 0)  # left early
            if epoch == 1:
                break
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["epochs"], result["status"]) == (2 + 4, 2, "completed")
    assert result["reason"] == "left after epoch 2 of 5"
    assert read_index(tmp_path / "run")["last"]["step"] == 6
    t = Training(tmp_path / "run", resume=True)
    assert t.train(3, size=3) == [2]
    assert t.run.step == 10
    found = samestep.load(tmp_path / "run", checkpoint="last", model=nn.Linear(2, 1))
    assert torch.equal(found(t.data), t.model(t.data))
    assert not found.training
    steps = [r["step"] for r in all_records(tmp_path / "run") if r["event"] == "step"]
    assert steps == [1, *range(3, 11)]  # each of so short a run but that of the break


LOSSES = (5.0, 3.0, 2.0, 4.0, 3.0, 1.0, 6.0, 7.0, 8.0)


def stops_early(path, epochs, *, leaves=False, until=99, **more):
    """Train until the validation loss was no better for 2 epochs; return what was trained."""
    torch.manual_seed(0)
    t = Training(path, keep_newest=1, **more)
    trained = []
    with t.run as run:
        run.state["waited"] = 0
        for epoch in run.epochs(epochs, state=t.state):
            if epoch == until:
                raise RuntimeError("killed")
            for batch in run.batches(t.data, 5):
                t.step(batch)
            for _ in run.validation(t.data, 10):
                run.log(loss=LOSSES[epoch])
            run.state["waited"] = 0 if run.best("loss") else run.state["waited"] + 1
            assert run.best("loss") == (run.state["waited"] == 0), "asked twice"
            trained.append(epoch)
            if run.state["waited"] == 2:
                run.finish("no better for 2 epochs")
                if leaves:
                    break
        last = t.model.weight.detach().clone()
        best = run.load_best()
    return trained, best, last, t.model.weight.detach()


@pytest.mark.parametrize("leaves", [False, True])
def test_stopped_early_a_run_has_its_best_checkpoint_and_is_not_trained_on(tmp_path, leaves):
    path = tmp_path / "run"
    with pytest.raises(RuntimeError):
        stops_early(path, 9, until=4)
    trained, best, last, weights = stops_early(path, 9, leaves=leaves, resume=True)
    assert (trained, best) == ([4], 3)  # it had waited for one epoch when it was killed
    assert not torch.equal(last, weights)
    index = read_index(path)
    assert [entry["epoch"] for entry in index["checkpoints"]] == [3, 5]  # of the newest 1, and best
    assert (index["best"]["metric"], index["monitor"], index["mode"]) == (2.0, "loss", "min")
    result = json.loads((path / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("completed", "no better for 2 epochs")
    for ask in (samestep.load, samestep.evaluate):
        with pytest.raises(samestep.UserError, match="model=…"):
            ask(path)
    before = (path / "checkpoints" / index["best"]["path"]).read_bytes()
    trained, best, _, again = stops_early(path, 9, resume=True)
    assert (trained, best) == ([], 3)
    assert torch.equal(again, weights)
    assert (path / "checkpoints" / index["best"]["path"]).read_bytes() == before
    trained, best, *_ = stops_early(path, 10, resume=True)  # more are asked for
    assert trained == [5, 6, 7]
    assert best == 6


def test_the_run_directory_is_none_of_the_settings(tmp_path):
    for place in ("here", "moved"):
        arguments = {"out": str(tmp_path / place), "again": tmp_path / place, "lr": 0.1}
        t = Training(tmp_path / place, resume=True, settings=arguments)
        t.train(1 + (place == "moved"))
        settings = tomllib.loads((tmp_path / place / "settings.toml").read_text())
        assert settings["options"] == {"lr": 0.1}
        if place == "here":
            (tmp_path / place).rename(tmp_path / "moved")
    assert t.run.step == 4


def test_in_one_autocast_around_the_loop_it_learns_as_in_one_around_each_pass(tmp_path):
    """PyTorch forgets the weights it has cast when the outermost context ends, and not before."""

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    found = []
    for outer, inner in ((contextlib.nullcontext, autocast), (autocast, contextlib.nullcontext)):
        torch.manual_seed(0)
        t = Training(tmp_path / f"run-{len(found)}", log_every=1)
        with outer(), t.run as run:
            for epoch in run.epochs(5, state=t.state):
                for batch in run.batches(t.data, 3):
                    for _ in range(2):  # two steps in a batch, as of a GAN
                        with inner():
                            loss = t.model(batch.data).square().mean()
                        t.optimizer.zero_grad()
                        run.backward(loss, t.model)
                        t.optimizer.step()
                    run.log(loss=loss)
                if epoch % 2:
                    with torch.no_grad(), inner():
                        for batch in run.validation(t.data, 5):
                            run.log(loss=t.model(batch.data).square().mean())
        found.append([r["loss"] for r in all_records(run.path) if "loss" in r])
    assert found[0] == found[1]
    assert found[0][-1] < 0.2 * found[0][0]


def test_without_a_loss_values_are_metrics_and_a_directory_is_open_once(tmp_path, capfd):
    t = Training(tmp_path / "run", log_every=2)
    with t.run as run:
        for _ in run.epochs(1, state=t.state):
            for batch in run.batches(torch.arange(10), 5):
                run.log(number=batch.data.double().mean())
            assert run.means == {"number": 4.5}
    found = all_records(tmp_path / "run")
    assert [r["step"] for r in found if r["event"] == "metrics"] == [2]
    assert not [r for r in found if r["event"] in ("step", "epoch")]
    with Training(tmp_path / "open").run, pytest.raises(SystemExit) as ended:
        Training(tmp_path / "open", resume=True).run.__enter__()
    assert ended.value.code == 2
    assert "in this process already" in capfd.readouterr().err


def test_a_batch_is_as_a_tensor_a_data_set_or_collate_makes_it(tmp_path):
    t, numbers = Training(tmp_path / "run"), torch.arange(10)
    forms = [
        (t.data, {}, t.data[:3]),
        ((t.data, numbers, numbers / 10), {}, [t.data[:3], numbers[:3], numbers[:3] / 10]),
        (torch.utils.data.TensorDataset(t.data, numbers), {}, [t.data[:3], numbers[:3]]),
        ([*t.data], {"collate": lambda rows: {"x": torch.stack(rows)}}, {"x": t.data[:3]}),
    ]
    with t.run as run:
        for epoch in run.epochs(4, state=t.state):
            data, how, expected = forms[epoch]
            (batch, *_) = list(run.validation(data, 3, **how))
            assert_close(batch.data, expected, 0)
            for batch in run.batches((t.data, numbers), 10):
                assert torch.equal(batch.data[0], t.data[batch.data[1]])


def test_normal_numbers_are_normal_and_belong_to_their_keys():
    keys = torch.arange(20_000)
    drawn = samestep.normal(keys, 5)
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.std()) - 1) < 0.01
    assert float((drawn.abs() < 1.959964).float().mean()) == pytest.approx(0.95, abs=0.003)
    correlation = torch.corrcoef(drawn.T) - torch.eye(5)
    assert float(correlation.abs().max()) < 0.03
    assert torch.equal(samestep.normal(keys[7:8], 5), drawn[7:8])
    assert samestep.normal(keys[:0], 5).shape == (0, 5)


# Words of different lengths, a loss per word, a validation, a schedule, draws at every place.
SCRIPT = """
import random, sys, torch, samestep
from torch import nn
from torch.nn.utils.rnn import pad_sequence
class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 23
    def __getitem__(self, index):
        return torch.linspace(0, 1, 2 + index % 5) + 0.01 * torch.randn(1)
def collate(words):
    return {"x": pad_sequence(words, batch_first=True), "n": torch.tensor([*map(len, words)])}
DROPOUT = float(sys.argv[1])
with samestep.open_run("run", seed=3, resume=True, log_every=1, checkpoint_every_steps=1,
                       settings={"dropout": DROPOUT}, keep_newest=3) as run:
    model = run.place(nn.Sequential(nn.Linear(1, 8), nn.Dropout(DROPOUT), nn.Linear(8, 1)))
    unused = run.place(nn.Linear(1, 1))
    optimizer = torch.optim.Adam([*model.parameters(), *unused.parameters()], lr=0.01)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.005, 2, cycle_momentum=False)
    held_out = torch.rand(11, 4, 1)
    state = {"model": model, "unused": unused, "optimizer": optimizer, "schedule": schedule}
    data = Words()
    for epoch in run.epochs(3, state=state):
        for group in optimizer.param_groups:  # done again by a run that resumes in the epoch
            group["lr"] *= 0.9
        [kept["exp_avg"].mul_(0.5) for kept in optimizer.state.values()]
        for batch in run.batches(data, 11, collate=collate, num_workers=int(sys.argv[2])):
            x, n = batch.data["x"].unsqueeze(2), batch.data["n"]
            there = torch.arange(x.shape[1]) < n[:, None]
            noise = batch.normal(7, 1)[:, :x.shape[1]]
            error = (model(x + noise) - x).square().squeeze(2)
            words = there.sum()
            optimizer.zero_grad()
            run.backward((error * there).sum() / words / 2, optimizer, terms=words)
            run.backward((error.detach() * 0 + model(x + batch.uniform(1, 1)).squeeze(2) * there)
                         .sum() / words / 2, optimizer, terms=words)
            optimizer.step()
            run.log(loss=(error * there).sum() / words, terms=words)
            run.log(drawn=batch.uniform(), lr=schedule.get_last_lr()[0]) if len(x) == 1 else None
            if DROPOUT:
                run.log(own=torch.rand(()), also=random.random())
        schedule.step()
        model[2].requires_grad_(epoch != 0 and model[2].bias.requires_grad)  # once, as in a warm-up
        shift = float(torch.rand(()))
        model.eval()
        with torch.no_grad():
            for batch in run.validation(held_out, 3):
                loss = (model(batch.data + shift) - batch.data).square().mean()
                run.log(loss=loss, largest=batch.data.abs().mean())
        model.train()
        print(epoch, sorted(run.means))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "words.py"
    path.write_text(SCRIPT)
    return path


def test_a_mean_over_words_is_the_same_on_any_number_of_ranks(script, tmp_path):
    alone, three = (tmp_path / name for name in ("alone", "three"))
    for folder in (alone, three):
        folder.mkdir()
    assert run_here(script, "0", "0", folder=alone) == 0
    ranks = run(script, "0", "1", world_size=3, folder=three)
    assert "2 ['largest', 'loss']" in ranks.printed(0)
    names = ("event", "step", "epoch", "loss", "split", "largest", "samples")
    ours, theirs = (
        [{k: r[k] for k in names if k in r} for r in account(folder / "run")]
        for folder in (three, alone)
    )
    assert [r["event"] for r in ours].count("evaluation") == 3
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert_close(weights(three / "run"), weights(alone / "run"), 1e-9)


@pytest.mark.parametrize(("world_size", "nth"), [(1, 3), (2, 5)])
def test_with_dropout_and_draws_a_resumed_run_is_the_same(script, tmp_path, world_size, nth):
    for folder, strike, code in (("whole", None, 0), ("parts", Strike(nth, signal.SIGTERM), 143)):
        (tmp_path / folder).mkdir()
        where = {"world_size": world_size, "folder": tmp_path / folder}
        run(script, "0.5", "0", **where, strike=strike, code=code)
    stopped = [r["step"] for r in read_records(tmp_path / "parts/run") if r["event"] == "stop"]
    assert stopped == [nth] if world_size == 1 else nth <= stopped[0] < 9
    run(script, "0.5", "0", world_size=world_size, folder=tmp_path / "parts")
    assert_same(tmp_path / "parts" / "run", tmp_path / "whole" / "run", tolerance=0)
    assert {"own", "also"} <= account(tmp_path / "whole" / "run")[0].keys()
