"""The curves that `samestep demo` draws."""

from hypothesis import given
from hypothesis import strategies as st

from samestep.reporting.words import BOTH, FIRST, LABEL, SECOND, curve_lines

losses = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500)


@given(losses, st.integers(10, 120), st.integers(1, 20))
def test_equal_curves_lie_on_each_other_within_the_width(values, width, height):
    lines = curve_lines(values, values, width, height)
    assert len(lines) == height
    drawn = "".join(line[LABEL:] for line in lines)
    assert {*drawn} <= {BOTH, " "}
    assert drawn.count(BOTH) == min(len(values), width - LABEL)


def test_where_the_curves_differ_each_is_alone():
    lines = curve_lines([0.0, 1.0, 1.0], [0.0, 1.0, 0.0], 40, 2)
    assert [line[LABEL:] for line in lines] == [f" {BOTH}{FIRST}", f"{BOTH} {SECOND}"]
    assert [line[:LABEL].strip() for line in lines] == ["1", "0"]
