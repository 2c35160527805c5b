"""The cache is read, written and fought over by real processes."""

import os
import signal
import subprocess
import sys

import pytest

from samestep.errors import UserError
from samestep.recipes.cricket import cache
from samestep.recipes.cricket.cache import open_corpus
from samestep.recipes.cricket.synthetic import documents
from tests.cricket_files import match, write
from tests.recipes.cricket.test_corpus import same

DOCUMENTS = dict(documents(12, seed=0))


@pytest.fixture
def matches(tmp_path):
    return write(tmp_path / "matches", DOCUMENTS)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(cache, "_FILES_PER_PART", 3)


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


@pytest.mark.usefixtures("small_parts")
def test_several_processes_read_what_one_reads(tmp_path, matches):
    alone = open_corpus(matches, folder=tmp_path / "one", jobs=1)
    several = open_corpus(matches, folder=tmp_path / "two", jobs=2)
    same(several.corpus, alone.corpus)


@pytest.mark.parametrize("changed", ["folder", "version"])
def test_what_has_changed_is_read_anew_and_that_is_said_once(
    tmp_path, matches, monkeypatch, changed
):
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


def test_one_bad_file_is_named_and_may_be_skipped(tmp_path, matches):
    write(matches, {"000007.json": b'{"meta": 1'})
    with pytest.raises(UserError, match=r"(?s)000007\.json: .*--skip-bad 1"):
        open_corpus(matches, folder=tmp_path / "kept", jobs=1)
    found = open_corpus(matches, folder=tmp_path / "kept", jobs=1, skip_bad=1)
    assert len(found.corpus.matches["date"]) == 11
    assert len(found.notes) == 1


def test_matches_of_other_kinds_alone_are_refused(tmp_path):
    source = write(tmp_path / "matches", {"a.json": match(match_type="Test", overs=None)})
    with pytest.raises(UserError, match="Test"):
        open_corpus(source, folder=tmp_path / "kept", jobs=1)


def test_without_a_place_to_keep_them_matches_are_still_read(tmp_path, matches):
    (tmp_path / "file").write_text("in the way")
    found = open_corpus(matches, folder=tmp_path / "file" / "kept", jobs=1)
    assert len(found.corpus.matches["date"]) == 12
    assert len(found.notes) == 1


@pytest.mark.usefixtures("small_parts")
def test_what_was_read_before_a_failure_is_not_read_again(tmp_path, matches, monkeypatch):
    folder, read = tmp_path / "kept", []

    def fail_at_third(some):
        read.append(1)
        if len(read) == 3:
            raise KeyboardInterrupt
        return from_documents(some)

    from_documents = cache.from_documents
    monkeypatch.setattr(cache, "from_documents", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(matches, folder=folder, jobs=1)
    assert len(open_corpus(matches, folder=folder, jobs=1).corpus.matches["date"]) == 12
    assert len(read) == 3 + 2  # of four parts two were there


# Reads with very small parts, and stops for good after some of them if asked to.
PROGRAM = """\
import os, signal, sys
from pathlib import Path
from samestep.recipes.cricket import cache
cache._FILES_PER_PART = 3
left = int(sys.argv[3])
from_documents = cache.from_documents
def read(some):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return from_documents(some)
cache.from_documents = read
kept = cache.open_corpus(Path(sys.argv[1]), folder=Path(sys.argv[2]), jobs=1)
print(len(kept.corpus.matches["date"]), -left)
"""


def start(matches, folder, kill_at=0):
    command = [sys.executable, "-c", PROGRAM, str(matches), str(folder), str(kill_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def test_two_at_once_and_one_that_was_killed_before_leave_one_whole_file(tmp_path, matches):
    folder = tmp_path / "kept"
    killed = start(matches, folder, kill_at=3)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    both = [start(matches, folder), start(matches, folder)]
    answers = [process.communicate()[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [answer[0] for answer in answers] == ["12", "12"]
    assert sum(int(answer[1]) for answer in answers) == 2  # of four parts, by both together
    assert len(kept(folder)) == 1
