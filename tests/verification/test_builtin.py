"""The recipes that come with samestep train the same but for what they say they accept."""

import pytest

from samestep.verification.trace import ROUNDING
from tests.cifar_files import write_binary
from tests.idx_files import write_mnist
from tests.image_files import write_images
from tests.verification.forked import check, verified


def folder_for(name: str, folder) -> tuple[str, ...]:
    """Write a little data; return the flags that name it."""
    if name == "mnist":
        return ("--data-dir", str(write_mnist(folder / "mnist")))
    small = ("--width", "4")
    if name == "cifar10":
        return ("--data-dir", str(write_binary(folder / "cifar10")), *small)
    if name == "images":
        root = write_images(folder / "photos", "train", count=30, classes=("bird", "ship"))
        return ("--data-dir", str(root), *small)
    return ()


@pytest.mark.parametrize(
    ("name", "flags", "sizes", "accepted"),
    [("spiral", (), (1, 3), {"dropout"}), ("mnist", ("--precision", "bf16"), (1, 2), set())],
    ids=["spiral", "mnist"],
)
def test_it_is_the_same_but_for_what_the_recipe_accepts(name, flags, sizes, accepted, tmp_path):
    lightning = name == "spiral"
    words, ranks = (*folder_for(name, tmp_path), *flags), tmp_path / "ranks"
    report = verified(name, *words, folder=ranks, sizes=sizes, lightning=lightning)
    assert report.same, [(c.name, c.cause.why) for c in report.checks if not c.passed]
    assert {c.name for c in report.checks if c.status == "accepted"} == accepted
    assert {c.status for c in report.checks} <= {"same", "accepted", "skipped"}
    for row in (*(f"{size} ranks" for size in sizes[1:]), "accumulation", "stop and resume"):
        assert check(report, row).difference < ROUNDING["fp64"] / 1000
    assert report.precisions == ("fp64", "fp32" if lightning else "bf16")
    assert check(report, "last batch").status == "same"
    assert check(report, "lightning").status == ("same" if lightning else "skipped")
    if lightning:
        assert check(report, "lightning").difference < 1e-12


# As quick as it gets: how a training is stopped, resumed and accumulated is one code for all.
@pytest.mark.parametrize(
    ("name", "flags", "accepted"),
    [
        pytest.param(
            *("mnist", ("--model", "convnet", "--precision", "fp64"), "dropout"),
            id="convnet",
            marks=pytest.mark.slow,
        ),
        pytest.param("cifar10", (), "BatchNorm", marks=pytest.mark.slow),
        ("images", ("--precision", "fp64", "--image-size", "16", "--drop-last"), "BatchNorm"),
    ],
)
def test_with_convolutions_it_is_so_too(name, flags, accepted, tmp_path):
    words, ranks = (*folder_for(name, tmp_path), *flags), tmp_path / "ranks"
    report = verified(name, *words, folder=ranks, quick=True)
    assert report.same, [(c.name, c.cause.why) for c in report.checks if not c.passed]
    assert [c.name for c in report.checks if c.status == "accepted"] == [accepted]
    assert check(report, "2 ranks").difference < ROUNDING["fp64"] / 1000
    assert (check(report, "last batch").status == "skipped") is ("--drop-last" in flags)


def test_one_size_alone_compares_accumulation_and_resuming(tmp_path):
    report = verified("spiral", folder=tmp_path, sizes=(1,))
    assert report.same
    assert check(report, "stop and resume").difference < 1e-12
    assert check(report, "stop and resume").compared.endswith("1→1")
    assert check(report, "accumulation").status == "same"
