"""What a script does wrong, or a recipe that calls exit(), ends all ranks with one message."""

import shutil

import pytest

from tests.command_line import RECIPE, read_json, refusal
from tests.loops.scripts import refused, run, run_here, start
from tests.tiny import all_records, changed, files

SCRIPT = """
import os, sys, torch, samestep
from torch import nn
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
    assert old in SCRIPT
    path = folder / name
    path.write_text(SCRIPT.replace(old, new) if old else SCRIPT)
    return path


LOG, DATA, MADE = "run.log(loss=loss)", "data, size)", "\n    state, size"
BATCHES = "for batch in run.batches(data, size):"
NOBODY_KEEPS = ("loss, model)", "loss, model, other)", "state")
MISTAKES = [
    ('"optimizer": optimizer}', '"optimizer": 1}', "state['optimizer']"),
    ("state, size = {", "state, size = {} and {", "state="),
    ("run.place(nn.Linear(2, 1))", "run.place(nn.LazyLinear(1))", "lazy parameters"),
    ("}, 6", "}, 0", "global_batch_size"),
    NOBODY_KEEPS,
    ("loss, model)", "loss)", "run.backward"),
    ("loss, model)", "loss.detach(), model)", "without a gradient"),
    ("loss, model)", "model(batch.data), model)", "shape (6, 1)"),
    (LOG, "run.log(loss=batch.data)", "loss"),
    (LOG, "run.log(loss=loss, step=1)", "step"),  # a name of the records
    (LOG, "run.log(loss=loss * float('nan'))", "NaN"),
    (LOG, "sys.exit(0)", "mine.py:17"),
    (LOG, "os._exit(0)", "mine.py:17"),
    (DATA, "torch.utils.data.DataLoader(data), size)", "DataLoader"),
    (DATA, "data, size, order='sorted')", "sequential"),
    (DATA, "data, size, order='weighted', weights=[1, 2])", "has 2 numbers"),
    (DATA, "data, size, weights=data[:, 0])", "weighted"),
    (DATA, "data, size, order='weighted', weights=torch.rand(20))", "torch.multinomial"),
    (DATA, "data, size, order='replacement', drop_last=True)", "drop_last"),
    (DATA, "data, 21, order='columns')", "21 columns"),
    (DATA, "(data, data[1:]), size)", "The data has 20 inputs"),
    (OPENED, 'opened = {"path": "run", "seed": -1}', "open_run(seed=-1): it must be 0 or more"),
    (OPENED, 'opened = {"device": "gpu"}', "'auto', 'cpu', 'cuda', 'mps'"),
    (OPENED, 'opened = {"settings": {"nets": [data]}}', "settings['nets'][0] is a Tensor"),
    (DATA, "data, size, num_workers=-1)", "num_workers=-1"),
    ("loss, model)", "loss, model, terms=float('nan'))", "terms=nan"),
    (LOG, "run.log(loss=loss, terms=-1)", "terms"),
    (LOG, f"{LOG}\n        [*run.validation(data, 6, split='train')]", "split='train'"),
    ("for epoch in run.epochs(2, state=state):", "if 1:", "run.epochs"),
    (BATCHES, "while False:", "run.batches"),
    (f"            {LOG}", "run.log(loss=1)", "with samestep.open_run"),
    (BATCHES, "for batch in run.validation(data, size):", "run.backward"),
    (LOG, f"{LOG}\n        samestep.gather(data)", "samestep.gather"),
    (LOG, f"{LOG}\n        [samestep.gather(b.data) for b in run.validation(data, 9)]", "gather"),
    (LOG, f"{LOG}\n        run.state['seen'] = torch.ones(2)", "run.state['seen']"),
    (LOG, f"{LOG}\n        model.register_buffer('seen', data[:1])", "seen is not in the model"),
    (LOG, f"{LOG}\n        run.best('lost')", "run.best('lost')"),
    (LOG, f"{LOG}\n        run.best(mode='up')", "mode='up'"),
    (MADE, f"\n    model.register_buffer('graph', torch.eye(2).to_sparse()){MADE}", "graph"),
    (MADE, f"\n    optimizer.param_groups[0]['why'] = nn.Linear(1, 1){MADE}", "state['optimizer']"),
]


@pytest.mark.parametrize(("old", "new", "named"), MISTAKES)
def test_a_mistake_is_told_once_with_exit_code_2(tmp_path, refused_here, old, new, named):
    assert named in refused_here(script(tmp_path, old, new))


def test_after_a_with_that_failed_nothing_is_saved_any_more(tmp_path, refused_here):
    path = script(tmp_path, LOG, "raise ValueError")
    suppressed = "import contextlib\nwith contextlib.suppress(ValueError), samestep"
    path.write_text(path.read_text().replace("with samestep", suppressed) + "run.load_best()\n")
    assert "with samestep.open_run" in refused_here(path)


TWICE = "[run.backward(model(batch.data).square().mean(), model) for _ in range(1 + rank)]"
ONE_VALIDATES = "rank or [*run.validation(data, 6)]"
OF_RANKS = [
    ("run.backward(loss, model)", TWICE, "2 times in step 1 on some ranks, 1 on others"),
    ("run.backward(loss, model)", "rank or run.backward(loss, model)", "1 times in step 1 on some"),
    (LOG, f"{LOG}\n        if run.is_main and run.best(): pass\n        break", "run.best"),
    (LOG, f"{LOG}\n        {ONE_VALIDATES}", "run.validation on rank 0 and the end"),
    (LOG, f"{LOG}\n            {ONE_VALIDATES}", "run.validation was called in step 1"),
    ("run.batches(data,", "run.batches(data + rank,", "Rank 1 has other data"),
    ("run.batches(data,", "run.batches([*data + rank],", "Rank 1 has other values"),
    ('"seed": 0', '"seed": rank', "seed is 0 on rank 0 and 1 on rank 1"),
    (
        '"resume": True',
        '"settings": {"a": rank, "local_rank": rank, "dir": f"/tmp/{rank}", "on": f"cuda:{rank}"}',
        "between the ranks: settings['a'] is 0 on rank 0 and 1 on rank 1.",
    ),
    ("}, 6", "}, 6 + rank", "global_batch_size is 6 on rank 0 and 7 on rank 1"),
    ("epochs(2", "epochs(2 + rank", "num_epochs"),
    (MADE, f"\n    model.bias.requires_grad_(rank == 0){MADE}", "model.bias"),
    (MADE, f"\n    run.state['waited'] = rank{MADE}", "run.state['waited']"),
    (DATA, "data, size, carry=lambda rows: torch.full((rows, 1), rank))", "carried state"),
    (LOG, f"{LOG}; rank and model.register_buffer('late', data[0])", "late is not in the model"),
    NOBODY_KEEPS,
]


@pytest.mark.parametrize(("old", "new", "named"), OF_RANKS, ids=[new for _, new, _ in OF_RANKS])
def test_what_differs_between_ranks_is_told_with_both_values(tmp_path, old, new, named):
    assert named in refused(script(tmp_path, old, new), world_size=2, folder=tmp_path)


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
    folder = tmp_path_factory.mktemp("trained")
    assert run_here(script(folder)) == 0
    result = read_json(folder / "run" / "result.json")
    assert (result["status"], result["steps"]) == ("completed", 8)
    return folder


@pytest.fixture
def finished(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "finished")


@pytest.mark.parametrize("change", OTHER_RUNS)
def test_a_run_of_something_else_is_refused_and_left_as_it_is(finished, refused_here, change):
    old, new, named = OTHER_RUNS[change]
    changed = script(finished, old, new)
    changed.write_text(changed.read_text().replace("epochs(2", "epochs(3"))
    kept = finished / "run"
    before = files(kept / "checkpoints"), (kept / "events.jsonl").read_bytes()
    assert named in refused_here(changed)
    assert (files(kept / "checkpoints"), (kept / "events.jsonl").read_bytes()) == before


def test_a_run_of_another_script_is_refused_and_more_epochs_go_on(finished, refused_here):
    other = script(finished, "epochs(2", "epochs(3", name="other.py")
    assert "'mine'" in refused_here(other)
    assert run_here(script(finished, "epochs(2", "epochs(3")) == 0
    result = read_json(finished / "run" / "result.json")
    assert (result["status"], result["steps"], result["epochs"]) == ("completed", 12, 3)


@pytest.mark.parametrize(
    ("raising", "told"),
    [
        ("        if rank == 0 and epoch: raise ValueError('mine')", "ValueError: mine"),
        ("1 / (1 - rank)", "ZeroDivisionError"),
    ],
    ids=["in a step", "after the epochs"],
)
def test_an_error_on_one_rank_ends_all_and_is_told_once(tmp_path, raising, told):
    log = f"            {LOG}\n"
    ranks = start(script(tmp_path, log, f"{log}    {raising}\n"), world_size=2, folder=tmp_path)
    # No launcher ends the other rank here: it meets the loss of its peer by itself.
    assert ranks.wait() == [1, 1]
    assert ranks.output().count(told) == 1
    assert "Traceback" not in ranks.output()
    result, stop = read_json(tmp_path / "run" / "result.json"), all_records(tmp_path / "run")[-1]
    assert (result["status"], result["reason"]) == ("failed", stop["reason"])
    assert told in stop["reason"], "what failed first, not that a rank has lost its peer"


def test_an_error_alone_is_python_s_own(tmp_path, capfd):
    with pytest.raises(ValueError, match="mine"):
        run_here(script(tmp_path, "run.log(loss=loss)", "raise ValueError('mine')"))
    assert "samestep:" not in capfd.readouterr().err
    assert read_json(tmp_path / "run" / "result.json")["status"] == "failed"


ADAM, SGD = (f"optim.{name}(model.parameters(), lr=0.1)" for name in ("Adam", "SGD"))
SCHEDULED = f"{SGD}\n    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)"
IN_STATE = '"optimizer": optimizer}'
AROUND = f"{ADAM}\n    inner, optimizer = optimizer, torch.{SGD}"
AROUND += "\n    optimizer.inner, optimizer.step = inner, inner.step"
AFTER_STEP = f"{SGD}\n    optimizer.register_step_post_hook(lambda *_: {{}})"


@pytest.mark.parametrize(
    ("optimizer", "state", "named"),
    [
        (ADAM, "}", "the optimizer (Adam)"),
        (ADAM, IN_STATE, ""),
        (SGD, "}", ""),  # it has nothing to keep
        (f"{AROUND}; optimizer.state = inner.state", IN_STATE, ""),
        (AROUND, IN_STATE, "the optimizer (Adam)"),  # as SAM, whose state_dict has its own alone
        (f"{SGD}; optimizer.param_groups[0]['lr'] = __import__('numpy').float64(1)", IN_STATE, ""),
        (f"{SGD}; optimizer.step = int", IN_STATE, "gradients of a batch wait"),
        (AFTER_STEP.format("other.load_state_dict(model.state_dict())"), IN_STATE, "Linear (1, 2)"),
        (AFTER_STEP.format("other.state_dict()"), IN_STATE, ""),
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


FORGETFUL = """import time
class Meter:
    def reset(self): self.total = 0.0
    def add(self, value): self.total += value
