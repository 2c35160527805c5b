"""`samestep explain`: what a training will do, before anything runs."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from samestep.base.errors import UserError
from samestep.base.flags import InShell, NumRanks
from samestep.base.run.directory import is_run
from samestep.base.settings import Settings
from samestep.base.tracker_choice import check_installed, chosen
from samestep.core.recipes import RECIPES
from samestep.launch.ranks.nproc import ranks_to_start, refuse_inside_launcher
from samestep.launch.ranks.process import run_as_rank
from samestep.shell.api.arguments import check_positive
from samestep.shell.commands.forms import Form, Switch
from samestep.shell.commands.target import parse_target
from samestep.shell.commands.train import check_resume

if TYPE_CHECKING:
    from samestep.core.session.request import Request
    from samestep.launch.ranks.world import ImaginedWorld

_MOST_RANKS = 4096


@dataclass(frozen=True)
class ExplainFlags:
    """Explain what training {} will do: ranks, batches, memory, learning rate, checkpoints."""

    config: Path | None = None
    """TOML or YAML file of settings and options; flags win over it."""
    nproc: NumRanks = 1
    """Ranks per node; this machine need not have room for them. auto: as many as `samestep train`
    would start here."""
    nodes: int = 1
    """Number of nodes."""
    new: Switch = False
    """With a RUN, explain a new run with its settings, as `samestep train RUN` starts it."""
    resume: Switch = False
    """With a RUN, explain how it is resumed; this is the default."""
    allow_change: Annotated[str | None, InShell("NAMES")] = None
    """Settings that may differ, as in `samestep train RUN --resume`."""
    recipe_of_run: Switch = False
    """Use the run's own copy of its recipe, as in `samestep train RUN --resume`."""
    json: Switch = False
    """Print one JSON object with all numbers."""


FORM = Form(
    verb="explain",
    kind=ExplainFlags,
    examples=("explain spiral --nproc 8 --epochs 5", "explain runs/ID --nproc 2 --nodes 2 --json"),
    settings=True,
)


def main(arguments: list[str]) -> int:
    """Explain a training, or report a mistake in one message."""
    return run_as_rank(lambda _log: _explain(arguments))


def _explain(arguments: list[str]) -> int:
    refuse_inside_launcher("samestep explain", "Start it as one process.")
    command, request = _parse(arguments)
    settings = request.settings
    from samestep.prove.explanation.explain import explain  # noqa: PLC0415
    from samestep.prove.explanation.explanation_text import text_of  # noqa: PLC0415
    from samestep.shell.api.training import check_engine  # noqa: PLC0415 - the help needs no torch

    check_engine(request)
    check_installed(chosen(settings.track))
    world, device = _imagined(command, settings)
    # A recipe must not print before the JSON object.
    with redirect_stdout(sys.stderr if command.json else sys.stdout):
        explanation = explain(request, world, device)
    if command.json:
        sys.stdout.write(json.dumps(explanation.as_json(), indent=2, default=list) + "\n")
    else:
        sys.stdout.write(text_of(explanation))
    return 0


def _parse(arguments: list[str]) -> "tuple[ExplainFlags, Request]":
    """Return the command and the request; a run is resumed unless --new is given."""
    typed = set(arguments[1:])
    if {"--new", "--resume"} <= typed:
        raise UserError("--new and --resume exclude each other: leave one out.")
    is_target = arguments and arguments[0] not in RECIPES and is_run(Path(arguments[0]))
    if is_target and not typed & {"--new", "--resume"}:
        arguments = [*arguments, "--resume"]
    command, request = parse_target(FORM, arguments)
    check_resume(request)
    return command, request


def _imagined(command: ExplainFlags, settings: Settings) -> "tuple[ImaginedWorld, str]":
    """Return the world to explain, in which this process is rank 0, and its device."""
    import torch  # noqa: PLC0415 - the help needs none

    from samestep.launch.ranks.world import ImaginedWorld, choose_backend, choose_device  # noqa: PLC0415

    nproc = command.nproc
    if nproc == "auto":
        nproc = ranks_to_start("auto", settings.device)
    check_positive(nproc=nproc, nodes=command.nodes)
    ranks = nproc * command.nodes
    if ranks > _MOST_RANKS:
        raise UserError(f"{ranks} ranks are too many to explain; the limit is {_MOST_RANKS}.")
    device = settings.device
    if device == "auto":
        kind = choose_device("auto", 0).type
        # Gloo cannot reduce tensors on Apple's GPU.
        device = "cuda" if kind == "cuda" else "mps" if kind == "mps" and ranks == 1 else "cpu"
    backend = choose_backend(settings.backend, torch.device(device))
    world = ImaginedWorld(
        world_size=ranks,
        local_world_size=nproc,
        num_nodes=command.nodes,
        backend=backend if ranks > 1 else "none",
    )
    return world, device
