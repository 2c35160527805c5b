"""What a script writes goes into a scratch copy: no file that was there before is changed."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.scripts.checking import guard
from samestep.scripts.checking.guard import guarding
from samestep.scripts.checking.scratch import Scratch


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project beside a folder that is not part of it, neither counted as temporary."""
    monkeypatch.setattr(guard, "_TEMPORARY", ())
    home, beside = tmp_path / "user" / "project", tmp_path / "user" / "runs"
    for folder in (home / "data" / "deep", home / ".cache", beside / "old"):
        folder.mkdir(parents=True)
        (folder / "kept.txt").write_text("kept")
    (home / "train.py").write_text("pass")
    (home / "large.bin").write_bytes(bytes(2 << 20))
    return home


@pytest.fixture
def scratch(project, tmp_path):
    return scratch_of(project, tmp_path / "place")


def scratch_of(project: Path, place: Path) -> Scratch:
    place.mkdir()
    made = Scratch(place, project)
    made.create(project)
    return made


def files_in(folder: Path) -> dict[str, bytes | None]:
    """Return what each file of a folder holds, and its folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def overwrite(path: Path) -> None:
    path.write_text("new")


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("new")


def by_torch(path: Path) -> None:
    torch.save({"a": torch.ones(1)}, str(path))
    assert torch.load(path)["a"] == 1


def by_numpy(path: Path) -> None:
    np.save(path.with_suffix(".npy"), np.ones(1))
    memory = np.memmap(path, mode="r+", dtype=np.uint8)
    memory[:] = 1
    memory.flush()


def replace_by_temporary(path: Path) -> None:
    temporary = path.with_name("temporary")
    temporary.write_text("new")
    temporary.replace(path)


def rename_away(path: Path) -> None:
    path.rename(path.with_name("other"))
    assert path.with_name("other").exists()


def remove(path: Path) -> None:
    path.unlink()
    assert not path.exists()
    assert path not in [*path.parent.iterdir()]


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)
    assert not path.parent.exists()
    path.parent.mkdir()
    overwrite(path)


def through_links(path: Path) -> None:
    for kind in ("symlink_to", "hardlink_to"):
        getattr(path.with_name(kind), kind)(path)
        path.with_name(kind).write_text("new")


def truncate(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    os.truncate(path, 1)
    path.chmod(0o600)
    os.utime(path, (0, 0))


CHANGES = [
    *(overwrite, append, by_torch, by_numpy, replace_by_temporary, rename_away),
    *(remove, remove_folder, through_links, truncate),
]
FILES = [
    *("project/data/deep/kept.txt", "project/.cache/kept.txt", "project/large.bin"),
    "runs/old/kept.txt",
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_reaches_a_file_that_was_there(change, project, scratch):
    user = project.parent
    before = files_in(user)
    with guarding(scratch, time.time()):
        for name in FILES:
            if change is not remove_folder or "large" not in name:
                change(user / name)
                assert Path(scratch.twin(user / name)).parent.is_dir()
    assert files_in(user) == before


def test_what_was_written_is_read_again_by_either_name(project, scratch, monkeypatch):
    twin = Path(scratch.twin(project))
    with guarding(scratch, time.time()):
        monkeypatch.chdir(project)
        assert Path.cwd() == twin
        Path("best.pt").write_text("best")
        Path("data/deep/new.txt").write_text("new")
        assert (project / "best.pt").read_text() == "best"
        assert {p.name for p in (project / "data" / "deep").iterdir()} == {"kept.txt", "new.txt"}
        assert Path("../runs/old/kept.txt").read_text() == "kept"
        Path("../runs/new").mkdir()
        assert (project.parent / "runs" / "new").is_dir()
    assert scratch.shown(str(twin / "best.pt")) == str(project / "best.pt")
    assert not (project / "best.pt").exists()


def test_a_temporary_file_that_was_not_there_is_the_scripts_own(project, scratch, monkeypatch):
    beside = project.parent / "runs"
    monkeypatch.setattr(guard, "_TEMPORARY", (str(project.parent),))
    with guarding(scratch, time.time()):
        (beside / "rendezvous").write_text("new")
        (beside / "rendezvous").write_text("newer")
        (beside / "old" / "kept.txt").write_text("changed")
        assert (beside / "old" / "kept.txt").read_text() == "changed"
    assert (beside / "rendezvous").read_text() == "newer"
    assert (beside / "old" / "kept.txt").read_text() == "kept"


def test_of_a_folder_of_many_files_most_are_reached_without_a_twin_of_their_own(project, tmp_path):
    many = project / "many"
    for folder in range(8):
        (many / str(folder)).mkdir(parents=True)
        for number in range(1_000):
            (many / str(folder) / str(number)).touch()
    (project / "zoo.py").touch()
    scratch = scratch_of(project, tmp_path / "place")
    assert 2_000 < len(files_in(Path(scratch.twin(project)))) < 8_000
    with guarding(scratch, time.time()):
        (many / "7" / "999").write_text("new")
        assert (many / "7" / "999").read_text() == "new"
    assert not (many / "7" / "999").read_text()


def test_a_second_guard_of_the_same_files_changes_nothing(project, scratch, monkeypatch):
    twin = Path(scratch.twin(project))
    with guarding(scratch, time.time()), guarding(Scratch(scratch.place, project), time.time()):
        monkeypatch.chdir(twin)
        overwrite(project / "large.bin")
        assert Path("large.bin").resolve() == twin / "large.bin"
        assert scratch.real(str((twin / "train.py").resolve())) == str(project / "train.py")
        assert Path("../runs/old/kept.txt").read_text() == "kept"
    assert (project / "large.bin").stat().st_size == 2 << 20