class Patience:
    best = None
    def see(self, value): self.best = value if self.best is None else min(value, self.best)
def forgetful(epochs, run):
    best, rate, waited, count, ema, began = None, 1.0, 0, 0, {"x": torch.zeros(1)}, time.time()
    meter, patience, acc, shown = Meter(), Patience(), 0.0, torch.zeros(3); run.state["n"] = 0
    for epoch in epochs:
        meter.reset(); count, total = 0, sum(rate for rate in (1.0, 2.0))
        yield epoch
        value, took, began = run.means["loss"] - epoch, time.time() - began, time.time()
        ema["x"], shown[epoch] = 0.9 * ema["x"] + value, value
        count, total = count + 1, total + value; run.state["n"] += 1
        meter.add(value), patience.see(value), shown.sum()
        if epoch % 2: acc = value
        else: print(acc)
        best, waited = (value, 0) if best is None or value < best else (best, waited + 1)
        rate *= 0.5
"""


def test_what_variables_carry_from_epoch_to_epoch_is_told_and_nothing_else(tmp_path, capfd):
    path, epochs = script(tmp_path), "run.epochs(2, state=state)"
    path.write_text(FORGETFUL + changed(path.read_text(), (epochs, f"forgetful({epochs}, run)")))
    assert run_here(path) == 0
    (note,) = [line for line in capfd.readouterr().err.splitlines() if "note: " in line]
    assert note.startswith("samestep: note: best, ema, patience.best, rate changed")


NAMES = ["calls", "codes", "data set Draws", "drift,", "generator rng", "given a sum"]
DRIFTS = """class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("drift", torch.zeros(1), persistent=False)
        self.register_buffer("codes", torch.zeros(2))
        self.calls = 0
    def forward(self, x):
        self.drift += self.training
        self.calls += self.training
        self.codes = 0.9 * self.codes + 0.1 * x.mean(0)
        return super().forward(x) + self.drift
