"""What scripts of many shapes make of a profile: their epochs, their ends, their optimizers."""

import subprocess
import sys
from pathlib import Path

import pytest

from samestep.profiling.events import phases_of
from samestep.profiling.tracing import read_trace
from tests.command_line import read_json, refusal, run

QUICK = ("--seconds", "0.3")
HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(120, 8), torch.randn(120, 1))
def step(x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
EPOCHS = """
for epoch in range({epochs}):
    for x, y in {loader}:
        step(x, y)
    print("epoch", epoch)
"""
SAME = "(loader := globals().get('loader') or DataLoader(data, batch_size=10))"
NEW = "DataLoader(data, batch_size=10)"
NEW_DATA = "DataLoader(TensorDataset(*data.tensors), batch_size=10)"


def script(here: Path, text: str) -> str:
    (here / "train.py").write_text(HEAD + text)
    return "train.py"


def profiled(here: Path, text: str, *flags: str, world_size: int = 1) -> dict:
    run(
        "profile",
        script(here, text),
        "--out",
        "out",
        *flags,
        folder=here.parent / "o",
        world_size=world_size,
    )
    return read_json(here / "out" / "profile.json")


def said(here: Path, text: str, *flags: str) -> str:
    return refusal("profile", script(here, text), *flags, folder=here.parent / "o")


@pytest.mark.parametrize("loader", [SAME, NEW, NEW_DATA])
@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_is_one_wherever_the_script_makes_its_loader(here, loader, epoch):
    text = EPOCHS.format(epochs=3, loader=loader)
    found = profiled(here, text, "--epoch", str(epoch))
    (trace,) = (here / "out" / "traces").glob("trace_*")
    phases = [phase for phase, _ in phases_of(read_trace(trace))]
    assert phases.count("backward") == 12
    assert found["measured"]["samples"] == 10


def test_the_evaluation_on_the_same_data_begins_no_epoch(here):
    text = (
        EPOCHS.format(epochs=3, loader=NEW)
        + """
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=10):
            model(x)
"""
    )
    assert "has 3 epochs" in said(here, text, "--epoch", "4")


def test_an_epoch_that_never_began_is_one_message(here):
    text = EPOCHS.format(epochs=3, loader=NEW)
    assert "train.py has 3 epochs, and --epoch is 99" in said(here, text, "--epoch", "99")
    text = "for _ in range(20): step(torch.randn(10, 8), torch.randn(10, 1))"
    assert "without a torch DataLoader" in said(here, text, "--epoch", "2")


LONG = """
import time
began = time.monotonic()
class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8), torch.randn(1)
for x, y in DataLoader(Endless(), batch_size=4):
    if torch.autograd.profiler._is_profiler_enabled:
        time.sleep(0.1)
    step(x, y)
    if time.monotonic() - began > 4:
        break
"""


def test_of_an_epoch_that_is_longer_than_there_is_time_for_some_steps_are_traced(here):
    """What these take, half of the 4 seconds, is in no number."""
    found = profiled(here, LONG, *QUICK)
    assert len(list((here / "out" / "traces").glob("trace_*"))) == 1
    assert "untraced" not in {part["kind"] for part in found["verdict"]["parts"]}
    measured = found["measured"]
    assert sum(measured["ranks"][0]["phases"].values()) == pytest.approx(measured["wall"], rel=0.02)
    assert measured["wall"] * measured["steps"] < 2


CLOSURE = """
import time
class Slow(torch.optim.LBFGS):
    @torch.no_grad()
    def step(self, closure):
        time.sleep(0.05)
        closure = torch.enable_grad()(closure)
        closure()
        time.sleep(0.05)
        return closure()
optimizer = Slow(model.parameters())
def closure():
    optimizer.zero_grad()
    time.sleep(0.002)
    loss = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1])
    loss.backward()
    return loss
for _ in range(100):
    optimizer.step({how}closure)
"""


@pytest.mark.parametrize("how", ["", "closure="])
def test_what_an_optimizer_does_around_its_closure_is_its_own(here, how):
    found = profiled(here, CLOSURE.format(how=how), *QUICK)
    phases = found["measured"]["ranks"][0]["phases"]
    assert phases["optimizer"] >= 0.1
    assert 0.004 <= phases["forward"] < 0.1


def test_a_script_whose_data_is_an_iterable_data_set_is_known_as_one(here):
    assert profiled(here, LONG.replace("> 4", "> 1"), *QUICK)["measured"]["iterable"]
    (here / "out" / "profile.json").unlink()
    text = EPOCHS.format(epochs=1000, loader=NEW)
    assert not profiled(here, text, *QUICK)["measured"]["iterable"]


def ended(here: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", "profile", script(here, text), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)


STEPS = "for _ in range({}): step(torch.randn(4, 8), torch.randn(4, 1))\n"


@pytest.mark.parametrize("nproc", ["1", "2"])
@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("raise SystemExit(3)", 3, "exit code 3 after 0 steps"),
        ("raise SystemExit('no data folder')", 1, "exit code 1 after 0 steps"),
        (STEPS.format(1) + "raise ValueError('no data folder')", 1, "an error after 1 step"),
    ],
)
def test_of_a_script_that_fails_is_said_how_far_it_came(here, nproc, text, code, says):
    done = ended(here, text, "--nproc", nproc)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(f"train.py ended with {says}: nothing was measured") == 1
    assert done.stderr.count("\nsamestep: ") + done.stderr.startswith("samestep: ") == 1
    assert ("no data folder" in done.stderr) == ("no data folder" in text)
    assert not list(here.rglob("meeting*")), "what the ranks agreed on is no result"


