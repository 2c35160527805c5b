"""Verify a recipe: which starts there are, and what each rank does in them.

A rank runs the short trainings of its start one by one, and hands each back when it is done.
"""

import contextlib
import shutil
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from samestep.base.errors import UserError
from samestep.base.settings import Precision, in_precision
from samestep.core.data.keyed_random import seed_alike
from samestep.core.data.recipe_data import is_stream, load_splits
from samestep.core.learner.device import switched
from samestep.core.learner.side_effects import ALL_KINDS, RandomDraws, watched
from samestep.core.plan import check_virtual
from samestep.core.recipe import Recipe, Splits
from samestep.core.recipe_checks import with_options
from samestep.core.session.request import Request
from samestep.core.session.training_run import Shown, run_elastic, run_session
from samestep.core.training.stopping import ReceivedSignal
from samestep.core.training.work import Learner
from samestep.launch.ranks.process import hand_back
from samestep.launch.ranks.regroup import Membership
from samestep.launch.ranks.world import World
from samestep.prove.verification import NO_EFFECT, few_samples, harness
from samestep.prove.verification.evidence import Evidence
from samestep.prove.verification.recipe_under_test import (
    RecipeUnderTest,
    exact_precision,
    hold_model,
    nudge,
)
from samestep.prove.verification.rows import plan_trainings, run_experiments, run_on_rank
from samestep.prove.verification.rows.metrics import ONE_DEVICE, evaluate_checkpoint
from samestep.prove.verification.rows.model import unused_parameters
from samestep.prove.verification.rows.one_writer import ONE_WRITER, RecipeOutput
from samestep.prove.verification.rows.trainings import OPTIMIZER
from samestep.prove.verification.short_trainings import (
    MAIN,
    RankReport,
    RecipeFacts,
    ShortTraining,
    StartInstructions,
    plan_starts,
    run_of,
    settings_of,
    start_with_death,
)
from samestep.prove.verification.trace import Trace, recording

_HEAVY = 1_000_000
"""A model of more parameters gets fewer steps, so that a verification stays within a minute."""


def verify_recipe(
    request: Request,
    options: harness.VerifyOptions,
    launch: harness.Launch,
    *,
    explicit: Collection[str],
    launch_elastic: harness.Launch | None = None,
    progress: harness.Progress = lambda *_: None,
) -> harness.Verification:
    """Train a recipe for a few steps on several numbers of ranks, and compare.

    `launch` starts ranks that call `run_start`, and `launch_elastic` ranks that outlive each other;
    `explicit` are the settings that the user has given.
    """
    recipe = request.recipe
    notes = list[str]()
    if idle := sorted({*explicit} & {*NO_EFFECT}):  # as train() takes them
        notes.append(f"{', '.join(idle)}: no effect, since verify chooses its own steps.")
    batch = request.settings.batch_size if "batch_size" in explicit else None
    with harness.starting(options, request.settings, launch, progress) as starts:
        if starts.device != "cpu" and torch.cuda.is_available():
            launch_elastic = None  # it was never tried with NCCL
        evidence = gather(request, starts, launch_elastic, batch=batch)
    return starts.answer(recipe.name, evidence, recipe.accepts, notes)


def gather(
    request: Request,
    starts: harness.Starts,
    launch_elastic: harness.Launch | None = None,
    *,
    batch: int | None = None,
    lightning: bool = True,
) -> Evidence:
    """Start ranks, one size after the other, and gather what they hand back.

    One process is always among the sizes. The global batch is the smallest that will do, unless it
    is given. Lightning's Trainer is compared too if it is installed.
    """
    settings, recipe, quick = request.settings, request.recipe, starts.options.quick
    planned = plan_starts(starts.sizes, quick=quick)
    with_death = None
    if launch_elastic is not None and not quick:
        with_death = start_with_death(starts.sizes, len(planned))
    in_lightning = (  # its engine refuses the opposites
        find_spec("lightning") is not None
        and recipe.loss_over == "samples"
        and recipe.carry is None
        and settings.ema is None
        and settings.virtual_ranks is None
        and not {"optimizer", "metrics"}.intersection(recipe.schedule_asks())
    )
    instructions = StartInstructions(
        start=planned[0],
        folder=starts.folder,
        sizes=tuple(sorted({1, *starts.sizes})),
        batch=batch,
        lightning=lightning and in_lightning,
        quick=quick,
    )
    all_starts = [*planned, *([with_death] if with_death else [])]
    starts.total = len(all_starts)
    for start in all_starts:
        in_one_process = starts.reports.get(0, ())
        failed = frozenset(f.training for report in in_one_process for f in report.failures)
        task = replace(instructions, start=start, facts=starts.facts, failed=failed)
        _, failure = starts.run(start, task, launch_elastic if start.loses_rank else None)
        if start.place:  # the runs before it may be large, and have been resumed now
            shutil.rmtree(starts.folder / f"runs-{start.place - 1}", ignore_errors=True)
        elif failure and failure.mistake:
            raise UserError(failure.message)
        elif (0, MAIN) not in starts.traces:
            break
    if starts.facts is None:
        raise UserError(starts.ended.get(0, "The first process left nothing."))
    return starts.evidence(starts.facts, planned, settings.precision, with_death)


