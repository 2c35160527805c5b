"""A tracker's process beside a training: it sends each step once, and whatever it does harms none.

The tracker is one of a user's own, which can be told to misbehave (own_tracker.py).
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from samestep import read_records
from tests import tiny
from tests.command_line import read_json
from tests.faults import Fault
from tests.processes import TIMEOUT_S, start_ranks
from tests.tracking import own_tracker
from tests.tracking.readers import expected

TRACKER = str(Path(own_tracker.__file__))
TRACK = ("--track", TRACKER)


PATIENCE_S = 150.0
"""Of a busy machine, where nothing is to be given up."""


def command_line(arguments, environment, faults=(), end_s=PATIENCE_S):
    """Run `samestep` on this rank, which waits so long for its trackers at the end."""
    os.environ.update(environment)
    from samestep.tracking import processes
    from tests import faults as planted

    processes.END_S = end_s
    planted.command_line(arguments, faults)


def samestep(*arguments, folder, world_size=1, faults=(), end_s=PATIENCE_S, **environment):
    """Start `samestep` on N ranks with variables in their environment."""
    output = folder / f"output-{len(list(folder.glob('output-*')))}"
    return start_ranks(
        command_line, world_size, output, [str(a) for a in arguments], environment, faults, end_s
    )


def train(*arguments, folder, **more):
    """Train to the good end; return the ranks that did."""
    ranks = samestep("train", *arguments, folder=folder, **more)
    assert set(ranks.wait()) == {0}, ranks.output()
    return ranks


def send(run, folder, code=0, **environment):
    """Run `samestep track` with the test's tracker; return what it printed."""
    ranks = samestep("track", run, "--to", TRACKER, folder=folder, **environment)
    assert ranks.wait() == [code], ranks.output()
    return ranks.output()


def sent(run):
    """Return what the service has: series name → [(step, epoch, values)]."""
    series = {}
    for line in own_tracker.lines(run):
        if line["what"] not in ("start", "finish", "system", "checkpoint"):
            name = {"step": "train"}.get(line["what"], line["what"])
            series.setdefault(name, []).append((line["step"], line["epoch"], line["values"]))
    return series


def what(run, event):
    return [line for line in own_tracker.lines(run) if line["what"] == event]


def children_of(run):
    """Return the processes that still have to do with a run's trackers."""
    return [line["pid"] for line in what(run, "start") if _runs(line["pid"])]


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # nobody may have asked for it
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("untracked")
    train(tiny.write_recipe(folder), "--run-dir", folder / "run", folder=folder)
    return folder / "run"


# --- what is sent


@pytest.mark.parametrize("engine", ["native", "lightning"])
def test_one_tracker_run_gets_every_record_in_its_order_whatever_the_engine(tmp_path, engine):
    text = tiny.RECIPE.replace('    "checkpoint_every_steps": 4,\n', "")
    recipe, run = tiny.write_recipe(tmp_path, text), tmp_path / "run"
    ranks = train(
        recipe,
        *TRACK,
        "--run-dir",
        run,
        "--engine",
        engine,
        "--epochs",
        "2",
        "--track-tags",
        "a, b",
        "--track-workspace",
        "us",
        folder=tmp_path,
        world_size=2,
    )
    assert sent(run) == expected(run)
    (start,), (finish,) = what(run, "start"), what(run, "finish")
    assert (start["project"], start["name"]) == ("tiny", "run")
    assert (start["tags"], start["workspace"]) == (["a", "b"], "us")
    assert start["settings"]["lr"] == 0.01
    assert start["settings"]["options.hidden"] == 16
    assert start["facts"]["world_size"] == 2
    assert start["facts"]["parameters"] == 178
    assert start["facts"]["monitor"] == "accuracy"
    assert start["facts"]["lower_is_better"] == '["loss"]'
    assert not start["has_torch"], "a tracker needs no PyTorch, and PyTorch no tracker"
    assert start["group"] == start["pid"], "Ctrl-C in the terminal is for the training alone"
    assert finish["status"] == "completed"
    assert finish["values"]["best.mode"] == "max"
    assert finish["values"]["test.loss"] == read_json(run / "result.json")["test"]["loss"]
    assert {line["axis"] for line in what(run, "epoch")} == {"epoch"}
    assert {line["axis"] for line in what(run, "step") + what(run, "validation")} == {"step"}
    assert len(what(run, "system")) == 1, "a short run is measured once"
    assert ranks.output().count("https://tracker.example/the-run") == 1
    assert not children_of(run)
    times = [
        line["time"]
        for line in own_tracker.lines(run)
        if line["what"] not in ("start", "finish", "system")
    ]
    assert times == sorted(times), "times of records never go back"
    assert times[0] >= next(r["time"] for r in read_records(run) if r["event"] == "start")
    assert not what(run, "checkpoint"), "they were not asked for"


