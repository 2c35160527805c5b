"""Runs are read as far as they go, whatever state they are in: one in full, a folder in short."""

import json
import math
import os
import signal
import tempfile
from contextlib import closing, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.base.errors import UserError
from samestep.base.run import summary
from samestep.base.run.directory import Run, lock_run
from samestep.base.run.records import RecordFile, as_uninterrupted
from samestep.base.run.step_rows import CompactRecords
from samestep.base.run.summary import GrowingSummary
from samestep.show.reporting.run_data import read_run
from samestep.show.reporting.run_table import as_json, read_runs, sorted_runs
from tests.processes import start_ranks
from tests.reporting.made_runs import append, change, change_start, lines_of, write_run
from tests.tiny import until


@pytest.fixture(autouse=True)
def _every_record_is_worth_a_write(request, monkeypatch):
    if "of_the_time" not in request.node.name:
        monkeypatch.setattr(summary, "_SHARE", math.inf)
        monkeypatch.setattr(summary, "_EVERY_S", 0.0)


def only(folder):
    (run,) = read_runs(folder)
    return run


def live(run, *records, result=None):
    """Write records into a run as a training does."""
    with closing(Run(run)) as opened:
        for record in records:
            opened.append(record)
        if result is not None:
            opened.write_result({"recipe": "toy", **result})
    return run


def lived(run, num_records=None, start=None, **more):
    """Make a run whose records a training wrote; it may be killed after some of them."""
    write_run(run, finished=False, **more)
    records = [json.loads(line) for line in lines_of(run)]
    records[0] |= start or {}
    (run / "events.jsonl").unlink()
    return live(run, *records[:num_records])


def told_twice(run):
    """Return the run by its summary, which its records must confirm."""
    found = only(run.parent)
    (run / "summary.json").rename(run / "kept")
    by_records = only(run.parent)
    (run / "kept").rename(run / "summary.json")
    assert as_json(found) == as_json(by_records)
    return found


STOP = {"event": "stop", "step": 18, "reason": "finished"}
ENDED = {"status": "completed", "reason": "finished", "steps": 18, "epochs": 3}


def test_a_run_is_told_alike_by_its_summary_and_its_records_and_by_its_result(tmp_path):
    run = lived(tmp_path / "a" / "run", ranks=2)
    found = told_twice(run)
    assert (found.name, found.recipe, found.run_dir) == ("run", "toy", run)
    assert (found.state, found.epochs, found.steps, found.world_size) == ("killed", 3, 18, 2)
    assert found.seconds == pytest.approx(6 * 1.5 + 12 * 0.5)
    assert (found.metric, found.mode, found.value) == ("accuracy", "max", 0.75)
    assert found.losses == [1 / 6, 1 / 12, 1 / 18]
    live(run, STOP, result={**ENDED, "training_seconds": 7.5})
    found = only(tmp_path / "a")
    assert (found.state, found.reason, found.seconds) == ("completed", "finished", 7.5)
    found = told_twice(lived(tmp_path / "b" / "run", 5, accuracy=None))
    assert (found.losses, found.epochs, found.steps) == ([1, 1 / 2, 1 / 3, 1 / 4], 0, 4)
    assert found.metric is None
    odd = {"recipe": "not UTF-8 \udcff"}
    found = told_twice(lived(tmp_path / "c" / "run", start=odd, loss=lambda _: math.inf))
    assert (found.losses, found.recipe) == ([None, None, None], odd["recipe"])


def test_a_resumed_run_leaves_out_what_was_superseded_and_begun_anew_it_has_nothing(tmp_path):
    run = lived(tmp_path / "run", accuracy=lambda epoch: 1 / epoch)
    entry = {"path": "a.pt", "step": 12, "epoch": 2, "sha256": "", "metric": 0.5}
    table = {"monitor": "accuracy", "mode": "max", "checkpoints": [entry]}
    (run / "checkpoints" / "index.json").write_text(json.dumps(table))
    start = json.loads(lines_of(run)[0])
    again = {**start, "resumed": True, "world_size": 4}
    resume = {"event": "resume", "step": 12, "checkpoint": "checkpoint_epoch_2.pt"}
    step = {"event": "step", "step": 13, "loss": 1.0, "seconds": 99.0, "samples": 130}
    live(run, again, resume)
    found = told_twice(run)
    assert (found.state, found.value, found.world_size) == ("killed", 0.5, 4)
    assert found.losses == [1 / 6, 1 / 12], "the third epoch is to be done again"
    assert (found.steps, found.epochs, found.starts) == (12, 2, 2)
    live(run, step, STOP | {"step": 14, "reason": "SIGTERM"})
    found = told_twice(run)
    assert (found.state, found.steps, found.seconds) == ("stopped", 14, 99.0)
    live(run, again, resume, STOP | {"step": 12, "reason": "failed: no memory"})
    assert told_twice(run).state == "failed"
    live(run, start)
    found = told_twice(run)
    assert (found.state, found.steps, found.starts, found.losses) == ("killed", 0, 1, [])


