"""How a training ends: the test of its best checkpoint, baselines, pictures, and result.json."""

import time
from collections.abc import Mapping
from dataclasses import replace
from threading import Thread
from typing import Any

import torch

from samestep.base.errors import UserError, defined_at
from samestep.base.run.index import read_index
from samestep.core.data.recipe_data import open_split
from samestep.core.learner.device import data_dtype
from samestep.core.recipe import Recipe
from samestep.core.session.build import Built
from samestep.core.session.request import Request
from samestep.core.session.session import Outcome, Session, training_result
from samestep.core.training.evaluation import Interruptible
from samestep.core.training.loop import evaluate_work, stop_by
from samestep.core.training.snapshot import load_evaluated, weights_sha256
from samestep.core.training.stopping import Agreement
from samestep.core.training.work import State, Work
from samestep.launch.ranks import watched
from samestep.launch.ranks.mesh import mesh_of
from samestep.launch.ranks.world import World

_MEET_EVERY_S = 0.5

Baselines = Mapping[str, Mapping[str, float] | str]
"""Name → its metrics, or why it was not measured."""


def finish_run(
    request: Request,
    built: Built,
    session: Session,
    agreement: Agreement,
    first_step_s: float | None,
) -> Outcome:
    """Evaluate the best checkpoint on the test set, and write the result.

    A run that is stopped within that evaluation repeats it when it continues.
    """
    watched.turn_to(watched.END)
    session.world.on_main(session.saver.settle_well)
    work = built.work
    state = built.state
    run = session.run
    test = None
    # The weights where the training ended; the test below loads the best ones.
    sharded = work.learner.sharded
    weights = weights_sha256(work.learner.model) if run is not None or sharded else ""
    baselines: Baselines = {}
    if not state.signum and built.splits.test is not None:
        test = _test(request, built, session, agreement)
        if test is not None and request.recipe.baselines is not None:
            baselines = _measure_baselines(request, session, state, agreement)
    if run is not None:
        status = "stopped" if state.signum else "completed"
        result = training_result(request, work, state, status, weights, test, first_step_s)
        result |= {} if session.regroups is None else {"regroups": session.regroups}
        if measured := {n: row for n, row in baselines.items() if not isinstance(row, str)}:
            result["baselines"] = measured
        best = read_index(run.checkpoints).best
        if best is not None:  # an evaluation may have been better where nothing was saved
            result["best"] |= {"value": best.metric, "epoch": best.epoch}
        run.write_result(result)
        if not state.signum and not sharded:  # a failing picture cannot lose the result any more
            _draw_pictures(request, built, session, test, agreement)
    session.emit({"event": "stop", "step": state.position.step, "reason": state.stop_reason})
    return Outcome(path=session.path, signum=state.signum)


def _test(
    request: Request, built: Built, session: Session, agreement: Agreement
) -> dict[str, Any] | None:
    """Evaluate the best whole checkpoint; return what was measured, None after a stop signal."""
    work, state, splits = built.work, built.state, built.splits
    world, settings, started = work.world, work.settings, time.perf_counter()
    problems: list[str] = []
    checkpoint = _load_best(work, session, world, problems)
    assert splits.test is not None
    dtype = data_dtype(settings.precision)
    part = Interruptible(open_split(splits.test, world, request.recipe, settings, dtype), agreement)
    if work.measure is not None:  # it may find other things to measure than in a validation
        work = replace(work, measure=replace(work.measure, names=()))
    values = evaluate_work(work, part, classes=request.recipe.counted_classes(splits))
    if signum := agreement.on(part.left_for):
        stop_by(state, signum)
        return None
    test = {**values, "checkpoint": checkpoint}
    record = {"event": "evaluation", "split": "test", "epoch": state.position.epoch}
    record |= {"step": state.position.step, **test, "seconds": time.perf_counter() - started}
    session.emit({**record, "problems": problems})
    return test


def _measure_baselines(
    request: Request, session: Session, state: State, agreement: Agreement
) -> Baselines:
    """Measure on rank 0 what the model has to beat; return nothing if a signal ends it.

    The ranks meet twice a second, so no collective waits long, and a stop signal ends the wait.
    """
    started, world = time.perf_counter(), session.world
    rows: dict[str, Mapping[str, float] | str] = {}
    problems: list[str] = []

    def measure() -> None:
        try:
            rows.update(_checked(request.recipe, request.recipe.measure_baselines(request.options)))
        except UserError as error:
            problems.append(str(error))

    thread = Thread(target=measure, daemon=True)  # a signal does not wait for it
    if world.is_main:
        thread.start()
    busy = 1
    while busy:
        if world.is_main:
            thread.join(_MEET_EVERY_S)
        both = torch.tensor([int(thread.is_alive()), agreement.signum])
        busy, signum = world.reduce(both, "max").tolist()
        if signum:
            stop_by(state, signum)
            return {}
    record = {"event": "baselines", "step": state.position.step, "values": rows}
    record |= {"problems": problems, "seconds": time.perf_counter() - started}
    session.emit(record)
    return rows


def _checked(recipe: Recipe, rows: Any) -> Baselines:
    try:
        return {
            str(name): row if isinstance(row, str) else {str(n): float(v) for n, v in row.items()}
            for name, row in rows.items()
        }
    except Exception as error:  # whatever the recipe's own dict raises
        raise UserError(
            f"The recipe's baselines(){defined_at(recipe.baselines)} returned {rows!r:.80}; it "
            "must return {name: {metric: number}}, or a sentence instead of the metrics."
        ) from error


def _draw_pictures(
    request: Request,
    built: Built,
    session: Session,
    test: dict[str, Any] | None,
    agreement: Agreement,
) -> None:
    """Draw the run's pictures with the weights that were tested, or else with the best ones."""
    from samestep.core.session import picture_making  # noqa: PLC0415 - no step waits for them

    work = built.work
    tested = None if test is None else str(test["checkpoint"])

    def load_best() -> str:
        nonlocal tested
        if tested is not None:  # the first time, the model still holds them
            name, tested = tested, None
            return name
        return _load_best(work, session, World(), [])

    source = picture_making.PictureSource(
        recipe=request.recipe, work=work, splits=built.splits, load_best=load_best
    )
    step = built.state.position.step
    for record in picture_making.picture_records(source, session.path, step, agreement):
        session.emit(record)


def _load_best(work: Work, session: Session, world: World, problems: list[str]) -> str:
    """Load the weights of the best whole checkpoint; return its name, "last" if there is none."""
    from samestep.core.session.restoring import load_first  # noqa: PLC0415 - no step waits for it

    folder, learner = session.path / "checkpoints", work.learner
    mesh = mesh_of(learner.model)
    best = load_first(world, folder, lambda: read_index(folder).ranked(), problems, mesh)
    if best is None:
        return "last"
    load_evaluated(learner.model, best.content)
    learner.moment.after(best.content["position"])
    if learner.average is not None:
        learner.average.hold()
    return best.entry.path
