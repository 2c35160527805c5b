"""How many CPU threads a rank computes with."""

from torch import nn

from samestep.ranks.limits import threads_wished

# Below this a matrix product is over before a second thread has woken up.
_SMALL_PARAMETERS = 1_000_000


def choose_threads(wanted: int | None, model: nn.Module, cores: int, neighbours: int) -> int:
    """Return the threads of one rank: those wanted, else those of OMP_NUM_THREADS, else a guess.

    A small model without convolutions computes on one thread: it is as fast, and a busy neighbour
    on the machine then slows it little, where two threads that wait for each other slow down
    many times over. Others share their cores evenly with the ranks that have the same ones.
    """
    wanted = wanted or threads_wished()
    if wanted is not None:
        return wanted
    return 1 if is_small(model) else max(1, cores // neighbours)


def is_small(model: nn.Module) -> bool:
    """Whether a model's operations are so short that what lies between them counts more."""
    parameters = list(model.parameters())
    convolves = any(parameter.dim() > 2 for parameter in parameters)
    return not convolves and sum(p.numel() for p in parameters) < _SMALL_PARAMETERS
