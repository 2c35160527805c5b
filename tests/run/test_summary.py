"""Runs are read as far as they go, whatever state they are in: one in full, a folder in short."""

import json
import math
import os
import signal

import pytest

from samestep.base.errors import UserError
from samestep.base.run.directory import lock_run
from samestep.base.run.summary import read_runs, sorted_runs
from samestep.show.reporting.run_data import read_run
from tests.processes import start_ranks
from tests.reporting.made_runs import append, change, change_start, lines_of, write_run
from tests.tiny import until


def only(folder):
    (run,) = read_runs(folder)
    return run


def result_of(run):
    return json.loads((run / "result.json").read_text())


def write_result(run, **more):
    (run / "result.json").write_text(json.dumps({**result_of(run), **more}))


def write_index(run, value=0.5, monitor="accuracy", mode="max"):
    (run / "checkpoints").mkdir()
    table = {"best": {"metric": value}, "monitor": monitor, "mode": mode, "checkpoints": []}
    (run / "checkpoints" / "index.json").write_text(json.dumps(table))


def test_a_completed_run_is_told_by_its_result_and_a_loss_may_be_nan(tmp_path):
    run = write_run(tmp_path / "run", ranks=2)
    best = {"metric": "loss", "mode": "min", "value": 0.25, "epoch": 2}
    write_result(run, best=best, training_seconds=7.5, epochs=3, steps=18)
    found = only(tmp_path)
    assert (found.name, found.recipe, found.run_dir) == ("run", "toy", run)
    assert (found.state, found.reason) == ("completed", "finished")
    assert (found.metric, found.mode, found.value) == ("loss", "min", 0.25)
    assert (found.seconds, found.epochs, found.steps, found.world_size) == (7.5, 3, 18, 2)
    assert found.losses == (1 / 6, 1 / 12, 1 / 18)
    run = write_run(tmp_path / "b" / "run")
    text = (run / "events.jsonl").read_text()
    for number, loss in ((1 / 6, "null"), (1 / 12, "NaN"), (1 / 18, "Infinity")):
        text = text.replace(f'"loss": {number}', f'"loss": {loss}')
    (run / "events.jsonl").write_text(text)
    assert str(only(tmp_path / "b").losses) == "(nan, nan, inf)"


def test_what_has_not_ended_is_told_by_index_evaluations_and_steps(tmp_path):
    run = write_run(tmp_path / "run", finished=False)
    write_index(run, 0.75)
    found = only(tmp_path)
    best = (found.metric, found.mode, found.value)
    assert (found.state, best) == ("killed", ("accuracy", "max", 0.75))
    assert (found.epochs, found.steps) == (3, 18)
    assert found.seconds == pytest.approx(6 * 1.5 + 12 * 0.5)
    run = write_run(tmp_path / "b" / "run", finished=False, accuracy=lambda epoch: 1 / epoch)
    change_start(run, monitor="accuracy")
    assert only(tmp_path / "b").value == 1.0
    run = write_run(tmp_path / "c" / "run", finished=False)
    (run / "events.jsonl").write_text("".join(lines_of(run)[:5]))
    found = only(tmp_path / "c")
    assert (found.losses, found.epochs, found.steps) == ((1, 1 / 2, 1 / 3, 1 / 4), 0, 4)


@pytest.mark.parametrize(("age_s", "state"), [(0, "running"), (600, "killed")])
def test_a_run_that_another_machine_opened_runs_while_it_writes(tmp_path, age_s, state):
    run = write_run(tmp_path / "run", finished=False)
    (run / "run.lock").write_text("process 7 on another-machine\n")
    written = (run / "events.jsonl").stat().st_mtime - age_s
    os.utime(run / "events.jsonl", (written, written))
    assert only(tmp_path).state == state


@pytest.mark.parametrize(
    ("reason", "state"),
    [("finished", "completed"), ("SIGTERM", "stopped"), ("failed: out of memory", "failed")],
)
def test_without_its_result_the_last_record_tells_how_a_run_ended(tmp_path, reason, state):
    run = write_run(tmp_path / "run", finished=False)
    append(run, {"event": "stop", "step": 18, "reason": reason})
    found = only(tmp_path)
    assert (found.state, found.reason) == (state, reason)


