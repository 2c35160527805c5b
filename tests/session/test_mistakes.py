"""What a script does wrong ends it, on all ranks, with one message and exit code 2."""

import json
import shutil

import pytest

from tests.command_line import one_message
from tests.session.scripts import refused, run_here, start
from tests.tiny import files

SCRIPT = """
import os, sys
import torch
from torch import nn
import samestep

rank = int(os.environ.get("RANK", "0"))
data = torch.arange(40.0, dtype=torch.float64).view(20, 2) / 40
opened = {"path": "run", "seed": 0, "resume": True}
with samestep.open_run(**opened) as run:
    model, other = run.place(nn.Linear(2, 1)), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, size = {"model": model, "optimizer": optimizer}, 6
    for epoch in run.epochs(2, state=state):
        for batch in run.batches(data, size):
            loss = model(batch.data).square().mean()
            optimizer.zero_grad()
            run.backward(loss, model)
            optimizer.step()
            run.log(loss=loss)
"""
OPENED = 'opened = {"path": "run", "seed": 0, "resume": True}'


def script(folder, old="", new="", name="mine.py"):
    """Write the script, with a part of it changed."""
    assert old in SCRIPT
    path = folder / name
    path.write_text(SCRIPT.replace(old, new) if old else SCRIPT)
    return path


MISTAKES = {
    "state without state_dict": (
        '"optimizer": optimizer}',
        '"optimizer": 1}',
        "state['optimizer']",
    ),
    "a sparse buffer": (
        "state, size",
        "model.register_buffer('graph', torch.eye(2).to_sparse())\n    state, size",
        "graph",
    ),
    "no state": ("state, size = {", "state, size = {} and {", "state="),
    "batch size 0": ("}, 6", "}, 0", "global_batch_size"),
    "parameters that nobody keeps": ("loss, model)", "loss, model, other)", "state"),
    "nothing to train": ("loss, model)", "loss)", "run.backward"),
    "a loss without a gradient": ("loss, model)", "loss.detach(), model)", "without a gradient"),
    "a loss of each sample": ("loss, model)", "model(batch.data), model)", "shape (6, 1)"),
    "a vector is logged": ("log(loss=loss)", "log(loss=batch.data)", "loss"),
    "a name of the records": ("log(loss=loss)", "log(loss=loss, step=1)", "step"),
    "NaN": ("log(loss=loss)", "log(loss=loss * float('nan'))", "NaN"),
    "exit within the run": ("run.log(loss=loss)", "sys.exit(0)", "mine.py:20"),
    "a loader": ("batches(data,", "batches(torch.utils.data.DataLoader(data),", "DataLoader"),
    "an order that there is not": ("data, size)", "data, size, order='sorted')", "sequential"),
    "weights of another number": (
        "data, size)",
        "data, size, order='weighted', weights=[1, 2])",
        "run.batches(weights=…) has 2 numbers",
    ),
    "an order by no weights": ("data, size)", "data, size, order='weighted')", "weights=…"),
    "weights of no order": ("data, size)", "data, size, weights=data[:, 0])", "weighted"),
    "draws that are left out": (
        "data, size)",
        "data, size, order='replacement', drop_last=True)",
        "drop_last",
    ),
    "more columns than samples": ("data, size)", "data, 21, order='columns')", "21 columns"),
    "inputs and targets of different length": (
        "batches(data,",
        "batches((data, data[1:]),",
        "The data has 20 inputs",
    ),
    "a seed below 0": (OPENED, 'opened = {"path": "run", "seed": -1}', "seed"),
    "batches outside of epochs": (
        "for epoch in run.epochs(2, state=state):",
        "if 1:",
        "run.epochs",
    ),
    "no batches": ("for batch in run.batches(data, size):", "while False:", "run.batches"),
    "after the with": (
        "            run.log(loss=loss)",
        "run.log(loss=1)",
        "with samestep.open_run",
    ),
    "a state that cannot be loaded": (
        "state, size",
        "optimizer.param_groups[0]['why'] = torch.nn.Linear(1, 1)\n    state, size",
        "state['optimizer']",
    ),
}


@pytest.fixture
def refused_here(capfd):
    """Run a script that is refused in this process; return its one message."""

    def call(path) -> str:
        capfd.readouterr()
        code = run_here(path)
        return one_message(code, "".join(capfd.readouterr()))

    return call


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_once_with_exit_code_2(tmp_path, refused_here, mistake):
    old, new, named = MISTAKES[mistake]
    assert named in refused_here(script(tmp_path, old, new))


def test_after_a_with_that_failed_nothing_is_saved_any_more(tmp_path, refused_here):
    suppressed = "import contextlib\nwith contextlib.suppress(ValueError), samestep"
    path = script(tmp_path, "with samestep", suppressed)
    failing = path.read_text().replace("run.log(loss=loss)", "raise ValueError")
    path.write_text(f"{failing}run.load_best()\n")
    assert "with samestep.open_run" in refused_here(path)


def test_all_ranks_end_with_the_one_message(tmp_path):
    old, new, named = MISTAKES["parameters that nobody keeps"]
    assert named in refused(script(tmp_path, old, new), world_size=2, folder=tmp_path)


@pytest.mark.parametrize("leaves", ["", "        break\n"])
def test_a_best_epoch_that_one_rank_alone_asks_for_is_told(tmp_path, leaves):
    logs = "            run.log(loss=loss)\n"
    asks = f"{logs}        if run.is_main and run.best(): pass\n{leaves}"
    assert "run.best" in refused(script(tmp_path, logs, asks), world_size=2, folder=tmp_path)


