"""Folders of images: which files are samples, of what class, in what order; and what is refused."""

import os
import re
from pathlib import Path

import pytest

from samestep import UserError
from samestep.data.images.image_files import class_names, find_files
from tests.image_files import CLASSES, write_images


def names(files):
    return [files.name(k) for k in range(len(files))]


def test_files_come_sorted_by_class_and_name_with_their_labels(tmp_path):
    root = write_images(tmp_path, count=2)
    assert class_names(root) == CLASSES
    files = find_files(root, "train", CLASSES)
    found = [f"train/{c}/{n}" for c in CLASSES for n in ("000.JPG", "001.png")]
    assert names(files) == found
    assert files.labels.tolist() == [0, 0, 1, 1]
    assert Path(files.path(3)) == root / found[3]
    assert names(files.take([3, 0])) == [found[3], found[0]]


def test_endings_count_in_any_case_and_other_files_do_not(tmp_path):
    root = write_images(tmp_path, count=1)
    for name in ("a.JPEG", "b.Png", "c.gif", "notes.txt", "._000.jpg", ".hidden.png", "d.jpg.part"):
        (root / "train" / "cat" / name).write_bytes(b"x")
    for name in (".cache", "__MACOSX/cat"):
        (root / "train" / name).mkdir(parents=True)
    (root / "train" / "README.md").write_text("x")
    assert class_names(root) == CLASSES
    found = [Path(name).name for name in names(find_files(root, "train", CLASSES))]
    assert found == ["000.JPG", "a.JPEG", "b.Png", "000.JPG"]


@pytest.mark.parametrize("name", ["val", "validation"])
def test_the_validation_folder_has_two_names_and_may_lack_a_class(tmp_path, name):
    write_images(tmp_path)
    assert find_files(tmp_path, "validation", CLASSES) is None
    write_images(tmp_path, name, classes=CLASSES[:1], count=3)
    assert find_files(tmp_path, "validation", CLASSES).labels.tolist() == [0, 0, 0]


def refusal(root, split="train"):
    with pytest.raises(UserError) as caught:
        find_files(root, split, class_names(root))
    return str(caught.value)


def test_folders_that_are_missing_or_single_are_told_with_what_they_should_hold(tmp_path):
    assert "train/CLASS/*.jpg" in refusal(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(tmp_path / "file")
    assert "train/" in refusal(tmp_path)
    (tmp_path / "train").mkdir()
    assert "no folders" in refusal(tmp_path)
    write_images(tmp_path, classes=CLASSES[:1])
    assert "cat/" in refusal(tmp_path)


def test_class_folders_that_are_empty_or_not_named_in_text_are_refused(tmp_path):
    write_images(tmp_path)
    (tmp_path / "train" / "bird").mkdir()
    assert "train/bird has no images" in refusal(tmp_path)
    (tmp_path / "train" / "bird" / "a.webp").write_bytes(b"x")
    assert "a.webp" in refusal(tmp_path)
    os.mkdir(os.fsencode(tmp_path / "train") + b"/\xff\xfe")  # noqa: PTH102
    assert r"'\udcff\udcfe'" in refusal(tmp_path)


def test_a_split_without_images_or_with_another_class_or_twice_is_refused(tmp_path):
    write_images(tmp_path)
    write_images(tmp_path, "val", classes=("dog", "emu"))
    message = refusal(tmp_path, "validation")
    assert "val/emu " in message
    assert "cat, dog" in message
    (tmp_path / "test" / "cat").mkdir(parents=True)
    assert "test has no images" in refusal(tmp_path, "test")
    (tmp_path / "validation").mkdir()
    assert "both val/ and validation/" in refusal(tmp_path, "validation")


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    write_images(tmp_path)
    real = os.scandir

    def refuse(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert re.search("train/dog .*Permission denied", refusal(tmp_path))