def run_start(
    request: Request,
    instructions: StartInstructions,
    world: World,
    output: RecipeOutput,
    membership: Membership | None = None,
) -> None:
    """Run a start's short trainings on this rank; hand back traces, facts and, last, a report.

    With a `membership`, the world is yet to be joined, once a training begins.
    """
    start = _Start(request, instructions, world, membership)
    try:
        with switched(request.settings, world.device):
            start.run()
    finally:
        start.report.results[ONE_WRITER.name] = output
        hand_back(start.report)


class _Start:
    """The short trainings of one start on one rank, and the data that they share."""

    _recipe: Recipe
    _facts: RecipeFacts
    _few: Splits

    def __init__(
        self,
        request: Request,
        instructions: StartInstructions,
        world: World,
        membership: Membership | None,
    ) -> None:
        self._request, self._instructions, self._start = request, instructions, instructions.start
        self._membership, self._joined = membership, world
        self._world = World(device=world.device) if membership else world
        self.report = RankReport()

    def run(self) -> None:
        """Look at the recipe if this is the first start, then run what is planned."""
        request, start, settings = self._request, self._start, self._request.settings
        options = self._world.on_main(lambda: request.recipe.complete_options(request.options))
        self._recipe = replace(request.recipe.with_options(options), complete=None)
        # The self-check would end the training with what is to be named here.
        quiet = replace(settings, self_check=False)
        self._request = replace(request, options=options, settings=quiet, resume=True)
        seed_alike(settings.seed)
        # A run prepares all of its data; here a few samples are used.
        splits = load_splits(self._recipe, options, self._world, prepare=False)
        if settings.virtual_ranks is not None:  # refuses data that they cannot share
            num = 0 if is_stream(splits.train) else few_samples.num_samples(splits.train)
            check_virtual(settings, num, self._world.world_size)
            torch.set_num_threads(settings.threads or 1)
        splits = few_samples.without_streams(splits, settings.seed)
        self.report.num_samples = few_samples.num_samples(splits.train)
        facts = self._facts = self._instructions.facts or self._size(splits)
        self._few = few_samples.cut_down(splits, facts.size.num_samples, facts.size.num_evaluated)
        self._recipe = few_samples.cut_numbers(self._recipe, splits, self._few)
        problem = ""
        if start.place == 0:
            exact, why, problem = exact_precision(self._tested(), settings.precision)
            self._facts = replace(facts, exact=exact, inexact=why)
        # Before anything else is tried: the other processes do the same.
        self.report.results |= run_on_rank(self._tested(), self._world)
        if start.place == 0:
            if not problem:
                self._facts = run_experiments(self._tested(), self._facts)
            hand_back(self._facts)
        quick, failed = self._instructions.quick, self._instructions.failed
        planned = partial(plan_trainings, quick=quick, failed=failed)
        for training in planned(start, self._facts, settings.precision):
            trace = Trace(training=training.name)
            try:
                self._train(training, trace)
            except Exception as error:
                self.report.failures.append(harness.failure_of(trace, error))
                if self._world.world_size > 1 or training.name == MAIN:
                    raise
            else:
                hand_back(trace)
        if start.closing:
            run = run_of(self._instructions.folder, start.place - 1, MAIN)
            self.report.results[ONE_DEVICE.name] = evaluate_checkpoint(self._tested(), run)

    def _size(self, splits: Splits) -> RecipeFacts:
        """Choose how much of the data is trained and evaluated."""
        name, settings = few_samples.evaluated_split(splits), self._request.settings
        seed_alike(settings.seed)
        heavy = False
        with contextlib.suppress(UserError):  # the first short training reports it
            model = self._recipe.build_model(self._request.options)
            heavy = sum(p.numel() for p in model.parameters()) > _HEAVY
        size = few_samples.choose_training_size(
            self.report.num_samples,
            few_samples.num_samples(getattr(splits, name)),
            self._instructions.sizes,
            batch=self._instructions.batch,
            virtual=settings.virtual_ranks,
            drop_last=settings.drop_last,
            heavy=heavy,
        )
        return RecipeFacts(
            num_samples=self.report.num_samples,
            size=size,
            evaluates=name,
            lightning=self._instructions.lightning,
            allows_unused=settings.allows_unused,
            virtual_ranks=settings.virtual_ranks,
        )

    def _tested(self, precision: Precision | None = None) -> RecipeUnderTest:
        return RecipeUnderTest(
            recipe=self._recipe,
            options=self._request.options,
            settings=in_precision(self._request.settings, precision or self._facts.exact),
            splits=self._few,
            size=self._facts.size,
            world=World(device=self._world.device),
        )

    def _train(self, training: ShortTraining, trace: Trace) -> None:
        place, name = self._start.place, training.name
        if training.resumes:
            place, name = place - 1, MAIN
        run, users = run_of(self._instructions.folder, place, name), self._request.settings
        settings = settings_of(training, users, self._facts, self._start.world_size, run)
        if self._world.device.type != "cuda":
            settings = replace(settings, sync_batchnorm=False)
        few, inner = self._few, self._recipe
        # A schedule may follow what is validated; else only some trainings take that time.
        if {"optimizer", "metrics"}.intersection(inner.schedule_asks()):
            settings = replace(settings, monitor=users.monitor, mode=users.mode)
        elif not training.evaluates:
            few = replace(few, validation=None)
        unused = [] if settings.allows_unused else unused_parameters(self._facts)

        def model(options: Any = None) -> nn.Module:
            """Build it without parameters that nothing uses."""
            built: nn.Module = with_options("model", inner.model, options)()
            for name, parameter in built.named_parameters():
                if name in unused:
                    parameter.requires_grad = False
            return built

        recipe = replace(inner, model=model, data=lambda *_: few)
        tested, prepare = self._tested(settings.precision), lambda _: None
        if self._facts.virtual_ranks is None:  # else nothing is fixed, or looked into
            held = ALL_KINDS - training.free
            recipe = replace(
                recipe,
                loss=watched(tested.placed_loss, RandomDraws(), held),
                evaluation_loss=inner.evaluation_loss
                and watched(tested.placed_evaluation_loss, RandomDraws(), held),
                forward=inner.forward and tested.exactly(inner.forward),
            )
            prepare = partial(self._hold, training, trace, tested)
        request = replace(self._request, recipe=recipe, settings=settings)
        received, shown = ReceivedSignal(), Shown((trace.keep,))
        engine = recording(training, self._facts.size.stop, trace, prepare)
        if self._membership is None:
            run_session(request, self._world, received=received, shown=shown, engine=engine)
        else:
            run_elastic(
                request,
                self._joined,
                self._membership,
                received=received,
                shown=lambda *_: shown,
                engine=engine,
            )

    def _hold(
        self, training: ShortTraining, trace: Trace, tested: RecipeUnderTest, learner: Learner
    ) -> None:
        """Hold still what a training does not leave free, before anything is computed."""
        model = learner.model
        # A checkpoint, or another rank, brings the statistics that it was trained with.
        continues = training.resumes or trace.begun > 0
        calibrate = None if continues else partial(tested.calibrate, learner.applied)
        hold_model(model, RandomDraws(), ALL_KINDS - training.free, calibrate)
        model.forward = tested.exactly(model.forward)
        if training.nudged:
            nudge(model, tested.settings.precision)
        if arithmetic := self._facts.results.get(OPTIMIZER.name):
            arithmetic.hold(tested, learner.optimizer)
            if training.nudges_gradient:
                learner.optimizer.register_step_pre_hook(arithmetic.nudging())
