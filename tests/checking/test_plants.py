"""The planted scripts of the benchmark: each compiles, and differs from its twin."""

import sys
from pathlib import Path

import samestep.scripts.checking

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
