"""What scripts of many shapes make of a profile: their epochs, their ends, their optimizers."""

import gzip
import json
import re
from pathlib import Path

import pytest

from samestep.scripts.measuring.trace_digest import phases_of
from tests.command_line import call, end_with_first_failure, read_json, run, start, typed
from tests.processes import Ranks

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
    for x, y in {loader}: step(x, y)
    print("epoch", epoch)
"""
STEPS = "for _ in range({}): step(torch.randn(4, 8), torch.randn(4, 1))\n"


def script(here: Path, text: str) -> str:
    (here / "train.py").write_text(HEAD + text)
    return "train.py"


def profiled(here: Path, text: str, *flags: str) -> dict:
    assert call("profile", script(here, text), "--out", "out", *flags) == 0
    return found_in(here)


def found_in(here: Path) -> dict:
    return read_json(here / "out" / "profile.json")


def ended(here: Path, code: int, text: str, *flags: str) -> Ranks:
    ranks = start("profile", *flags, script(here, text), folder=here.parent / "o")
    assert ranks.wait() == [code], ranks.output()
    return ranks


def line_of(ranks: Ranks) -> str:
    (line,) = [line for line in ranks.output().splitlines() if line.startswith("samestep: ")]
    return line


def test_an_epoch_is_traced_from_its_first_step_to_its_last(here):
    text = EPOCHS.format(epochs=3, loader="DataLoader(data, batch_size=10)")
    found = profiled(here, text, "--epoch", "2")
    (trace,) = (here / "out" / "traces").glob("trace_*")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    phases = [phase for phase, _ in phases_of(events)]
    assert phases.count("backward") == 12
    assert found["measured"]["samples"] == 10
    assert not found["measured"]["iterable"]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (EPOCHS.format(epochs=3, loader="DataLoader(data, batch_size=10)"), ["3", "99"]),
        (STEPS.format(20), ["99"]),
    ],
    ids=["a loader", "no loader"],
)
def test_an_epoch_that_never_began_is_one_message(here, refused, text, numbers):
    said = refused("profile", script(here, text), "--epoch", "99")
    message = said[said.index("samestep: ") :]  # below what the script prints
    assert "--epoch" in message
    assert re.findall(r"\b\d+\b", message) == numbers


ERROR = STEPS.format(1) + "raise ValueError('no data folder')"


@pytest.mark.parametrize(("text", "code", "steps"), [("raise SystemExit(3)", 3, 0), (ERROR, 1, 1)])
def test_of_a_script_that_fails_is_said_how_far_it_came(here, text, code, steps):
    ranks = ended(here, code, text)
    assert re.findall(r"train\.py|\d+", line_of(ranks))[-1] == str(steps)
    assert ("no data folder" in ranks.output()) == (text == ERROR)
    assert not list(here.glob("runs/*")), "nothing was measured"


SAYS_AND_WAITS = """
import os, signal, time
from pathlib import Path
if rank := int(os.environ["RANK"]):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if rank == 1:
        os.write(1, b"bad card")
        Path("said").touch()
    signal.pause()
while not Path("said").exists():
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_ranks_that_samestep_starts_tell_of_a_failure_once_and_leave_logs_that_say_something(here):
    path = script(here, SAYS_AND_WAITS + ERROR)
    done = typed("-m", "samestep", "profile", path, "--nproc", "3", folder=here)
    assert done.returncode == 1, done.stderr
    assert len(re.findall(r"^samestep: .*train\.py ", done.stderr, re.MULTILINE)) == 1
    assert "no data folder" in done.stderr
    (log,) = here.glob("runs/*/*")
    assert (log.name, log.read_text()) == ("rank-1.log", "bad card")


def test_what_was_measured_until_a_script_failed_is_kept(here):
    ranks = ended(here, 1, STEPS.format(100) + "raise ValueError('late')", "--out", "out")
    assert "ValueError: late" in ranks.output()
    assert "verdict" in ranks.output()
    assert found_in(here)["measured"]["steps"] > 1


def test_sigterm_ends_a_script_and_shows_what_was_measured(here):
    text = "import os, signal, sys\n" + STEPS.format(100)
    text += "os.kill(os.getpid(), signal.SIGTERM)\nprint('went on')\n"
    ranks = ended(here, 143, text, "--seconds", "60", "--out", "out")
    assert re.findall(r"SIGTERM|\b\d+\b", line_of(ranks)) == ["SIGTERM", "100"]
    assert "verdict" in ranks.output()
    assert "went on" not in ranks.output()
    assert found_in(here)["measured"]["steps"] > 1


UNEVEN = "import os\n" + STEPS.format("60 if os.environ['RANK'] == '0' else 10**9")


