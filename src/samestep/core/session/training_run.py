"""One training of a recipe: build what the loop needs, pass its records on, write the result.

This is where settings, recipe and world meet. The caller decides what the screen shows.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.base.errors import no_exit
from samestep.base.run.directory import Run, check_free, git_commit, is_run, new_run_path
from samestep.base.run.files import write_text
from samestep.base.run.index import Retention
from samestep.base.run.records import Record
from samestep.base.settings import Settings, free_names, order_name
from samestep.core.learner.agreement import OF_A_RANK, arithmetic, check_same
from samestep.core.learner.device import kernels_of, switched
from samestep.core.learner.optimizer import own_rate
from samestep.core.learner.prepare import Wrap, wrap
from samestep.core.recipe_checks import FROM_PYTHON
from samestep.core.session.build import Built, build
from samestep.core.session.declared import kept_options
from samestep.core.session.notes import notes_of
from samestep.core.session.request import Request, to_toml
from samestep.core.session.session import (
    Holding,
    Outcome,
    Session,
    Sink,
    environment,
    record_failure,
    refuse_taken,
    resume_record,
    start_record,
)
from samestep.core.training.loop import RunControl, SaveTimer, train
from samestep.core.training.snapshot import capture
from samestep.core.training.stopping import Agreement, ReceivedSignal
from samestep.core.training.work import State, Work
from samestep.launch.ranks.world import World, gpu_uuid

if TYPE_CHECKING:
    from samestep.core.session.restoring import Loaded
    from samestep.launch.ranks.regroup import Membership

Write = Callable[[dict[str, Any], float | None, float], None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training that is built and restored, ready for an engine."""

    request: Request
    work: Work
    state: State
    control: RunControl
    checkpoint: Path | None
    """The checkpoint that it was restored from."""
    session: Session
    write: Write
    """Save (content, monitored metric, when it began by `time.perf_counter`); on rank 0, and on all
    ranks if they hold parts of the model."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What takes the steps of a training."""

    wrap: Wrap
    """Puts the model on all ranks."""
    drive: Callable[[Task], None]
    """Trains until there is a reason to stop."""
    holds_norms: bool = False
    """Whether it holds batch normalisation still, which can then train on one sample."""


def _drive(task: Task) -> None:
    for record in train(task.work, task.state, task.control):
        task.session.emit(record)


NATIVE = Engine(wrap=wrap, drive=_drive)


def engine_named(name: str) -> Engine:
    """Return the engine that `--engine` names."""
    if name == "native":
        return NATIVE
    # By its name: the bridge is built upon this module, and what it needs is an extra.
    engine: Engine = importlib.import_module("samestep.bridges.lightning.engine").LIGHTNING
    return engine


@dataclass(frozen=True)
class Shown:
    """What shows a run, where it was started."""

    sinks: Sequence[Sink] = ()
    """What gets each record on rank 0, besides the run directory."""
    begin: Callable[[Path], None] = lambda _path: None
    """Gets the run directory on every rank, once it is there."""
    started_at: float = field(default_factory=time.time)
    """When the user's command began, in seconds since the epoch."""


def run_session(
    request: Request,
    world: World,
    *,
    received: ReceivedSignal,
    shown: Shown,
    engine: Engine = NATIVE,
) -> Outcome:
    """Train a recipe on this world, from the beginning or from the newest checkpoint."""
    outcome = _run(request, world, received, shown, engine)
    assert isinstance(outcome, Outcome)
    return outcome


def run_elastic(
    request: Request,
    world: World,
    membership: "Membership",
    *,
    received: ReceivedSignal,
    shown: Callable[[World, Path | None], Shown],
    engine: Engine = NATIVE,
) -> tuple[Outcome, World]:
    """Do as `run_session`, among ranks that outlive each other; return the last world, too.

    `shown` is asked in each group of ranks, with the run directory once there is one.
    """
    from samestep.launch.ranks.regroup import is_newcomer  # noqa: PLC0415 - of elastic ranks

    holding = Holding()
    if is_newcomer(membership):  # what takes time is done before the others wait for it
        alone = World(device=world.device)
        with switched(request.settings, world.device):
            built = build(completed(request, alone), alone)
            built.work.close()
        holding = Holding(splits=built.splits)
        membership.wait_to_join()
    first_world = world
    while True:
        world = membership.join(first_world)
        begun = membership.run()
        screen = shown(world, Path(begun) if begun else None)
        outcome = _run(request, world, received, screen, engine, membership, holding)
        if isinstance(outcome, Outcome):
            return outcome, world
        holding = outcome


