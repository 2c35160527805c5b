"""`samestep profile`: what it measures and writes, on recipes and scripts; what it refuses."""

import errno
import gzip
import json
import os
from pathlib import Path

import pytest

from samestep.profiling.trace_digest import phases_of
from tests import tiny
from tests.command_line import end_with_first_failure, read_json, run, start, train_here, typed
from tests.processes import Ranks
from tests.profiling.planted import SITUATIONS
from tests.training.test_full_disk import disk, fill  # noqa: F401 - the disk is a fixture

QUICK = "--seconds 0.3"
SLOW_DATA = next(one for one in SITUATIONS if one.name == "a data set that sleeps")
SCRIPT = next(one for one in SITUATIONS if one.name == "slow saving in a script")


def profile(here: Path, command: str, **how) -> Ranks:
    """Run `samestep profile` to its good end."""
    return run("profile", *command.split(), folder=here.parent / "outputs", **how)


def begin(here: Path, command: str, **how) -> Ranks:
    return start("profile", *command.split(), folder=here.parent / "outputs", **how)


def profiled(here: Path, command: str, **how) -> dict:
    """Return what a profile wrote."""
    profile(here, command, **how)
    (path,) = here.rglob("profile.json")
    return read_json(path)


def traces_of(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "traces").glob("trace_*"))


def events_of(trace: Path) -> dict:
    return json.loads(gzip.decompress(trace.read_bytes()))


@pytest.fixture(scope="module", params=[1, 2])
def recipe_profile(request, tmp_path_factory) -> tuple[int, Path, str]:
    """The tiny recipe's profile on one rank and on two: ranks, directory, what was shown."""
    here = tmp_path_factory.mktemp("profile") / "here"
    here.mkdir()
    recipe = tiny.write_recipe(here)
    tiny.set_pace(recipe, 0.003)
    how = {"world_size": request.param, "environment": {"COLUMNS": "80"}}
    shown = profile(here, f"{recipe} {QUICK} --run-dir {here}/out", **how).printed(0)
    return request.param, here / "out", shown


def test_the_phases_of_a_profile_add_up_to_the_clock(recipe_profile):
    """Measured by the clock alone, over whole steps; every rank for itself."""
    world_size, out, shown = recipe_profile
    found = read_json(out / "profile.json")
    measured = found["measured"]
    assert len(measured["ranks"]) == world_size
    for rank in measured["ranks"]:
        assert sum(rank["phases"].values()) == pytest.approx(measured["wall"], rel=0.1)
        assert rank["phases"]["forward"] >= 0.003
    assert found["verdict"]["step"] >= sum(measured["ranks"][0]["phases"].values()) * 0.99
    lines = [line for line in shown.splitlines() if not line.startswith(("trace", "[W", "[rank"))]
    assert max(map(len, lines)) <= 80
    for word in ("forward", "verdict", "ceiling", "change", "100%"):
        assert word in shown


def test_every_rank_leaves_a_whole_trace_that_viewers_can_open(recipe_profile):
    world_size, out, _shown = recipe_profile
    traces = traces_of(out)
    assert traces == [f"trace_rank{rank}_workers_0.json.gz" for rank in range(world_size)]
    for rank, name in enumerate(traces):
        trace = events_of(out / "traces" / name)
        assert trace["distributedInfo"]["rank"] == rank
        complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
        assert len([e for e in complete if e["name"].startswith("ProfilerStep#")]) >= 3
        assert any(event["name"] == "aten::addmm" for event in complete)
        ranges = {event["name"] for event in complete if event.get("cat") == "phase"}
        assert {"data", "forward", "backward", "optimizer"} <= ranges
        assert ("all_reduce" in ranges) == (world_size == 2)
    rows = (out / "traces" / "memory_rank0_workers_0.csv").read_text().splitlines()
    assert rows[0] == "ms,phase,MiB"
    assert len(rows) > 10


def test_a_directory_that_holds_a_profile_is_not_written_to_again(recipe_profile, refused):
    _, out, _ = recipe_profile
    message = refused("profile", str(out.parent / "tiny.py"), "--run-dir", str(out))
    assert "--run-dir" in message
    assert "--resume" not in message


def args_of(events: dict) -> set[str]:
    """Return what the trace tells of operations and of Python calls, beside their times."""
    return {name for event in events["traceEvents"] for name in event.get("args", {})}


def test_shapes_and_python_calls_are_in_the_trace_if_asked_for(here, recipe_profile):
    asked = {"Input Dims", "Python id"}
    _, plain, _ = recipe_profile
    assert not asked & args_of(events_of(plain / "traces" / traces_of(plain)[0]))
    command = f"{tiny.write_recipe(here)} --record-shapes --with-stack {QUICK} --run-dir out"
    profile(here, command)
    (trace,) = traces_of(here / "out")
    assert asked <= args_of(events_of(here / "out" / "traces" / trace))


