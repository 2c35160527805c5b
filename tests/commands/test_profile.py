"""`samestep profile`: what it measures and writes, on recipes and scripts; what it refuses."""

import errno
import gzip
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from samestep.scripts.measuring.trace_digest import phases_of
from tests import tiny
from tests.command_line import call, end_with_first_failure, read_json, run, train_here, tree
from tests.faults import Fault, command_line
from tests.loops.scripts import EXAMPLES
from tests.processes import start_ranks
from tests.profiling.planted import SITUATIONS
from tests.tiny import RECIPE, write_recipe
from tests.training.test_full_disk import disk, fill  # noqa: F401 - the disk is a fixture

QUICK = "--seconds 0.3"
SLOW_DATA = next(one for one in SITUATIONS if one.name == "a data set that sleeps")


def found_in(here: Path) -> dict:
    (path,) = here.rglob("profile.json")
    return read_json(path)


def traces_of(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "traces").glob("trace_*"))


def events_of(trace: Path) -> dict:
    return json.loads(gzip.decompress(trace.read_bytes()))


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory) -> tuple[Path, str]:
    """The tiny recipe's profile on two ranks: its directory, and what was shown."""
    here = tmp_path_factory.mktemp("profile") / "here"
    here.mkdir()
    recipe = tiny.write_recipe(here)
    tiny.set_pace(recipe, 0.003)
    words = ("profile", str(recipe), *QUICK.split(), "--run-dir", str(here / "out"))
    how = {"world_size": 2, "environment": {"COLUMNS": "80"}}
    return here / "out", run(*words, folder=here.parent / "outputs", **how).printed(0)


def test_the_phases_of_a_profile_add_up_and_every_rank_leaves_a_whole_trace(of_two_ranks):
    out, shown = of_two_ranks
    found = read_json(out / "profile.json")
    measured = found["measured"]
    assert len(measured["ranks"]) == 2
    assert measured["samples"] == pytest.approx(131 / 11)  # the last batch is smaller
    for rank in measured["ranks"]:
        assert sum(rank["phases"].values()) == pytest.approx(measured["wall"], rel=0.1)
        assert rank["phases"]["forward"] >= 0.003
    assert found["verdict"]["step"] >= sum(measured["ranks"][0]["phases"].values()) * 0.99
    lines = [line for line in shown.splitlines() if not line.startswith(("trace", "[W", "[rank"))]
    assert max(map(len, lines)) <= 80
    for word in ("forward", "verdict", "ceiling", "change", "100%"):
        assert word in shown
    traces = traces_of(out)
    assert traces == [f"trace_rank{rank}_workers_0.json.gz" for rank in (0, 1)]
    for rank, name in enumerate(traces):
        trace = events_of(out / "traces" / name)
        assert trace["distributedInfo"]["rank"] == rank
        complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
        assert len([e for e in complete if e["name"].startswith("ProfilerStep#")]) >= 3
        assert any(event["name"] == "aten::addmm" for event in complete)
        ranges = {event["name"] for event in complete if event.get("cat") == "phase"}
        assert {"data", "forward", "backward", "all_reduce", "optimizer"} <= ranges
    rows = (out / "traces" / "memory_rank0_workers_0.csv").read_text().splitlines()
    assert rows[0] == "ms,phase,MiB"
    assert len(rows) > 10


def test_a_directory_that_holds_a_profile_is_not_written_to_again(of_two_ranks, refused):
    out, _shown = of_two_ranks
    message = refused("profile", str(out.parent / "tiny.py"), "--run-dir", str(out))
    assert "--run-dir" in message
    assert "--resume" not in message


def args_of(events: dict) -> set[str]:
    return {name for event in events["traceEvents"] for name in event.get("args", {})}


def test_a_whole_epoch_can_be_traced_with_shapes_and_python_calls(here, output_of, of_two_ranks):
    flags = "--epoch 2 --record-shapes --with-stack --run-dir out"
    output_of("profile", tiny.write_recipe(here), *flags.split())
    (trace,) = traces_of(here / "out")
    events = events_of(here / "out" / "traces" / trace)
    assert [phase for phase, _ in phases_of(events["traceEvents"])].count("forward") == 11
    assert found_in(here)["measured"]["steps"] <= 11  # those of the epoch before
    asked, (plain, _) = {"Input Dims", "Python id"}, of_two_ranks
    assert asked <= args_of(events)
    assert not asked & args_of(events_of(plain / "traces" / traces_of(plain)[0]))


