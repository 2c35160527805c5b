"""Random numbers without state: what is drawn depends only on a key, never on rank or worker.

Keys are mixed with SplitMix64 (Steele, Lea & Flood, 2014, "Fast splittable pseudorandom number
generators"), on Python integers and, the same function, on int64 tensors.

The global generators are seeded by such keys. Ranks draw other numbers in forward, since they hold
other samples. Whatever changes the weights has to draw the same everywhere, or the weights drift
apart, and nothing else would show it.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from samestep.launch.ranks.world import World

T = TypeVar("T")

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(*parts: int) -> int:
    """Return one well-mixed 63-bit integer of some integers from 0 to 2**63 - 1, in their order."""
    mixed = 0
    for part in parts:
        mixed = mix_next(mixed, part)
    return mixed


def mix_next(mixed: int, part: int) -> int:
    """Return `mix` with one more part, for a loop in which only the last one varies."""
    return _mix64((mixed * 2 + part * _GOLDEN + _GOLDEN) & _MASK) >> 1


def sample_keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Return one key for each sample (samples,), int64, for its augmentation in this epoch."""
    return _mix_tensor(indices.to(torch.int64) * _signed(_GOLDEN) + _signed(mix(seed, epoch)))


def uniform(keys: Tensor, draws: int) -> Tensor:
    """Return `draws` numbers in [0, 1) for each key: (samples, draws), float32.

    The same key gives the same numbers on every device, in any batch, on any rank.
    """
    counter = torch.arange(1, draws + 1, device=keys.device, dtype=torch.int64)
    mixed = _mix_tensor(keys[:, None] + counter * _signed(_GOLDEN))
    # The top 24 bits are what a float32 in [0, 1) holds exactly.
    return ((mixed >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def normal(keys: Tensor, draws: int) -> Tensor:
    """Return `draws` numbers of mean 0 and variance 1 for each key: (samples, draws), float32.

    From pairs of `uniform` numbers by the method of Box & Muller (1958), "A note on the generation
    of random normal deviates". None is further from 0 than 5.8.
    """
    pairs = -(-draws // 2)
    # Rounded from float64, so that the processor's way of computing a logarithm does not show.
    wide = torch.float32 if keys.device.type == "mps" else torch.float64
    first, second = uniform(keys, 2 * pairs).to(wide).chunk(2, dim=1)
    radius, angle = (-2 * torch.log1p(-first)).sqrt(), 2 * torch.pi * second
    both = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
    return both[:, :draws].to(torch.float32)


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _shift(value, 27)) * _signed(_SECOND)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    # int64 shifts keep the sign; the mask makes it the logical shift of the definition.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def seed_reading(drawn: int) -> None:
    """Seed the generators that a data set may draw from, before it gives a sample."""
    torch.default_generator.manual_seed(drawn)
    _seed_others(drawn)


@contextmanager
def host_seeded(drawn: int) -> Iterator[None]:
    """Seed the generators of the host; afterwards they are as they were.

    In a third of the time of `agreement.random_numbers`, which keeps them as checkpoints do.
    """
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002
    seed_reading(drawn)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def seed_torch(drawn: int, device: torch.device) -> None:
    """Seed torch's generator of a device, and that of the CPU.

    `torch.manual_seed` seeds those of all devices: ten times the work, at every step.
    """
    torch.default_generator.manual_seed(drawn)
    if device.type == "cuda":
        # It makes the generators; later calls return at once.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[device.index or 0].manual_seed(drawn)
    elif device.type == "mps":
        torch.mps.manual_seed(drawn)


def seed_alike(seed: int) -> None:
    """Seed every global generator alike on all ranks, to make the data and the model."""
    if torch.accelerator.current_accelerator() is None:
        # Without a GPU in the build, `manual_seed` keeps a stack trace for the CUDA to come.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    _seed_others(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Seed Python's and NumPy's generators for one rank; torch's is seeded at every step."""
    _seed_others(mix(seed, rank))


_mixed = cache(mix)


def seed_update(seed: int, step: int, device: torch.device, nth: int = 0) -> None:
    """Seed every generator alike on all ranks for the `nth` update of a step."""
    # Five parts: no forward of a rank is seeded alike.
    drawn = mix_next(mix_next(mix_next(_mixed(seed, 1), step), 0), nth)
    seed_reading(drawn)
    if device.type != "cpu":
        seed_torch(drawn, device)


class RankSeeds:
    """Seed what a rank draws in a step: its own numbers in forward, the ranks' alike elsewhere."""

    def __init__(self, seed: int, world: "World") -> None:
        self._seed, self._world = seed, world
        self._of_rank = mix(seed, world.rank)
        self.step = 0
        """The step that is being taken, or the newest."""

    def begin(self, step: int) -> None:
        """Seed a step's forwards, so that dropout resumes exactly."""
        self.step = step
        seed_torch(mix_next(self._of_rank, step), self._world.device)

    def begin_part(self, part: int) -> None:
        """Seed the forwards of a virtual rank: without those, `begin` has seeded the rank's."""

    def begin_loss(self) -> None:
        """Seed what a loss over the whole batch draws: the same on all ranks."""
        seed_update(self._seed, self.step, self._world.device, 1)

    def begin_update(self) -> None:
        """Seed what the update draws: the same on all ranks."""
        seed_update(self._seed, self.step, self._world.device)

    def end_update(self) -> None:
        """Seed what user code draws until the next step, differently on each rank."""
        seed_rank(mix(self._seed, self.step + 1), self._world.rank)


_seed_numpy: Callable[[int], None] = np.random.mtrand._rand.seed  # noqa: SLF001
"""`np.random.seed`, which existing code draws from, in half its time."""


def _seed_others(drawn: int) -> None:
    random.seed(drawn)
    try:
        _seed_numpy(drawn & 0xFFFFFFFF)
    except TypeError:  # the script has called np.random.set_bit_generator
        np.random.seed(drawn & 0xFFFFFFFF)  # noqa: NPY002


def without_draws(read: Callable[[], T]) -> T | None:
    """Return the result of `read` if it drew no random numbers; None if it did, or failed.

    Seeding before each sample costs more than reading a small one; where a data set draws nothing,
    one check serves a whole batch. Looking at a generator's state or seed counts as drawing: a
    state that is saved and put back leaves no trace of what was drawn in between.
    """
    reads: list[object] = []
    untouched, noted = _untouched(), partial(_noted, reads)
    originals = [getattr(place, name) for place, name in _STATE_READERS]
    for (place, name), original in zip(_STATE_READERS, originals, strict=True):
        setattr(place, name, partial(noted, original))
    seed_reading(_UNTOUCHED)
    try:
        result = read()
    except Exception:
        return None
    finally:
        for (place, name), original in zip(_STATE_READERS, originals, strict=True):
            setattr(place, name, original)
    return None if reads or _drawn() != untouched else result


def _noted(reads: list[object], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    reads.append(original)
    return original(*args, **kwargs)


_UNTOUCHED = 0x2545F491
_STATE_READERS = (
    (torch, "get_rng_state"),
    (torch, "initial_seed"),
    (torch.random, "get_rng_state"),
    (torch.random, "initial_seed"),
    (random, "getstate"),
    (np.random, "get_state"),
)


@cache
def _untouched() -> tuple[bytes, float, float]:
    seed_reading(_UNTOUCHED)
    return _drawn()


def _drawn() -> tuple[bytes, float, float]:
    state = torch.default_generator.get_state().numpy().tobytes()
    return state, random.random(), np.random.random_sample()  # noqa: NPY002, S311
