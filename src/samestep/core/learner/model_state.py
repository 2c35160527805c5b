"""How a checkpoint's state is loaded into a model, and a trial of it."""

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.base.errors import UserError, error_text, listed
from samestep.base.run.checkpoints import own_memory
from samestep.base.trees import map_leaves, map_tensors, tree_leaves
from samestep.launch.ranks.mesh import is_sharded, sharded_as

EXTRA_STATE = "_extra_state"
_Model = TypeVar("_Model", bound=nn.Module)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and those in it, as `modules()` does, in a quarter of its time.

    One that is in two places comes twice.
    """
    modules = [module]
    for child in module._modules.values():  # noqa: SLF001
        modules += modules_of(child) if child is not None else ()
    return modules


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module, as `parameters()` does, in a quarter of its time.

    One that is in two places comes twice.
    """
    if type(module).parameters is not nn.Module.parameters:
        return [*module.parameters()]
    tables = (part._parameters for part in modules_of(module))  # noqa: SLF001
    return [p for table in tables for p in table.values() if p is not None]


def copied(model: _Model, memo: dict[int, Any] | None = None) -> _Model:
    """Return a deep copy of a model; as of `copy.deepcopy`, `memo` says what is not copied.

    `net.forward = wrapped(net.forward)` puts a function in the place of a method, whose closure
    holds the module itself: a copy by `copy.deepcopy` would call the original.
    """
    known: dict[int, Any] = {} if memo is None else memo
    twin = copy.deepcopy(model, known)
    for module in twin.modules() if twin is not model else ():
        hooks = [own for own in vars(module).values() if isinstance(own, OrderedDict)]
        for place in (vars(module), *hooks):
            place.update({name: _of_copy(own, known) for name, own in place.items()})
    return twin


def _of_copy(own: Any, known: dict[int, Any]) -> Any:
    """Return a function or a method that belongs to the copies known by their ids, or a copy."""
    if isinstance(own, MethodType):
        return MethodType(_of_copy(own.__func__, known), _of_copy(own.__self__, known))
    if isinstance(own, list | dict) and any(id(leaf) in known for leaf in tree_leaves(own)):
        return map_leaves(lambda leaf: _of_copy(leaf, known), own)  # such as layers in a list
    if not isinstance(own, FunctionType) or own.__closure__ is None or id(own) in known:
        return known.get(id(own), own)
    cells = tuple(known.setdefault(id(cell), CellType()) for cell in own.__closure__)
    usual = own.__defaults__ and tuple(_of_copy(value, known) for value in own.__defaults__)
    twin = FunctionType(own.__code__, own.__globals__, own.__name__, usual, cells)
    twin.__kwdefaults__ = own.__kwdefaults__
    known[id(own)] = functools.update_wrapper(twin, own)
    for cell, new in zip(own.__closure__, cells, strict=True):
        with contextlib.suppress(ValueError):  # an empty cell: it is not assigned yet
            new.cell_contents = _of_copy(cell.cell_contents, known)
    return twin


def hooked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters with hooks on their gradients."""
    named = model.named_parameters()
    return {n: p for n, p in named if p._backward_hooks or p._post_accumulate_grad_hooks}  # noqa: SLF001


def misfits(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each saved weight that does not fit the model's."""
    problems = [f"{name} is missing" for name in own if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in own]
    return problems + _other_shapes(saved, own)


def load_model(
    model: nn.Module,
    state: dict[str, Any],
    what: str = "The checkpoint does",
    remedy: str = "Use the model options of the run that wrote it.",
    most: int = 3,
) -> None:
    """Load a checkpoint's weights into a model.

    A module's own `_load_from_state_dict` may make room for what has grown, or take other names.

    Raises:
        UserError: the checkpoint does not fit the model; `what` begins the message, which lists as
            many misfits as `most`.
    """
    saved, own = state["model"], model.state_dict()
    wrong = misfits(saved, own)
    given = copy.copy(saved)  # with the versions of its modules, which are in an attribute
    if any(is_sharded(value) for value in own.values()):
        given.update({n: sharded_as(tensor, own[n]) for n, tensor in saved.items() if n in own})
    # A module may keep what `set_extra_state` gives it.
    given.update({n: own_memory(part) for n, part in saved.items() if n.endswith(EXTRA_STATE)})
    try:
        model.load_state_dict(given)
        # PyTorch puts the first of several numbers into a single one.
        loaded = not wrong or not _other_shapes(saved, model.state_dict())
    except Exception:
        if not wrong:
            raise
        loaded = False
    if not loaded:
        raise UserError(
            f"{what} not fit the model: {listed(wrong, most, between='; ')}.", remedy=remedy
        )