def test_writing_the_summary_takes_a_fixed_share_of_the_time(tmp_path, monkeypatch):
    now, written_at, cost_s = 0.0, [], 0.01

    def write(*_, **__):
        nonlocal now
        written_at.append(now)
        now += cost_s

    monkeypatch.setattr(summary, "write_text", write)
    monkeypatch.setattr(summary, "time", SimpleNamespace(perf_counter=lambda: now))
    run = lived(tmp_path / "run", 1)
    with closing(Run(run)) as opened:
        written_at.clear()
        for number in range(100_000):
            now += 0.01
            event = {"event": "step", "step": number + 2, "loss": 1.0}
            opened._summary.add(event)
            opened._summary.add({**event, "event": "checkpoint"})
    assert 0.0004 < len(written_at) * cost_s / now < 0.0006
    gaps = np.diff(written_at)
    assert gaps.max() < 1.1 * cost_s / 0.0005


@pytest.mark.parametrize("event", ["epoch", "step"])
def test_of_many_losses_some_are_kept_evenly_spread_and_the_newest(tmp_path, event):
    growing = GrowingSummary(tmp_path)
    for number in range(1, 10_001):
        at = {"epoch": number, "step": number, "loss": float(number), "train_seconds": 1.0}
        growing.add({"event": event, **at})
    losses = growing.complete().losses
    assert 32 <= len(losses) <= 64
    assert losses[-1] == 10_000
    assert len({*np.diff(losses[:-1])}) == 1


def test_a_failure_that_others_record_counts_unless_the_run_has_gone_on(tmp_path):
    run = lived(tmp_path / "run")
    result = run / "result.json"
    result.write_text(json.dumps({"status": "failed", "reason": "failed: rank 1 hangs"}))
    found = told_twice(run)
    assert (found.state, found.reason) == ("failed", "failed: rank 1 hangs")
    os.utime(result, (1.0, 1.0))
    assert told_twice(run).state == "killed"


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"format": 1, "state": 7}', "{}", "[" * 10**5]
)
def test_a_damaged_or_foreign_summary_is_told_and_the_records_tell_the_rest(tmp_path, content):
    run = lived(tmp_path / "run")
    (run / "summary.json").write_text(content)
    found = only(tmp_path)
    assert (found.state, found.steps) == ("damaged", 18)
    assert "summary.json" in found.reason
    live(run, STOP)
    assert told_twice(run).state == "completed", "and the next record mends it"
    (run / "summary.json").write_text('{"accuracy": 0.9}')
    with pytest.raises(UserError, match="not written by samestep"):
        Run(run)


@pytest.mark.parametrize(("age_s", "state"), [(0, "running"), (600, "killed")])
def test_a_run_that_another_machine_opened_runs_while_it_writes(tmp_path, age_s, state):
    run = write_run(tmp_path / "run", finished=False)
    (run / "run.lock").write_text("process 7 on another-machine\n")
    written = (run / "events.jsonl").stat().st_mtime - age_s
    os.utime(run / "events.jsonl", (written, written))
    assert only(tmp_path).state == state


def test_runs_in_a_folder_of_the_folder_are_found_and_profiles_and_files_are_not_runs(tmp_path):
    write_run(tmp_path / "sweep" / "one")
    profile = tmp_path / "profile-spiral"
    profile.mkdir()
    for name in ("settings.toml", "profile.json", "events.jsonl"):
        (profile / name).touch()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".cache").mkdir()
    assert [run.name for run in read_runs(tmp_path)] == ["sweep/one"]


def test_the_order_is_the_one_asked_for_and_the_lowest_best_if_it_is_to_fall(tmp_path):
    for place, (value, seconds) in enumerate([(0.5, 9.0), (0.9, 5.0), (0.7, 7.0)]):
        start = {"time": [200.0, 300.0, 100.0][place]}
        run = lived(tmp_path / f"run-{place}", start=start, accuracy=lambda _, value=value: value)
        live(run, STOP, result={**ENDED, "training_seconds": seconds})
    lived(tmp_path / "run-3", accuracy=lambda _: 0.8)

    def places(by):
        return [int(run.name[-1]) for run in sorted_runs(read_runs(tmp_path), by)]

    assert places("date") == [1, 0, 2, 3]
    assert places("name") == [0, 1, 2, 3]
    assert places("metric") == [1, 3, 2, 0]
    assert places("duration") == [3, 0, 2, 1]
    assert places("state") == [1, 0, 2, 3]
    for name, value in (("high", 2.0), ("low", 1.0)):
        lived(tmp_path / "b" / name, start={"monitor": "loss"}, loss=lambda _, value=value: value)
    assert [run.name for run in sorted_runs(read_runs(tmp_path / "b"), "metric")] == ["low", "high"]


