"""A script that goes on, in this process: where it stops, what it may change, what it draws."""

import contextlib
import json
import signal

import pytest
import torch
from torch import nn

from samestep.base.run.directory import STEPPED
from samestep.base.startup import JOB_RUN
from tests.loops import scripts
from tests.loops.test_loops import Training
from tests.tiny import all_records, changed, events, read_index


@contextlib.contextmanager
def ended(code: int):
    with pytest.raises(SystemExit) as end:
        yield
    assert end.value.code == code


def records(path, event):
    return [record for record in all_records(path) if record["event"] == event]


def test_each_epoch_may_have_data_of_its_own_also_after_a_resume(tmp_path):
    for num_epochs in (2, 3):
        t = Training(tmp_path, resume=True)
        with t.run as run:
            for epoch in run.epochs(num_epochs, state=t.state):
                for batch in run.batches(torch.rand(10 + epoch, 2), 4):
                    t.step(batch)
    assert [record["samples"] for record in records(tmp_path, "epoch")] == [10, 11, 12]


def test_within_an_epoch_its_data_must_be_the_same(tmp_path, capfd):
    for shift, code in ((0, 143), (1, 2), (2, 143)):
        t = Training(tmp_path, resume=True)
        with ended(code), t.run as run:
            for epoch in run.epochs(2, state=t.state):
                for batch in run.batches(t.data + epoch * shift, 4):
                    t.step(batch)
                    if run.step == 3:
                        signal.raise_signal(signal.SIGTERM)
        newest = tmp_path / "checkpoints" / read_index(tmp_path)["last"]["path"]
        if code == 2:  # as the message says, it goes on from the checkpoint before
            newest.unlink()
    assert "other data" in capfd.readouterr().err
    assert records(tmp_path, "resume")[-1]["step"] == 3


def test_data_that_was_changed_in_place_is_read_again(tmp_path):
    t = Training(tmp_path)
    with t.run as run:
        for epoch in run.epochs(3, state=t.state):
            for _ in run.batches(t.data, 10):
                opened = run._batches._data["train"]
            if epoch == 0:
                first = opened
            assert (opened is first) == (epoch < 2)
            if epoch == 1:
                t.data.mul_(2)


def test_a_checkpoint_that_could_not_be_read_is_not_announced(tmp_path, capfd):
    t = Training(tmp_path)
    with ended(2), t.run as run:
        for epoch in run.epochs(3, state=t.state):
            if epoch == 1:
                t.optimizer.param_groups[0]["own"] = object
            for batch in run.batches(t.data, 5):
                t.step(batch)
    assert "state['optimizer']" in capfd.readouterr().err
    assert [entry["step"] for entry in read_index(tmp_path)["checkpoints"]] == [2]


def test_what_comes_before_and_after_the_epochs_is_recorded_once(tmp_path):
    def train(test_fails: bool):
        t = Training(tmp_path, resume=True)
        with t.run as run:
            for epoch in run.epochs(1, state=t.state):
                if epoch == 0:
                    list(run.validation(t.data, 5))
                for batch in run.batches(t.data, 5):
                    t.step(batch)
            if test_fails:
                raise OSError
            for batch in run.validation(t.data, 5, split="test"):
                run.log(number=batch.data.mean())

    with pytest.raises(OSError):
        train(test_fails=True)
    for _ in range(2):
        train(test_fails=False)
    found = [(record["split"], record["step"]) for record in records(tmp_path, "evaluation")]
    assert found == [("validation", 0), ("test", 2)]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("completed", 2)
    assert len(records(tmp_path, "start")) == 2


def test_settings_may_change_where_the_script_says_so(tmp_path, capfd):
    def train(settings, **more):
        Training(tmp_path, resume=True, settings=settings, **more).train(1)

    def settings(lr=0.1, workers=1, trees=1):
        nested = {"size": 3, "hf_token": "a secret"}
        one_process_only = {"function": lambda: 0, "device": object(), "nan": float("nan")}
        plain = {"lr": lr, "workers": workers, "trees": trees, "sizes": [1, 2], "net": nested}
        return plain | one_process_only

    [train(settings()) for _ in range(2)]
    train(settings(workers=2), may_change=["workers"])
    for other in (settings(workers=2), settings(trees=2), settings(lr=1)):
        with ended(2):
            train(other)
    assert "may_change=['lr']" in capfd.readouterr().err
    written = (tmp_path / "settings.toml").read_text()
    assert ("sizes" in written, "secret" in written) == (True, False)


