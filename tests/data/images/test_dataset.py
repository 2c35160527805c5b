"""Image files on ranks: the same samples with any cache, workers and ranks; broken files left out.

The rows are compared as the model sees them: decoded, augmented and normalised, bit for bit.
"""

import os
import re
from pathlib import Path

import pytest
import torch

from samestep import UserError
from samestep.data.images import dataset, image_files
from samestep.data.images.dataset import ImageFiles
from samestep.ranks.world import World
from tests.data.images.ranks_of_images import (
    batches,
    other_files,
    ready,
    shares_one_memory,
    train_rows,
    what_is_refused,
)
from tests.image_files import BROKEN, write_images
from tests.processes import run_ranks

ALONE = World()


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch) -> Path:
    """Keep what a scan remembers out of the user's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "samestep" / "images"


@pytest.fixture
def root(tmp_path) -> Path:
    """Two classes of seven images, one of them broken in the middle and one at the end."""
    folder = write_images(tmp_path / "data", count=7)
    for name in ("cat/003.png", "dog/006.JPG"):
        (folder / "train" / name).write_bytes(b"")
    return folder


def assert_same(one, other):
    assert [(step, label) for step, _, label in one] == [(step, label) for step, _, label in other]
    assert all(torch.equal(a, b) for (_, a, _), (_, b, _) in zip(one, other, strict=True))


def empty(folder):
    for path in folder.rglob("*.*"):
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("side", "on_two_ranks"), [(20, ("off", 1)), (75, ("memory", 0))], ids=["small", "large"]
)
def test_rows_are_the_same_with_any_cache_workers_and_ranks(tmp_path, root, side, on_two_ranks):
    """75 pixels are seen as 65, cropped at a random scale; 20 are shifted."""
    files = ready(root, ALONE, cache="off", side=side)
    expected = batches(files.splits["train"], ALONE)
    assert len(expected) == 3 * 12
    kept = ready(root, ALONE, cache="memory", side=side)
    assert isinstance(kept.splits["train"], tuple)
    assert kept.left_out == files.left_out
    assert_same(batches(kept.splits["train"], ALONE), expected)
    assert_same(batches(files.splits["train"], ALONE, num_workers=2), expected)
    cache, num_workers = on_two_ranks
    ranks = run_ranks(train_rows, 2, tmp_path / "out", root, cache, side, num_workers)
    assert [left_out for _, left_out in ranks] == [files.left_out] * 2
    # Within a step the ranks' shares lie one after the other.
    rows = sorted((row for found, _ in ranks for row in found), key=lambda row: row[0])
    evaluated = [row for row in rows if row[0] == (-1, 0)]
    assert_same([*(row for row in rows if row[0] != (-1, 0)), *evaluated], expected)


def test_samples_of_an_augmented_batch_do_not_depend_on_each_other(root):
    """Else a batch of another size, on another number of ranks, would hold other images."""
    data = ready(root, ALONE, cache="memory", side=75).splits["train"]
    whole = batches(data, ALONE, epochs=(0,), global_batch=12)[:12]
    single = batches(data, ALONE, epochs=(0,), global_batch=1)[:12]
    assert all(torch.equal(a, b) for (_, a, _), (_, b, _) in zip(whole, single, strict=True))


@pytest.mark.parametrize("cache", ["memory", "off"])
def test_a_broken_file_is_named_and_left_out(tmp_path, cache):
    folder = write_images(tmp_path / "data", count=3)
    write_it, says = BROKEN["truncated"]
    write_it(folder / "train" / "cat" / "0010.jpg")
    found = ready(folder, ALONE, cache=cache)
    (left_out,) = found.left_out
    assert left_out.startswith("train/cat/0010.jpg: ")
    assert says in left_out
    assert found.notes[0].startswith("1 of 7 images ")
    assert left_out in found.notes[0]
    assert len(batches(found.splits["train"], ALONE, epochs=(0,))) == 12


def test_a_split_after_a_broken_file_keeps_its_own_images(tmp_path, root):
    for split, count in (("val", 3), ("test", 2)):
        write_images(root, split, count=count)
    files, kept = (ready(root, ALONE, cache=cache) for cache in ("off", "memory"))
    for name, count in (("train", 12), ("validation", 6), ("test", 4)):
        images, labels = kept.splits[name]
        assert len(images) == len(labels) == len(files.splits[name]) == count
        for k in range(count):
            image, label = files.splits[name][k]
            assert torch.equal(images[k], image)
            assert labels[k] == label


def test_too_many_broken_files_end_the_run_with_one_message(tmp_path, root):
    for cache in ("memory", "off"):
        refused = run_ranks(what_is_refused, 2, tmp_path / cache, root, cache, 0.1)
        for message, on_all_ranks in refused:
            assert on_all_ranks
            assert message.startswith("2 of 14 images ")
            assert f"{root}/train/cat/003.png: it is empty" in message
            assert "--max-corrupt 0.15" in message
    empty(root / "train")
    with pytest.raises(UserError, match="and 11 more"):
        ready(root, ALONE, cache="off")
    with pytest.raises(UserError, match=f"train/cat/.* in {root}"):
        ready(root, ALONE, cache="off", max_corrupt=1.0)


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [("test", "test/cat/000.JPG"), ("train/dog", "class dog/ .* train/dog/000.JPG")],
)
def test_a_split_or_a_class_of_which_nothing_is_left_is_named(tmp_path, spoiled, says):
    root = write_images(write_images(tmp_path / "data"), "test")
    empty(root / spoiled)
    with pytest.raises(UserError, match=says):
        ready(root, ALONE, cache="off", max_corrupt=0.9)


def test_a_broken_file_is_named_on_one_line_whatever_its_name(tmp_path):
    root = write_images(tmp_path / "data")
    name = os.fsencode(root / "train" / "cat") + b"/\xff\n.png"
    with open(name, "wb"):  # noqa: PTH123 - pathlib takes no bytes
        pass
    [left_out] = ready(root, ALONE, cache="off").left_out
    assert left_out == r"train/cat/\udcff\n.png: it is empty"


def test_ranks_that_see_different_files_are_told(tmp_path, root):
    other = write_images(tmp_path / "other", count=8)
    for place, numbers in enumerate((["0", "14", "1", "16"], ["0", "16", "1", "16"])):
        first, second = run_ranks(other_files, 2, tmp_path / f"out{place}", root, other)
        assert first == second
        assert re.findall(r"\d+", first) == numbers
        for name in ("cat", "dog"):  # as many as the other, by other names
            (root / "train" / name / "zebra.png").write_bytes(b"")


def test_a_scan_is_remembered_until_a_file_changes(root, cache_home, tmp_path, monkeypatch):
    first = ready(root, ALONE, cache="off")
    assert len(list(cache_home.iterdir())) == 1
    calls = []
    real = image_files.decode
    monkeypatch.setattr(image_files, "decode", lambda *a: calls.append(a) or real(*a))
    assert ready(root, ALONE, cache="off").left_out == first.left_out
    assert not calls
    write_images(root, count=4)  # mends cat/003.png
    assert ready(root, ALONE, cache="off").left_out == first.left_out[1:]
    assert len(calls) == 14
    (tmp_path / "file").write_text("x")  # where nothing can be remembered the run goes on
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert ready(root, ALONE, cache="off").left_out == first.left_out[1:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_breaks_later_is_named_without_a_traceback(root, num_workers):
    data = ready(root, ALONE, cache="off").splits["train"]
    (root / "train" / "dog" / "000.JPG").unlink()
    with pytest.raises(UserError, match="No such file") as caught:
        batches(data, ALONE, num_workers=num_workers)
    assert str(caught.value).startswith(f"{root}/train/dog/000.JPG ")
    assert "Traceback" not in str(caught.value)


def test_nothing_is_decoded_after_memory_is_filled(root, monkeypatch):
    data = ready(root, ALONE, cache="memory").splits["train"]
    for module in (image_files, dataset):
        monkeypatch.setattr(module, "decode", None, raising=False)
    for path in (root / "train").rglob("*.*"):
        path.unlink()
    assert len(batches(data, ALONE)) == 36


def test_the_ranks_of_a_node_share_one_memory_that_has_no_name(tmp_path, root):
    before = set(Path("/dev/shm").glob("samestep-*"))
    found = run_ranks(shares_one_memory, 2, tmp_path / "out", root)
    for values, mapped in found:
        assert values == [77]
        assert len(mapped) == 1
        assert mapped[0].endswith("(deleted)")
    assert set(Path("/dev/shm").glob("samestep-*")) <= before


def test_auto_keeps_what_takes_at_most_half_of_the_free_memory(root, monkeypatch):
    num_bytes = 14 * 3 * 20 * 20
    for cache, free, kind in (
        ("auto", 2 * num_bytes, tuple),
        ("auto", 2 * num_bytes - 2, ImageFiles),
        ("memory", 2 * num_bytes - 2, tuple),
    ):
        monkeypatch.setattr(dataset, "free_memory_bytes", lambda free=free: free)
        found = ready(root, ALONE, cache=cache)
        assert isinstance(found.splits["train"], kind)
        assert "14 images of 3 × 20 × 20 bytes" in found.notes[-1]
        assert ("half" in found.notes[-1]) == (kind is ImageFiles)
    monkeypatch.setattr(dataset, "free_memory_bytes", lambda: 1000)
    with pytest.raises(UserError, match="--cache memory: 14 images"):
        ready(root, ALONE, cache="memory")


def test_a_full_file_system_is_met_before_a_byte_is_written(monkeypatch, root):
    """A rank that wrote to a page that cannot be had would be ended by SIGBUS."""

    def refuse(*_):
        raise OSError(28, "No space left on device")

    before = set(Path("/dev/shm").glob("samestep-*"))
    pair = World(local_world_size=2)  # alone in fact: what it gathers is its own
    monkeypatch.setattr(dataset.os, "posix_fallocate", refuse)
    found = ready(root, pair, cache="auto")
    assert isinstance(found.splits["train"], ImageFiles)
    assert "No space left on device" in found.notes[-1]
    assert set(Path("/dev/shm").glob("samestep-*")) <= before