@pytest.mark.slow
def test_batches_and_a_schedule_of_a_recipes_own_are_profiled_beyond_its_end(here, output_of):
    """The run has 145 steps, and a schedule that is below 0 after them."""
    output_of("profile", EXAMPLES / "csv_regression.py", *QUICK.split(), "--run-dir", "out")
    assert found_in(here)["measured"]["steps"] > 3


@pytest.mark.slow
def test_a_sweep_of_workers_finds_those_that_help_and_writes_them_where_it_is_told(here):
    (here / "mine.toml").write_text("lr = 0.5  # mine\n")
    # On a rank, whose loader workers are forked.
    words = f"profile {SLOW_DATA.write(here)} {QUICK} --workers 2,0 --run-dir out"
    run(*words.split(), "--config", "mine.toml", "--apply", folder=here.parent / "outputs")
    found = found_in(here)
    assert found["verdict"]["kind"] == SLOW_DATA.verdict
    (sweep,) = found["sweeps"]
    assert [row["value"] for row in sweep["rows"]] == [0, 2]
    assert sweep["best"] == 2
    assert sweep["rows"][1]["ratio"] > 1.3
    assert (here / "mine.toml").read_text() == "lr = 0.5  # mine\nnum_workers = 2\n"
    assert traces_of(here / "out") == [f"trace_rank0_workers_{n}.json.gz" for n in (0, 2)]


def test_what_cannot_be_written_or_measured_is_refused_first(here, refused):
    recipe = SLOW_DATA.write(here)
    (here / f"{recipe.stem}.toml").write_text("lr = 0.5\n")
    said = refused("profile", str(recipe), *["--workers", "0,1", "--apply", "--run-dir", "out"])
    assert f"{recipe.stem}.toml" in said
    assert "--config" in said
    assert not (here / "out").exists()
    for text, says in (
        ("print('nothing')", "torch.optim"),
        (LOOP.format(steps=1), "1 optimizer step"),
        ("x = (", "train.py:1: "),
    ):
        write(here, text)
        assert says in refused("profile", "train.py")


def test_a_runs_profile_is_a_directory_of_its_own_and_json_is_nothing_but_json(here, output_of):
    train_here(str(tiny.write_recipe(here)), "--run-dir", "run", "--epochs", "1")
    before = tiny.files(here / "run")
    found = json.loads(output_of("profile", "run", *QUICK.split(), "--json"))
    assert tiny.files(here / "run") == before
    (made,) = (here / "runs").iterdir()
    assert made.name.startswith("profile-tiny-")
    assert (made / "settings.toml").is_file()
    assert found["verdict"]["kind"]
    assert found == read_json(made / "profile.json")


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


def write(here: Path, text: str) -> None:
    (here / "train.py").write_text(text)


def _with_output_apart(words: list[str], environment: dict[str, str]) -> None:
    """Run the command line with a file of its own as standard output."""
    from samestep.shell.cli import main

    os.environ |= environment
    os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT), 1)
    sys.exit(main(words))


def test_a_script_gets_its_own_arguments_is_ended_when_seen_and_prints_nothing_into_the_json(here):
    write(here, LOOP.format(steps=10**9))
    words = f"profile train.py {QUICK} --out out --json -- --lr 1 --json".split()
    ranks = start_ranks(_with_output_apart, 1, here.parent / "outputs", words, {})
    assert ranks.wait() == [0], ranks.output()
    told = ranks.output()
    assert "arguments ['--lr', '1', '--json'] name __main__" in told
    assert "the end" not in told
    found = json.loads((here / "printed").read_text())
    assert found == found_in(here)
    assert found["name"] == "train.py"
    assert found["measured"]["script"]