def test_an_earlier_result_does_not_speak_for_one_that_was_killed(tmp_path):
    run = write_run(tmp_path / "run")
    write_result(run, best={"metric": "accuracy", "value": 0.99}, steps=18)
    write_index(run, 0.5)
    start = json.loads(lines_of(run)[0])
    resume = {"event": "resume", "step": 12, "checkpoint": "checkpoint_epoch_2.pt"}
    step = {"event": "step", "step": 13, "loss": 1.0, "seconds": 99.0}
    append(run, {**start, "resumed": True, "world_size": 4}, resume, step)
    found = only(tmp_path)
    assert (found.state, found.value, found.world_size) == ("killed", 0.5, 4)
    assert found.losses == (1 / 6, 1 / 12), "the third epoch is to be done again"
    assert (found.steps, found.seconds) == (13, 99.0)
    run = write_run(tmp_path / "b" / "run")
    best = {"metric": "accuracy", "mode": "max", "value": 0.99}
    write_result(run, best=best, steps=18, training_seconds=1.0)
    write_index(run, 0.5)
    step = {"event": "step", "step": 20, "loss": 1.0, "seconds": 99.0}
    append(run, step, {"event": "stop", "step": 20, "reason": "SIGTERM"})
    found = only(tmp_path / "b")
    assert (found.state, found.value, found.steps) == ("stopped", 0.5, 20)
    assert found.seconds == 99.0


@pytest.mark.parametrize(
    ("accuracy", "best"),
    [(lambda epoch: 1 - 1 / (epoch + 1), ("accuracy", "max", 0.75)), (None, (None, None, None))],
    ids=["validated", "not validated"],
)
def test_of_a_loop_of_ones_own_the_evaluations_tell_the_best(tmp_path, accuracy, best):
    run = write_run(tmp_path / "gan", accuracy=accuracy)
    (run / "settings.toml").write_text("epochs = 1\nseed = 0\n[options]\n")
    found = only(tmp_path)
    assert (found.recipe, found.metric, found.mode, found.value) == ("toy", *best)


def test_runs_in_a_folder_of_the_folder_are_found_and_profiles_and_files_are_not_runs(tmp_path):
    write_run(tmp_path / "sweep" / "one")
    profile = tmp_path / "profile-spiral"
    profile.mkdir()
    for name in ("settings.toml", "profile.json", "events.jsonl"):
        (profile / name).touch()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".cache").mkdir()
    assert [run.name for run in read_runs(tmp_path)] == ["sweep/one"]


