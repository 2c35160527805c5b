"""What scripts of many shapes make of a profile: their epochs, their ends, their optimizers."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.profiling.trace_digest import phases_of
from tests.command_line import end_with_first_failure, read_json, refusal, run, start
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
    for x, y in {loader}:
        step(x, y)
    print("epoch", epoch)
"""
STEPS = "for _ in range({}): step(torch.randn(4, 8), torch.randn(4, 1))\n"


def script(here: Path, text: str) -> str:
    (here / "train.py").write_text(HEAD + text)
    return "train.py"


def profiled(here: Path, text: str, *flags: str, world_size: int = 1) -> dict:
    path, folder = script(here, text), here.parent / "o"
    run("profile", path, "--out", "out", *flags, folder=folder, world_size=world_size)
    return read_json(here / "out" / "profile.json")


def ended(here: Path, code: int, text: str, *flags: str) -> Ranks:
    """Profile a script that ends in this way; return its one rank."""
    ranks = start("profile", *flags, script(here, text), folder=here.parent / "o")
    assert ranks.wait() == [code], ranks.output()
    return ranks


def line_of(ranks: Ranks) -> str:
    """Return the one line of samestep's own that was printed."""
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


LONG = """
import time
began = time.monotonic()
class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8), torch.randn(1)
for x, y in DataLoader(Endless(), batch_size=4):
    if torch.autograd.profiler._is_profiler_enabled:
        time.sleep(0.1)  # planted: slower while it is traced
    step(x, y)
    if time.monotonic() - began > 2:
        break
"""


def test_of_an_epoch_that_is_longer_than_there_is_time_for_some_steps_are_traced(here):
    """What these take, half a second or more of the two, is in no number."""
    found = profiled(here, LONG, *QUICK)
    assert len(list((here / "out" / "traces").glob("trace_*"))) == 1
    assert "untraced" not in {part["kind"] for part in found["verdict"]["parts"]}
    measured = found["measured"]
    assert measured["iterable"]
    assert sum(measured["ranks"][0]["phases"].values()) == pytest.approx(measured["wall"], rel=0.02)
    assert measured["wall"] * measured["steps"] < 1.2


ERROR = STEPS.format(1) + "raise ValueError('no data folder')"


@pytest.mark.parametrize(
    ("text", "code", "steps"),
    [("raise SystemExit(3)", 3, 0), ("raise SystemExit('no data folder')", 1, 0), (ERROR, 1, 1)],
)
def test_of_a_script_that_fails_is_said_how_far_it_came(here, text, code, steps):
    ranks = ended(here, code, text)
    assert re.findall(r"train\.py|\d+", line_of(ranks))[-1] == str(steps)
    assert ("no data folder" in ranks.output()) == ("no data folder" in text)
    assert not list(here.glob("runs/*")), "nothing was measured"


def test_ranks_that_samestep_starts_tell_of_a_scripts_failure_once(here):
    """In real processes: the parent tells what the ranks leave for it; empty logs do not stay."""
    command = [sys.executable, "-m", "samestep", "profile", script(here, ERROR), "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 1, done.stderr
    assert len(re.findall(r"^samestep: .*train\.py ", done.stderr, re.MULTILINE)) == 1
    assert "no data folder" in done.stderr
    assert not list(here.glob("runs/*")), "nothing was measured"


def test_of_a_rank_that_ends_without_an_error_the_log_stays_as_the_message_says(here):
    """In real processes: nothing else tells what it printed last."""
    ends = "import os\nif os.environ['RANK'] == '1':\n    os.write(1, b'bad card')\n    os._exit(3)"
    text = f"{ends}\n{STEPS.format(50)}"
    command = [sys.executable, "-m", "samestep", "profile", script(here, text)]
    done = subprocess.run(
        [*command, "--nproc", "2"], capture_output=True, text=True, check=False, cwd=here
    )
    assert done.returncode == 1, done.stderr
    assert "rank-1.log of the run directory" in done.stderr
    (log,) = here.glob("runs/*/rank-1.log")
    assert log.read_text() == "bad card"


def test_what_was_measured_until_a_script_failed_is_kept(here):
    text = STEPS.format(100) + "raise ValueError('late')"
    ranks = ended(here, 1, text, "--out", "out")
    assert "ValueError: late" in ranks.output()
    assert "verdict" in ranks.output()
    assert read_json(here / "out" / "profile.json")["measured"]["steps"] > 1


def test_sigterm_ends_a_script_and_shows_what_was_measured(here):
    """The script sends the signal itself, in the midst of a step, once there is enough."""
    text = "import os, signal, sys\n" + STEPS.format(100)
    text += "os.kill(os.getpid(), signal.SIGTERM)\nprint('went on')\n"
    ranks = ended(here, 143, text, "--seconds", "60", "--out", "out")
    assert re.findall(r"SIGTERM|\b\d+\b", line_of(ranks)) == ["SIGTERM", "100"]
    assert "verdict" in ranks.output()
    assert "went on" not in ranks.output()
    assert read_json(here / "out" / "profile.json")["measured"]["steps"] > 1


INDEXED = """
import time
for _ in range(10**9):
    time.sleep(0.02)  # planted: Python between the steps
    order = torch.randperm(120)
    x = torch.stack([data.tensors[0][i] for i in order[:4]])
    step(x, data.tensors[1][:4])
"""


def test_python_of_a_loop_without_a_loader_is_the_loops_and_an_index_is_no_number_read(here):
    """What bounds it depends on what else runs on the machine, and is judged by numbers alone."""
    (rank,) = profiled(here, INDEXED, "--steps", "20")["measured"]["ranks"]
    assert rank["operations"]["syncs"] == 0
    assert rank["phases"]["other"] >= 0.02
    assert not rank["phases"].get("data")


UNEVEN = "import os\n" + STEPS.format("60 if os.environ['RANK'] == '0' else 10**9")


def test_ranks_of_which_one_ends_early_are_told_apart_at_once(here):
    """The others learn it from rank 0's next answer, not from its silence."""
    ranks = start("profile", script(here, UNEVEN), "--out", "out", world_size=2, folder=here / "o")
    assert end_with_first_failure(ranks) == 2
    assert re.search(r"^samestep: .*Rank 0 .* 60 .* rank 1 ", ranks.printed(1), re.MULTILINE)


def test_a_directory_that_is_used_again_shows_the_traces_of_this_profile_only(here):
    text = EPOCHS.format(epochs=1000, loader="DataLoader(data, batch_size=10)")
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
    assert found["verdict"]["notes"]
    # With the 0.3 s after each of its profilers it would be three quarters.
    assert measured["ranks"][0]["phases"]["other"] < 0.65 * measured["wall"]
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
    said = refusal("profile", script(here, text), "--epoch", "2", folder=here.parent / "o")
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
    found = read_json(here / "out" / "profile.json")
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
for _ in range(400):
    nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 1)).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.01)
        p.grad = None
"""


def test_a_script_without_an_optimizer_is_profiled_by_its_backward_passes_and_told_so(here):
    ranks = ended(here, 0, OWN, "--out", "out", *QUICK)  # the flags may be before the script
    assert ranks.output().count("torch.optim") == 1
    measured = read_json(here / "out" / "profile.json")["measured"]
    assert measured["steps"] > 8
    assert measured["gradient_bytes"] == 4 * (8 * 16 + 16 + 16 + 1)
    assert {"forward", "backward", "other"} <= set(measured["ranks"][0]["phases"])
