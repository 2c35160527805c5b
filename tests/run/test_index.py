"""What an announcement deletes, and what it must not; and what of it is still whole."""

import hashlib
import os
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UserError
from samestep.run import index as indexes
from samestep.run.index import Entry, Index, Retention, announce, remove_unannounced, verify

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


def test_an_entry_without_a_time_is_as_old_as_its_file(tmp_path):
    now = time.time()
    write(tmp_path, "checkpoint_step_1.pt", at=now - 3 * HOUR_S)
    write(tmp_path, "checkpoint_step_2.pt", "checkpoint_step_3.pt", "checkpoint_step_4.pt", at=now)
    before = Index(checkpoints=(entry(1), entry(2), entry(3)))
    kept = announce(tmp_path, before, entry(4, 0.1), Retention(hours=2))
    assert [e.step for e in kept.checkpoints] == [2, 3, 4]
    assert names(tmp_path) == {f"checkpoint_step_{step}.pt" for step in (2, 3, 4)}
    assert indexes.read_index(tmp_path) == kept
    assert all(e.time is not None and e.time >= now - 1 for e in kept.checkpoints)


@pytest.mark.parametrize("how", ["changed", "cut", "missing"])
def test_a_file_that_is_not_as_it_was_announced_is_named(tmp_path, how):
    write(tmp_path, "checkpoint_step_1.pt")
    path = tmp_path / "checkpoint_step_1.pt"
    path.write_bytes(bytes(3 << 20))
    announced = replace(entry(1), sha256=hashlib.sha256(bytes(3 << 20)).hexdigest())
    verify(tmp_path, announced)
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(bytes((3 << 20) - 1) + b"?" * (how == "changed"))
    with pytest.raises(UserError, match=r"checkpoint_step_1\.pt"):
        verify(tmp_path, announced)


def test_a_file_that_was_not_announced_goes_with_its_parts_and_parts_go_without_a_file(tmp_path):
    for name in ("checkpoint_epoch_1", "checkpoint_step_7"):
        (tmp_path / f"{name}.shards").mkdir()
    (tmp_path / "checkpoint_epoch_1.pt").touch()
    (tmp_path / "checkpoint_mine.pt").touch()
    remove_unannounced(tmp_path, (), since=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_mine.pt"]