def large(run, *, count, epochs):
    """Write records of some 20 MB: many steps, and an epoch at even distances."""
    start = lines_of(run)[0]
    step = json.dumps({"event": "step", "step": 1, "loss": 2.0, "seconds": 1.0, "pad": "x" * 900})
    with (run / "events.jsonl").open("w") as file:
        file.write(start)
        for epoch in range(1, epochs + 1):
            file.write((step + "\n") * (count // epochs))
            at = {"epoch": epoch, "step": epoch * 100, "loss": 1 / epoch, "train_seconds": 1.0}
            file.write(json.dumps({"event": "epoch", **at}) + "\n")
        last = {"step": epochs * 100, "loss": 0.5, "seconds": 321.0}
        file.write(json.dumps({"event": "step", **last}) + "\n")


@pytest.mark.parametrize("epochs", [2, 10_000])
def test_of_large_records_only_blocks_are_read(tmp_path, monkeypatch, epochs):
    run = write_run(tmp_path / "run", finished=False)
    large(run, count=20_000, epochs=epochs)
    read = []
    real = os.read
    monkeypatch.setattr(os, "read", lambda file, n: read.append(n) or real(file, n))
    found = only(tmp_path)
    assert sum(read) < 2**20 < (run / "events.jsonl").stat().st_size / 15
    assert (found.epochs, found.steps, found.seconds) == (epochs, epochs * 100, 321.0)
    assert len(found.losses) >= 12 or epochs == 2
    assert (found.losses[0] > 10 * found.losses[-1]) == (epochs > 2)


def test_the_order_is_the_one_asked_for_and_the_lowest_best_if_it_is_to_fall(tmp_path):
    for place, (value, seconds) in enumerate([(0.5, 9.0), (0.9, 5.0), (0.7, 7.0)]):
        run = write_run(tmp_path / f"run-{place}")
        best = {"metric": "accuracy", "mode": "max", "value": value}
        write_result(run, best=best, training_seconds=seconds, steps=18)
        change_start(run, time=[200.0, 300.0, 100.0][place])
    write_run(tmp_path / "run-3", finished=False)

    def places(by):
        return [int(run.name[-1]) for run in sorted_runs(read_runs(tmp_path), by)]

    assert places("date") == [1, 0, 2, 3]
    assert places("name") == [0, 1, 2, 3]
    assert places("metric") == [1, 3, 2, 0]
    assert places("duration") == [3, 0, 2, 1]
    assert places("state") == [1, 0, 2, 3]
    for name, value in (("high", 2.0), ("low", 1.0)):
        run = write_run(tmp_path / "b" / name)
        write_result(run, best={"metric": "loss", "mode": "min", "value": value}, steps=18)
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
    assert {run.state for run in found} == {"damaged"}
    assert all(run.reason for run in found)
    whole = next(run for run in found if run.name == "torn-result-2")
    assert (len(whole.losses), whole.steps) == (3, 18), "what is whole is told"
    assert "spiral" in {run.recipe for run in found}, "before a run begins its settings tell it"


VALUES = ["null", "-1", "1e308", "NaN", '"x"', "[1]", "{}", "true", "9" * 400]


@pytest.mark.parametrize("value", VALUES)
def test_whatever_a_field_holds_the_run_is_listed(tmp_path, value):
    run = write_run(tmp_path / "run")
    best = {"metric": "METRIC", "mode": "min", "value": "VALUE"}
    write_result(run, best=best, training_seconds="VALUE", epochs="VALUE", steps="VALUE")
    for name in ("result.json", "events.jsonl"):
        text = (run / name).read_text().replace('"VALUE"', value)
        text = text.replace('"time": 0.0', f'"time": {value}').replace('"METRIC"', value)
        (run / name).write_text(text)
    found = only(tmp_path)
    assert found.name == "run"
    assert found.value is None or math.isfinite(found.value)
    assert sorted_runs([found], "duration") == [found]


@pytest.mark.parametrize("name", ["nothing", "file", "run"])
def test_a_folder_that_is_none_is_refused(tmp_path, name):
    write_run(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=name):
        read_runs(tmp_path / name)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_a_whole_run_has_no_problems_and_of_a_half_written_last_line_the_rest_is_used(run):
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


def test_a_damaged_line_inside_is_left_out_and_named(run):
    lines = lines_of(run)
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
    (problem,) = found.problems
    assert problem.startswith("settings.toml")
    assert found.settings is None
    assert found.facts["batch_size"] == 10


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


def test_what_an_earlier_attempt_ended_with_does_not_speak_for_one_that_was_killed(run):
    start = json.loads(lines_of(run)[0]) | {"resumed": True}
    append(run, start, {"event": "resume", "step": 12, "checkpoint": "checkpoint_epoch_2.pt"})
    found = read_run(run)
    assert "no end recorded, last written" in found.status
    assert [record["step"] for record in found.of("step")] == list(range(1, 13))


def test_a_run_on_two_sizes_says_that_its_figures_mix_them(run):
    def resumed(records):
        start = records[0] | {"world_size": 2, "resumed": True}
        return [*records[:-1], start, records[-1]]

    change(run, resumed)
    (problem,) = read_run(run).problems
    assert "1, then 2 ranks" in problem


@pytest.mark.parametrize("name", ["nothing", "empty", "file"])
def test_what_is_no_run_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="runs/ID"):
        read_run(tmp_path / name)
