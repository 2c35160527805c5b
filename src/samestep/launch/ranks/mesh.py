"""Tensors that ranks hold in parts, and the modules that gather them: PyTorch's FSDP2 and DTensor.

Here a sharded tensor is one whose part each rank holds; any other tensor is its own part. Importing
DTensor takes 0.8 s, so only functions that make sharded tensors import it.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError
from samestep.launch.ranks.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def make_mesh(world: World, within: Literal["all", "node"]) -> "DeviceMesh":
    """Return the mesh that a model is sharded over; all ranks call it.

    Its axes are ("shard",), or within nodes ("replicate", "shard"): (nodes, ranks per node).

    Raises:
        UserError: nodes have unequally many ranks, or ranks of a node do not follow each other.
    """
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    if within == "all":
        return init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("shard",))
    nodes = world.gather(world.node)
    each = nodes.count(nodes[0])
    if nodes != [node for node in dict.fromkeys(nodes) for _ in range(each)]:
        counts = ", ".join(f"node {node}: {nodes.count(node)}" for node in dict.fromkeys(nodes))
        raise UserError(
            "--shard-within node needs the same number of consecutive ranks on each node; here "
            f"they are {counts}.",
            remedy="Start the same number of ranks per node, or use --shard-within all.",
            on_all_ranks=True,
        )
    shape, names = (len(nodes) // each, each), ("replicate", "shard")
    return init_device_mesh(world.device.type, shape, mesh_dim_names=names)


def shard_module(
    module: nn.Module,
    mesh: "DeviceMesh",
    *,
    reshard_after_forward: bool,
    cpu_offload: bool,
    gather_dtype: torch.dtype | None = None,
) -> None:
    """Shard a module's parameters, but for those that are sharded already; blocks come first.

    The module stays where it is; its class becomes a subclass that gathers and frees. With
    `gather_dtype` it computes with weights of that type; gradients are reduced in float32.
    """
    from torch.distributed.fsdp import (  # noqa: PLC0415
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    exact = torch.float32 if gather_dtype else None
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=exact),
        offload_policy=CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    )


def free_gathered(root: nn.Module) -> None:
    """Free all weights that a forward without a backward has left gathered, or one that failed."""
    roots: list[Any] = list(filter(is_shard_root, root.modules()))
    for module in roots:
        module.reshard()
    if not roots or all(map(is_sharded, root.parameters())):
        return
    # One that failed leaves the root gathered: an optimizer would get weights that no step trains.
    if not callable(undo := getattr(roots[0], "reset_iter_state", None)):
        raise UserError(
            "The model's forward failed in training mode, in the trial before the first step, and "
            "--strategy fsdp still holds the weights that it gathered for it.",
            remedy="Use PyTorch 2.13 or newer, or --strategy ddp.",
        )
    undo()


def is_shard_root(module: nn.Module) -> bool:
    """Whether a module gathers and frees weights: a block, or the root."""
    return hasattr(module, "set_requires_gradient_sync")


def is_sharded(tensor: object) -> bool:
    """Whether this rank holds a part of a tensor."""
    return hasattr(tensor, "full_tensor")


def is_partial_sum(tensor: Tensor) -> bool:
    """Whether each rank holds a summand of a tensor, which is their sum."""
    placements: tuple[Any, ...] = getattr(tensor, "placements", ())
    return any(placement.is_partial() for placement in placements)


def added_up(tensor: Any) -> Any:
    """Return a partial sum, added up, on each rank; all ranks call it."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


def any_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are sharded."""
    return any(is_sharded(p) for p in model.parameters())


def mesh_of(model: nn.Module) -> "DeviceMesh | None":
    """Return the mesh that a model's parameters are sharded over; None if they are whole."""
    sharded: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    return sharded[0].device_mesh if sharded else None


@torch.no_grad()
def part_of_rank(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory, without a graph."""
    part: Any = tensor.detach()
    return part.to_local() if is_sharded(part) else part  # type: ignore[no-any-return]


def parts_of_rank(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of tensors, as `part_of_rank` does."""
    return [part_of_rank(tensor) for tensor in tensors]


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks; all ranks call it."""
    full: Any = tensor.detach()
    return full.full_tensor() if is_sharded(full) else full  # type: ignore[no-any-return]


_NUMBERS = ("item", "__float__", "__int__", "__bool__", "__index__", "__complex__")


def whole_numbers() -> AbstractContextManager[None]:
    """Within this, a number read from a sharded tensor is the whole one's; all ranks read it.

    PyTorch's would be this rank's summand, of `weight.norm()` for instance.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    from samestep.base.patches import patched  # noqa: PLC0415 - for sharded models only

    def read(original: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        return original(whole(tensor))

    return patched(*((DTensor, name, read) for name in _NUMBERS))


def sharded_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor sharded as another one is; every rank has the whole one.

    What is sharded already, or need not be, is returned as it is.
    """
    if is_sharded(value) or not is_sharded(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

    sharded: Any = like
    moved = value.detach().to(part_of_rank(like).device)
    # No rank sends anything: each cuts out its own part.
    mesh, placements = sharded.device_mesh, sharded.placements
    placed: Tensor = distribute_tensor(moved, mesh, placements, src_data_rank=None)
    return placed


def total_norm(gradients: Sequence[Tensor], world: World) -> Tensor:
    """Return the norm of all gradients together, of which each rank holds its parts."""
    parts = parts_of_rank(gradients)
    mesh = next((g.device_mesh for g in gradients if is_sharded(g)), None)  # type: ignore[attr-defined]
    own = nn.utils.get_total_norm(parts)
    if mesh is None:
        return own
    copies = world.world_size // mesh.shape[-1]  # of each part, where nodes hold the same ones
    norm: Tensor = (world.reduce(own.double() ** 2) / copies).sqrt()
    return norm.to(own.dtype)