MISTAKES = {
    "no weights in state": (lambda t, _: t.state.pop("model"), "'optimizer'"),
    "a forgotten optimizer": (lambda t, _: t.state.pop("optimizer"), "(SGD)"),
    "a parameter by itself": (lambda t, own: t.trained.append(own), "nn.ParameterList"),
    "a model in parts": (lambda t, _: setattr(t.model.weight, "placements", ()), "state['model']"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_checkpoints_would_not_hold_is_named(tmp_path, capfd, mistake):
    t, own = Training(tmp_path), nn.Parameter(torch.zeros(2))
    t.trained = [t.model, t.optimizer]
    make, named = MISTAKES[mistake]
    make(t, own)
    with ended(2), t.run as run:
        for _ in run.epochs(1, state=t.state):
            for batch in run.batches(t.data, 5):
                run.backward(t.model(batch.data).mean() + own.sum(), *t.trained)
    assert named in capfd.readouterr().err


def test_a_parameter_in_a_list_is_kept_and_a_graph_may_be_used_twice(tmp_path):
    t, own = Training(tmp_path), nn.Parameter(torch.zeros(2))
    with t.run as run:
        for _ in run.epochs(1, state={**t.state, "own": nn.ParameterList([own])}):
            for batch in run.batches(t.data, 10):
                outputs = t.model(batch.data).mean() * own.sum()
                run.backward(outputs, own, retain_graph=True)
                run.backward(outputs, own)
    torch.testing.assert_close(own.grad, (2 * t.model(t.data).mean()).detach().expand(2))


def test_in_a_job_the_run_is_where_the_job_looks(tmp_path, monkeypatch):
    monkeypatch.setenv(JOB_RUN, str(tmp_path / "job"))
    for epochs in (1, 2):
        assert Training(None, resume=True).train(epochs) == [epochs - 1]
    assert (tmp_path / "job" / STEPPED).exists()
    assert read_index(tmp_path / "job")["last"]["step"] == 4


LOOP = """
import sys, torch, samestep
from torch import nn
text = torch.randint(0, 9, (4 * 47 + 1,), generator=torch.Generator().manual_seed(0))
data = text[:-1].view(-1, 4), text[1:].view(-1, 4)
def new_hidden(rows):
    return torch.zeros(rows, 6)
with samestep.open_run("run", resume=True, log_every=1, checkpoint_every_steps=1) as run:
    embed, cell, out = nn.Embedding(9, 5), nn.GRU(5, 6, batch_first=True), nn.Linear(6, 9)
    model = run.place(nn.ModuleList([embed, cell, out]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for epoch in run.epochs(2, state={"model": model, "optimizer": optimizer}):
        for batch in run.batches(data, 7, order="columns", carry=new_hidden):
            x, y = batch.data
            found, hidden = cell(embed(x), run.carry.unsqueeze(0))
            run.carry = hidden.squeeze(0)
            loss = nn.functional.cross_entropy(out(found).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            run.backward(loss, model)
            optimizer.step()
            run.log(loss=loss)
"""


def losses(folder):
    return [record["loss"] for record in events(folder / "run", "step")]


def written(folder, *changes):
    (folder / "loop.py").write_text(changed(LOOP, *changes))
    return folder / "loop.py"


def test_it_goes_on_after_a_kill_on_another_number_of_ranks(tmp_path):
    straight, killed, anew = (tmp_path / name for name in ("straight", "killed", "anew"))
    for folder in (straight, killed, anew):
        folder.mkdir()
    scripts.run(written(straight), world_size=3, folder=straight)
    assert len(losses(straight)) == 14
    script = written(killed)
    strike = scripts.Strike(4, signal.SIGKILL, rank=None)
    ranks = scripts.start(script, world_size=2, folder=killed, strike=strike)
    assert ranks.wait() == [-signal.SIGKILL] * 2
    assert scripts.run_here(script) == 0
    assert losses(killed) == pytest.approx(losses(straight), rel=1e-11)
    assert scripts.run_here(written(anew, ("run.carry = hidden.squeeze(0)", "pass"))) == 0
    assert losses(anew)[1] != pytest.approx(losses(straight)[1], rel=1e-6)


def test_one_state_a_rank_goes_on_on_as_many_ranks(tmp_path):
    of_rank = (
        "def new_hidden(rows):\n    return torch.zeros(rows, 6)",
        "def new_hidden():\n    return torch.full((), run.rank + 1.0)",
    )
    used = ("run.carry.unsqueeze(0)", "torch.zeros(1, len(x), 6)")
    left = ("run.carry = hidden.squeeze(0)", "hidden, run.carry = run.carry, run.carry * 2")
    logged = ("run.log(loss=loss)", "run.log(loss=loss, hidden=hidden)")
    script = written(tmp_path, of_rank, used, left, logged)
    strike = scripts.Strike(4, signal.SIGKILL, rank=None)
    ranks = scripts.start(script, world_size=2, folder=tmp_path, strike=strike)
    assert ranks.wait() == [-signal.SIGKILL] * 2
    scripts.run(script, world_size=2, folder=tmp_path)
    steps = events(tmp_path / "run", "step")
    shares = [(4, 3)] * 6 + [(3, 2)]  # of 7, and of the last 5 samples of an epoch
    means = [(a + 2 * b) * 2**k / (a + b) for k, (a, b) in enumerate(shares)] * 2
    assert [step["hidden"] for step in steps] == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        ("run.carry = hidden.squeeze(0)", "run.carry = None"),
        ("run.carry = hidden.squeeze(0)", "run.carry = hidden"),
        ("run.carry = hidden.squeeze(0)", "run.carry = hidden.squeeze(0)[:, :3]"),
        (", carry=new_hidden", ""),
        ("torch.zeros(rows, 6)", "torch.zeros(6)"),
    ],
)
def test_state_that_cannot_be_carried_is_refused(change, tmp_path, refused_here):
    assert refused_here(written(tmp_path, change))