def test_what_was_measured_until_a_script_failed_is_kept(here):
    done = ended(here, STEPS.format(100) + "raise ValueError('late')", "--out", "out")
    assert done.returncode == 1
    assert "ValueError: late" in done.stderr
    assert "with an error after 100 steps: the profile is of what was" in done.stderr
    assert "verdict" in done.stdout
    assert read_json(here / "out" / "profile.json")["measured"]["steps"] > 50


UNEVEN = "import os\n" + STEPS.format("60 if os.environ['RANK'] == '0' else 10**9")


def test_ranks_of_which_one_ends_early_are_told_apart_at_once(here):
    done = ended(here, UNEVEN, "--nproc", "2")
    assert done.returncode == 2
    assert "Rank 0 of train.py ended after 60 optimizer steps, and rank 1 still" in done.stderr


def test_a_directory_that_is_used_again_shows_the_traces_of_this_profile_only(here):
    text = EPOCHS.format(epochs=1000, loader=NEW)
    for world_size in (2, 1):
        found = profiled(here, text, *QUICK, world_size=world_size)
        assert found["traces"] == [
            f"traces/trace_rank{rank}_workers_0.json.gz" for rank in range(world_size)
        ]


PROFILES = """
import time
began = time.monotonic()
loader = DataLoader(data, batch_size=1)
profilers = 0
epoch = 0
while time.monotonic() - began < 4:
    epoch += 1
    own = torch.profiler.profile() if epoch {when} else None
    if own is not None:
        profilers += 1
        own.start()
    for x, y in loader:
        step(x, y)
    if own is not None:
        own.stop()
        time.sleep(0.3)
"""


def test_steps_that_a_script_profiles_itself_are_in_no_number(here):
    found = profiled(here, PROFILES.format(when="% 2 == 0"), *QUICK)
    measured = found["measured"]
    assert measured["profiled_itself"]
    assert any("profiles some of its steps itself" in note for note in found["verdict"]["notes"])
    assert measured["ranks"][0]["phases"]["other"] < 0.3 * measured["wall"]
    assert found["traces"]
    assert sum(measured["ranks"][0]["phases"].values()) == pytest.approx(measured["wall"], rel=0.02)


def test_a_profiler_of_the_scripts_own_may_start_in_the_midst_of_the_trace(here):
    text = """
while True:
    enabled = torch.autograd.profiler._is_profiler_enabled
    own = torch.profiler.profile(acc_events=True) if enabled else None
    if own is not None:
        own.start()
    step(torch.randn(4, 8), torch.randn(4, 1))
    if own is not None:
        own.stop()
"""
    assert profiled(here, text, *QUICK)["measured"]["profiled_itself"]


def test_an_epoch_that_the_script_profiles_itself_is_not_traced_twice(here):
    text = PROFILES.format(when="== 2")
    assert "a profiler of its own on in epoch 2" in said(here, text, "--epoch", "2")


def test_a_module_is_profiled_as_python_would_run_it(here):
    (here / "pkg").mkdir()
    (here / "pkg" / "__init__.py").write_text("")
    (here / "pkg" / "net.py").write_text("WIDTH = 8\n")
    text = f"import sys\nfrom .net import WIDTH\n{HEAD}\nprint(sys.argv[1:], __name__)\n"
    (here / "pkg" / "train.py").write_text(text + STEPS.format(10**9))
    ranks = run(
        "profile",
        "-m",
        "pkg.train",
        *QUICK,
        "--out",
        "out",
        "--",
        "--lr",
        "1",
        folder=here.parent / "o",
    )
    assert "['--lr', '1'] __main__" in ranks.printed(0)
    assert read_json(here / "out" / "profile.json")["name"] == "pkg.train"


def test_a_module_that_fails_shows_its_own_frames_and_a_wrong_name_is_one_message(here):
    (here / "mine.py").write_text("raise ValueError('of the module')\n")
    command = [sys.executable, "-m", "samestep", "profile", "-m", "mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 1
    assert "ValueError: of the module" in done.stderr
    assert "runpy" not in done.stderr
    assert "mine ended with an error after 0 steps" in done.stderr
    assert "no module gone.train" in refusal("profile", "-m", "gone.train", folder=here.parent)
    assert "Name the module after -m" in refusal("profile", "-m", folder=here.parent)
