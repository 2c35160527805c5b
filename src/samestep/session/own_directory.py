"""The run directory of a loop of one's own: the same files as those of `samestep train`."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch

from samestep.errors import UserError
from samestep.ranks.process import JOB_RUN
from samestep.ranks.world import World
from samestep.run.directory import Run, is_run, new_run_path
from samestep.run.environment import names_secret, versions
from samestep.run.files import write_text
from samestep.run.records import RUN_FORMAT, Record
from samestep.session.own_state import Standing, simple

SCRIPT_COPY = "script.py"
"""The script as it was when the run began, in the run's directory."""


def choose_path(wanted: str | Path | None, program: str, *, resume: bool) -> Path:
    """Return the directory of a run that is to begin or to go on.

    Raises:
        UserError: it holds a run already.
    """
    path = Path(wanted or os.environ.get(JOB_RUN) or new_run_path(program))
    if not resume and is_run(path):
        raise UserError(
            f"{path} already holds a run. Go on with it by open_run(…, resume=True), or name "
            "another directory."
        )
    return path


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as TOML has them.

    Those that are None, that TOML does not know, or that are named like a secret are left out.
    """
    plain = {
        str(name): _plain(value) for name, value in settings.items() if not names_secret(str(name))
    }
    return {name: value for name, value in plain.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a value as TOML has it; None of an object: its text may be another in each process."""
    if isinstance(value, Mapping):
        return plain_settings(value)
    if isinstance(value, list | tuple):
        return [plain for part in value if (plain := _plain(part)) is not None]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # as a number, NaN differs from itself
    return str(value) if isinstance(value, Path) else simple(value)


def names_of_path(settings: Mapping[str, Any], path: str | Path | None) -> set[str]:
    """Return the names of settings that are the run directory, which may be moved."""
    if path is None:
        return set()
    texts = {name: value for name, value in settings.items() if isinstance(value, str | Path)}
    return {
        name for name, value in texts.items() if Path(value).absolute() == Path(path).absolute()
    }


def start_record(
    world: World, standing: Standing, path: Path, numbers: Record, *, resumed: bool
) -> Record:
    """Return the record that a run begins or goes on with.

    `numbers` are the sizes that follow from the data.
    """
    parameters = [
        p for kept in standing.state.values() for p in getattr(kept, "parameters", tuple)()
    ]
    return {
        "event": "start",
        "format": RUN_FORMAT,
        "time": time.time(),
        "recipe": standing.program,
        "run_dir": str(path),
        "world_size": world.world_size,
        **numbers,
        "device": str(world.device),
        "backend": world.backend,
        "launcher": world.launcher,
        "num_nodes": world.num_nodes,
        "precision": _precision(parameters),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in parameters),
        "lower_is_better": ["loss"],
        "resumed": resumed,
        "notes": [*world.notes],
    }


def _precision(parameters: list[Any]) -> str:
    """Return the least precise type of the weights, by which `compare` knows their rounding."""
    kinds = {p.dtype for p in parameters}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if dtype in kinds:
            return name
    return "fp64" if kinds == {torch.float64} else "fp32"


def describe(run: Run, world: World, standing: Standing, numbers: Record) -> None:
    """Write settings, environment and a copy of the script into a run."""
    sizes = {name: numbers[name] for name in ("epochs", "global_batch_size")}
    table = {**sizes, "seed": standing.order["seed"], "options": dict(standing.settings)}
    write_text(run.path / "settings.toml", tomli_w.dumps(table))
    kept, script = run.path / SCRIPT_COPY, Path(sys.argv[0])
    if script.suffix == ".py" and not kept.exists():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            write_text(kept, script.read_text(encoding="utf-8"))
    run.write_environment(
        {
            "versions": versions(),
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "launcher": world.launcher,
            "device": str(world.device),
            "backend": world.backend,
            "threads": torch.get_num_threads(),
        }
    )


def result_of(world: World, standing: Standing, status: str, reason: str) -> dict[str, Any]:
    """Return what result.json says of how a run ended."""
    position = standing.position
    return {
        "recipe": standing.program,
        "status": status,
        "reason": reason,
        "world_size": world.world_size,
        "global_batch_size": standing.order.get("global_batch_size"),
        "epochs": position.epoch,
        "steps": position.step,
        "training_seconds": position.seconds,
        "samples_per_s": position.samples / position.seconds if position.seconds else 0.0,
        "device": str(world.device),
        "backend": world.backend,
        "versions": versions(),
    }
