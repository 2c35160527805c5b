"""The table of a sweep as text, where the terminal is narrow."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from samestep.profiling.profile_report import Sweep, SweepRow, sweep_table


@pytest.mark.parametrize(("width", "narrow"), [(60, True), (80, False)])
def test_the_table_of_a_sweep_cuts_no_number_and_no_heading(width, narrow):
    times = {"seconds": 0.012345, "data": 0.00123, "samples_per_s": 115_360.0}
    row = SweepRow(value=64, **times, ratio=1.0, low=0.98, high=1.02, helps=True)
    found = Sweep(setting="batch_size", rows=(row, replace(row, value=32)), best=64)
    console = Console(file=io.StringIO(), width=width)
    console.print(sweep_table(found, narrow=narrow))
    words = console.file.getvalue().split()
    for word in ("--batch-size", "waiting", "before", "samples/s", "115,360", "0.98–1.02"):
        assert word in words
