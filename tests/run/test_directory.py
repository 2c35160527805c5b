"""A run shows that it takes steps, its commit, and its format, which older readers refuse."""

import contextlib
import json
import os
from types import SimpleNamespace

import pytest

from samestep import UserError, read_records
from samestep.reporting.run_data import read_run
from samestep.run import directory
from samestep.run.directory import STEPPED, Heartbeat, Run, git_commit
from samestep.run.files import read_object
from samestep.run.records import RUN_FORMAT, parse_lines
from samestep.tracking.processes import send_run
from tests.reporting.made_runs import change_start, write_run
from tests.tiny import files


def test_a_step_is_seen_at_once_and_every_few_seconds_and_no_disk_is_needed(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(directory, "time", SimpleNamespace(monotonic=lambda: now))
    heart, path = Heartbeat(tmp_path), tmp_path / STEPPED
    seen = []
    for _ in range(60):
        heart.beat()
        seen.append(path.stat().st_mtime > 0)
        os.utime(path, (0, 0))
        now += 0.1
    assert seen[0]
    assert sum(seen) == 3  # in six seconds
    Heartbeat(tmp_path / "nowhere").beat()


def test_the_commit_is_read_from_the_repository_around_a_folder(tmp_path):
    git = tmp_path / "project" / ".git"
    inner = tmp_path / "project" / "recipes"
    inner.mkdir(parents=True)
    assert git_commit(inner) == ""
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_commit(inner) == "", "there is no commit yet"
    (git / "packed-refs").write_text(f"# pack-refs\n{'b' * 40} refs/heads/main\n")
    assert git_commit(inner) == "b" * 40
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert git_commit(inner) == "a" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert git_commit(inner) == "c" * 40
    (git / "HEAD").write_bytes(b"\xff\xfe")
    assert git_commit(inner) == ""


def test_who_hung_is_overwritten_by_the_failures_of_the_next_start_alone(tmp_path):
    file = tmp_path / "result.json"
    for status in ("failed", "completed"):
        file.unlink(missing_ok=True)
        with contextlib.closing(Run(tmp_path)) as run:
            file.write_text('{"status": "failed", "stall": {"rank": 1}}')  # by the watcher
            run.write_result({"status": status})
            assert ("stall" in read_object(file)) == (status == "failed")
    file.write_text('{"status": "failed", "stall": {"rank": 1}}')
    with contextlib.closing(Run(tmp_path)) as run:
        run.write_result({"status": "failed"})
    assert read_object(file) == {"status": "failed"}


READERS = {
    "read_records": lambda run: list(read_records(str(run))),
    "compare": read_run,
    "resume": lambda run: Run(run).close(),
    "track": lambda run: send_run(run, {"track": "tests.tracking.own_tracker"}, print),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_run_of_a_newer_format_is_refused_with_both_numbers_and_left_as_it_is(tmp_path, reader):
    run = write_run(tmp_path / "run")
    change_start(run, format=RUN_FORMAT + 7)
    before = files(run)
    with pytest.raises(UserError) as refused:
        READERS[reader](run)
    for named in (str(run), f"format {RUN_FORMAT + 7}", f"to {RUN_FORMAT}."):
        assert named in str(refused.value)
    after = files(run)
    assert {name: after[name] for name in before} == before


def test_a_line_that_a_kill_tore_off_is_cut_away_before_the_next_record(tmp_path):
    path = tmp_path / "events.jsonl"
    for torn in ("", '{"event": "st'):
        path.write_text('{"event": "compile"}\n' + torn)
        run = Run(tmp_path)
        run.append({"event": "stop"})
        run.close()
        assert path.read_text() == '{"event": "compile"}\n{"event": "stop"}\n'


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]", b"7", b'{"event": ["step"]}', b'{"step": 1}', b'{"event": "step", "st'),
        *(b"\xff", b"[" * 100_000, b'{"event": "step", "step": -1}', b'{"loss": NaN'),
    ],
)
def test_a_line_without_a_record_is_left_out_and_its_neighbours_are_read(line):
    good = b'{"event": "stop", "step": 3, "reason": "all epochs"}'
    found = parse_lines(b"\n".join([good, line, good]) + b"\n", checked=True)
    assert [one is None for one in found] == [False, True, False]


def test_a_path_that_is_not_utf_8_is_no_damage_and_nan_of_earlier_versions_is_null(tmp_path):
    path = write_run(tmp_path / "run")
    events = path / "events.jsonl"
    first, *others = events.read_text().splitlines()
    start = json.loads(first) | {"run_dir": os.fsdecode(b"x_\xff")}
    events.write_text("\n".join([json.dumps(start), *others, ""]))
    assert len(list(read_records(path))) == len(list(read_records(write_run(tmp_path / "plain"))))
    assert parse_lines(b'{"event": "own", "loss": NaN}\n') == [{"event": "own", "loss": None}]
