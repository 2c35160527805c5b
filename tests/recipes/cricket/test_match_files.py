import errno
import io
import os
import tarfile
import zipfile

import pytest

from samestep.base.errors import UserError
from samestep.core.recipes.cricket import cache
from samestep.core.recipes.cricket.cache import open_corpus
from samestep.core.recipes.cricket.match_files import open_match_files
from samestep.core.recipes.cricket.synthetic import documents
from tests.cricket_files import encoded, match, write
from tests.recipes.cricket.test_corpus import same

FILES = {"b.json": encoded(match()), "deep/a.json": encoded(match(date="2024-02-02"))}


def as_zip(path, files=FILES):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def as_tar(path, files=FILES, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def read_all(path):
    source = open_match_files(path)
    source.list_names()
    return list(source.read())


def refused(path):
    with pytest.raises(UserError) as caught:
        read_all(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


EXTRA = {"README.txt": b"text", "__MACOSX/._b.json": b"\0"}


def test_a_folder_a_zip_and_tars_hold_the_same_matches_and_one_file_is_a_match(tmp_path):
    made = [write(tmp_path / "folder", FILES | EXTRA), as_zip(tmp_path / "z", FILES | EXTRA)]
    made += [
        as_tar(tmp_path / f"t.{kind}", FILES | EXTRA, mode=f"w:{kind}")
        for kind in ("", "gz", "bz2", "xz")
    ]
    for path in made:
        source = open_match_files(path)
        assert sorted(source.list_names()) == sorted(FILES)
        assert dict(source.read()) == FILES
    path = write(tmp_path, {"m.json": match()}) / "m.json"
    assert [name for name, _ in open_match_files(path).read()] == ["m.json"]


@pytest.mark.parametrize("left", [0.7, 0.98])
@pytest.mark.parametrize("mode", ["zip", "w:gz", "w:xz"])
def test_a_truncated_archive_is_told(tmp_path, mode, left):
    path = tmp_path / "m"
    as_zip(path) if mode == "zip" else as_tar(path, mode=mode)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * left)])
    refused(path)


def test_a_tar_cut_between_files_is_truncated_and_links_are_passed_over(tmp_path):
    path = as_tar(tmp_path / "m.tar")
    size = 512 + -(-len(FILES["b.json"]) // 512) * 512
    for left in (size, size - 512):
        path.write_bytes(path.read_bytes()[:left])
        refused(path)
    path = as_tar(tmp_path / "m.tar")
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert sorted(open_match_files(path).list_names()) == sorted(FILES)


@pytest.mark.parametrize("name", ["../m.json", "/etc/m.json", "a/../../m.json", "C:\\m.json"])
def test_a_name_that_leads_out_of_an_archive_is_refused(tmp_path, name):
    for path in (
        as_zip(tmp_path / "m.zip", FILES | {name: b"{}"}),
        as_tar(tmp_path / "m.tar", FILES | {name: b"{}"}),
    ):
        assert repr(name) in refused(path)


def test_a_file_too_large_for_a_match_and_no_matches_are_told(tmp_path):
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m.json", bytes(100_000_000))
    assert path.stat().st_size < 200_000
    assert "100,000,000" in refused(path)
    sparse = tmp_path / "m.tar"
    entry = tarfile.TarInfo("m.json")
    entry.size = 10**12
    sparse.write_bytes(entry.tobuf())
    assert "1,000,000,000,000" in refused(sparse)
    empty = tmp_path / "empty"
    empty.mkdir()
    paths = [empty, as_zip(tmp_path / "m.zip", {"a.txt": b""}), as_tar(tmp_path / "m.tar", EXTRA)]
    for path in paths:
        assert "no matches" in refused(path)
    (tmp_path / "m.csv").write_text("a,b\n")
    refused(tmp_path / "m.csv")
    refused(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    write(tmp_path, FILES)
    scan, closed = os.scandir, str(tmp_path / "deep")

    def scandir(folder):
        if os.fspath(folder) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", closed)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert closed in refused(tmp_path)


DOCUMENTS = dict(documents(12, seed=0))


@pytest.fixture
def matches(tmp_path):
    return write(tmp_path / "matches", DOCUMENTS)


def kept(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_matches_are_read_once_unless_their_file_is_damaged(tmp_path, matches, monkeypatch):
    first = open_corpus(matches, folder=tmp_path / "kept", jobs=1)
    assert first.notes == ()
    (path,) = (tmp_path / "kept").glob("*.npz")
    path.write_bytes(path.read_bytes()[:1000])
    same(open_corpus(matches, folder=tmp_path / "kept", jobs=1).corpus, first.corpus)
    monkeypatch.setattr(cache, "_read_all", lambda *_: pytest.fail("matches were read"))
    same(open_corpus(matches, folder=tmp_path / "kept").corpus, first.corpus)
    assert len(kept(tmp_path / "kept")) == 1


@pytest.mark.parametrize("changed", ["folder", "version"])
def test_what_has_changed_is_read_anew_and_said_once(tmp_path, matches, monkeypatch, changed):
    folder = tmp_path / "kept"
    open_corpus(matches, folder=folder, jobs=1)
    before = kept(folder)
    if changed == "folder":
        write(matches, {"more.json": match()})
    else:
        monkeypatch.setattr(cache, "VERSION", 10**6)
    again = open_corpus(matches, folder=folder, jobs=1)
    assert len(again.notes) == 1
    assert len(again.corpus.matches["date"]) == 12 + (changed == "folder")
    assert len(kept(folder)) == 1
    assert kept(folder) != before
    assert open_corpus(matches, folder=folder, jobs=1).notes == ()
