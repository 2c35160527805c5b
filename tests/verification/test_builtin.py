"""The recipes that come with samestep train the same but for what they say they accept."""

import pytest

from samestep.verification.difference import ROUNDING
from tests.cifar_files import write_binary
from tests.idx_files import write_mnist
from tests.image_files import write_images
from tests.verification.forked import check, verified


def folder_for(name: str, folder) -> tuple[str, ...]:
    """Write a little data; return the flags that name it."""
    if name == "mnist":
        return ("--data-dir", str(write_mnist(folder / "mnist")))
    # Channels-last, a layer of so narrow a network crashes in oneDNN: see docs/log.md.
    small = ("--width", "4", "--no-channels-last")
    if name == "cifar10":
        return ("--data-dir", str(write_binary(folder / "cifar10")), *small)
    if name == "images":
        root = write_images(folder / "photos", "train", count=30, classes=("bird", "ship"))
        return ("--data-dir", str(root), *small)
    return ()


@pytest.mark.parametrize(
    ("name", "flags", "accepted"),
    [
        ("spiral", (), {"dropout"}),
        ("mnist", (), set()),
        ("mnist", ("--model", "convnet"), {"dropout"}),
        ("cifar10", (), {"BatchNorm"}),
        ("images", (), {"BatchNorm"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_it_is_the_same_training_but_for_what_the_recipe_accepts(name, flags, accepted, tmp_path):
    data = folder_for(name, tmp_path)
    sizes = (1, 2, 3) if name in ("spiral", "mnist") else (1, 2)  # the others take their time
    report = verified(name, *data, *flags, folder=tmp_path / "ranks", sizes=sizes)
    assert report.same, [(c.name, c.why) for c in report.checks if not c.passed]
    assert {c.name for c in report.checks if c.status == "accepted"} == accepted
    assert {c.status for c in report.checks} <= {"same", "accepted", "skipped"}
    for row in (*(f"{size} ranks" for size in sizes[1:]), "accumulation", "stop and resume"):
        assert check(report, row).difference < ROUNDING["fp64"] / 1000


def test_lightnings_trainer_is_among_what_is_the_same(tmp_path):
    report = verified("spiral", folder=tmp_path, lightning=True)
    assert check(report, "lightning").status == "same"
    assert check(report, "lightning").difference < 1e-12


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_the_precision_of_the_settings_is_compared_too(precision, tmp_path):
    report = verified("spiral", "--precision", precision, folder=tmp_path)
    assert report.same
    assert report.precisions == tuple(dict.fromkeys(("fp64", precision)))


def test_one_size_alone_compares_accumulation_and_resuming(tmp_path):
    report = verified("spiral", folder=tmp_path, sizes=(1,))
    assert report.same
    assert check(report, "stop and resume").difference < 1e-12
    assert check(report, "stop and resume").compared == "after step 2: rank 1→1"
    assert check(report, "accumulation").compared.endswith(": 1 rank")
    for row in ("dropout", "order", "evaluation", "metrics", "one writer", "one device"):
        found = check(report, row)
        assert (found.status, found.difference) == ("skipped", None), row


def test_without_the_incomplete_batch_there_is_no_uneven_step(tmp_path):
    report = verified("spiral", "--drop-last", folder=tmp_path)
    assert report.same
    assert check(report, "last batch").status == "skipped"
