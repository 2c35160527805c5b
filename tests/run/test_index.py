"""What an announcement deletes and must not; what a run's directory tells while it is written."""

import contextlib
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import read_records
from samestep.base.errors import UserError
from samestep.base.run import directory
from samestep.base.run.directory import STEPPED, Heartbeat, Run, git_commit
from samestep.base.run.files import read_object
from samestep.base.run.index import Entry, Index, Retention, announce, remove_unannounced
from samestep.base.run.records import RUN_FORMAT, parse_lines
from samestep.show.reporting.run_data import read_run
from samestep.show.tracking.processes import send_run
from tests.reporting.made_runs import change_start, write_run
from tests.tiny import files

SINCE = 1_000_000.0


def entry(step, metric=None):
    name = f"checkpoint_step_{step}.pt"
    return Entry(path=name, step=step, epoch=1, sha256="0", metric=metric)


def write(folder, *names, at=SINCE + 1):
    for name in names:
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (at, at))


def names(folder):
    return {path.name for path in folder.glob("*.pt")}


def test_files_that_the_index_never_named_are_not_deleted_by_an_announcement(tmp_path):
    index = Index(checkpoints=(entry(1, 0.1), entry(2, 0.2)))
    write(tmp_path, *(f"checkpoint_step_{step}.pt" for step in (1, 2, 3, 9)))
    announce(tmp_path, index, entry(3, 0.3), Retention(top_k=1))
    assert names(tmp_path) == {"checkpoint_step_3.pt", "checkpoint_step_9.pt"}


def test_checkpoints_ranked_by_another_metric_are_spared(tmp_path):
    old = tuple(entry(step) for step in (1, 2))
    write(tmp_path, *(f"checkpoint_step_{step}.pt" for step in (1, 2, 3)))
    kept = announce(
        tmp_path, Index(checkpoints=old), entry(3, 0.3), Retention(top_k=1), [e.path for e in old]
    )
    assert {e.step for e in kept.checkpoints} == {1, 2, 3}
    assert len(names(tmp_path)) == 3


def test_what_a_kill_left_is_told_from_what_was_announced_and_from_what_was_there(tmp_path):
    write(tmp_path, "checkpoint_step_4.pt", "checkpoint_step_5.pt", "checkpoint_mine.pt")
    write(tmp_path, "checkpoint_step_6.pt", at=SINCE - 1)
    remove_unannounced(tmp_path, {"checkpoint_step_5.pt"}, SINCE)
    assert names(tmp_path) == {"checkpoint_step_5.pt", "checkpoint_step_6.pt", "checkpoint_mine.pt"}


def test_what_a_kill_has_left_of_old_checkpoints_goes_and_a_new_one_of_the_name_stays(tmp_path):
    index = Index(checkpoints=(entry(1), entry(2)))
    announce(tmp_path, index, entry(3), Retention(newest=1))
    write(tmp_path, "checkpoint_step_1.pt", "checkpoint_step_2.pt", "checkpoint_step_3.pt")
    announced = {f"checkpoint_step_{step}.pt" for step in (1, 2, 3)}
    remove_unannounced(tmp_path, announced, SINCE)
    assert names(tmp_path) == {"checkpoint_step_3.pt"}


HOUR_S = 3600.0
NEWER = st.integers(1, 9)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 3)), min_size=1, max_size=9),
    st.none() | NEWER,
    st.none() | NEWER,
    st.none() | st.integers(1, 9),
)
def test_what_any_rule_keeps_stays_with_the_best_and_the_last(added, top, newest, hours):
    """`added`: the age in hours and the metric of each checkpoint, oldest step first."""
    now = 10 * HOUR_S
    entries = tuple(
        replace(entry(step, metric), time=now - age * HOUR_S)
        for step, (age, metric) in enumerate(added)
    )
    index = Index(checkpoints=entries)
    kept = index.prune(Retention(top_k=top, newest=newest, hours=hours), now=now).checkpoints
    if top is newest is hours is None:
        assert kept == entries
        return
    ranked = sorted((e for e in entries if e.metric is not None), key=lambda e: (-e.metric, e.step))
    wanted = {e.step for e in ranked[: top or 1]} | {e.step for e in entries[-(newest or 1) :]}
    if hours is not None:
        wanted |= {e.step for e, (age, _) in zip(entries, added, strict=True) if age <= hours}
    assert {e.step for e in kept} == wanted


def test_a_file_that_was_not_announced_goes_with_its_parts_and_parts_go_without_a_file(tmp_path):
    for name in ("checkpoint_epoch_1", "checkpoint_step_7"):
        (tmp_path / f"{name}.shards").mkdir()
    (tmp_path / "checkpoint_epoch_1.pt").touch()
    (tmp_path / "checkpoint_mine.pt").touch()
    remove_unannounced(tmp_path, (), since=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_mine.pt"]


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


EPOCH = (
    b'{"event": "epoch", "epoch": 1, "step": 3, "samples": 3, "train_seconds": 1, "loss": 1,'
    b' "phases": {"data": 0.5}}'
)


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]", b"7", b"{}", b"\xff", b"\0\0", b"[" * 100_000, b'{"loss": NaN'),
        *(b'{"event": ["step"]}', b'{"step": 1}', b'{"event": "step", "st'),
        *(b'{"event": "step", "step": -1}', b'{"event": "step", "step": 3}'),
        *(b'{"event": "evaluation", "step": null}', b'{"event": "resume", "step": 4}'),
        *(EPOCH.replace(b"1", b"2.5", 1), EPOCH.replace(b"0.5", b'"x"')),
        b'{"event": "start", "world_size": 1, "num_samples": 60, "steps_per_epoch": 0}',
    ],
)
def test_a_line_without_a_record_is_left_out_and_its_neighbours_are_read(line):
    good = b'{"event": "stop", "step": 3, "reason": "all epochs"}'
    found = parse_lines(b"\n".join([good, line, good]) + b"\n", checked=True)
    assert [one is None for one in found] == [False, True, False]


def test_a_torn_line_is_cut_away_and_a_path_that_is_not_utf_8_no_damage(tmp_path):
    path = write_run(tmp_path / "run")
    events = path / "events.jsonl"
    first, *others = events.read_text().splitlines()
    start = json.loads(first) | {"run_dir": os.fsdecode(b"x_\xff")}
    events.write_text("\n".join([json.dumps(start), *others, ""]))
    assert len(list(read_records(path))) == len(list(read_records(write_run(tmp_path / "plain"))))
    assert parse_lines(b'{"event": "own", "loss": NaN}\n') == [{"event": "own", "loss": None}]
    path = tmp_path / "events.jsonl"
    for torn in ("", '{"event": "st'):
        path.write_text('{"event": "compile"}\n' + torn)
        run = Run(tmp_path)
        run.append({"event": "stop"})
        run.close()
        assert path.read_text() == '{"event": "compile"}\n{"event": "stop"}\n'
