"""Weights that a training starts from (`--init-from`): of another run, or of a file."""

import copy
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep.base.errors import UserError, error_text, listed, what_to_install
from samestep.base.nearby import nearby
from samestep.base.run.checkpoints import load, read_file
from samestep.base.run.directory import is_run, no_run
from samestep.base.run.files import sha256_of
from samestep.base.run.index import Entry, find_checkpoint, verify
from samestep.base.run.summary import first_start
from samestep.core.learner.model_state import load_model, misfits
from samestep.core.session.weights_file import SAFETENSORS, weights_in
from samestep.launch.ranks.world import World

_INDEX = ".safetensors.index.json"
_SAVED = (f"model{_INDEX}", "model.safetensors", "pytorch_model.bin")
"""Files that `save_pretrained` writes into a folder; the first is an index of several files."""
_BY_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_INSIDE = ("state_dict", "model_state_dict", "model")
"""Where in a file of PyTorch's the weights may be, if it holds more."""
_AROUND = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and a LightningModule put before each name."""
_MOST = 20
"""Misfits that a message lists."""


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """The weights that a model was given before its first step."""

    path: str
    """The file; of a run, its checkpoint."""
    sha256: str
    """Of the file; of an index, over the hashes of it and of its files."""
    left_out: tuple[str, ...]
    """With --no-init-strict: what did not fit."""

    def note(self) -> str:
        """Return the note for the start of the run."""
        left = f" Not loaded, as it did not fit: {listed(self.left_out, _MOST, '; ')}."
        return f"It starts from the weights in {self.path}.{left if self.left_out else ''}"

    def check_unchanged(self, run: Path) -> None:
        """Check that a run that begins again, without a checkpoint, starts from the same."""
        before = first_start(run).get("init_from") or {}
        if before and before["sha256"] != self.sha256:
            raise UserError(
                f"--init-from {self.path} is not what {run} started with: its SHA-256 was "
                f"{before['sha256'][:12]}…, now it is {self.sha256[:12]}…. Restore the file, or "
                "start a new run without --resume."
            )


def start_from(model: nn.Module, source: Path, world: World, *, strict: bool) -> InitialWeights:
    """Load weights into a new model, before ranks share it out; all ranks call it.

    No code in a file is run.

    Args:
        model: the new model; where it has no numbers yet, rank 0's will be taken.
        source: a run, whose best checkpoint is taken as it is evaluated; one of its checkpoints; a
            file: .safetensors, or a `state_dict` of PyTorch in .pt, .pth, .bin or .ckpt; or what
            `save_pretrained` wrote: the folder, or the index of several .safetensors.
        world: the ranks; each reads the file.
        strict: whether names and shapes must be those of the model; else those that are, are
            loaded.

    Raises:
        UserError: the file cannot be read, or the weights do not fit.
    """
    flag = f"--init-from {source}"
    path, entry, digest = world.on_main(lambda: _weights_file(source, flag))
    left_out = world.on_every(lambda: _fill(model, _read(path, entry, flag), flag, strict=strict))
    return InitialWeights(path=str(path), sha256=digest, left_out=left_out)


def _weights_file(source: Path, flag: str) -> tuple[Path, Entry | None, str]:
    """Return the file to read, its entry if it is a run's checkpoint, and its SHA-256."""
    if source.is_dir() and not is_run(source):
        saved = (source / name for name in _SAVED)
        if (weights := next(filter(Path.is_file, saved), None)) is None:
            raise no_run(source)
        source = weights
    folder, name = source.parent, source.name
    if source.is_dir():
        folder = source / "checkpoints"
        name = "best"
    if folder.name == "checkpoints" and is_run(folder.parent):
        entry = find_checkpoint(folder, name)
        verify(folder, entry)
        return folder / entry.path, entry, entry.sha256
    if not name.endswith((SAFETENSORS, _INDEX, *_BY_TORCH)):
        raise UserError(
            f"{flag}: name the directory of a run, one of its checkpoints, a folder that "
            f"save_pretrained wrote, or a file that ends in {SAFETENSORS}, or in "
            f"{', '.join(_BY_TORCH)} for a state_dict of PyTorch."
            f"{'' if source.exists() else nearby(source, 'run', 'file')}"
        )
    try:
        hashes = [sha256_of(file) for file in (source, *_files_of(source, flag))]
    except OSError as error:
        raise UserError(
            f"{flag}: {error.filename}: {error.strerror}.{nearby(source, 'file')}"
        ) from error
    together = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return source, None, together if len(hashes) > 1 else hashes[0]


