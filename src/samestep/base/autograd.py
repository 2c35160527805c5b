"""What a backward pass reaches, and when it ends."""

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.autograd import Variable


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the backward of a loss gives a gradient to."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor that may be sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def tell_end_of_autograd(loss: Tensor, tell: Callable[[], None]) -> None:
    """Call `tell` within loss.backward(), once all gradients are computed and sent off.

    The engine calls back in the order of requests: this one when backward begins, DDP's wait for
    all-reduces with the last gradient.
    """
    engine = Variable._execution_engine  # noqa: SLF001 - PyTorch's own DDP has no other way

    def ask(_gradient: Tensor) -> None:
        engine.queue_callback(tell)

    loss.register_hook(ask)  # type: ignore[no-untyped-call]
