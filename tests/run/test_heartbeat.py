"""A run in a job shows that it takes steps, and not more often than needed."""

import os
from types import SimpleNamespace

from samestep.run import heartbeat
from samestep.run.directory import STEPPED, Heartbeat


def test_a_step_is_seen_at_once_and_then_every_few_seconds(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now))
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
