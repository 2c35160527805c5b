"""The planted scripts of the benchmark: each compiles, and differs from its twin."""

import sys
from pathlib import Path

import pytest

import samestep.scripts.checking
from tests.checking.planted import check, codes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from check_plants import PLANTS, clean


def test_planted_scripts_compile_and_differ_from_their_twins():
    pages = Path(samestep.scripts.checking.__file__).parent / "pages"
    right = clean()
    for name, plant in PLANTS.items():
        compile(plant.text, name, "exec")
        assert plant.text not in right.values()
        assert all((pages / f"{code}.md").exists() for code in plant.codes)
    for name, text in right.items():
        compile(text, name, "exec")
    assert (len(PLANTS), len(right)) == (55, 78)


@pytest.mark.slow
def test_lightnings_trainer_takes_the_ranks_that_there_are(tmp_path):
    pytest.importorskip("lightning")
    report = check(tmp_path, clean()["lightning_means"])
    assert (codes(report), report.ranks, report.steps > 1) == (set(), 2, True)