def _going_on(
    request: Request, world: World, membership: "Membership | None", holding: Holding
) -> Request:
    """Return the request of a run that another group of ranks has begun, if one has."""
    run_dir = "" if membership is None else membership.run()
    if not run_dir:
        return request
    settings, options = next(filter(None, world.gather(holding.asked)), ({}, {}))
    changed = replace(request.settings, **settings | {"run_dir": run_dir})
    request = replace(request, settings=changed, resume=True)
    return with_options(request, replace(request.options, **options)) if options else request


def _shared_settings(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings and options of a request, without those that are each rank's own."""
    settings = {n: v for n, v in vars(request.settings).items() if n not in OF_A_RANK}
    options = request.options
    named = {} if options is None else {f.name: getattr(options, f.name) for f in fields(options)}
    return settings, named


def _run(
    request: Request,
    world: World,
    received: ReceivedSignal,
    shown: Shown,
    engine: Engine = NATIVE,
    membership: "Membership | None" = None,
    holding: Holding | None = None,
) -> Outcome | Holding:
    """Train to the end, or until the ranks part; then return what this one brings to the next."""
    built = session = None
    holding = holding or Holding()
    with switched(request.settings, world.device):
        try:
            request = _going_on(request, world, membership, holding)
            holding = replace(holding, asked=_shared_settings(request))
            named = world.on_main(lambda: choose_path(request))
            path = named.absolute()  # the recipe's functions may change the working directory
            request = completed(request, world)
            norms = engine.holds_norms
            fresh = request
            if request.resume:
                from samestep.core.session.restoring import as_built  # noqa: PLC0415

                fresh = as_built(request, path, world)
            built = build(fresh, world, engine.wrap, holding.splits, holds_norms=norms)
            holding = replace(holding, splits=built.splits)
            session = Session(path, world, shown.begin, shown.sinks)
            if membership is not None:
                membership.announce_run(path)
            run = _Run(request, built, session, named, membership, holding)
            return _train(run, received, shown.started_at, engine)
        except Exception as error:
            begun = built if session is not None else None
            if membership is not None:
                from samestep.core.session.regrouping import has_parted, holding_of  # noqa: PLC0415

                if has_parted(error, membership, world):
                    return holding_of(begun, request.recipe.name, holding, session)
            if begun is not None and session is not None:
                record_failure(session, request, begun.work, begun.state, error)
            raise
        finally:
            if built is not None:
                built.work.close()
            if session is not None:
                session.close()


@dataclass(frozen=True)
class _Run:
    """A run that is open, and the training in it that is built."""

    request: Request
    built: Built
    session: Session
    named: Path
    """The run directory, as it is shown."""
    membership: "Membership | None"
    holding: Holding


def _begin(run: _Run) -> "Loaded | None":
    """Bring the training to where it continues, and write its first records.

    Returns the checkpoint that it was restored from, if any.
    """
    request, built, session = run.request, run.built, run.session
    work, state, world = built.work, built.state, built.work.world
    if run.membership is not None and _has_taken_over(run, run.membership):
        return None
    resumed = None
    if request.resume and world.on_main(lambda: is_run(session.path)):
        from samestep.core.session.restoring import go_on, remove_unfinished  # noqa: PLC0415

        resumed = go_on(request, work, state, session.path, world)
        if resumed is not None and work.settings.self_check:
            built.unkept.refuse(request.recipe.loss, request.recipe.model)
        if resumed is not None:
            world.on_main(lambda: remove_unfinished(session.path))
    if (initial := built.initial) is not None:
        world.on_main(lambda: initial.check_unchanged(session.path))
    gpus = world.gather(gpu_uuid(world.device))
    if session.run is not None:
        describe(session.run, request, built, gpus)
    start = _start_record(request, built, session.path, run.named, resumed)
    resume_line = None
    if resumed is not None:
        step, checkpoint = state.position.step, resumed.entry.path
        resume_line = resume_record(world, step, checkpoint, resumed.problems)
        if resumed.changes:
            resume_line["changes"] = resumed.changes
    session.begin(start, resume_line, state.position.step, state.watch)
    if run.membership is not None and session.regroups:
        from samestep.core.session.regrouping import regroup_record  # noqa: PLC0415

        session.emit(regroup_record(run.membership, state.position.step))
    return resumed


def _has_taken_over(run: _Run, membership: "Membership") -> bool:
    from samestep.core.session.regrouping import regroup_record, take_over  # noqa: PLC0415
    from samestep.core.session.restoring import remove_unfinished  # noqa: PLC0415

    session, state = run.session, run.built.state
    session.regroups = membership.regroups
    if not session.regroups:
        return False
    newest = take_over(run.holding, run.built.work, state, run.request.recipe.name)
    if newest is None:
        return False
    if session.run is not None and not run.holding.was_main:
        remove_unfinished(session.path)  # which the rank before may have begun to write
    step = state.position.step
    session.go_on(regroup_record(membership, step), step, state.watch, newest)
    return True


def _train(run: _Run, received: ReceivedSignal, started_at: float, engine: Engine) -> Outcome:
    request, built, session = run.request, run.built, run.session
    work, state, world = built.work, built.state, built.work.world
    resumed = _begin(run)
    every = request.settings.checkpoint_every_minutes
    minutes = SaveTimer(every)
    waits = None if run.membership is None else run.membership.someone_waits
    agreement = Agreement(world, received, minutes.passed if every else None, waits)
    made_with, sharded = to_toml(request, work.plan), work.learner.sharded
    is_hopeless: Callable[[int, float], bool] = lambda _number, _metric: False  # noqa: E731
    if (factor := request.settings.halving) is not None:
        from samestep.core.session.halving import halving_of  # noqa: PLC0415 - of a sweep

        is_hopeless = halving_of(session.path, factor, state.watch.mode, world)

    def write(content: dict[str, Any], metric: float | None, began: float) -> None:
        session.saver.save(
            {**content, "made_with": made_with},
            state.position,
            metric=metric,
            watch=state.watch,
            retention=retention_of(work.settings),
            began=began,
            sync=work.settings.checkpoint_sync,
            sharded=sharded,
        )

    def save(metric: float | None) -> None:
        began = time.perf_counter()
        content = capture(work, state, request.recipe.name)
        agreed = world.on_every if sharded else world.on_main
        agreed(lambda: write(content, metric, began))

    task = Task(
        request=request,
        work=work,
        state=state,
        control=RunControl(
            agreement=agreement, minutes=minutes, save=save, is_hopeless=is_hopeless
        ),
        checkpoint=session.path / "checkpoints" / resumed.entry.path if resumed else None,
        session=session,
        write=write,
    )
    with no_exit():
        engine.drive(task)
        session.trained = True
        from samestep.core.session.outcome import finish_run  # noqa: PLC0415 - no step waits for it

        first = session.first_record_s
        # A clock that was set back meanwhile tells nothing.
        first_step_s = None if first is None or first < started_at else first - started_at
        outcome = finish_run(request, built, session, agreement, first_step_s)
        if run.membership is not None:
            world.barrier()  # rank 0 has written the result; had it died, another would
        return outcome


def retention_of(settings: Settings) -> Retention:
    """Return the rule that says which checkpoints the settings keep."""
    return Retention(
        top_k=settings.keep_top_k, newest=settings.keep_newest, hours=settings.keep_hours
    )


def completed(request: Request, world: World) -> Request:
    """Return the request, with the options that depend on the data filled in.

    All ranks call it first, and see whether they were asked for the same training.
    """
    recipe, before = request.recipe, request.options
    _check_same_request(request, world)
    if recipe.complete is None:
        options = world.on_every(lambda: kept_options(recipe, before))
        return request if options == before else with_options(request, options)
    find = partial(recipe.complete_options, before)
    options = world.on_main(lambda: kept_options(recipe, find(), completed=True))
    return with_options(request, options)


def with_options(request: Request, options: Any) -> Request:
    """Return a request with other options of its recipe."""
    return replace(request, recipe=request.recipe.with_options(options), options=options)


def _check_same_request(request: Request, world: World) -> None:
    """Refuse settings, options or parts of the recipe that another rank has otherwise."""
    recipe, settings, options = request.recipe, request.settings, request.options
    free = OF_A_RANK - {"threads" if settings.virtual_ranks else ""}
    free |= free_names(recipe.options)
    named = {**vars(settings), "resume": request.resume}
    named |= {} if options is None else {f.name: getattr(options, f.name) for f in fields(options)}
    parts = ("reduction", "loss_over", "loss_weights", "lower_is_better")
    named |= {name: getattr(recipe, name) for name in parts} | {"metrics": [*recipe.metrics]}
    compared = {name: value for name, value in named.items() if name not in free}
    where = request.source if request.source.endswith(".py") else ""
    check_same(compared, world, "The settings", where=where)


def choose_path(request: Request) -> Path:
    """Return the directory of a run that is to begin or to continue."""
    wanted = request.settings.run_dir
    path = Path(wanted) if wanted else new_run_path(request.recipe.name)
    if request.folder != Path.cwd():
        path = request.folder / path
    if request.settings.halving is not None:
        from samestep.core.session.halving import check_halving  # noqa: PLC0415 - of a sweep

        check_halving(path)
    if not request.resume:
        in_python = request.source.startswith(FROM_PYTHON)
        call = f"samestep.train({str(path)!r}, recipe=…, resume=True)"
        way = call if in_python else f"`samestep train {path} --resume`"
        refuse_taken(path, f"Continue it with {way}, or choose another --run-dir.")
    return path if is_run(path) else check_free(path)


def describe(run: Run, request: Request, built: Built, gpus: Sequence[str] = ()) -> None:
    """Write settings, recipe and environment into a run; `gpus` are UUIDs, "" for other devices."""
    world = built.work.world
    write_text(run.path / "settings.toml", to_toml(request, built.work.plan))
    changed = bool(request.recipe_changes)
    is_file = request.source.endswith(".py")
    commit = None
    if is_file or request.source.startswith(FROM_PYTHON):
        from samestep.core.session.recipe_changes import keep_recipe  # noqa: PLC0415

        keep_recipe(run.path, request.source, request.recipe, request.pieces, changed=changed)
    if (run.path / "code").is_dir():  # a job's copy of the code is of the commit at the submit
        from samestep.base.run.code_copy import kept_code  # noqa: PLC0415

        commit = kept_code(run.path).get("commit")
    commit = commit or git_commit(Path(request.source).resolve().parent if is_file else Path.cwd())
    run.write_environment(
        environment(
            world,
            gpus=[gpu for gpu in dict.fromkeys(gpus) if gpu],
            **kernels_of(world.device),
            **({"git_commit": commit} if commit else {}),
        )
    )


def _start_record(
    request: Request, built: Built, path: Path, named: Path, resumed: "Loaded | None"
) -> Record:
    work, splits, settings = built.work, built.splits, built.work.settings
    notes = notes_of(request, built, path, resumed=resumed is not None)
    only_if_set = {
        "batch_size_per_rank": request.settings.batch_size_per_rank,
        "batch_tokens": settings.batch_tokens,
        "order": order_name(settings) if order_name(settings) != "shuffled" else None,
        "param_dtype": settings.param_dtype,
        "own_schedule": bool(request.recipe.schedule),
        "own_lr": own_rate(work.learner.optimizer, work.plan.lr) if work.learner.made else None,
        "left_out": list(splits.left_out),
        "init_from": None if built.initial is None else vars(built.initial),
        "arithmetic": arithmetic(work.world.device) if work.world.virtual_ranks else None,
    }
    return start_record(
        work.world,
        recipe=request.recipe.name,
        run_dir=named,
        parameters=work.learner.model.parameters(),
        modules=[work.learner.model],
        **work.plan.record(),
        **kernels_of(work.world.device),
        lr_scaling=settings.lr_scaling,
        base_lr=settings.lr,
        precision=settings.precision,
        lower_is_better=[
            *dict.fromkeys((*request.recipe.falling(), *work.learner.parts, *work.evaluation_parts))
        ],
        monitor=built.state.watch.metric,
        free_options=sorted(free_names(request.recipe.options)),
        resumed=resumed is not None,
        **{name: value for name, value in only_if_set.items() if value},
        notes=[*splits.notes, *notes],
    )
