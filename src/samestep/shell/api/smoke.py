"""`samestep train … --smoke`: every part of a training once, in seconds, in a scratch directory.

Two steps on a few samples, with all that a run does: the checks before the first step, a checkpoint
and a resume between the two, validation, test. Nothing of it stays.
"""

import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.run.records import Record, metric_values
from samestep.base.words import count
from samestep.core.data.keyed_random import seed_alike
from samestep.core.data.recipe_data import SPLITS, is_stream, load_splits
from samestep.core.session.request import Request
from samestep.core.session.training_run import Shown, engine_named, run_session
from samestep.core.training.evaluation import evaluation_batch
from samestep.core.training.stopping import catch_signals
from samestep.launch.ranks import watched
from samestep.launch.ranks.world import World, find_world, join, leave
from samestep.prove.verification.few_samples import cut_numbers, some_of, without_streams
from samestep.shell.api.training import check_engine

_STEPS = 2
_SAMPLES = 32  # of a batch whose number of samples is not set


def smoke(request: Request) -> int:
    """Try a training as one rank of the world that the environment describes; return the exit code.

    Raises:
        UserError: a part of it does not work; those that do are printed before.
    """
    began, settings = time.monotonic(), request.settings
    if request.resume:
        raise UserError("--smoke starts a new run.", remedy="Leave --resume out.", flags=["resume"])
    check_engine(request)
    world = find_world(settings.device, settings.backend, oversubscribe=settings.oversubscribe)
    watched.start_watcher(world, settings.stall_s)
    join(world, settings.timeout_s)
    # Ranks on other machines see only what is shared.
    shared = None if world.num_nodes == 1 else Path.cwd()
    folder = world.on_main(lambda: tempfile.mkdtemp(prefix="samestep-smoke-", dir=shared))
    try:
        few, engine = _few(request, world, Path(folder, "run")), engine_named(settings.engine)
        with catch_signals() as received:
            for resume in (False, True):
                # As a signal does, this ends the first attempt after its first step.
                received.signum = received.signum or (0 if resume else signal.SIGTERM)
                outcome = run_session(
                    replace(few, resume=resume),
                    world,
                    received=received,
                    shown=Shown((_show,)),
                    engine=engine,
                )
                if outcome.signum not in (0, signal.SIGTERM):
                    return 128 + outcome.signum
                received.signum = 0
        if world.is_main:
            for name in [n for n in SPLITS[1:] if getattr(few.recipe.load_data(None), n) is None]:
                _line(name, "none: the recipe has no such data")
            _line("all well", f"in {time.monotonic() - began:.0f} s; nothing was kept")
        leave(world)
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _few(request: Request, world: World, run: Path) -> Request:
    """Return the request of a training of two steps on a few samples."""
    settings = request.settings
    options = world.on_main(lambda: request.recipe.complete_options(request.options))
    recipe = replace(request.recipe.with_options(options), complete=None)
    seed_alike(settings.seed)
    whole = load_splits(recipe, options, world, prepare=False)
    size = settings.batch_size or (settings.batch_size_per_rank or 0) * world.world_size
    evaluated = evaluation_batch(settings) * world.world_size
    wanted = {"train": _STEPS * (size or _SAMPLES), "validation": evaluated, "test": evaluated}
    nothing: Any = ()
    parts = without_streams(replace(whole, train=nothing), settings.seed)
    splits: dict[str, Any] = {name: getattr(parts, name) for name in SPLITS}
    splits["train"] = whole.train

    def few_of(data: Any, name: str) -> Any:
        # Two steps read little of a stream.
        return data if data is None or is_stream(data) else some_of(data, wanted[name])

    splits = {name: few_of(data, name) for name, data in splits.items()}
    splits["validation"] = parts.changed_validation(partial(few_of, name="validation"))
    few = replace(whole, **splits, notes=(), left_out=())
    if not is_stream(whole.train):
        recipe = cut_numbers(recipe, whole, few)
    recipe = replace(recipe, data=lambda *_: few, baselines=None, pictures={})
    brief = replace(
        settings,
        run_dir=str(run),
        epochs=None,
        max_steps=_STEPS,
        warmup_steps=min(settings.warmup_steps, 1),
        log_every=1,
        patience=None,
        stop_monitor=None,
        halving=None,
        pictures=False,
        track=None,
    )
    return replace(request, recipe=recipe, options=options, settings=brief)


def _show(record: Record) -> None:
    """Tell on rank 0 what a record says of a part of the training."""
    match record["event"]:
        case "start" if not record["resumed"]:
            on = f"on {count(record['world_size'], 'rank')} ({record['device']})"
            _line("model", f"{record['parameters']:,} parameters {on}")
        case "step":
            _line("training", f"step {record['step']}: loss {record['loss']:.4g}")
        case "checkpoint" if record["step"] < _STEPS:
            _line("checkpoint", f"of step {record['step']}, written in {record['seconds']:.2g} s")
        case "resume":
            _line("resume", f"from the checkpoint of step {record['step']}")
        case "evaluation":
            metrics = metric_values(record).items()
            values = [f"{n} {v:.4g}" for n, v in metrics if isinstance(v, float)]
            _line(record["split"], f"{count(record['samples'], 'sample')}: {'  '.join(values)}")


def _line(part: str, text: str) -> None:
    sys.stdout.write(f"{part:<11} {text}\n")
    sys.stdout.flush()
