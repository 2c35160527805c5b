"""A planted bottleneck is found, and named with its cause: the whole command, real processes."""

import pytest

from tests.command_line import start
from tests.profiling.planted import SITUATIONS, read


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow else [])
        for one in SITUATIONS
    ],
)
def test_the_bottleneck_that_was_planted_is_the_verdict(tmp_path, situation):
    command = situation.command(tmp_path, seconds=0.4)
    ranks = start(*command, world_size=situation.nproc, folder=tmp_path / "out")
    assert ranks.wait() == [0] * situation.nproc, ranks.output()
    verdict = read(tmp_path)["verdict"]
    if verdict["kind"] != situation.verdict:
        # Others that use the cores may take more of a step than what was planted, if it says so.
        assert "Other programs use the cores" in " ".join(verdict["notes"]), ranks.output()
        return
    assert situation.says in f"{verdict['why']} {verdict['change']}"
    assert verdict["ceiling"] > 1
    assert verdict["next_kind"] != verdict["kind"]
