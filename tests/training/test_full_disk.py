"""A disk that is full: few words, nothing lost, and the run goes on once there is room."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from samestep import UserError
from samestep.base.run.directory import Run
from samestep.base.run.index import Retention, announce
from samestep.core.session import saver
from samestep.core.training.work import Position
from samestep.launch.ranks.world import World
from tests import tiny
from tests.command_line import refusal, typed


@pytest.fixture
def disk(tmp_path):
    """A disk of 256 KiB, in memory."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    path = tmp_path / "disk"
    path.mkdir()
    done = typed("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path)
    if done.returncode:
        pytest.skip(f"no mount is permitted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)


def fill(path: Path, leave: int = 0) -> None:
    with path.open("wb", buffering=0) as file:
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        file.write(b"\0" * (free - leave))


def test_on_a_full_disk_the_training_goes_on_and_fails_at_the_end(disk, uninterrupted, tmp_path):
    run = disk / "run"
    words = ("--run-dir", str(run))
    ranks = tiny.start(tiny.write_recipe(tmp_path), *words, world_size=2, folder=tmp_path)
    assert ranks.wait() == [2, 2], ranks.output()
    said = ranks.printed(0)
    assert said.count("samestep: ") == 2, said
    assert "Traceback" not in said
    assert [r["step"] for r in tiny.all_records(run) if r["event"] == "step"][-1] == tiny.STEPS
    assert "disk" in said
    assert str(run) in said
    announced = tiny.newest_announced(run)
    assert announced > 0
    assert not list(run.rglob("*.tmp"))
    grow(disk)
    tiny.resumed(run)
    (found,) = (r for r in tiny.all_records(run) if r["event"] == "resume")
    assert (found["step"], found["problems"]) == (announced, [])
    tiny.assert_same_training(run, uninterrupted)


def test_where_the_records_fill_it_there_is_one_message_too(disk, uninterrupted, tmp_path, refused):
    recipe, run, other = tiny.write_recipe(tmp_path), disk / "run", disk / "other"
    fill(other, leave=28_000)
    flags = ("--checkpoint-every-steps", "1000", "--checkpoint-every-epochs", "100")
    said = refused("train", str(recipe), "--run-dir", str(run), *flags)
    assert "disk" in said
    assert "events.jsonl" in said
    assert not (run / "checkpoints" / "index.json").exists()
    grow(disk)
    often = ("--checkpoint-every-steps", "4", "--checkpoint-every-epochs", "1")
    tiny.resumed(run, *often)
    tiny.assert_same_training(run, uninterrupted)


def test_on_a_disk_that_was_full_before_nothing_is_begun(disk, tmp_path):
    fill(disk / "other")
    words = ("train", str(tiny.write_recipe(tmp_path)), "--run-dir", str(disk / "run"))
    assert "disk" in refusal(*words, folder=tmp_path / "out")
    assert all(not content for content in tiny.files(disk / "run").values())
    with pytest.raises(UserError, match="disk is full") as told:  # within this process, too
        Run(disk / "run")
    assert not [one for one in psutil.Process().open_files() if one.path.startswith(str(disk))]
    assert told  # which holds what was open then


def test_a_record_that_does_not_fit_leaves_only_whole_lines(disk):
    """A full disk takes the first part of a line: it must not stay in the middle of the file."""
    run, record = Run(disk / "run"), {"event": "step", "text": "x" * 700}
    fill(disk / "other", leave=8192)
    written = 0
    with pytest.raises(UserError, match="disk"):  # noqa: PT012 - which one is open
        while written < 100:
            run.append(record)
            written += 1
    assert tiny.all_records(disk / "run") == [record] * written
    assert (disk / "run" / "events.jsonl").read_bytes().endswith(b"\n")
    (disk / "other").unlink()
    run.append(record)
    run.close()
    assert tiny.all_records(disk / "run") == [record] * (written + 1)


@pytest.mark.parametrize("reaches", [False, True])
def test_a_checkpoint_without_an_index_leaves_the_full_disk(tmp_path, monkeypatch, reaches):
    """One that the index names by then stays."""

    def fails(*given):
        if reaches:
            announce(*given)
        raise UserError("full")

    monkeypatch.setattr(saver, "announce", fails)
    monkeypatch.setattr(saver, "sync_path", print)
    how = {"metric": None, "watch": None, "retention": Retention(), "began": 0.0, "sync": True}
    with pytest.raises(UserError, match="full"):
        saver.Saver(tmp_path, World(), print).save({}, Position(), **how)
    assert bool([*tmp_path.glob("*.pt")]) == reaches
