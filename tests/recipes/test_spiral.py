"""What `samestep predict` reads for the spiral."""

from pathlib import Path

import pytest
import torch

from samestep.recipes.spiral import SpiralOptions, read


@pytest.mark.parametrize("heading", ["", "x,y\n"])
def test_a_file_has_a_point_a_line_below_a_heading_or_not(tmp_path: Path, heading):
    file = tmp_path / "points.csv"
    file.write_text(f"{heading}1.5,2\n\n-3,4e-1\n")
    points = read(SpiralOptions(), file)
    assert torch.equal(torch.stack(points), torch.tensor([[1.5, 2.0], [-3.0, 0.4]]))


@pytest.mark.parametrize("line", ["1,2,3", "1", "one,two", "nan,1"])
def test_a_line_that_is_no_point_is_told_by_its_number(tmp_path, line):
    file = tmp_path / "points.csv"
    file.write_text(f"x,y\n1,2\n{line}\n")
    with pytest.raises(ValueError, match="line 3"):
        read(SpiralOptions(), file)