def _other_shapes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} has shape {_shape(saved[name])}, the model {_shape(own[name])}"
        for name in own
        if name in saved and _shape(saved[name]) != _shape(own[name])
    ]


class ModelTrial:
    """Whether a checkpoint leads back to the state of a model whose state changes its form.

    A copy of the new model loads it after the first step, and later where the form has changed
    again. Tensors of the copy have a shape and a type, and no memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._form = dict[str, Any]()
        self._parameters = [name for name, _ in model.named_parameters()]
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        self._new: nn.Module | None = None
        with contextlib.suppress(Exception), Hollowing():  # it may hold locks or streams
            self._new = copied(model, memo)

    def check(self, model: nn.Module, what: str, *, of_loop: bool = False) -> None:
        """Check that loading restores the state of a model; `what` begins the message.

        `of_loop`: a loop of the user's that adds layers may do so again before it resumes.
        """
        grown = self._parameters != [name for name, _ in model.named_parameters()]
        if self._new is None or (of_loop and grown):
            return
        state = model.state_dict()
        form = {name: (_shape(v), getattr(v, "dtype", None)) for name, v in state.items()}
        if form != self._form and (why := self._why_lost(state)):
            raise UserError(
                f"{what} could not be resumed: {why.rstrip('.')}.",
                remedy="Begin with all parameters, and a buffer of its last size (instead of None, "
                "too), or let the "
                "_load_from_state_dict of its module make room for the saved one before it calls "
                "super(). What get_extra_state returns, set_extra_state restores.",
            )
        self._form = form

    def _why_lost(self, state: dict[str, Any]) -> str:
        assert self._new is not None
        # A module's own code may read what it has packed into bytes.
        plain = {name: value for name, value in state.items() if not name.endswith(EXTRA_STATE)}
        state.update(map_tensors(hollow, plain))
        with Hollowing():
            twin = copied(self._new)
        try:
            load_model(twin, {"model": state})
            return difference(state, map_tensors(hollow, dict(twin.state_dict())))
        except Exception as error:
            text = error_text(error)
            if isinstance(error, UserError):
                text = str(error).split(" Use the")[0]
            # Its code may read numbers in tensors, which these have not.
            return "" if "meta" in text.lower() else text


def _shape(value: object) -> tuple[int, ...] | None:
    """Return a tensor's shape; None for the result of `get_extra_state`."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


class Hollowing(TorchFunctionMode):
    """Lets `copy.deepcopy` take no memory for tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        return hollow(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def hollow(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type without memory; a single number as it is."""
    if tensor.dim() == 0 and not is_sharded(tensor):
        return tensor.detach().clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def difference(first: Any, other: Any, path: str = "") -> str:
    """Return the first difference between a state and its loaded copy, "" if there is none."""
    if isinstance(first, dict) and isinstance(other, dict):
        pairs = [(key, value, other.get(key, _GONE)) for key, value in first.items()]
    elif isinstance(first, list | tuple) and isinstance(other, list | tuple):
        pairs = list(zip(range(len(first)), first, [*other, *[_GONE] * len(first)], strict=False))
    elif isinstance(first, Tensor) and isinstance(other, Tensor):
        empty = first.is_meta or other.is_meta
        # torch loads a fused optimizer's counts as float32, to where the parameters are.
        typed = first.dtype == other.dtype or (empty and first.dim() == 0)
        same = first.shape == other.shape and typed
        same = same and (empty or torch.equal(*(t.cpu().nan_to_num(0.5) for t in (first, other))))
        return "" if same else _described(path, first, other)
    else:
        with contextlib.suppress(Exception):  # of a class that does not compare
            # Two NaNs differ, and are written alike.
            if first != other and repr(first) != repr(other):
                return _described(path, first, other)
        return ""
    named = [(k if isinstance(k, int | str) else type(k), *values) for k, *values in pairs]
    differences = (difference(mine, its, f"{path}[{key!r}]") for key, mine, its in named)
    return next(filter(None, differences), "")


class _Gone:
    def __repr__(self) -> str:
        return "missing"


_GONE = _Gone()


def _described(path: str, first: Any, other: Any) -> str:
    def short(value: Any) -> str:
        if isinstance(value, Tensor) and value.dim():
            return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
        return f"{value!r:.40}"

    return f"state_dict(){path} is {short(first)}, and {short(other)} once it is loaded"
