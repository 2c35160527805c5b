"""Image files on ranks: the same samples with any cache, workers and ranks; broken files left out.

The rows are compared as the model sees them: decoded, augmented and normalised, bit for bit.
"""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samestep import UserError
from samestep.core.data.images import dataset, image_files
from samestep.core.data.images.dataset import ImageFiles
from samestep.launch.ranks.world import World
from tests.data.images.ranks_of_images import batches, on_two_ranks, ready
from tests.image_files import write_images
from tests.processes import run_ranks

# Two ranks are started once for all of them.
pytestmark = pytest.mark.xdist_group("image-files")

ALONE = World()
KINDS = {20: ("off", 1), 75: ("memory", 0)}
"""Side of the images → how two ranks read them: the cache, and workers each."""


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "samestep" / "images"


def write_root(folder: Path) -> Path:
    """Two classes of seven images, one of them broken in the middle and one at the end."""
    write_images(folder, count=7)
    for name in ("cat/003.png", "dog/006.JPG"):
        (folder / "train" / name).write_bytes(b"")
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    return write_root(tmp_path / "data")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each of two ranks reads of such a folder, or is refused; two others for its fellow."""
    folder = tmp_path_factory.mktemp("two-ranks")
    root, others = write_root(folder / "data"), [folder / "more", folder / "renamed"]
    write_images(others[0], count=8)
    write_root(others[1])
    (others[1] / "train" / "cat" / "000.JPG").rename(others[1] / "train" / "cat" / "zebra.JPG")
    found = run_ranks(on_two_ranks, 2, folder / "out", root, others, KINDS)
    return SimpleNamespace(root=root, ranks=found)


def assert_same(one, other):
    assert [(step, label) for step, _, label in one] == [(step, label) for step, _, label in other]
    assert all(torch.equal(a, b) for (_, a, _), (_, b, _) in zip(one, other, strict=True))


def empty(folder):
    for path in folder.rglob("*.*"):
        path.write_bytes(b"")


@pytest.mark.parametrize("side", KINDS, ids=["small", "large"])
def test_rows_are_the_same_with_any_cache_workers_and_ranks(two_ranks, side):
    files = ready(two_ranks.root, ALONE, cache="off", side=side)
    expected = batches(files.splits["train"], ALONE)
    assert len(expected) == 3 * 12
    kept = ready(two_ranks.root, ALONE, cache="memory", side=side)
    assert isinstance(kept.splits["train"], tuple)
    assert kept.left_out == files.left_out
    assert_same(batches(kept.splits["train"], ALONE), expected)
    assert_same(batches(files.splits["train"], ALONE, num_workers=2), expected)
    ranks = [found.read[side] for found in two_ranks.ranks]
    assert [left_out for _, left_out in ranks] == [files.left_out] * 2
    # Within a step the ranks' shares lie one after the other.
    rows = sorted((row for found, _ in ranks for row in found), key=lambda row: row[0])
    evaluated = [row for row in rows if row[0] == (-1, 0)]
    assert_same([*(row for row in rows if row[0] != (-1, 0)), *evaluated], expected)


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


def test_broken_files_are_named_on_one_line_and_left_out(root, tmp_path):
    found = ready(root, ALONE, cache="off")
    assert found.left_out == ("train/cat/003.png: it is empty", "train/dog/006.JPG: it is empty")
    assert found.notes[0].startswith("2 of 14 images ")
    assert all(name in found.notes[0] for name in found.left_out)
    root = write_images(tmp_path / "odd")
    name = os.fsencode(root / "train" / "cat") + b"/\xff\n.png"
    with open(name, "wb"):  # noqa: PTH123 - pathlib takes no bytes
        pass
    [left_out] = ready(root, ALONE, cache="off").left_out
    assert left_out == r"train/cat/\udcff\n.png: it is empty"


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [("test", "test/cat/000.JPG"), ("train/dog", "class dog/ .* train/dog/000.JPG")],
)
def test_a_split_or_a_class_of_which_nothing_is_left_is_named(tmp_path, spoiled, says):
    root = write_images(write_images(tmp_path / "data"), "test")
    empty(root / spoiled)
    with pytest.raises(UserError, match=says):
        ready(root, ALONE, cache="off", max_corrupt=0.9)


def test_ranks_share_a_memory_and_too_many_broken_files_end_the_run(two_ranks, root):
    first, second = (found.other for found in two_ranks.ranks)
    assert first == second
    numbers = [re.findall(r"\d+", message) for message, _on_all_ranks in first]
    assert numbers == [["0", "14", "1", "16"], ["0", "14", "1", "14"]]
    for values, mapped in (found.shared for found in two_ranks.ranks):
        assert values == [77]
        assert mapped
        assert all(line.endswith("(deleted)") for line in mapped)
    for message, on_all_ranks in (told for found in two_ranks.ranks for told in found.broken):
        assert on_all_ranks
        assert message.startswith("2 of 14 images ")
        assert f"{two_ranks.root}/train/cat/003.png: it is empty" in message
        assert "--max-corrupt 0.15" in message
    empty(root / "train")
    with pytest.raises(UserError, match="and 11 more"):
        ready(root, ALONE, cache="off")
    with pytest.raises(UserError, match=f"train/cat/.* in {root}"):
        ready(root, ALONE, cache="off", max_corrupt=1.0)


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
