"""The weights of a checkpoint as a file that other programs read, made from the run's files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, listed, what_to_install
from samestep.base.run.checkpoints import load
from samestep.base.run.directory import is_run, no_run
from samestep.base.run.files import write_atomically
from samestep.base.run.index import find_checkpoint
from samestep.core.learner.model_state import EXTRA_STATE, load_model, misfits
from samestep.core.training.snapshot import evaluated_weights

SAFETENSORS = ".safetensors"
_BY_TORCH = (".pt", ".pth")


def write_weights(
    run: Path, file: Path, checkpoint: str = "best", *, force: bool = False
) -> dict[str, Any]:
    """Write the weights that an evaluation of a checkpoint uses: averaged with `--ema`.

    The run's recipe is not needed. Of a run of `open_run` these are the modules of its state; the
    names begin with that of the module in the state if it has several.

    Args:
        run: the run's directory.
        file: a name that ends in .safetensors, or in .pt or .pth for a `state_dict` by torch.save.
        checkpoint: "best", "last", or a file name in checkpoints/.
        force: whether a file that is there is overwritten.

    Returns:
        What was written: `file`, `checkpoint`, `step`, `tensors`, `bytes`, and `left_out`, the
        names of what is not a tensor and so has no place in a safetensors file.

    Raises:
        UserError: the name, the run or the checkpoint does not fit, the file is there already, or
            safetensors is not installed.
    """
    if file.suffix not in (SAFETENSORS, *_BY_TORCH):
        raise UserError(
            f"{file}: name a file that ends in {SAFETENSORS}, or in {' or '.join(_BY_TORCH)} for "
            "a state_dict of PyTorch."
        )
    save = _by_safetensors() if file.suffix == SAFETENSORS else torch.save
    if not is_run(run):
        raise no_run(run)
    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no directory {file.parent}. Make it, or name another.")
    if file.is_dir() or (file.exists() and not force):
        more = "" if file.is_dir() else ", or overwrite it with --force"
        raise UserError(f"{file} exists already. Name another file{more}.")
    folder = file.resolve().parent
    if folder.name == "checkpoints" and is_run(folder.parent):
        raise UserError(f"{file} is in a run's folder of checkpoints. Name another file.")
    entry = find_checkpoint(run / "checkpoints", checkpoint)
    weights = weights_in(load(run / "checkpoints", entry))
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{run / 'checkpoints' / entry.path} holds no weights.")
    left_out = sorted(weights.keys() - tensors.keys()) if file.suffix == SAFETENSORS else []
    # A state_dict's order is that of the model.
    content = tensors if file.suffix == SAFETENSORS else weights
    write_atomically(file, lambda opened: save(content, opened))
    return {
        "file": str(file),
        "checkpoint": entry.path,
        "step": entry.step,
        "tensors": len(tensors),
        "bytes": file.stat().st_size,
        "left_out": left_out,
    }


def load_into(
    model: nn.Module, run: Path, checkpoint: str = "best", *, part: str | None = None
) -> nn.Module:
    """Load the weights that an evaluation of a checkpoint uses into a model; return it.

    Args:
        model: built as the run's was; it keeps its device and precision.
        run: the run's directory, of a recipe or of `open_run`.
        checkpoint: "best", "last", or a file name in checkpoints/.
        part: the entry of the state whose weights they are; by default the one that fits.

    Raises:
        UserError: there is no such run, checkpoint or part, or none or several fit the model.
    """
    if not is_run(run):
        raise no_run(run)
    entry = find_checkpoint(run / "checkpoints", checkpoint)
    modules = _modules_in(load(run / "checkpoints", entry))
    if part is None and len(modules) > 1:
        wrong = {name: misfits(state, model.state_dict()) for name, state in modules.items()}
        fitting = [name for name in modules if not wrong[name]]
        if len(fitting) != 1:
            fits = "; ".join(f"{name!r}: {why[0]}" for name, why in wrong.items() if why)
            fits = f"{', '.join(map(repr, fitting))} fit the model" if fitting else fits
            name = (fitting or [*modules])[0]
            raise UserError(f"{entry.path} has several modules: {fits}. Name one: part={name!r}.")
        (part,) = fitting
    part = next(iter(modules), "") if part is None else part
    if part not in modules:
        raise UserError(
            f"{entry.path} has no weights named {part!r}; it has {', '.join(modules) or 'none'}."
        )
    remedy = "Build the same model as the run's script."
    load_model(model, {"model": modules[part]}, f"{part!r} of {entry.path} does", remedy)
    return model.eval()


def weights_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights in a checkpoint's content by their names, as they are evaluated."""
    modules = _modules_in(content)
    if len(modules) == 1:
        return dict(next(iter(modules.values())))
    return {f"{name}.{key}": value for name, own in modules.items() for key, value in own.items()}


def _modules_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of each module of a loop's own state, or those of a recipe's model."""
    if "state" not in content:
        return {"model": evaluated_weights(dict(content))}
    return {name: state for name, state in content["state"].items() if _is_of_a_module(state)}


def _is_of_a_module(state: Any) -> bool:
    """Whether a state is that of a module: tensors by name. Others have numbers, too."""
    if not isinstance(state, Mapping) or not state:
        return False
    others = [n for n, v in state.items() if not isinstance(v, Tensor)]
    return len(others) < len(state) and all(str(name).endswith(EXTRA_STATE) for name in others)


def _by_safetensors() -> Callable[[dict[str, Tensor], BinaryIO], None]:
    try:
        from safetensors.torch import save_file  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise UserError(
            f"A {SAFETENSORS} file needs safetensors, which is not installed. "
            f"{what_to_install(error)}Or name a file that ends in .pt."
        ) from error

    def save(tensors: dict[str, Tensor], opened: BinaryIO) -> None:
        storages: set[int] = set()
        own = {}
        for name, tensor in tensors.items():
            place = tensor.untyped_storage().data_ptr()
            shared = place in storages  # tied weights: the format has no two names for one tensor
            storages.add(place)
            own[name] = tensor.detach().clone() if shared else tensor.detach().contiguous()
        try:
            save_file(own, opened.name, metadata={"format": "pt"})
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            kinds = sorted({str(tensor.dtype) for tensor in own.values()})
            raise UserError(
                f"safetensors cannot write {listed(kinds)}: {error}. Name a file that ends in .pt."
            ) from error

    return save
