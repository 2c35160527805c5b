"""How a run ends: the test of its best checkpoint, result.json, and what is said of a failure."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

from samestep.data.batches import open_split
from samestep.errors import UserError, device_error
from samestep.execution.pictures import picture_records
from samestep.recipe import Splits
from samestep.run import checkpoints
from samestep.run.directory import Run
from samestep.run.environment import versions
from samestep.run.index import Entry, read_index
from samestep.run.records import Record
from samestep.session.baselines import as_result, measure_baselines
from samestep.session.build import Built
from samestep.session.request import Request
from samestep.training.device import data_dtype, peak_memory_bytes
from samestep.training.evaluation import Interruptible
from samestep.training.loop import evaluate_work
from samestep.training.snapshot import load_evaluated, weights_sha256
from samestep.training.stopping import Agreement
from samestep.training.work import State, Work


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an execution ended."""

    path: Path
    signum: int
    """The signal that stopped it, or 0."""


def leave_why(run: Run, request: Request, work: Work, state: State, error: Exception) -> None:
    """Write down why the run failed, as far as the disk still allows."""
    state.stop_reason = f"failed: {device_error(error) or error}"
    with contextlib.suppress(UserError):
        run.append({"event": "stop", "step": state.position.step, "reason": state.stop_reason})
        run.write_result(_result(request, work, state, "failed", _weights(work)))


def _weights(work: Work) -> str:
    """Return the digest of the weights; nothing where the model itself fails to give them."""
    try:
        return weights_sha256(work.learner.model)
    except Exception:  # the failure before it is what is to be told
        return ""


def finish_run(
    request: Request,
    built: Built,
    path: Path,
    run: Run | None,
    emit: Callable[[Record], None],
    first_step_s: float | None,
    agreement: Agreement,
) -> Outcome:
    """Evaluate the best checkpoint on the test set, and write the result.

    A run that is stopped within that evaluation does it when it goes on.
    """
    work, state, splits = built.work, built.state, built.splits
    position, test = state.position, None
    # The test below is of the best checkpoint, not of where the training ended.
    weights = weights_sha256(work.learner.model) if run is not None else ""
    baselines: dict[str, Any] = {}
    if not state.signum and splits.test is not None:
        started = time.perf_counter()
        found, problems, signum = _test(request, work, splits, path, agreement)
        if signum:
            state.signum, state.stop_reason = signum, Signals(signum).name
        else:
            test = found
            emit(
                {
                    "event": "evaluation",
                    "split": "test",
                    "epoch": position.epoch,
                    "step": position.step,
                    **test,
                    "seconds": time.perf_counter() - started,
                    "problems": problems,
                }
            )
            if request.recipe.baselines is not None:
                baselines = _baselines(request, work, state, emit, agreement)
    status = "stopped" if state.signum else "completed"
    if run is not None:  # on rank 0 alone
        result = _result(request, work, state, status, weights, test, first_step_s)
        if baselines:
            result["baselines"] = baselines
        best = read_index(run.checkpoints).best
        if best is not None:  # an evaluation may have been better where nothing was saved
            result["best"] |= {"value": best.metric, "epoch": best.epoch}
        run.write_result(result)
        if not state.signum:  # the result is safe, whatever a recipe's own picture does
            for record in _pictures(request, built, path, test, agreement):
                emit(record)
    emit({"event": "stop", "step": position.step, "reason": state.stop_reason})
    return Outcome(path=path, signum=state.signum)


def _baselines(
    request: Request, work: Work, state: State, emit: Callable[[Record], None], agreement: Agreement
) -> dict[str, Any]:
    """Measure what the model has to beat, on rank 0; return it for result.json."""
    started = time.perf_counter()
    rows, problem, signum = measure_baselines(request, work.world, agreement)
    if signum:
        state.signum, state.stop_reason = signum, Signals(signum).name
        return {}
    emit(
        {
            "event": "baselines",
            "step": state.position.step,
            "values": rows,
            "problems": [problem] if problem else [],
            "seconds": time.perf_counter() - started,
        }
    )
    return as_result(rows)


def _pictures(
    request: Request, built: Built, path: Path, test: dict[str, Any] | None, agreement: Agreement
) -> list[Record]:
    """Make the run's pictures with the weights that were tested, else with the best ones."""
    work, splits, folder = built.work, built.splits, path / "checkpoints"

    held = test is not None

    def load_best() -> str:
        nonlocal held
        if held and test is not None:  # the first time the model holds them already
            held = False
            return str(test["checkpoint"])
        best, _ = _best_whole(folder)
        if best is None:
            return "last"
        _load(work, checkpoints.load(folder, best))
        return best.path

    step = built.state.position.step
    return picture_records(
        request.recipe,
        request.settings,
        work,
        splits,
        path,
        load_best=load_best,
        step=step,
        agreement=agreement,
    )


def _load(work: Work, content: dict[str, Any]) -> None:
    """Let the model hold the weights of a checkpoint, as they are evaluated."""
    load_evaluated(work.learner.model, content)
    if work.learner.average is not None:
        work.learner.average.load(None)


def _test(
    request: Request, work: Work, splits: Splits, path: Path, agreement: Agreement
) -> tuple[dict[str, Any], list[str], int]:
    """Evaluate the best checkpoint that is whole.

    Returns:
        What was measured, what was wrong with better checkpoints, and the signal that stopped it.
    """
    world, settings = work.world, work.settings
    folder = path / "checkpoints"
    best, problems = world.on_main(lambda: _best_whole(folder))
    if best is not None:
        _load(work, world.on_every(lambda: checkpoints.load(folder, best)))
    assert splits.test is not None
    plain = replace(request.recipe, augment=None)
    source = open_split(splits.test, world, plain, settings, data_dtype(settings.precision))
    part = Interruptible(source, agreement)
    values = evaluate_work(work, part, classes=request.recipe.counted_classes(splits))
    return {**values, "checkpoint": best.path if best else "last"}, problems, part.agreed()


def _best_whole(folder: Path) -> tuple[Entry | None, list[str]]:
    problems: list[str] = []
    for entry in read_index(folder).ranked():
        try:
            checkpoints.load(folder, entry)
        except UserError as error:
            problems.append(str(error))
        else:
            return entry, problems
    return None, problems


def _result(
    request: Request,
    work: Work,
    state: State,
    status: str,
    weights: str,
    test: dict[str, Any] | None = None,
    first_step_s: float | None = None,
) -> dict[str, Any]:
    position, plan, watch = state.position, work.plan, state.watch
    return {
        "recipe": request.recipe.name,
        "status": status,
        "reason": state.stop_reason,
        "world_size": plan.world_size,
        "global_batch_size": plan.global_batch_size,
        "epochs": position.epoch,
        "steps": position.step,
        "weights_sha256": weights,
        "test": test,
        "best": {
            "metric": watch.metric,
            "mode": watch.mode,
            "value": watch.best,
            "epoch": watch.best_epoch,
        },
        "training_seconds": position.seconds,
        "samples_per_s": position.samples / position.seconds if position.seconds else 0.0,
        "seconds_to_first_step": first_step_s,
        "peak_memory_bytes": peak_memory_bytes(work.world.device),
        "device": str(work.world.device),
        "backend": work.world.backend,
        "versions": versions(),
    }
