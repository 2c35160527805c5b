"""How much is trained: as little as shows every uneven share."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UserError
from samestep.verification.few_samples import choose_training_size

SIZES = st.sets(st.integers(1, 9), min_size=1).map(lambda sizes: tuple(sorted({1, *sizes})))


@given(SIZES, st.booleans(), st.booleans(), st.integers(2, 100))
def test_the_batch_and_the_last_one_are_uneven_for_some_and_no_rank_is_without_samples(
    sizes, drop_last, heavy, asked
):
    cut = choose_training_size(10_000, 1_000, sizes, drop_last=drop_last, heavy=heavy)
    several = [size for size in sizes if size > 1]
    assert cut.rest < cut.global_batch
    assert cut.num_samples == cut.full * cut.global_batch + cut.rest
    assert all(cut.rest % size for size in several)
    assert not several or any(cut.global_batch % size for size in several)
    assert cut.rest >= 2 * max(sizes) or max(sizes) == 1
    assert 0 < cut.stop < cut.steps
    assert all(cut.num_evaluated % size for size in several)
    assert choose_training_size(10_000, 10, sizes, batch=asked).global_batch == asked


@given(SIZES, st.integers(1, 60))
def test_few_samples_are_enough_or_refused_with_the_number_that_is_needed(sizes, num_samples):
    try:
        cut = choose_training_size(num_samples, 1, sizes)
    except UserError as error:
        needed = next(int(word) for word in re.split("ranks?: ", str(error))[1].split())
        assert needed > num_samples
        assert choose_training_size(needed, 1, sizes).num_samples == needed
    else:
        assert cut.num_samples <= num_samples


@pytest.mark.parametrize(
    ("samples", "sizes", "batch", "flags"),
    [
        (8, (1, 2, 3), None, ["--world-sizes 1,2."]),
        (4, (1, 2), None, ["--world-sizes 1."]),
        (2, (1,), None, []),
        (60, (1, 2), 100, ["--batch-size"]),
        (1, (1, 2), None, []),
        (5, (1, 2, 3), None, ["--world-sizes 1."]),
    ],
)
def test_the_message_has_the_samples_and_a_flag_that_leads_out(samples, sizes, batch, flags):
    with pytest.raises(UserError, match=rf"^{samples} ") as refused:
        choose_training_size(samples, 10, sizes, batch=batch)
    message = str(refused.value)
    assert re.findall(r"--\w[\w-]*(?: [\d,]+\.)?", message) == flags
