"""Share a model out over all ranks by FSDP2: which blocks are gathered and freed at once.

Each rank holds its part of every weight, gradient and optimizer state. A block's weights are
gathered only for its forward and backward.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, did_you_mean, listed
from samestep.base.settings import Settings
from samestep.base.trees import real_parts
from samestep.core.learner.agreement import rng_state, set_rng_state
from samestep.core.learner.model_state import hooked_parameters
from samestep.core.recipe import Recipe
from samestep.launch.ranks.mesh import is_shard_root, is_sharded, make_mesh, shard_module
from samestep.launch.ranks.world import World

_GATHERED = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}
_LEAST_SHARE = 16
"""A layer of its own class counts as a block with 1 / this many of the parameters."""


def shard(
    model: nn.Module, takes: nn.Module, recipe: Recipe, settings: Settings, world: World
) -> None:
    """Shard a model in place; all ranks call it.

    `takes` is what takes the inputs: the model, or the model by the recipe's `forward`.

    Raises:
        UserError: the recipe names a block that the model does not have, weights are tied across
            blocks, or the settings or the backend do not fit the device.
    """
    if world.device.type == "cuda" and world.backend == "gloo":
        # By PyTorch's table of backends. On an H200 two ranks that shared it trained, and one was
        # killed by SIGSEGV at the end (torch 2.11).
        raise UserError(
            "--strategy fsdp needs NCCL on GPUs: PyTorch's Gloo gathers and scatters no CUDA "
            "tensors. Start one rank per GPU, without --backend gloo and --oversubscribe; or use "
            "--strategy ddp, or --device cpu.",
            on_all_ranks=True,
        )
    if settings.cpu_offload and world.device.type != "cuda":
        raise UserError(
            f"--cpu-offload keeps a GPU's shards in the CPU's memory; this rank computes on "
            f"{world.device.type}. Leave it out.",
            on_all_ranks=True,
        )
    if getattr(recipe.evaluate_batch, "calls_model", recipe.evaluate_batch is not None):
        raise UserError(
            "Recipe(evaluate_batch=…) does not go with --strategy fsdp: it calls the model as "
            "often as it likes, and every forward takes all ranks. Use --strategy ddp, or measure "
            "with metrics=….",
            on_all_ranks=True,
        )
    if hooked := [*hooked_parameters(model)]:
        raise UserError(
            f"--strategy fsdp replaces the parameters with their hooks: {listed(hooked)}. "
            "Register them in Recipe(optimizer=…), or use --strategy ddp."
        )
    if tables := [n for n, m in model.named_modules() if getattr(m, "sparse", 0) is True]:
        raise UserError(
            f"--strategy fsdp needs dense gradients, and {listed(tables)} has sparse ones.",
            remedy="Build the layer with sparse=False, or use --strategy ddp.",
        )
    blocks = find_blocks(model, recipe.shard)
    _check_groups(model, blocks)
    mesh = make_mesh(world, settings.shard_within)
    for block in (*blocks, takes):
        _take_from_main(block, world)
        shard_module(
            block,
            mesh,
            # The backward begins with what the root holds, so it need not be freed before.
            reshard_after_forward=settings.reshard_after_forward and block is not takes,
            cpu_offload=settings.cpu_offload,
            gather_dtype=_GATHERED[settings.gather_dtype],
        )
    names = {id(module): name for name, module in model.named_modules()}
    if settings.compile == "off":
        hold_order(takes, {block: names[id(block)] for block in blocks})
    for block in (*blocks, takes):
        _hold_weights(block, names.get(id(block), ""))
    if blocks:  # their hooks do what PyTorch warns that the root's may miss
        root = re.escape(type(takes).__name__)
        about = rf"FSDP2-wrapped module \({root}\) returned a view"
        warnings.filterwarnings("ignore", message=about)


def hold_order(takes: nn.Module, names: dict[nn.Module, str]) -> None:
    """Refuse a forward in training that calls other blocks than the first one did.

    A call gathers the block's weights from all ranks. Where ranks call different blocks, FSDP
    gathers parts of both, and computes with the mixture.
    """
    first: list[nn.Module] = []
    now: list[nn.Module] | None = None

    def begin(*_: object) -> None:
        nonlocal now
        now = [] if takes.training else None

    def note_order(block: nn.Module, _: object) -> None:
        if now is None:  # recomputed in a backward, or an evaluation
            return
        now.append(block)
        if first and first[: len(now)] != now:
            _refuse_order(names[block])

    def end(*_: object) -> None:
        nonlocal now
        if now is not None and first and now != first:
            _refuse_order(names[first[len(now)]])
        if now and not first:
            first.extend(now)
        now = None

    takes.register_forward_pre_hook(begin, prepend=True)
    takes.register_forward_hook(end)
    for block in names:
        block.register_forward_pre_hook(note_order, prepend=True)


def _hold_weights(block: nn.Module, name: str) -> None:
    """Refuse a block that writes weights in its first forward in training: it has only copies."""
    before: dict[str, tuple[int, Tensor]] = {}
    done = False
    refused: UserError | None = None

    def mark() -> dict[str, tuple[int, Tensor]]:
        # What is written through `.data` leaves the version as it was.
        return {
            name: (weight._version, real_parts(weight.detach()).nansum(dtype=torch.float64))  # noqa: SLF001
            for name, weight in block.named_parameters(prefix=name)
            if not is_sharded(weight)
        }

    def begin(*_: object) -> None:
        nonlocal before
        if block.training and refused is not None:  # a trial before the first step kept it quiet
            raise refused
        if block.training and not done:  # once more after a forward that failed
            before = mark()

    def end(*_: object) -> None:
        nonlocal done, refused
        if done or not before:
            return
        now = mark()  # of more weights, where those of inner blocks stay gathered
        wrote = [name for name, then in before.items() if now.get(name) != then]
        done = True
        if wrote:
            refused = UserError(
                f"--strategy fsdp: forward writes the model's parameter {wrote[0]}, and what it "
                "writes is lost: the gathered weights are a copy. Keep it in a buffer, set it in "
                "model(), or use --strategy ddp."
            )
            raise refused

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end, prepend=True)


def _refuse_order(name: str) -> None:
    raise UserError(
        f"--strategy fsdp: a forward called or left out {name}, unlike the first one. Each block "
        "is gathered from all ranks, which have to call the same blocks in the same order: a model "
        "that leaves out blocks at random would compute with mixed weights.",
        remedy="Use --strategy ddp --find-unused, or multiply what a block adds by 0 instead.",
    )


def build_once(build: Callable[..., nn.Module], world: World) -> nn.Module:
    """Return a model with its numbers on rank 0, and on the others, where possible, without any.

    `build` takes `on_meta`. A constructor that looks at its numbers fails without them: then the
    rank builds all of the model, as rank 0 does. All ranks' generators are those of rank 0 then.
    """
    before = rng_state()
    model = None
    if not world.is_main:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of weights that are loaded into nothing
            model = build(on_meta=True)
            if any(_has_meta(vars(module).values()) for module in model.modules()):
                model = None
        set_rng_state(before)
    model = build() if model is None else model
    names, state = world.broadcast(([*model.state_dict()], rng_state()))
    if [*model.state_dict()] != names:  # without numbers it has made others
        model = build()
    set_rng_state(state)
    return model


def _has_meta(values: Iterable[Any]) -> bool:
    """Whether there are tensors without numbers besides parameters and buffers."""
    return any(
        isinstance(leaf, Tensor) and leaf.is_meta
        for value in values
        if isinstance(value, Tensor | list | tuple | set)
        for leaf in (value if isinstance(value, list | tuple | set) else (value,))
    )


@torch.no_grad()
def _take_from_main(block: nn.Module, world: World) -> None:
    """Give a block rank 0's numbers, on this rank's device, but for what is sharded already."""
    placed: dict[int, nn.Parameter] = {}  # tied weights are in one block, or in none
    for module in block.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is None or is_sharded(parameter):
                continue
            if id(parameter) in placed:  # tied
                module._parameters[name] = placed[id(parameter)]  # noqa: SLF001
                continue
            new = parameter
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=world.device)
                new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                new.__dict__.update(vars(parameter))
            else:
                new.data = parameter.data.to(world.device)
            module._parameters[name] = placed[id(parameter)] = placed[id(new)] = new  # noqa: SLF001
            world.take_from_main(new.detach())
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is None or id(buffer) in placed:
                continue
            there = torch.empty_like(buffer, device=world.device) if buffer.is_meta else buffer
            there = there.to(world.device)
            module._buffers[name] = there  # noqa: SLF001
            world.take_from_main(there)


def compile_blocks(root: nn.Module) -> None:
    """Compile the forward of each block, inside of what gathers and frees its weights."""
    for module in root.modules():
        if is_shard_root(module) and module is not root:
            module.forward = torch.compile(module.forward, dynamic=False)


def find_blocks(model: nn.Module, classes: tuple[type, ...]) -> list[nn.Module]:
    """Return the blocks of a model, the innermost first: of these classes, or found by size."""
    if not classes:
        return [*_by_size(model)][::-1]
    modules = [module for module in model.modules() if module is not model]
    for wanted in classes:
        if not any(isinstance(module, wanted) for module in modules):
            names = sorted({type(module).__name__ for module in modules})
            raise UserError(
                f"Recipe(shard=…) names {wanted.__name__}, and the model has no such block. "
                f"{did_you_mean(wanted.__name__, names)}Its modules are: {listed(names, 12)}.",
                on_all_ranks=True,
            )
    blocks = [m for m in modules if isinstance(m, classes) and any(True for _ in m.parameters())]
    return blocks[::-1]


def _by_size(model: nn.Module) -> Iterator[nn.Module]:
    """Yield repeated blocks in lists and sequences, and large layers in sequences.

    Others are left to the root: their weights may be used without calling them, as an embedding's
    for the output, and only a call gathers them.
    """
    least = _size(model) / _LEAST_SHARE

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        children = list(module.children())
        kinds = [type(child) for child in children]
        for child, kind in zip(children, kinds, strict=True):
            listed_one = isinstance(module, nn.ModuleList | nn.Sequential)
            repeats = listed_one and kinds.count(kind) > 1 and any(True for _ in child.children())
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.ParameterList)
            large = isinstance(module, nn.Sequential) and not any(True for _ in child.children())
            if not is_list and _size(child) and (repeats or (large and _size(child) >= least)):
                yield child
            else:
                yield from walk(child)

    # A layer that is used in several places is one module: twice a block would be no block.
    yield from dict.fromkeys(walk(model))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _check_groups(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Check what FSDP asks of the weights that are gathered together: a block's, or the rest."""
    names = {module: name for name, module in model.named_modules()}
    owner: dict[str, nn.Module] = {}
    for block in [model, *blocks[::-1]]:  # the innermost block has the last word
        prefix = names[block] + "." if names[block] else ""
        for name, _ in model.named_parameters(remove_duplicate=False):
            if name.startswith(prefix):
                owner[name] = block
    first: dict[int, str] = {}
    types: dict[nn.Module, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 0:
            raise UserError(
                f"--strategy fsdp: {name} is a single number, which ranks cannot share out. Make "
                "it a vector of one: torch.ones(1).",
                on_all_ranks=True,
            )
        other = types.setdefault(owner[name], name) if parameter.requires_grad else name
        if (theirs := model.get_parameter(other).dtype) != parameter.dtype:
            raise UserError(
                f"--strategy fsdp: {other} is {theirs} and {name} is {parameter.dtype}, and they "
                "are gathered together. Give the weights of a block one type.",
                on_all_ranks=True,
            )
        other = first.setdefault(id(parameter), name)
        if owner[other] is not owner[name]:
            blocks_of = [names[owner[n]] or "the rest of the model" for n in (other, name)]
            raise UserError(
                f"--strategy fsdp: {other} and {name} are one weight in two blocks "
                f"({blocks_of[0]}; {blocks_of[1]}), and each block gathers and frees its own. "
                "Name blocks that hold both or neither with Recipe(shard=(Block,)), or use "
                "--strategy ddp.",
                on_all_ranks=True,
            )
