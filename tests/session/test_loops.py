"""What a script may do with its loops, in this process: leave them early, draw, look at means."""

import contextlib
import json
import tomllib

import pytest
import torch
from torch import nn

import samestep
from samestep.data.order import Ordering, epoch_order
from tests.session.same import assert_close
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
        with pytest.raises(samestep.UserError, match=f'{index["best"]["path"]}"'):
            ask(path)
    before = (path / "checkpoints" / index["best"]["path"]).read_bytes()
    trained, best, _, again = stops_early(path, 9, resume=True)
    assert (trained, best) == ([], 3)
    assert torch.equal(again, weights)
    assert (path / "checkpoints" / index["best"]["path"]).read_bytes() == before
    trained, best, *_ = stops_early(path, 10, resume=True)  # more are asked for
    assert trained == [5, 6, 7]
    assert best == 6


def test_a_directory_is_open_once_in_a_process(tmp_path, capfd):
    with Training(tmp_path / "run").run, pytest.raises(SystemExit) as ended:
        Training(tmp_path / "run", resume=True).run.__enter__()
    assert ended.value.code == 2
    assert "in this process already" in capfd.readouterr().err


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


def test_without_a_loss_its_values_are_metrics(tmp_path):
    t = Training(tmp_path / "run", log_every=2)
    with t.run as run:
        for _ in run.epochs(1, state=t.state):
            for batch in run.batches(torch.arange(10), 5):
                run.log(number=batch.data.double().mean())
            assert run.means == {"number": 4.5}
    found = all_records(tmp_path / "run")
    assert [r["step"] for r in found if r["event"] == "metrics"] == [2]
    assert not [r for r in found if r["event"] in ("step", "epoch")]


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
