"""One training of a recipe: build what the loop needs, pass its records on, write the result.

This is where settings, recipe and world meet. The caller decides what the screen shows.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from samestep.base.errors import listed, no_exit
from samestep.base.run.code_copy import kept_code
from samestep.base.run.directory import Run, check_free, git_commit, is_run, new_run_path
from samestep.base.run.files import write_text
from samestep.base.run.index import Retention
from samestep.base.run.own_modules import modules_note
from samestep.base.run.records import Record, read_records
from samestep.base.settings import Settings, free_names, order_name
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.stream_source import StreamSource
from samestep.core.session.build import Built, build
from samestep.core.session.declared import kept_options
from samestep.core.session.free_space import room_notes, state_bytes
from samestep.core.session.halving import check_halving, halving_of
from samestep.core.session.outcome import Outcome, finish_run, record_failure
from samestep.core.session.recipe_changes import FROM_PYTHON, keep_recipe, recipe_changes
from samestep.core.session.request import Request, to_toml
from samestep.core.session.restoring import Loaded, go_on, remove_unfinished
from samestep.core.session.session import (
    Session,
    Show,
    environment,
    refuse_taken,
    resume_record,
    start_record,
)
from samestep.core.training.alike import OF_A_RANK, arithmetic, check_same
from samestep.core.training.device import kernels_of, switched
from samestep.core.training.loop import RunControl, train
from samestep.core.training.plan import plan_notes
from samestep.core.training.prepare import Wrap, wrap
from samestep.core.training.side_effects import batch_norms
from samestep.core.training.snapshot import capture
from samestep.core.training.stopping import Agreement, ReceivedSignal, SaveTimer
from samestep.core.training.work import State, Work, is_done
from samestep.launch.ranks.mesh import any_sharded
from samestep.launch.ranks.world import World, gpu_uuid

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


def run_session(
    request: Request,
    world: World,
    *,
    received: ReceivedSignal,
    show: Show,
    begin: Callable[[Path], None],
    started_at: float,
    engine: Engine = NATIVE,
) -> Outcome:
    """Train a recipe on this world, from the beginning or from the newest checkpoint.

    `show` gets each record on rank 0; `begin` gets the run directory on every rank once it is
    there. The user's command began at `started_at`, in seconds since the epoch.
    """
    with switched(request.settings, world.device):
        named = world.on_main(lambda: choose_path(request))
        path = named.absolute()  # the recipe's functions may change the working directory
        request = completed(request, world)
        built = build(request, world, engine.wrap, holds_norms=engine.holds_norms)
        session = Session(path, world, begin, show)
        try:
            return _train(request, built, session, named, received, started_at, engine)
        except Exception as error:
            record_failure(session, request, built.work, built.state, error)
            raise
        finally:
            built.work.close()
            session.close()


def _train(
    request: Request,
    built: Built,
    session: Session,
    named: Path,
    received: ReceivedSignal,
    started_at: float,
    engine: Engine,
) -> Outcome:
    work, state, world = built.work, built.state, built.work.world
    resumed = None
    if request.resume and world.on_main(lambda: is_run(session.path)):
        resumed = go_on(request, work, state, session.path, world)
        if resumed is not None and work.settings.self_check:
            built.unkept.refuse(request.recipe.loss, request.recipe.model)
        if resumed is not None:
            world.on_main(lambda: remove_unfinished(session.path))
    gpus = world.gather(gpu_uuid(world.device))
    if session.run is not None:
        describe(session.run, request, built, gpus)
    start = _start_record(request, built, session.path, named, resumed)
    resume_line = None
    if resumed is not None:
        step, checkpoint = state.position.step, resumed.entry.path
        resume_line = resume_record(world, step, checkpoint, resumed.problems)
        if resumed.changes:
            resume_line["changes"] = resumed.changes
    session.begin(start, resume_line, state.position.step, state.watch)
    every = request.settings.checkpoint_every_minutes
    minutes = SaveTimer(every)
    agreement = Agreement(world, received, minutes.passed if every else None)
    made_with, sharded = to_toml(request, work.plan), any_sharded(work.learner.model)
    is_hopeless = halving_of(session.path, request.settings.halving, state.watch.mode, world)

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
        first = session.first_record_s
        first_step_s = None if first is None else first - started_at
        return finish_run(request, built, session, agreement, first_step_s)


def retention_of(settings: Settings) -> Retention:
    """Return which checkpoints the settings keep."""
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
    given = {name: value for name, value in named.items() if name not in free}
    where = request.source if request.source.endswith(".py") else ""
    check_same(given, world, "The settings", where=where)


def choose_path(request: Request) -> Path:
    """Return the directory of a run that is to begin or to continue."""
    wanted = request.settings.run_dir
    path = Path(wanted) if wanted else new_run_path(request.recipe.name)
    if request.folder != Path.cwd():
        path = request.folder / path
    check_halving(path, request.settings.halving)
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
    keep_recipe(run.path, request.source, request.recipe, request.pieces, changed=changed)
    is_file = request.source.endswith(".py")
    # A job's copy of the code is of the commit at the submit.
    commit = kept_code(run.path).get("commit") or git_commit(
        Path(request.source).resolve().parent if is_file else Path.cwd()
    )
    run.write_environment(
        environment(
            world,
            gpus=[gpu for gpu in dict.fromkeys(gpus) if gpu],
            **kernels_of(world.device),
            **({"git_commit": commit} if commit else {}),
        )
    )


def _start_record(
    request: Request, built: Built, path: Path, named: Path, resumed: Loaded | None
) -> Record:
    work, splits, settings = built.work, built.splits, built.work.settings
    notes = notes_of(request, built, path, resumed=resumed is not None)
    only_if_set = {
        "batch_size_per_rank": request.settings.batch_size_per_rank,
        "batch_tokens": settings.batch_tokens,
        "order": order_name(settings) if order_name(settings) != "shuffled" else None,
        "param_dtype": settings.param_dtype,
        "own_schedule": bool(request.recipe.schedule),
        "left_out": list(splits.left_out),
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
        lower_is_better=[*request.recipe.falling(), *work.learner.parts],
        monitor=built.state.watch.metric,
        free_options=sorted(free_names(request.recipe.options)),
        resumed=resumed is not None,
        **{name: value for name, value in only_if_set.items() if value},
        notes=[*splits.notes, *notes],
    )


def notes_of(request: Request, built: Built, path: Path, *, resumed: bool) -> list[str]:
    """Return the notes of a run that is about to start."""
    notes = []
    work, settings, plan = built.work, built.work.settings, built.work.plan
    if request.settings_of is not None:
        notes.append(
            f"This is a new run with the settings of {request.settings_of}. To continue that "
            f"run: samestep train {request.settings_of} --resume."
        )
    by_virtual = "--virtual-ranks N makes it the same on any number of ranks."
    sharded = any_sharded(work.learner.model)
    by_virtual = f"With --strategy ddp, {by_virtual}" if sharded else by_virtual
    notes += [*built.unkept.notes(by_virtual), *_without_effect(work)]
    notes += _other_bits(work, path) if resumed else []
    notes += plan_notes(plan, settings)
    if settings.keep_top_k and work.validation is None:
        notes.append("--keep-top-k keeps only the last checkpoint: there is no validation data.")
    watched = built.state.watch.metric
    rises = getattr(request.recipe.metrics.get(watched), "higher_is_better", watched == "accuracy")
    directed = rises or watched in (*request.recipe.falling(), *work.learner.parts)
    if settings.monitor and settings.mode == "auto" and not directed:
        notes.append(
            f"--monitor {watched}: the highest {watched} counts as the best. If less is better, "
            f'write lower_is_better=("{watched}",) into the recipe, or add --mode min.'
        )
    if request.recipe_changes:
        changes = listed(request.recipe_changes, 5)
        notes.append(
            f"The run continues with the recipe as it is now; what has changed: {changes}."
        )
    elif resumed and (found := recipe_changes(path, request.source)):
        changes = listed(found, 5)
        notes.append(
            f"{request.source} has changed ({changes}); the run continues with its own copy."
        )
    average = work.learner.average
    extra = () if average is None else average.state().values()
    held = state_bytes([work.learner.model], [work.learner.optimizer], extra)
    notes += [*room_notes(path, held), *modules_note(path)]
    if resumed and is_done(work, built.state):
        notes.append(
            "The run is finished. To train further, give a larger --epochs or --max-steps."
        )
    return notes


def _without_effect(work: Work) -> list[str]:
    """Return which settings have no effect here, and what takes a slower way."""
    settings, world = work.settings, work.world
    train, is_stream = work.train, isinstance(work.train, StreamSource)
    never_saved = settings.checkpoint_every_steps is settings.checkpoint_every_minutes is None
    alone = world.world_size == 1
    found = batch_norms(work.learner.model.train())  # one may be kept in eval mode
    norms = [
        repr(n) for n, m in found.items() if m.training and not isinstance(m, nn.SyncBatchNorm)
    ]
    over_all_ranks = (
        "--sync-batchnorm normalises over those of all ranks."
        if world.device.type == "cuda"
        else "--virtual-ranks N makes it the same on any number of ranks."
    )
    notes = {
        "--num-workers has no effect: the data is held in memory.": (
            settings.num_workers and isinstance(train, MemorySource)
        ),
        "The training data stays in CPU memory, since it would take more than a quarter of the "
        "GPU's. Its batches are copied while the GPU computes.": (
            isinstance(train, MemorySource) and not train.is_resident
        ),
        "--shuffle-buffer has no effect: the data is not a stream, and is shuffled as a whole.": (
            settings.shuffle_buffer and not is_stream
        ),
        "The stream's state_dict does not lead back to the same element, or cannot be saved: a run "
        "that continues will read the earlier elements again, and skip them.": (
            isinstance(train, StreamSource) and train.loses_its_place
        ),
        "With --max-steps and no epochs, a stream that does not end is saved and evaluated only "
        "after the last step. --checkpoint-every-steps and --eval-every-steps do it before.": (
            work.plan.is_stream and not work.plan.epochs and never_saved
        ),
        "No pictures are drawn of a model that the ranks share out (--strategy fsdp).": (
            settings.pictures and settings.strategy == "fsdp" and world.connected
        ),
        f"The model has BatchNorm ({listed(norms, 1)}), which normalises over the samples of each "
        f"rank by itself: this is another training than on one rank. {over_all_ranks}": (
            norms and not (alone or settings.sync_batchnorm or settings.virtual_ranks)
        ),
        "--sync-batchnorm has no effect on one rank: it sees the whole batch.": (
            settings.sync_batchnorm and alone
        ),
        "--strategy fsdp has no effect on one rank: it holds the whole model.": (
            settings.strategy == "fsdp" and alone and not world.connected
        ),
        "--bucket-cap-mb has no effect on one rank: nothing is reduced.": (
            settings.bucket_cap_mb is not None and alone and not world.connected
        ),
        "--warmup-from has no effect without --warmup-steps.": (
            settings.warmup_from is not None and not settings.warmup_steps
        ),
        "--cudnn-benchmark has no effect: only NVIDIA GPUs use cuDNN.": (
            settings.cudnn_benchmark and world.device.type != "cuda"
        ),
    }
    return [note for note, applies in notes.items() if applies]


def _other_bits(work: Work, path: Path) -> list[str]:
    """Return a note if a run with virtual ranks continues where arithmetic rounds differently."""
    if not (work.world.virtual_ranks and work.world.is_main):
        return []
    starts = [r["arithmetic"] for r in read_records(path) if "arithmetic" in r]
    now = arithmetic(work.world.device)
    if not starts or starts[-1] == now:
        return []
    before, after = (" on ".join(one.values()) for one in (starts[-1], now))
    was = f"The run was trained with PyTorch {before}; here it is {after}."
    return [f"{was} From here on it is the same training to rounding, not to the last bit."]