def damaged_folder(folder):
    """Write runs that cannot be read, each in its own way; return their names."""
    garbage = bytes(range(256)) * 40
    for name in ("empty", "torn-start", "garbage", "torn-result", "torn-index", "torn-settings"):
        (folder / name).mkdir(parents=True)
    (folder / "torn-start" / "events.jsonl").write_text('{"event": "start", "ti')
    for name in ("events.jsonl", "settings.toml", "result.json", "run.lock"):
        (folder / "garbage" / name).write_bytes(garbage)
    write_run(folder / "torn-result-2")
    (folder / "torn-result-2" / "result.json").write_text('{"recipe": "to')
    (folder / "torn-result" / "result.json").write_text("[1, 2]")
    (folder / "torn-index" / "checkpoints").mkdir()
    (folder / "torn-index" / "settings.toml").write_text('recipe = "spiral"\n')
    (folder / "torn-index" / "checkpoints" / "index.json").write_bytes(garbage)
    (folder / "torn-settings" / "settings.toml").write_text("recipe = [")
    (folder / "file").write_bytes(garbage)
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("not-there")
    for name in ("events.jsonl", "result.json"):
        (folder / f"directory-as-{name}" / name).mkdir(parents=True)
    (folder / "fifo").mkdir()
    for name in ("events.jsonl", "result.json", "run.lock", "settings.toml"):
        os.mkfifo(folder / "fifo" / name)
    (folder / "deep").mkdir()
    (folder / "deep" / "result.json").write_text("[" * 100_000)
    (folder / "deep" / "events.jsonl").write_text('{"event": "start", "x": ' + "[" * 100_000 + "\n")
    write_run(folder / "newer")
    change_start(folder / "newer", format=99)
    return {path.name for path in folder.iterdir()}


def test_what_cannot_be_read_is_damaged_and_says_why(tmp_path):
    names = damaged_folder(tmp_path)
    found = read_runs(tmp_path)
    assert {run.name for run in found} == names
    assert [run.name for run in found if run.state != "damaged"] == []
    assert all(run.reason for run in found)
    whole = next(run for run in found if run.name == "torn-result-2")
    assert (len(whole.losses), whole.steps) == (3, 18), "what is whole is told"
    assert "spiral" in {run.recipe for run in found}, "before a run begins its settings tell it"


VALUES = ["null", "-1", "1e308", "NaN", '"x"', "[1]", "{}", "true", "9" * 400]


@pytest.mark.parametrize("value", VALUES)
def test_whatever_a_field_holds_the_run_is_listed(tmp_path, value):
    run = write_run(tmp_path / "run")
    best = {"metric": "METRIC", "mode": "min", "value": "VALUE"}
    result = {"best": best, "training_seconds": "VALUE", "epochs": "VALUE", "steps": "VALUE"}
    (run / "result.json").write_text(json.dumps({"status": "completed", **result}))
    for name in ("result.json", "events.jsonl"):
        text = (run / name).read_text().replace('"VALUE"', value)
        text = text.replace('"time": 0.0', f'"time": {value}').replace('"METRIC"', value)
        (run / name).write_text(text)
    found = only(tmp_path)
    assert found.name == "run"
    assert found.value is None or math.isfinite(found.value)
    assert sorted_runs([found], "duration") == [found]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_a_whole_run_has_no_problems_and_of_one_with_a_torn_line_the_rest_is_used(run):
    found = read_run(run)
    assert found.problems == ()
    assert found.status == "completed (finished)"
    assert found.recipe == "toy"
    assert len(found.of("step")) == 18
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text + '{"event": "step", "step": 19, "lo')
    found = read_run(run)
    (problem,) = found.problems
    assert "events.jsonl" in problem
    assert len(found.of("step")) == 18
    lines = text.splitlines(keepends=True)
    lines[3] = '{"event": "step", "step": 3}\n'
    (run / "events.jsonl").write_text("".join(lines))
    found = read_run(run)
    (problem,) = found.problems
    assert "events.jsonl" in problem
    assert "line 4," in problem
    assert [record["step"] for record in found.of("step")] == [1, 2, *range(4, 19)]


