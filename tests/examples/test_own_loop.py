"""The loop of one's own: shares of unequal sizes train as one process does."""

import os
import re
import runpy
from pathlib import Path

from tests.processes import start_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def loss_on(world_size: int, folder: Path) -> float:
    """Return the loss that the example prints at its end."""
    folder.mkdir()
    ranks = start_ranks(_execute, world_size, folder / "output", folder)
    assert ranks.wait() == [0] * world_size, ranks.output()
    ((number, loss),) = re.findall(r"(\d+) ranks?, loss (\d+\.\d+)", ranks.printed(0))
    assert int(number) == world_size
    return float(loss)


def _execute(folder: Path) -> None:
    os.chdir(folder)
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_three_ranks_with_unequal_shares_train_as_one_process(tmp_path):
    alone = loss_on(1, tmp_path / "alone")
    assert alone > 0.1
    assert abs(loss_on(3, tmp_path / "three") - alone) < 5e-6
