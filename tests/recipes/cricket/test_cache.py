"""The cache is read, written and fought over by real processes."""

import os
import signal

import pytest

from samestep.recipes.cricket import cache
from samestep.recipes.cricket.cache import open_corpus
from samestep.recipes.cricket.synthetic import documents
from tests.cricket_files import match, write
from tests.processes import run_ranks, start_ranks
from tests.recipes.cricket.test_corpus import same

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


def test_several_processes_read_what_one_reads(tmp_path, matches, monkeypatch):
    monkeypatch.setattr(cache, "_FILES_PER_PART", 3)
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


def test_without_a_place_to_keep_them_matches_are_still_read(tmp_path, matches):
    (tmp_path / "file").write_text("in the way")
    found = open_corpus(matches, folder=tmp_path / "file" / "kept", jobs=1)
    assert len(found.corpus.matches["date"]) == 12
    assert len(found.notes) == 1


def read_parts(matches, folder, kill_at=0):
    """Return how many matches there are, and how many parts of them this process has read."""
    read, from_documents = [], cache.from_documents

    def counted(some):
        read.append(1)
        if len(read) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return from_documents(some)

    cache._FILES_PER_PART, cache.from_documents = 3, counted
    return len(open_corpus(matches, folder=folder, jobs=1).corpus.matches["date"]), len(read)


def test_two_at_once_and_one_that_was_killed_before_leave_one_whole_file(tmp_path, matches):
    folder = tmp_path / "kept"
    killed = start_ranks(read_parts, 1, tmp_path / "killed", matches, folder, 3)
    assert killed.wait() == [-signal.SIGKILL], killed.output()
    answers = run_ranks(read_parts, 2, tmp_path / "both", matches, folder)
    assert [matches for matches, _ in answers] == [12, 12]
    assert sum(parts for _, parts in answers) == 2  # of four parts, by both together
    assert len(kept(folder)) == 1