rng = __import__("random").Random(0)
class Draws(list):
    def __getitem__(self, index): return super().__getitem__(index) * rng.random()
"""


def test_what_a_module_changes_and_no_checkpoint_holds_is_told(tmp_path, capfd):
    """A buffer of each rank's own samples is told on several ranks."""
    path = script(tmp_path, "data = torch", f"{DRIFTS}data = torch")
    new = {"nn.Linear(2, 1))": "Net())", "(data, size": "(Draws(data), size", "mean()": "sum()"}
    path.write_text(changed(path.read_text(), *new.items()))
    assert run_here(path) == 0
    (tmp_path / "two").mkdir()
    ranks = run(path, world_size=2, folder=tmp_path / "two")
    for output, named in (
        (capfd.readouterr().err, NAMES[:1] + NAMES[2:5]),
        (ranks.output(), NAMES),
    ):
        notes = [line for line in output.splitlines() if "note: " in line]
        assert sorted(n for line in notes for n in NAMES if f" {n}" in line) == named


DATA_SET = """class Exits(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        exit(4)
def data():
    return Splits(train=Exits(torch.ones(60, 4)))
"""
LOSS = """seen = []
def loss(outputs, targets):
    seen.append(1)
    if len(seen) == 9:
        raise SystemExit(3)
    return nn.functional.cross_entropy(outputs, targets)
recipe = Recipe(loss=loss, """


def edited(folder, old, new, line):
    text = RECIPE.replace(old, new)
    path = folder / "mine.py"
    path.write_text(text)
    return str(path), f"{path}:{text.splitlines().index(line) + 1}"


@pytest.mark.parametrize(
    ("new", "line"),
    [
        ("exit()\ndef data():", "exit()"),
        ("def data():\n    import os; os._exit(0)", "    import os; os._exit(0)"),
        (f"{DATA_SET}\ndef unused():", "        exit(4)"),
    ],
    ids=["file", "data()", "data set"],
)
def test_exit_in_a_recipe_is_a_mistake_that_names_the_line(tmp_path, new, line, refused):
    path, place = edited(tmp_path, "def data():", new, line)
    assert place in refused("train", path, "--run-dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_exit_in_the_loss_ends_all_ranks_with_one_message_and_the_run_as_failed(tmp_path):
    path, place = edited(tmp_path, "recipe = Recipe(", LOSS, "        raise SystemExit(3)")
    run = tmp_path / "run"
    command = ("train", path, "--run-dir", str(run))
    assert place in refusal(*command, world_size=2, folder=tmp_path / "output")
    assert all_records(run)[-1]["event"] == "stop"
    assert read_json(run / "result.json")["status"] == "failed"