@pytest.mark.slow
@pytest.mark.parametrize("example", ["padded_text", "csv_regression"])
def test_batches_and_a_schedule_of_a_recipes_own_are_profiled_beyond_its_end(here, example):
    """The table's run has 145 steps, and a schedule that is below 0 after them."""
    recipe = Path(__file__).parents[2] / "examples" / f"{example}.py"
    assert profiled(here, f"{recipe} {QUICK} --run-dir out")["measured"]["steps"] > 3


def test_a_whole_epoch_can_be_traced(here):
    """The tiny recipe has 11 steps an epoch."""
    found = profiled(here, f"{tiny.write_recipe(here)} --epoch 2 --run-dir out")
    (trace,) = traces_of(here / "out")
    events = events_of(here / "out" / "traces" / trace)["traceEvents"]
    assert [phase for phase, _ in phases_of(events)].count("forward") == 11
    assert found["measured"]["steps"] <= 11  # those of the epoch before


@pytest.mark.slow
def test_a_sweep_of_workers_finds_those_that_help_and_writes_them_where_it_is_told(here):
    """Each sample sleeps, so more workers than none are faster on any machine."""
    (here / "mine.toml").write_text("lr = 0.5  # mine\n")
    sweep_of = f"{SLOW_DATA.write(here)} {QUICK} --workers 2,0 --run-dir out"
    found = profiled(here, f"{sweep_of} --config mine.toml --apply")
    assert found["verdict"]["kind"] == SLOW_DATA.verdict
    (sweep,) = found["sweeps"]
    assert [row["value"] for row in sweep["rows"]] == [0, 2]
    assert sweep["best"] == 2
    assert sweep["rows"][1]["ratio"] > 1.3
    assert (here / "mine.toml").read_text() == "lr = 0.5  # mine\nnum_workers = 2\n"
    assert traces_of(here / "out") == [f"trace_rank0_workers_{n}.json.gz" for n in (0, 2)]


def test_where_to_write_is_checked_before_anything_is_measured(here, refused):
    recipe = SLOW_DATA.write(here)
    (here / f"{recipe.stem}.toml").write_text("lr = 0.5\n")
    said = refused("profile", str(recipe), *["--workers", "0,1", "--apply", "--run-dir", "out"])
    assert f"{recipe.stem}.toml" in said
    assert "--config" in said
    assert not (here / "out").exists()


@pytest.mark.slow
def test_a_sweep_of_batch_sizes_finds_the_fastest(here):
    """A step sleeps however many samples it has, so that the largest batch is the fastest."""
    recipe = tiny.write_recipe(here)
    tiny.set_pace(recipe, 0.004)
    (sweep,) = profiled(here, f"{recipe} {QUICK} --batch-sizes 2,8,32 --run-dir out")["sweeps"]
    assert sweep["best"] == 32
    assert sweep["rows"][2]["samples_per_s"] > 2 * sweep["rows"][0]["samples_per_s"]


def test_the_profile_of_a_run_is_a_directory_of_its_own_and_json_is_nothing_but_json(here):
    train_here(str(tiny.write_recipe(here)), "--run-dir", "run", "--epochs", "1")
    before = tiny.files(here / "run")
    printed = profile(here, f"run {QUICK} --json").printed(0)
    assert tiny.files(here / "run") == before
    (made,) = (here / "runs").iterdir()
    assert made.name.startswith("profile-tiny-")
    assert (made / "settings.toml").is_file()
    found = json.loads(printed[printed.index("{") :])  # after PyTorch's own warning
    assert found["verdict"]["kind"]
    assert found == read_json(made / "profile.json")


# --- scripts


LOOP = """
import sys
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("arguments", sys.argv[1:], "name", __name__)
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
print("the end", step)
"""
LONG = LOOP.format(steps=10**9)


def write(here: Path, text: str) -> None:
    (here / "train.py").write_text(text)


def test_a_script_gets_its_own_arguments_and_is_ended_when_it_has_been_seen(here):
    write(here, LONG)
    printed = profile(here, f"train.py {QUICK} --out out -- --lr 1 --json").printed(0)
    assert "arguments ['--lr', '1', '--json'] name __main__" in printed
    assert "the end" not in printed
    assert "verdict" in printed
    assert read_json(here / "out" / "profile.json")["measured"]["script"]


def test_a_short_script_runs_to_its_end_and_what_there_is_is_told(here):
    write(here, LOOP.format(steps=12))
    assert "the end 11" in profile(here, "train.py --out out").printed(0)
    assert read_json(here / "out" / "profile.json")["measured"]["steps"] == 11
    assert not traces_of(here / "out")


