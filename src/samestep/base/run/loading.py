"""Checkpoint files read back: verified, mapped into memory instead of copied, and let go again.

A checkpoint of gigabytes is resumed by all ranks of a node at once. They map one file, so its pages
are in memory once for all of them, and each rank copies only what it keeps.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.base.errors import UserError, listed
from samestep.base.run.checkpoints import FORMAT, why_not_loaded
from samestep.base.run.host_copy import map_state
from samestep.base.run.index import Entry, shards_of, verify

_LARGE = ("model", "ema", "optimizer", "state")
"""What nearly all of a checkpoint's bytes are in."""


def load(
    folder: Path,
    entry: Entry,
    *,
    verified: bool = False,
    mesh: Any = None,
    own: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU.

    Tensors under "model", "ema", "optimizer" and "state" lie in the mapped file: keep one
    only as a copy (`own_memory`), because a file that is deleted on another node takes its pages
    along. All others are copies. The mapping ends with the last of its tensors, so let the content
    go once it is restored. The parts of a sharded checkpoint are read over `mesh`, a DeviceMesh;
    without one they are put together.

    Args:
        folder: the run's checkpoints/.
        entry: what the index says of the checkpoint.
        verified: whether the hash is checked elsewhere; use nothing of the content before it is.
        mesh: over which sharded tensors are cut.
        own: what is copied besides, as "optimizer" or "state/adam".

    Raises:
        UserError: the file is missing, damaged, or no checkpoint that this version can load.
    """
    path = folder / entry.path
    if not verified:
        verify(folder, entry)
    state = read_file(path)
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise UserError(f"{path} is not a checkpoint of samestep.")
    if state["format"] > FORMAT:
        raise NewerFormat(
            f"{path} was written by a newer samestep: it is in checkpoint format "
            f"{state['format']}, and this version reads format {FORMAT}.",
            remedy="Update samestep here: pip install --upgrade samestep.",
        )
    _check_parts(path, state, entry)
    if entry.files:
        from samestep.base.run import shards  # noqa: PLC0415 - half a second, only for FSDP

        state = shards.read(folder / shards_of(entry.path), state, mesh)
    own = tuple(f"{path}/" for path in own)
    content: dict[str, Any] = own_memory(
        state, lambda path: path.split("/")[0] not in _LARGE or path.startswith(own)
    )
    return content


class NewerFormat(UserError):  # noqa: N818 - not an error of the file
    """A checkpoint is whole, and of a later version than this one."""


_NEEDED = {
    "recipe": (
        *("classes", "model", "optimizer/state", "optimizer/param_groups", "order", "rng"),
        *("loss_sums", "schedule", "scaler", "watch/metric", "watch/mode"),
    ),
    "program": ("settings", "state", "order", "sums", "own"),
    "pytorch-lightning_version": ("state_dict", "loops", "optimizer_states", "lr_schedulers"),
}
"""What is in each checkpoint of a kind, by what shows the kind: a recipe's, an own loop's."""


def _check_parts(path: Path, state: Mapping[str, Any], entry: Entry) -> None:
    """Check that a file with the right hash has what is needed to continue from it."""
    kinds = [kind for kind in _NEEDED if kind in state] or ["recipe"]
    needed = [part for kind in kinds for part in (kind, *_NEEDED[kind])]
    needed += [f"position/{name}" for name in ("step", "epoch", "step_in_epoch", "samples")]
    held = state.get("optimizer")
    if held and isinstance(held, Mapping) and not {"state", "param_groups"} & held.keys():
        needed = [part for part in needed if not part.startswith("optimizer/")]  # its own form
    missing = [part.replace("/", ".") for part in needed if not _has(state, part)]
    if missing:
        raise UserError(f"{path} is not a whole checkpoint: it lacks {listed(missing)}.")
    if (step := state["position"]["step"]) != entry.step:
        raise UserError(f"{path} is of step {step}; the index says step {entry.step}.")


def _has(state: Mapping[str, Any], part: str) -> bool:
    first, _, inner = part.partition("/")
    found = state.get(first)
    return first in state and (not inner or (isinstance(found, Mapping) and _has(found, inner)))


def read_file(path: Path) -> Any:
    """Return what a file holds, mapped; read into memory if it cannot be mapped."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    # The second way is for file systems without mmap, and it names what is wrong with a file.
    for maps in (True, False):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
        except Exception as error:  # what it raises depends on what stands in the file
            if not maps:
                raise UserError(
                    f"{path} is not a checkpoint that can be loaded safely: "
                    f"{why_not_loaded(error)}."
                ) from error
    raise AssertionError


def own_memory(value: Any, chosen: Callable[[str], bool] = lambda _: True) -> Any:
    """Return a part of a checkpoint with copies of its tensors, those at the `chosen` paths.

    Those that are one stay one.
    """
    copies: dict[int, Tensor] = {}

    def copy(path: str, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and chosen(path)):
            return leaf
        if id(leaf) not in copies:
            with torch.no_grad():
                copies[id(leaf)] = leaf.clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return map_state(copy, value)


def without_tensors(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content without its large parts, to keep once they are restored."""
    return {name: part for name, part in content.items() if name not in _LARGE}
