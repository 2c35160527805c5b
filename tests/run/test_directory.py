"""A run shows that it takes steps, and which commit it was started from."""

import contextlib
import os
from types import SimpleNamespace

from samestep.run import directory
from samestep.run.directory import STEPPED, Heartbeat, Run, git_commit
from samestep.run.files import read_object


def test_a_step_is_seen_at_once_and_then_every_few_seconds(tmp_path, monkeypatch):
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


def test_a_disk_that_takes_nothing_ends_no_training(tmp_path):
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


def test_who_hung_is_not_overwritten_by_the_failures_that_follow_but_by_those_of_the_next_start(
    tmp_path,
):
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