def test_what_a_script_prints_does_not_spoil_the_json(here):
    """Standard output is read alone, as a program would."""
    write(here, LONG)
    command = ("-m", "samestep", "profile", "train.py", *QUICK.split(), "--json")
    done = typed(*command, folder=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "train.py"
    assert "arguments []" in done.stderr


def test_a_script_on_two_ranks_is_profiled_on_both(here):
    found = profiled(here, f"{SCRIPT.write(here)} {QUICK} --out out", world_size=2)
    assert len(found["measured"]["ranks"]) == 2
    assert all(rank["phases"]["checkpoint"] >= 0.02 for rank in found["measured"]["ranks"])
    assert traces_of(here / "out") == [f"trace_rank{rank}_workers_0.json.gz" for rank in (0, 1)]
    assert not list((here / "out").glob("meeting*"))


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("--out DIR main.py -- --out x", "main.py --out DIR -- --out x"),
        ("--json --seconds=2 main.py --nproc 2", "main.py --json --seconds=2 --nproc 2"),
        ("--drop-last --no-pictures spiral", "spiral --drop-last --no-pictures"),
        ("--seconds 2 -m pkg.train --json", "-m pkg.train --seconds 2 --json"),
        ("main.py --out DIR", "main.py --out DIR"),
        ("--json", "--json"),
    ],
)
def test_flags_may_stand_before_what_is_profiled(given, target):
    from samestep.commands.profile import _SWITCHES
    from samestep.commands.script_target import target_first

    assert target_first(given.split(), _SWITCHES) == target.split()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_script_that_fails_tells_its_own_error_once(here, world_size):
    write(here, '\ndef inner():\n    raise ValueError("the script\'s own")\ninner()\n')
    ranks = begin(here, "train.py --out out", world_size=world_size)
    assert end_with_first_failure(ranks) == 1
    text = ranks.output()
    assert text.count("ValueError: the script's own") == 1
    assert "runpy" not in text
    assert 'train.py", line 3, in inner' in text


def test_a_scripts_exit_code_is_passed_on(here):
    write(here, "import sys; sys.exit(3)")
    assert begin(here, "train.py").wait() == [3]


# --- what is refused


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("print('nothing')", "", "torch.optim"),
        (LOOP.format(steps=1), "", "1 optimizer step"),
        ("x = (", "", "train.py:1: "),
        (LOOP, "--workers 0,1", "--workers"),
        (LOOP, "--epoch 0", "--epoch is 0"),
        (LOOP, "--seconds 0", "--seconds is 0"),
        (LOOP, "--steps 1", "--steps is 1"),
        (LOOP, "--nproc 0", "--nproc is 0"),
        (LOOP, "--lr 1", "Unrecognized"),
        (LOOP, "--out /dev/null/x", "/dev/null/x"),
    ],
)
def test_what_is_wrong_with_a_script_is_one_message(here, refused, text, flags, says):
    write(here, text)
    assert says in refused("profile", "train.py", *flags.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("tiny.py --workers 0,1", "--workers"),
        ("tiny.py --workers 0,x", "--workers 0,x"),
        ("tiny.py --batch-sizes 0", "--batch-sizes 0"),
        ("tiny.py --apply", "--apply"),
        ("tiny.py --engine lightning", "--engine"),
        ("tiny.py -- x", "`--`"),
        ("tiny.py --run-dir /dev/null/x", "/dev/null/x"),
        ("spirl", "'spirl'"),
        ("gone.py", "gone.py"),
    ],
)
def test_what_is_wrong_with_the_profile_of_a_recipe_is_one_message(here, refused, arguments, says):
    tiny.write_recipe(here)
    assert says in refused("profile", *arguments.split())


STOPS = """
import itertools
import os
import signal
from dataclasses import replace

calls = itertools.count(1)
without = recipe.loss

def loss(outputs, targets):
    if next(calls) == 100:
        os.kill(os.getpid(), signal.SIGTERM)
    return without(outputs, targets)

recipe = replace(recipe, loss=loss)
"""


def test_sigterm_ends_the_profile_of_a_recipe_and_shows_what_was_measured(here):
    """Every rank sends the signal to itself, as a scheduler would, when it trains step 100."""
    recipe = tiny.write_recipe(here, tiny.RECIPE + STOPS)
    ranks = begin(here, f"{recipe} --seconds 60 --run-dir out", world_size=2)
    assert set(ranks.wait()) == {143}
    assert read_json(here / "out" / "profile.json")["measured"]["stopped"]
    assert "verdict" in ranks.printed(0)


def test_a_full_disk_leaves_no_part_of_a_trace(here, refused, disk):  # noqa: F811
    recipe, out = tiny.write_recipe(here), disk / "out"
    out.mkdir()
    fill(disk / "ballast", leave=40_000)  # for the run's own files, not for a trace
    message = refused("profile", str(recipe), *QUICK.split(), "--run-dir", str(out))
    assert "trace_rank0_workers_0.json.gz" in message
    assert os.strerror(errno.ENOSPC) in message
    assert not [p for p in out.rglob("*") if "trace_" in p.name or ".tmp" in p.name]
