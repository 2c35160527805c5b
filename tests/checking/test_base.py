"""Scripts without a mistake: the one that all planted ones are made from, and a lesson's."""

import pytest

from tests.checking.planted import BASE, check, codes
from tests.checking.test_plants import clean
from tests.examples.programs import ROOT
from tests.idx_files import write_mnist


def test_nothing_is_found_in_a_script_without_a_mistake_and_nothing_is_left_beside_it(tmp_path):
    report = check(tmp_path, BASE)
    assert (report.findings, report.exit_code) == ([], 0)
    assert report.steps == 4 + 4 + 1  # later epochs end after one batch
    assert not [said for said in report.not_seen if said.startswith("SS309")]
    assert "epoch 2: accuracy" in report.output[0]
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["train.py"]
    assert check(tmp_path, BASE, nproc=1).findings == []


@pytest.mark.slow
def test_nothing_is_found_in_the_script_of_the_lesson(tmp_path):
    script = ROOT / "examples" / "mnist_torchrun" / "train_distributed.py"
    write_mnist(tmp_path / "project" / "data")
    few = ("--epochs", "2", "--batch-size", "20", "--data-dir", "data")
    assert check(tmp_path, script.read_text(), *few).findings == []


def test_a_script_of_one_process_is_judged_by_the_number_of_ranks_only_if_it_is_given(tmp_path):
    report = check(tmp_path, alone := clean()["vae"], asked=False)
    assert (report.findings, report.exit_code) == ([], 0)
    (note,) = report.notes
    assert "--nproc 2" in note
    report = check(tmp_path, alone)
    assert {"SS101", "SS201"} <= codes(report)
    assert ("SS501", "error") in {(found.code, found.severity) for found in report.findings}
