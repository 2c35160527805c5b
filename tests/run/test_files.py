"""A file is the old one or the new one, whole; never something between."""

import errno
import os
import signal
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from samestep import UserError
from samestep.base.run.directory import check_free
from samestep.base.run.files import cannot_write, write_atomically, write_text
from tests.processes import start_ranks
from tests.tiny import files


@pytest.mark.parametrize("old", [{}, {"file": b"old"}], ids=["none", "old"])
@pytest.mark.parametrize(
    "error", [None, ValueError("x"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")]
)
def test_a_reader_sees_the_old_file_until_the_new_one_is_whole_and_no_other(tmp_path, old, error):
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)

    def write(file) -> None:
        for piece in (b"ne", b"", b"w"):
            file.write(piece)
            file.flush()
            assert (tmp_path / "file").exists() == bool(old)
            assert not old or (tmp_path / "file").read_bytes() == b"old"
        if error is not None:
            raise error

    if error is None:
        write_atomically(tmp_path / "file", write)
    else:
        with pytest.raises(UserError if isinstance(error, OSError) else type(error)):
            write_atomically(tmp_path / "file", write)
    assert files(tmp_path) == (old if error else {"file": b"new"})


def test_the_content_is_synced_before_the_rename_and_the_directory_after_it(tmp_path, monkeypatch):
    """Otherwise a power cut could leave the new name with no content."""
    seen = []
    sync, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        seen.append("folder" if is_folder else f"{os.fstat(descriptor).st_size} bytes")
        sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        seen.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_text(tmp_path / "file", "seven b")
    assert seen == ["7 bytes", "rename", "folder"]


def kill_within(path: Path) -> None:
    def write(file) -> None:
        file.write(b"ne")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    write_atomically(path, write)


def test_a_kill_while_writing_leaves_the_old_file_and_the_next_write_works(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    ranks = start_ranks(kill_within, 1, tmp_path / "output", path)
    assert ranks.wait() == [-signal.SIGKILL]
    assert path.read_text() == "old"
    torn = tmp_path / ".file.tmp"
    assert torn.read_bytes() == b"ne", "it struck where it should"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert not torn.exists()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        *((errno.ENOSPC, "Free some space"), (errno.EDQUOT, "quota"), (errno.EIO, "disk")),
        *((errno.EFBIG, "ulimit -f"), (errno.EMFILE, "ulimit -n"), (errno.EACCES, "permissions")),
        (errno.ENAMETOOLONG, "shorter"),
    ],
)
@pytest.mark.parametrize("of_run", [True, False])
def test_what_to_do_fits_the_error_and_the_place(tmp_path, monkeypatch, number, remedy, of_run):
    if of_run:
        (tmp_path / "events.jsonl").touch()
    told = cannot_write(tmp_path / "file", OSError(number, ""))
    assert remedy in told.remedy
    assert ("Free" in told.remedy) == (number == errno.ENOSPC)
    assert "--run-dir" not in told.remedy
    assert ("resume" in told.remedy) == (of_run and number != errno.EACCES)
    (tmp_path / "index.json").touch()
    announced = cannot_write(tmp_path / "file", OSError(number, ""))
    assert "intact" not in told.remedy
    assert ("intact" in announced.remedy) == ("resume" in told.remedy)
    read_only = cannot_write(tmp_path / "file", OSError(errno.EROFS, "")).remedy
    assert ("mount" if of_run else "another directory") in read_only
    not_made = str(cannot_write(tmp_path / "runs" / "new", OSError(number, "")))
    is_named = f" {tmp_path}, or" in not_made or f" {tmp_path})" in not_made
    assert is_named == (number in (errno.EACCES, errno.ENOSPC)), not_made
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=1, f_favail=0))
    without_inodes = str(cannot_write(tmp_path / "file", OSError(number, "")))
    assert ("no inodes" in without_inodes) == (number == errno.ENOSPC)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ENAMETOOLONG])
@pytest.mark.parametrize("there", [True, False], ids=["folder", "deleted"])
def test_where_nothing_can_be_deleted_either_it_is_told_all_the_same(tmp_path, number, there):
    path = tmp_path / "file" if there else tmp_path / "no" / "file"

    def fail(_file) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: fail(None))
        with pytest.raises(UserError, match=r"file could not be written") as told:
            write_atomically(path, fail)
    assert isinstance(told.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("names", "fits"),
    [
        *(([], True), (["job.log", ".hidden"], True), (["checkpoints", "note.txt"], True)),
        *((["thesis.tex"], False), (["photos/"], False)),
    ],
)
def test_a_run_begins_in_a_folder_of_nothing_else_and_never_in_the_root(tmp_path, names, fits):
    for name in names:
        (tmp_path / name).mkdir() if name[-1] == "/" else (tmp_path / name).touch()
    if fits:
        check_free(tmp_path)
        check_free(tmp_path / "new")
        return
    with pytest.raises(UserError, match=r"--run-dir .* (thesis|photos)"):
        check_free(tmp_path)
    with pytest.raises(UserError, match="--run-dir /"):
        check_free(Path("/"))