def test_ranks_of_which_one_ends_early_are_told_apart_at_once(here):
    """The others learn it from rank 0's next answer, not from its silence."""
    ranks = start("profile", script(here, UNEVEN), "--out", "out", world_size=2, folder=here / "o")
    assert end_with_first_failure(ranks) == 2
    assert re.search(r"^samestep: .*Rank 0 .* 60 .* rank 1 ", ranks.printed(1), re.MULTILINE)


STREAM = """
class Stream(IterableDataset):
    def __iter__(self): return iter(data)
"""


def test_a_directory_that_is_used_again_shows_the_traces_of_this_profile_only(here):
    text = STREAM + EPOCHS.format(epochs=1000, loader="DataLoader(Stream(), batch_size=10)")
    words = ("profile", script(here, text), "--out", "out", *QUICK)
    run(*words, world_size=2, folder=here.parent / "o")
    traces = [f"traces/trace_rank{rank}_workers_0.json.gz" for rank in range(2)]
    assert found_in(here)["traces"] == traces
    assert len(found_in(here)["measured"]["ranks"]) == 2
    found = profiled(here, text, *QUICK)
    assert found["traces"] == traces[:1]
    assert found["measured"]["iterable"]


def test_a_profiler_of_the_scripts_own_may_start_in_the_midst_of_the_trace(here):
    text = """
while True:
    enabled = torch.autograd.profiler._is_profiler_enabled
    own = torch.profiler.profile(acc_events=True) if enabled else None
    if own is not None: own.start()
    step(torch.randn(4, 8), torch.randn(4, 1))
    if own is not None: own.stop()
"""
    found = profiled(here, text, *QUICK)
    assert found["measured"]["profiled_itself"]
    assert found["verdict"]["notes"]


def test_an_epoch_that_the_script_profiles_itself_is_not_traced_twice(here, refused):
    text = """
for _ in range(2):
    with torch.profiler.profile():
        for x, y in DataLoader(data, batch_size=10): step(x, y)
"""
    said = refused("profile", script(here, text), "--epoch", "2")
    assert re.search(r"train\.py .* epoch 2.*--epoch", said)


def test_a_module_is_profiled_as_python_would_run_it_for_so_many_steps_as_asked(here):
    (here / "pkg").mkdir()
    (here / "pkg" / "__init__.py").write_text("")
    (here / "pkg" / "net.py").write_text("WIDTH = 8\n")
    text = f"import sys\nfrom .net import WIDTH\n{HEAD}\nprint(sys.argv[1:], __name__)\n"
    epochs = EPOCHS.format(epochs=10**9, loader="DataLoader(data, batch_size=10)")
    (here / "pkg" / "train.py").write_text(text + epochs)
    flags = ("--steps", "50", "--out", "out", "--", "--lr", "1")
    ranks = run("profile", "-m", "pkg.train", *flags, folder=here.parent / "o")
    assert "['--lr', '1'] __main__" in ranks.printed(0)
    found = found_in(here)
    assert (found["name"], found["measured"]["steps"]) == ("pkg.train", 50)


def test_a_module_that_fails_shows_its_own_frames_and_a_wrong_name_is_one_message(here, refused):
    (here / "mine.py").write_text("raise ValueError('of the module')\n")
    ranks = start("profile", "-m", "mine", folder=here.parent / "o")
    assert ranks.wait() == [1]
    assert "ValueError: of the module" in ranks.output()
    assert "runpy" not in ranks.output()
    assert re.search(r"^samestep: mine .* 0 steps", ranks.output(), re.MULTILINE)
    assert "gone.train" in refused("profile", "-m", "gone.train")
    assert "-m" in refused("profile", "-m")


OWN = """
for _ in range(10**9):
    x = torch.stack([data.tensors[0][i] for i in torch.randperm(120)[:4]])  # a tensor as an index
    nn.functional.mse_loss(model(x), torch.randn(4, 1)).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.01)
        p.grad = None
"""


def test_a_script_without_an_optimizer_is_profiled_by_its_backward_passes_and_told_so(here):
    ranks = ended(here, 0, OWN, "--out", "out", *QUICK)  # the flags may be before the script
    assert ranks.output().count("torch.optim") == 1
    measured = found_in(here)["measured"]
    assert measured["steps"] > 8
    assert measured["gradient_bytes"] == 4 * (8 * 16 + 16 + 16 + 1)
    (rank,) = measured["ranks"]
    assert {"forward", "backward", "other"} <= set(rank["phases"])
    assert not rank["phases"].get("data")
    assert rank["operations"]["syncs"] == 0
