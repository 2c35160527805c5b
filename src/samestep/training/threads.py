"""How many CPU threads a rank computes with."""

from torch import nn

# Below this a matrix product is over before a second thread has woken up.
_SMALL_PARAMETERS = 1_000_000


def choose_threads(wanted: int | None, model: nn.Module, cores: int, local_world_size: int) -> int:
    """Return the threads of one rank.

    A small model without convolutions computes on one thread: it is as fast, and a busy neighbour
    on the machine then slows it little, where two threads that wait for each other slow down
    many times over. Others share the cores of the node evenly.
    """
    if wanted is not None:
        return wanted
    parameters = list(model.parameters())
    convolves = any(parameter.dim() > 2 for parameter in parameters)
    if not convolves and sum(p.numel() for p in parameters) < _SMALL_PARAMETERS:
        return 1
    return max(1, cores // local_world_size)