def test_checkpoints_are_sent_when_they_are_asked_for(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    flags = ("--track-checkpoints", "--max-steps", "8", "--run-dir", run)
    train(recipe, *TRACK, *flags, folder=tmp_path)
    files = [line["file"] for line in what(run, "checkpoint")]
    assert files == ["checkpoint_step_4.pt", "checkpoint_step_8.pt"]


# --- resuming


def test_a_killed_and_resumed_run_is_one_tracker_run_and_each_step_is_sent_once(
    tmp_path, untracked
):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    tiny.set_pace(recipe, 0.02)  # so that the tracker sees more than the checkpoint
    train(recipe, *TRACK, "--run-dir", run, "--epochs", "1", folder=tmp_path)
    kill = Fault(point="after a step", nth=25)
    resumed = ("train", run, "--resume", "--epochs", "6")
    ranks = samestep(*resumed, folder=tmp_path, faults=(kill,))
    assert ranks.wait() == [-signal.SIGKILL]
    tiny.set_pace(recipe, 0)
    # At once: the process of the first execution may still be closing.
    train(run, "--resume", folder=tmp_path)
    assert len([r for r in tiny.all_records(run) if r["event"] == "resume"]) == 2
    tiny.assert_same_training(run, untracked, 0)
    assert [line["known"] for line in what(run, "start")] == [None, "the run", "the run"]
    statuses = [line["status"] for line in what(run, "finish")]
    assert statuses == ["completed", "killed", "completed"], "the second left no result of its own"
    steps = [step for step, _, _ in sent(run)["train"]]
    assert steps == list(range(1, tiny.STEPS + 1))
    assert losses(sent(run)) == losses(expected(run)), "superseded steps were the same to the bit"
    assert not children_of(run)


def losses(series):
    return [values["train/loss"] for _, _, values in series["train"]]


def test_a_run_that_goes_on_after_its_end_goes_on_at_the_tracker(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    train(recipe, *TRACK, "--run-dir", run, "--epochs", "1", folder=tmp_path)
    train(run, "--resume", "--epochs", "2", folder=tmp_path)
    assert [line["known"] for line in what(run, "start")] == [None, "the run"]
    for series in ("train", "epoch", "validation"):
        assert sent(run)[series] == expected(run)[series]


def test_a_resumed_run_keeps_its_trackers_and_flags_change_them(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    train(recipe, *TRACK, "--run-dir", run, "--epochs", "1", folder=tmp_path)
    train(run, "--resume", "--epochs", "2", "--track", "none", folder=tmp_path)
    assert len(what(run, "start")) == 1
    train(run, "--resume", "--epochs", "3", *TRACK, "--track-project", "other", folder=tmp_path)
    assert [line["project"] for line in what(run, "start")] == ["tiny", "other"]
    assert sent(run)["train"] == expected(run)["train"], "what was missed in between was made up"


@pytest.mark.slow
def test_ranks_that_samestep_starts_have_one_tracker_too(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    command = (
        sys.executable,
        "-m",
        "samestep",
        "train",
        recipe,
        "--nproc",
        "2",
        *TRACK,
        "--max-steps",
        "8",
        "--run-dir",
        run,
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert len(what(run, "start")) == 1
    assert sent(run) == expected(run)


# --- a tracker that misbehaves

FAULTS = (
    *("import:raise", "import:hang", "start:hang", "start:exit", "start:mute"),
    *("record:raise", "record:hang", "record:kill", "finish:hang"),
)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_tracker_does_the_training_is_the_same_and_its_records_are_sent_later(
    tmp_path, fault, untracked
):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    ranks = train(
        recipe,
        *TRACK,
        "--track-timeout",
        "1",
        "--run-dir",
        run,
        folder=tmp_path,
        TRACKER_FAULT=fault,
        end_s=5.0,
    )
    tiny.assert_same_training(run, untracked, 0)
    output = ranks.output()
    assert "Traceback" not in output
    assert output.count("warning own_tracker failed: ") == 1, output
    assert f"samestep track {run} --to {TRACKER}" in " ".join(output.split())
    has = 0 if fault.startswith(("import", "start")) else None
    count = r"It has ([\d,]+) of ([\d,]+) records"
    (told,) = re.findall(count, " ".join(output.split()))
    assert has in (None, int(told[0]))
    assert int(told[1].replace(",", "")) > 0
    if fault.endswith("raise"):
        assert f"ConnectionError: the service has gone at {fault.split(':')[0]}" in output
    if fault in ("import:hang", "start:hang", "record:hang"):
        assert " 1 s. " in output
    assert not children_of(run)
    assert "https://tracker.example/the-run" in send(run, tmp_path)
    assert sent(run) == expected(run), "once, whatever came of the first time"
    if fault == "finish:hang":
        send(run, tmp_path, code=2)
        assert sent(run) == expected(run)


@pytest.mark.parametrize("flags", [("--track-offline",), ()], ids=["writes files", "starts"])
def test_a_slow_tracker_that_only_writes_files_or_still_starts_is_waited_for(tmp_path, flags):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    arguments = (recipe, *TRACK, *flags, "--run-dir", run)
    slow = {"TRACKER_FAULT": "start:wait", "end_s": 0.0}
    assert "failed" not in train(*arguments, folder=tmp_path, **slow).output()
    assert sent(run) == expected(run)


def test_a_tracker_that_is_killed_within_the_run_has_its_part_once(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    tiny.set_pace(recipe, 0.02)  # so that there is a second time to hand over
    ranks = train(
        recipe, *TRACK, "--run-dir", run, folder=tmp_path, TRACKER_FAULT="later record:kill"
    )
    assert "signal 9" in ranks.output()
    before = sent(run)["train"]
    assert 0 < len(before) < tiny.STEPS
    send(run, tmp_path)
    assert sent(run) == expected(run)


def test_the_training_does_not_wait_for_a_tracker_to_start(tmp_path):
    """Its start waits for the last record of the training: if that waited too, none would end."""
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    train(recipe, *TRACK, "--run-dir", run, folder=tmp_path, TRACKER_FAULT="start:wait")
    assert sent(run) == expected(run)


@pytest.mark.parametrize("fault", ["start:hang", "finish:hang"])
def test_a_signal_ends_the_training_without_its_hanging_tracker(tmp_path, fault):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    tiny.set_pace(recipe, 0.02)
    stop = Fault(point="after a step", nth=20, signum=signal.SIGTERM)
    ranks = samestep(
        "train",
        recipe,
        *TRACK,
        "--run-dir",
        run,
        folder=tmp_path,
        faults=(stop,),
        TRACKER_FAULT=fault,
    )
    # The tracker's own limit is 120 s, longer than this wait.
    assert ranks.wait(110) == [128 + signal.SIGTERM]
    assert read_json(run / "result.json")["status"] == "stopped"
    assert ranks.output().count("warning own_tracker failed: ") == 1
    assert not children_of(run)


def test_a_run_that_is_refused_leaves_no_process_and_no_file(tmp_path):
    recipe = tiny.write_recipe(tmp_path, tiny.RECIPE.replace("options.samples", "options.nothing"))
    run = tmp_path / "run"
    ranks = samestep("train", recipe, *TRACK, "--run-dir", run, folder=tmp_path)
    assert ranks.wait() == [2]
    assert not run.exists()
    assert not own_tracker.lines(run)
    assert ranks.output().count("samestep: ") == 1


def test_a_run_that_fails_is_closed_as_failed_and_its_message_comes_first(tmp_path):
    recipe = tiny.write_recipe(
        tmp_path, tiny.RECIPE.replace("(outputs, targets)\n", "(outputs, targets) / 0\n")
    )
    run = tmp_path / "run"
    ranks = samestep("train", recipe, *TRACK, "--run-dir", run, folder=tmp_path)
    assert ranks.wait() == [2], ranks.output()
    tiny.until(lambda: bool(what(run, "finish")))
    assert what(run, "finish")[0]["status"] == "failed"
    tiny.until(lambda: not children_of(run))


FILES = """
import json, os, signal
from samestep.tracking import Started
COUNTS_AT_END = True

def start(run):
    path = run.folder / f"part-{len(list(run.folder.iterdir()))}.jsonl"
    return Started(client=path.open("w"))

def record(client, entries):
    for entry in entries:
        client.write(json.dumps([entry.event, entry.step]) + "\\n")
    client.flush()
    if os.environ.get("KILLED"):
        os.kill(os.getpid(), signal.SIGKILL)

def finish(client, result):
    client.close()
"""


def test_files_that_a_killed_tracker_did_not_close_are_written_anew(tmp_path):
    tracker = tmp_path / "files.py"
    tracker.write_text(FILES)
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    offline = ("--track", tracker, "--track-offline")
    train(recipe, *offline, "--run-dir", run, "--epochs", "1", folder=tmp_path)
    first = (run / "tracking" / "files" / "part-0.jsonl").read_text()
    assert first
    train(run, "--resume", "--epochs", "2", folder=tmp_path, KILLED="1")
    assert len(list((run / "tracking" / "files").iterdir())) == 2
    train(run, "--resume", "--epochs", "3", folder=tmp_path)
    parts = sorted((run / "tracking" / "files").iterdir())
    assert [part.name for part in parts] == ["part-0.jsonl", "part-1.jsonl"]
    assert parts[0].read_text() == first, "what was closed stays"
    lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [step for event, step in lines if event == "step"] == list(range(1, 34))


def test_what_a_tracker_says_of_a_key_reaches_neither_the_screen_nor_a_file(tmp_path):
    tracker = tmp_path / "talks.py"
    tracker.write_text(
        "import os\nkey = os.environ['MY_API_KEY']\n"
        "def start(run):\n    print('the key is', key)\n    raise ValueError('refused: ' + key)\n"
        "def record(client, entries): pass\ndef finish(client, result): pass\n"
    )
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    planted = "hunter2-the-planted-key"
    ranks = train(recipe, "--track", tracker, "--run-dir", run, folder=tmp_path, MY_API_KEY=planted)
    assert "ValueError: refused: …" in ranks.output()
    assert planted not in ranks.output()
    assert "the key is …" in (run / "tracking" / "talks.log").read_text()
    assert not [name for name, content in tiny.files(run).items() if planted.encode() in content]


def test_a_tracker_whose_start_returns_something_else_is_told_what_it_must_return(tmp_path):
    tracker = tmp_path / "wrong.py"
    tracker.write_text(
        "def start(run): return 7\ndef record(client, entries): pass\n"
        "def finish(client, result): pass\n"
    )
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    ranks = train(recipe, "--track", tracker, "--run-dir", run, folder=tmp_path)
    assert "start() returned int" in ranks.output()


def test_a_tracker_named_as_a_module_is_found_from_the_current_folder(tmp_path, monkeypatch):
    package = tmp_path / "ours"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "logs.py").write_text(Path(TRACKER).read_text())
    monkeypatch.chdir(tmp_path)
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    train(recipe, "--track", "ours.logs", "--run-dir", run, "--max-steps", "8", folder=tmp_path)
    assert sent(run) == expected(run)
    assert read_json(run / "tracking" / "ours.logs.json")["online"]["finished"]


def test_a_password_in_a_trackers_link_is_in_no_file_and_on_no_screen(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    link = {"TRACKER_LINK": "http://me:pa55word@host/the-run"}
    ranks = train(recipe, "--run-dir", run, *TRACK, "--epochs", "1", folder=tmp_path, **link)
    assert "http://host/the-run" in ranks.output()
    assert "http://host/the-run" in send(run, tmp_path, code=2)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if b"pa55word" in path.read_bytes()]
