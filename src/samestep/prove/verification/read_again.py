"""What changes a sample when it is read again, or put together again, with the same seeds."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from samestep.base.errors import listed
from samestep.core.data.keyed_random import seed_reading
from samestep.core.training.side_effects import RandomDraws, watched
from samestep.prove.verification import causes
from samestep.prove.verification.causes import Cause
from samestep.prove.verification.trace import hash_of, sample_hashes

_SAMPLES = 8
"""Samples that are read again; and how often one is put into a batch, where all rows are alike."""
Reader = Literal["dataset", "transform", "augment", "collate"]


class Changes(NamedTuple):
    """What changes a sample when it is read twice."""

    part: Reader
    batchwise: bool
    """Whether it does so only when the sample is read in another batch."""
    draws: str = ""
    """What collate draws from, with the line."""

    @property
    def cause(self) -> Cause:
        """The cause in words."""
        if self.part == "collate":
            return causes.COLLATE_DRAWS.of(draws=self.draws or "a generator of its own")
        other = "for a sample when the batch has other samples"
        again = "each time the same sample is read in the same epoch"
        return causes.UNKEYED[self.part].of(when=other if self.batchwise else again)


def collated_again(collate: Callable[[Any], Any], rows: list[Any]) -> Changes | None:
    """Put samples together again: what a collate draws, it draws for all of them together."""
    seen, of_one = RandomDraws(), list[str]()

    def made(seed: int, rows: list[Any]) -> Any:
        seed_reading(seed)
        return watched(collate, seen)(rows)

    first, second, other = (hash_of(made(seed, rows)) for seed in (1, 1, 2))
    with contextlib.suppress(Exception):  # a batch without a row for each sample
        of_one = sample_hashes(made(1, [rows[0]] * _SAMPLES))
    lines = {f"torch ({line})" if line else "torch" for line in seen.draws.values()}
    draws = sorted(lines | seen.generators)
    # It may seed anew for each batch: one sample in several places shows that.
    by_place = bool(draws) and len(of_one) == _SAMPLES and len({*of_one}) > 1
    if first == second == other and not by_place:
        return None
    return Changes("collate", first == second, listed(draws))


def dataset_again(data: Any, collate: Callable[[Any], Any] | None) -> Changes | None:
    """Read samples of a data set again, each seeded as in a training, and put them together."""

    def read() -> list[Any]:
        rows = []
        for place in range(min(_SAMPLES, len(data))):
            seed_reading(place)
            rows.append(data[place])
        return rows

    rows = read()
    if hash_of(rows) != hash_of(read()):
        return Changes("dataset", batchwise=False)
    return None if collate is None else collated_again(collate, rows)