@pytest.mark.parametrize("first", [0, 25])
def test_backward_passes_of_one_rank_alone_are_told(tmp_path, first):
    changed = script(
        tmp_path,
        "run.backward(loss, model)",
        f"""for _ in range(1 + rank):
                if rank == 0 or batch.step >= {first}:
                    run.backward(model(batch.data).square().mean(), model)""",
    )
    changed.write_text(changed.read_text().replace("epochs(2", "epochs(9"))
    expected = "2 times in step 1 on some ranks, 1 on others" if first == 0 else "run.backward"
    assert expected in refused(changed, world_size=2, folder=tmp_path)


def test_ranks_with_different_data_are_told(tmp_path):
    changed = script(tmp_path, "run.batches(data,", "run.batches(data + rank,")
    assert "Rank 1 has other data" in refused(changed, world_size=2, folder=tmp_path)


OTHER_RUNS = {
    "batch size": ("}, 6", "}, 5", "global_batch_size = 6"),
    "seed": ('"seed": 0', '"seed": 1', "seed = 0"),
    "number of samples": ("batches(data,", "batches(data[:-1],", "num_samples = 20"),
    "values of the data": ("batches(data,", "batches(data + 1,", "other data"),
    "names": ('"model": model', '"net": model', "net"),
    "sizes": ("nn.Linear(2, 1)), nn", "nn.Linear(2, 3)), nn", "state['model']"),
    "settings": ('"resume": True}', '"resume": True, "settings": {"lr": 2}}', "lr"),
    "no resume": ('"resume": True', '"resume": False', "resume=True"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a finished run in it; only to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    assert run_here(script(folder)) == 0
    result = json.loads((folder / "run" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("completed", 8)
    return folder


@pytest.fixture
def finished(trained, tmp_path):
    """Give a folder with a finished run in it."""
    return shutil.copytree(trained, tmp_path / "finished")


@pytest.mark.parametrize("change", OTHER_RUNS)
def test_a_run_of_something_else_is_refused_and_left_as_it_is(finished, refused_here, change):
    old, new, named = OTHER_RUNS[change]
    changed = script(finished, old, new)
    changed.write_text(changed.read_text().replace("epochs(2", "epochs(3"))
    before = files(finished / "run" / "checkpoints"), (finished / "run/events.jsonl").read_bytes()
    assert named in refused_here(changed)
    after = files(finished / "run" / "checkpoints"), (finished / "run/events.jsonl").read_bytes()
    assert after == before


def test_a_run_of_another_script_is_refused_and_more_epochs_go_on(finished, refused_here):
    other = script(finished, "epochs(2", "epochs(3", name="other.py")
    assert "'mine'" in refused_here(other)
    assert run_here(script(finished, "epochs(2", "epochs(3")) == 0
    result = json.loads((finished / "run" / "result.json").read_text())
    assert (result["status"], result["steps"], result["epochs"]) == ("completed", 12, 3)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_ends_all_and_is_told_once(tmp_path, failing):
    raising = f"if rank == {failing} and epoch: raise ValueError('mine')"
    changed = script(tmp_path, "run.log(loss=loss)", f"{raising}\n            run.log(loss=loss)")
    ranks = start(changed, world_size=2, folder=tmp_path)
    # No launcher ends the other rank here: it meets the loss of its peer by itself.
    assert ranks.wait()[failing] == 1
    assert ranks.wait()[1 - failing] == 1
    assert ranks.output().count("ValueError: mine") == 1
    assert "Traceback" not in ranks.output()


def test_an_error_of_one_rank_after_the_epochs_ends_a_run_as_failed(tmp_path):
    changed = script(
        tmp_path,
        "            run.log(loss=loss)",
        "            run.log(loss=loss)\n    1 / (1 - rank)",
    )
    ranks = start(changed, world_size=2, folder=tmp_path)
    assert ranks.wait() == [1, 1]
    assert "ZeroDivisionError" in ranks.output()
    assert "Traceback" not in ranks.output()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


def test_an_error_alone_is_python_s_own(tmp_path):
    changed = script(tmp_path, "run.log(loss=loss)", "raise ValueError('mine')")
    ranks = start(changed, folder=tmp_path)
    assert ranks.wait() == [1]
    assert "Traceback" in ranks.output()
    assert "samestep:" not in ranks.output()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed"


ADAM, SGD = (f"optim.{name}(model.parameters(), lr=0.1)" for name in ("Adam", "SGD"))
SCHEDULED = f"{SGD}\n    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)"
IN_STATE = '"optimizer": optimizer}'


@pytest.mark.parametrize(
    ("optimizer", "state", "named"),
    [
        (ADAM, "}", "the optimizer (Adam)"),
        (ADAM, IN_STATE, ""),
        (SGD, "}", ""),  # it has nothing to keep
        (SCHEDULED, IN_STATE, "the scheduler of the optimizer (SGD)"),
        (SCHEDULED, '"optimizer": optimizer, "scheduler": scheduler}', ""),
    ],
)
def test_what_a_resumed_run_would_begin_anew_is_told_once(tmp_path, capfd, optimizer, state, named):
    path = script(tmp_path, SGD, optimizer)
    path.write_text(path.read_text().replace(IN_STATE, state))
    assert run_here(path) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "warning:" in line]
    assert len(said) == bool(named)
    assert all(named in line for line in said)
