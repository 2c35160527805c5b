"""What an announcement deletes, and what it must not."""

import os

from samestep.run.index import Entry, Index, Retention, announce, remove_unannounced

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