def _files_of(index: Path, flag: str) -> list[Path]:
    """Return the files in an index's folder that it names; none if this is another file."""
    if not index.name.endswith(_INDEX):
        return []
    try:
        names = {Path(name).name for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{flag}: {index} has no weight_map: it is not an index.") from error
    return [index.with_name(name) for name in sorted(names)]


def _read(path: Path, entry: Entry | None, flag: str) -> dict[str, Any]:
    if entry is not None:
        return weights_in(load(path.parent, entry, verified=True))
    if files := _files_of(path, flag):
        return {n: value for file in files for n, value in _read(file, None, flag).items()}
    if path.suffix == SAFETENSORS:
        try:
            return import_module("safetensors.torch").load_file(path)  # type: ignore[no-any-return]
        except Exception as error:  # it is an extra, and its errors are its own
            more = what_to_install(error)
            raise UserError(
                f"{flag} cannot be read: {error_text(error)}. {more}".rstrip()
            ) from error
    content = read_file(path)
    if isinstance(content, dict) and isinstance(content.get("format"), int):
        content = weights_in(content)  # a checkpoint that was taken out of its run
    inside = [content.get(name) for name in _INSIDE] if isinstance(content, dict) else []
    for state in (content, *inside):
        if isinstance(state, dict) and any(isinstance(v, Tensor) for v in state.values()):
            return copy.copy(state)
    raise UserError(
        f"{flag}: the file holds no tensors by name, on top or under {', '.join(_INSIDE)}. Save "
        "only the weights: torch.save(model.state_dict(), file)."
    )


def _fill(model: nn.Module, weights: dict[str, Any], flag: str, *, strict: bool) -> tuple[str, ...]:
    own = model.state_dict()
    if any(isinstance(value, Tensor) and value.is_meta for value in own.values()):
        return ()
    measured = _measured_names(model)
    loaded = _named_as(own, weights) | {name: own[name] for name in measured}
    wrong = misfits(loaded, own)
    if wrong and not strict:
        fits = {n for n in own if n in loaded and not misfits({n: loaded[n]}, {n: own[n]})}
        if not fits:
            raise UserError(f"{flag}: nothing in it fits the model: {listed(wrong, _MOST, '; ')}.")
        loaded = {name: loaded[name] if name in fits else value for name, value in own.items()}
    remedy = "Build the model that they belong to, or add --no-init-strict to load what fits."
    load_model(model, {"model": loaded}, f"{flag}: the weights do", remedy, most=_MOST)
    return () if strict else tuple(wrong)


def _measured_names(model: nn.Module) -> set[str]:
    """Return the names of what metrics of torchmetrics keep: it is of the training before."""
    known = sys.modules.get("torchmetrics")
    metrics = [(n, m) for n, m in model.named_modules() if known and isinstance(m, known.Metric)]
    return {f"{name}.{key}" for name, metric in metrics for key in metric.state_dict()}


def _named_as(own: Mapping[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """Return weights by the names that they have in a model, also without a wrapper's prefix."""
    for prefix in _AROUND:
        inside = all(name.startswith(prefix) for name in weights)
        if inside and not any(name.startswith(prefix) for name in own):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    # Files of Hugging Face hold tied weights once.
    places = {n: (v.data_ptr(), v.shape) for n, v in own.items() if isinstance(v, Tensor)}
    held = {place: weights[n] for n, place in places.items() if n in weights and place[0]}
    tied = {n: held[place] for n, place in places.items() if n not in weights and place in held}
    weights.update(tied)
    return weights
