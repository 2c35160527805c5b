"""A run is read as far as it goes: running, killed, damaged; and what is not there is said."""

import json
import signal

import pytest

from samestep.base.errors import UserError
from samestep.base.run.directory import lock_run
from samestep.base.run.summary import read_runs
from samestep.show.reporting.run_data import read_run
from tests.processes import start_ranks
from tests.reporting.made_runs import append, change, lines_of, write_run
from tests.tiny import until


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


EPOCH = (
    '{"event": "epoch", "epoch": 1, "step": 3, "samples": 3, "train_seconds": 1, "loss": 1,'
    ' "phases": {"data": 0.5}}'
)


@pytest.mark.parametrize(
    "damage",
    [
        "\x00\x00\x00",
        "[1, 2]",
        '{"event": "step", "step": 3}',
        '{"event": "step", "ste',
        "7",
        "{}",
        '{"event": "evaluation", "step": null}',
        '{"event": "resume", "step": 4}',
        EPOCH.replace("1", "2.5", 1),
        EPOCH.replace("0.5", '"x"'),
        '{"event": "start", "world_size": 1, "num_samples": 60, "steps_per_epoch": 0}',
    ],
)
def test_a_damaged_line_inside_is_left_out_and_named(run, damage):
    lines = lines_of(run)
    lines[3] = damage + "\n"
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
