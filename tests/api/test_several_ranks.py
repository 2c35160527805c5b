"""`samestep.train` and `verify` on ranks: recipes sent to them, failures, interrupts, launchers."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep import Recipe, UserError
from samestep.shell.api.call import Call, receive, send
from tests.api.recipes import made
from tests.command_line import typed
from tests.examples.programs import forked

pytestmark = pytest.mark.usefixtures("here")


def in_a_notebook(text: str) -> dict:
    """Run the text of a cell: its functions belong to __main__, and no file has them."""
    names = {"__name__": "__main__"}
    exec(compile(text, "/tmp/ipykernel_7/1.py", "exec"), names)
    return names


CELL = """
import torch
from dataclasses import dataclass, replace
from torch import nn
from samestep import Recipe, Splits
x = torch.randn(60, 4, generator=torch.Generator().manual_seed(7))
y = (x[:, 0] > 0).long()
@dataclass(frozen=True)
class Options:
    hidden: int | None = None
@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)
    def __getitem__(self, index):
        return x[index], y[index]
def pairs(rows):
    return Pair(*map(torch.stack, zip(*rows)))
def fails():
    raise ValueError("of mine")
settings = {"epochs": 2, "batch_size": 12}
recipe = Recipe(
    model=lambda options: nn.Sequential(nn.Linear(4, options.hidden), nn.Linear(options.hidden, 2)),
    data=lambda: Splits(train=Rows()),
    options=Options,
    complete=lambda options: replace(options, hidden=3),
    collate=pairs,
    forward=lambda model, pair: model(pair.x),
    loss=lambda outputs, pair: nn.functional.cross_entropy(outputs, pair.y),
    metrics={},
    settings=settings,
    name="mine",
)
failing = Recipe(model=fails, data=lambda: Splits(train=(x, y)), settings=settings)
"""


@pytest.mark.slow
def test_a_recipe_of_a_notebook_trains_alike_on_one_rank_and_on_two_and_goes_on():
    recipe = in_a_notebook(CELL)["recipe"]
    threads = set(threading.enumerate())
    variables, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    one = samestep.train(recipe, quiet=True)
    two = samestep.train(recipe, nproc=2, num_workers=1, epochs=1, quiet=True)
    assert two.history[0]["world_size"] == 2
    assert two.settings["options"] == {"hidden": 3}
    assert not list(two.path.rglob("*.pkl"))
    two = samestep.train(two, recipe=recipe, resume=True, nproc=2, epochs=2, quiet=True)
    assert samestep.compare(one, two)["same_training"][0]["verdict"] in ("equal", "rounding")
    assert set(threading.enumerate()) == threads
    assert dict(os.environ) == variables
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_failure_of_a_rank_is_one_message_that_names_the_cell():
    with pytest.raises(UserError, match="of mine") as told:
        samestep.train(in_a_notebook(CELL)["failing"], nproc=2, quiet=True)
    assert len(str(told.value).splitlines()) == 1


def captures(what: object) -> Recipe:
    def model():
        return nn.Linear(4, 2 + (what is None))

    return made(model)


@pytest.mark.parametrize("what", ["file", "lock", "inner"])
def test_what_cannot_be_sent_is_named_before_any_rank_starts(what, here):
    with Path("log").open("w") as file:
        culprit = {"file": file, "lock": threading.Lock(), "inner": {"deep": [threading.Lock()]}}[
            what
        ]
        with pytest.raises(UserError) as told:
            samestep.train(captures(culprit), nproc=2, quiet=True)
    said = str(told.value)
    named = {"inner": ["deep"], "file": ["'what'", "log"]}.get(what, ["'what'"])
    for words in ("model", __file__, *named):
        assert words in said
    assert not (here / "runs").exists()


def test_a_call_is_read_by_its_own_user_alone_and_finds_the_callers_modules(here, monkeypatch):
    module = here / "mine" / "nets.py"
    module.parent.mkdir()
    module.write_text("from torch import nn\ndef net(): return nn.Linear(4, 2)")
    monkeypatch.syspath_prepend(here / "mine")
    import nets

    send(Call(target=None, recipe=made(nets.net)), here / "call")
    assert (here / "call").stat().st_mode & 0o077 == 0
    monkeypatch.delitem(sys.modules, "nets")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(here / "mine")])
    assert isinstance(receive(here / "call").recipe.model(), nn.Linear)
    module.unlink()
    monkeypatch.delitem(sys.modules, "nets")
    with pytest.raises(UserError, match="nets"):
        receive(here / "call")


SCRIPT = f"""
import samestep
{CELL}
run = samestep.train(recipe, quiet=True)
print("first", run.result["weights_sha256"], run.history[0]["world_size"])
run = samestep.train(run, recipe=recipe, resume=True, epochs=3, quiet=True)
print("second", run.result["steps"])
"""


def test_a_script_that_a_launcher_starts_trains_on_its_ranks_and_again(here):
    (here / "script.py").write_text(SCRIPT)
    done = forked("script.py", folder=here, world_size=2)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("first")
    assert first.endswith(" 2")
    assert second == "second 15"
    assert len(list((here / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("call", "named"), [("train('spirl')", "spirl"), ("train(recipe, nproc=2)", "nproc=2")]
)
def test_a_mistake_among_a_launchers_ranks_is_told_once(here, call, named):
    (here / "script.py").write_text(f"{CELL}\nimport samestep\nsamestep.{call}\n")
    done = forked("script.py", folder=here, world_size=2)
    assert done.returncode == 2
    assert done.stderr.count(named) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_script_without_a_guard_starts_its_ranks_once(here):
    (here / "script.py").write_text(
        f"{CELL}\nimport samestep\nprint('begins')\n"
        "run = samestep.train(recipe, nproc=2, num_workers=0, quiet=True)\n"
        "print(run.result['status'])\n"
    )
    done = typed(sys.executable, "script.py", folder=here, OMP_NUM_THREADS="1")
    assert done.stdout.split() == ["begins", "completed"]
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_that_trains_when_a_rank_imports_it_is_told(here, monkeypatch):
    monkeypatch.setenv("SAMESTEP_PARENT", "1")
    with pytest.raises(UserError) as told:
        samestep.train(made(), quiet=True)
    assert "__main__" in str(told.value)
    with pytest.raises(UserError):
        samestep.verify(made())


@pytest.mark.slow
def test_a_recipe_of_a_notebook_is_verified_whatever_modes_the_caller_is_in():
    recipe = in_a_notebook(CELL)["recipe"]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), torch.device("meta"):
        found = samestep.verify(recipe, world_sizes=(2,), quick=True, epochs=1)
    assert found["same"] is True
    assert any("epochs" in note for note in found["notes"]), "as train() takes it"
