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
    # Channels-last, a layer of so narrow a network crashes in oneDNN: see docs/project/log.md.
    small = ("--width", "4", "--no-channels-last")
    if name == "cifar10":
        return ("--data-dir", str(write_binary(folder / "cifar10")), *small)
    if name == "images":
        root = write_images(folder / "photos", "train", count=30, classes=("bird", "ship"))
        return ("--data-dir", str(root), *small)
    return ()


@pytest.mark.parametrize(
    ("name", "flags", "sizes", "accepted"),
    [
        ("spiral", (), (1, 2, 3), {"dropout"}),
        ("mnist", ("--precision", "bf16"), (1, 2, 3), set()),
        (
            "mnist",
            ("--model", "convnet", "--precision", "fp64", "--drop-last"),
            (1, 2),
            {"dropout"},
        ),
        ("cifar10", (), (1, 2), {"BatchNorm"}),
        ("images", ("--precision", "fp64"), (1, 2), {"BatchNorm"}),
    ],
    ids=["spiral", "mnist", "convnet", "cifar10", "images"],
)
def test_it_is_the_same_training_but_for_what_the_recipe_accepts(
    name, flags, sizes, accepted, tmp_path
):
    data = folder_for(name, tmp_path)
    lightning = name == "spiral"
    report = verified(
        name, *data, *flags, folder=tmp_path / "ranks", sizes=sizes, lightning=lightning
    )
    assert report.same, [(c.name, c.cause.why) for c in report.checks if not c.passed]
    assert {c.name for c in report.checks if c.status == "accepted"} == accepted
    assert {c.status for c in report.checks} <= {"same", "accepted", "skipped"}
    for row in (*(f"{size} ranks" for size in sizes[1:]), "accumulation", "stop and resume"):
        assert check(report, row).difference < ROUNDING["fp64"] / 1000
    chosen = flags[flags.index("--precision") + 1] if "--precision" in flags else "fp32"
    assert report.precisions == tuple(dict.fromkeys(("fp64", chosen)))
    assert (check(report, "last batch").status == "skipped") is ("--drop-last" in flags)
    assert check(report, "lightning").status == ("same" if lightning else "skipped")
    if lightning:
        assert check(report, "lightning").difference < 1e-12


def test_one_size_alone_compares_accumulation_and_resuming(tmp_path):
    report = verified("spiral", folder=tmp_path, sizes=(1,))
    assert report.same
    assert check(report, "stop and resume").difference < 1e-12
    assert check(report, "stop and resume").compared.endswith("1→1")
    assert check(report, "accumulation").status == "same"
