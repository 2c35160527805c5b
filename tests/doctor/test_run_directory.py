"""Facts and checks of the run directory."""

import json
import os
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.doctor import run_directory as checks
from samestep.doctor.findings import run_checks, worst
from samestep.doctor.run_directory import read_folder
from tests.doctor.situations import FOLDER, says


def test_a_folder_that_can_be_written_is_green_and_a_file_in_its_place_red(tmp_path):
    folder = read_folder(tmp_path / "runs" / "deep")
    assert folder.problem == ""
    assert list(tmp_path.iterdir()) == []
    says(checks.run_directory(folder), "green", str(tmp_path))
    (tmp_path / "runs").write_text("not a folder")
    for path in (tmp_path / "runs", tmp_path / "runs" / "below"):
        says(checks.run_directory(read_folder(path)), "red", str(tmp_path / "runs"), "--run-dir")
    assert (tmp_path / "runs").read_text() == "not a folder"
    # Nobody, not even root, makes a folder there.
    says(checks.run_directory(read_folder(Path("/proc/none"))), "red", "--run-dir")


@contextmanager
def as_a_stranger():
    """Be a user to whom pytest's folders are closed, where this one is root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_this_user_may_not_look_into_is_red_and_its_space_is_not_judged(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with as_a_stranger():
        folder = read_folder(closed / "runs")
    says(checks.run_directory(folder), "red", "Permission denied", "--run-dir")
    assert checks.free_space(folder) is None


def test_a_file_system_that_does_not_answer_is_red_in_bounded_time(tmp_path, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(checks, "_ANSWER_S", 0.05)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: answer.wait())
    folder = read_folder(tmp_path)
    answer.set()
    says(checks.run_directory(folder), "red", "0.05 s")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "settings.toml").write_text("epochs = 5\nnum_workers = 3\n")
    for epoch in (1, 2):
        (tmp_path / "checkpoints" / f"checkpoint_epoch_{epoch}.pt").write_bytes(b"x" * epoch * 1000)
    records = [{"event": "start", "resumed": False}] + [
        {"event": "epoch", "epoch": e, "step": e, "train_seconds": 10.0 * e} for e in (1, 2)
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def test_a_run_tells_the_size_of_its_checkpoints_its_workers_and_the_time_of_an_epoch(run):
    folder = read_folder(run)
    assert folder.checkpoint_bytes in (1000, 2000)
    assert (folder.num_checkpoints, folder.num_workers, folder.epoch_s) == (5, 3, 20.0)
    (run / "settings.toml").write_text("keep_top_k = 2\n")
    assert read_folder(run).num_checkpoints == 4
    (run / "settings.toml").write_text("not = = toml")  # then it is any folder
    folder = read_folder(run)
    assert (folder.problem, folder.epoch_s, folder.checkpoint_bytes) == ("", None, None)


# free, of one checkpoint, how many are kept → status
SPACE = {
    (1000e9, None, None): "green",
    (2e9, None, None): "yellow",  # three of the estimated size do not fit
    (10e6, None, None): "red",
    (10e9, 1_000_000_000, 5): "green",
    (3e9, 1_000_000_000, 5): "yellow",
    (1.5e9, 1_000_000_000, 5): "red",  # the next is written beside the last
}


@pytest.mark.parametrize("case", SPACE, ids=str)
def test_free_space_is_judged_by_the_checkpoints_that_will_be_kept(case):
    free, one, count = case
    folder = replace(FOLDER, free_bytes=int(free), checkpoint_bytes=one, num_checkpoints=count)
    says(checks.free_space(folder), SPACE[case], "measured" if one else "estimated")
    assert worst(run_checks(checks.CHECKS, folder)) == SPACE[case]