def test_without_its_settings_a_run_still_tells_its_batch(run):
    (run / "settings.toml").unlink()
    found = read_run(run)
    assert [problem.split()[0] for problem in found.problems] == ["settings.toml"]
    assert (found.settings, found.facts["batch_size"]) == (None, 10)


@pytest.mark.parametrize("name", ["settings.toml", "environment.json", "result.json"])
def test_a_file_cut_in_half_is_named(run, name):
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) // 2] + b"\xff")
    (problem,) = read_run(run).problems
    assert problem.startswith(f"{name} is ")
    assert "damaged" in problem


def test_a_run_not_begun_and_one_told_by_its_lock_are_read(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.toml").write_text('recipe = "spiral"\n')
    found = read_run(tmp_path / "run")
    assert found.recipe == "spiral"
    assert found.status == "not begun"
    assert found.problems[0].startswith("events.jsonl")
    run = write_run(tmp_path / "runs" / "run")  # with the result of an earlier attempt
    holder = start_ranks(_hold, 1, tmp_path / "output", run)
    until(lambda: read_run(run).status == "running", holder)
    assert [one.state for one in read_runs(tmp_path / "runs")] == ["running"]
    assert read_run(run).status == "running"
    holder.kill()
    holder.wait()
    assert [one.state for one in read_runs(tmp_path / "runs")] == ["completed"]


def _hold(run):
    with lock_run(run):
        signal.pause()


def test_a_killed_run_whose_summary_lags_is_listed_with_its_newest_step(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "_SHARE", -1.0)
    run = lived(tmp_path / "run", num_records=9)
    steps = [step for line in lines_of(run) if (step := json.loads(line).get("step"))]
    assert json.loads((run / "summary.json").read_text())["steps"] == 0
    assert (only(tmp_path).state, only(tmp_path).steps) == ("killed", max(steps))


def test_what_an_earlier_attempt_ended_with_does_not_speak_for_one_that_was_killed(run):
    start = json.loads(lines_of(run)[0]) | {"resumed": True}
    append(run, start, {"event": "resume", "step": 12, "checkpoint": "checkpoint_epoch_2.pt"})
    found = read_run(run)
    assert "no end recorded, last written" in found.status
    assert [record["step"] for record in found.of("step")] == list(range(1, 13))


def test_a_run_on_two_sizes_says_that_its_figures_mix_them(run):
    again = {"world_size": 2, "resumed": True}
    change(run, lambda records: [*records[:-1], records[0] | again, records[-1]])
    (problem,) = read_run(run).problems
    assert "1, then 2 ranks" in problem


@pytest.mark.parametrize("name", ["nothing", "empty", "file", "run"])
def test_what_is_no_run_and_what_is_no_folder_of_runs_is_refused(run, name):
    (run.parent / "empty").mkdir()
    (run.parent / "file").touch()
    for read, wrong in ((read_run, name != "run"), (read_runs, name != "empty")):
        with pytest.raises(UserError, match=name) if wrong else nullcontext():
            read(run.parent / name)


def same(records):
    return [repr(sorted(record.items())) for record in records]


VALUES = st.integers() | st.floats(-9, 1e300) | st.sampled_from([None, "text", [1], True])
FIELDS = dict.fromkeys(("loss", "lr", "norm"), VALUES)
STEPS = st.fixed_dictionaries({"event": st.just("step"), "samples": VALUES}, optional=FIELDS)
OTHERS = st.sampled_from(["checkpoint", "evaluation", "resume", "start", "anything"])


@given(st.lists(STEPS | OTHERS, max_size=30), st.integers(0, 5))
def test_records_in_columns_are_the_records_that_were_written(events, back):
    with tempfile.TemporaryDirectory() as folder:
        written, step = [], 0
        for event in events:
            step = max(0, step - back) if event == "resume" else step + isinstance(event, dict)
            more = {"event": event, "resumed": bool(back), "checkpoint": f"{step}.pt", "rows": 2}
            more |= {"path": f"checkpoints/{step}.pt", "seconds": 1.0} if back else {}
            written.append({**(event if isinstance(event, dict) else more), "step": step})
        file = Path(folder, "events.jsonl")
        file.write_text("".join(json.dumps(record) + "\n" for record in written))
        expected = as_uninterrupted(RecordFile(file).read_all(), Path(folder))
        found = CompactRecords(RecordFile(file), file.parent)
        assert same([*found]) == same(expected), "with their types, and in their order"
        assert same([*found.steps()]) == same([r for r in expected if r["event"] == "step"])
        short = iter(found.in_short())
        for record, after in pairwise([*expected, {"event": ""}]):
            if (record["event"], after["event"]) != ("step", "step"):
                assert record in short, "in their order, with the last of each row of steps"