def test_a_short_script_runs_to_its_end_and_what_there_is_is_told(here, output_of):
    write(here, LOOP.format(steps=12))
    printed = output_of("profile", "train.py", "--out", "out")
    assert "the end 11" in printed
    assert "verdict" in printed
    assert 0 < found_in(here)["measured"]["steps"] <= 11  # a busy machine is longer in warming up
    assert not traces_of(here / "out")


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("--out DIR main.py -- --out x", "main.py --out DIR -- --out x"),
        ("--drop-last --no-pictures spiral", "spiral --drop-last --no-pictures"),
        ("--seconds 2 -m pkg.train --json", "-m pkg.train --seconds 2 --json"),
        ("main.py --out DIR", "main.py --out DIR"),
    ],
)
def test_flags_may_stand_before_what_is_profiled(given, target):
    from samestep.shell.commands.profile import ProfileFlags
    from samestep.shell.commands.target import target_first

    assert target_first(given.split(), ProfileFlags) == target.split()


def test_sigterm_ends_the_profile_of_a_recipe_and_shows_what_was_measured(here):
    words = ["profile", str(tiny.write_recipe(here)), "--seconds", "60", "--run-dir", "out"]
    signals = (Fault("after a step", 100, signal.SIGTERM, rank=None),)
    ranks = start_ranks(command_line, 2, here.parent / "outputs", words, signals)
    assert set(ranks.wait()) == {143}
    assert found_in(here)["measured"]["stopped"]
    assert "verdict" in ranks.printed(0)


def test_a_full_disk_leaves_no_part_of_a_trace(here, refused, disk):  # noqa: F811
    recipe, out = tiny.write_recipe(here), disk / "out"
    out.mkdir()
    fill(disk / "ballast", leave=40_000)  # for the run's own files, not for a trace
    message = refused("profile", str(recipe), *QUICK.split(), "--run-dir", str(out))
    assert "trace_rank0_workers_0.json.gz" in message
    assert os.strerror(errno.ENOSPC) in message
    assert not [p for p in out.rglob("*") if "trace_" in p.name or ".tmp" in p.name]


@pytest.fixture
def scale(here, monkeypatch, capfd):
    """Measure on forked ranks; return the exit code, and what was printed on output and errors."""
    outputs = here.parent / "outputs"

    def start(num_ranks: int, words: list[str], task: str) -> int:
        environment = {"SAMESTEP_TASK": task, "OMP_NUM_THREADS": "1"}
        ranks = start_ranks(_with_output_apart, num_ranks, outputs, words, environment)
        code = end_with_first_failure(ranks)
        sys.stderr.write(ranks.output())
        return code

    def measured(*flags: str) -> tuple[int, str, str]:
        code = call("scale", "tiny.py", "--nproc", "1,2", "--device", "cpu", *flags)
        assert (here / "printed").read_text() == ""
        (here / "printed").unlink()
        return code, *capfd.readouterr()

    monkeypatch.setattr("samestep.launch.ranks.start.start_ranks", start)
    return measured


def test_it_measures_each_size_and_keeps_the_runs_where_it_is_told_to(here, scale):
    recipe = write_recipe(here)
    recipe.write_text("print('read')\n" + recipe.read_text())
    flags = "--seconds 0.3 --rounds 1 --run-dir kept --json"
    code, printed, told = scale(*flags.split())
    assert code == 0, told
    assert "Traceback" not in told
    assert "round 1 of 1" in told
    found = json.loads(printed)  # nothing else is on standard output
    assert {
        mode: [(r["ranks"], r["global_batch_size"]) for r in results]
        for mode, results in found["modes"].items()
    } == {"weak": [(1, 12), (2, 24)], "strong": [(1, 12), (2, 12)]}
    base, two = found["modes"]["weak"]
    assert base["speed_up"] == 1
    assert two["speed_up"] == pytest.approx(two["samples_per_s"] / base["samples_per_s"])
    assert two["efficiency"] == pytest.approx(two["speed_up"] / 2)
    low, high = two["speed_up_interval"]
    assert low <= high
    assert sum(two["phases_ms_per_step"].values()) == pytest.approx(1000 / two["steps_per_s"])
    kept = sorted(path.name for path in (here / "kept").iterdir())
    assert kept == ["strong-2-round-1", "weak-1-round-1", "weak-2-round-1"]


def test_what_fails_on_the_ranks_is_told_once_and_leaves_nothing(here, scale):
    text = "def data(options):\n    raise RuntimeError('no such shelf')\n"
    write_recipe(here, RECIPE.replace("def data(options):\n", text))
    before = tree(here)
    code, printed, told = scale()
    assert code in (1, 2)
    assert told.count("no such shelf") == 1
    assert printed == ""
    assert tree(here) == before
