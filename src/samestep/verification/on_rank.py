"""What each rank of a start does: the short trainings one by one, each handed back when done."""

import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.data.recipe_splits import load_splits
from samestep.data.stream_lanes import is_stream
from samestep.errors import LOST_PEER, UserError, caused, is_users
from samestep.ranks.process import hand_back
from samestep.ranks.world import World
from samestep.recipe import Recipe, Splits
from samestep.recipe_source import with_options
from samestep.session.request import Request
from samestep.session.training_run import run_session
from samestep.settings import Precision, in_precision
from samestep.training.alike import seed_alike
from samestep.training.device import switched
from samestep.training.plan import check_virtual
from samestep.training.side_effects import ALL_KINDS, Kind, RandomDraws, watched
from samestep.training.stopping import ReceivedSignal
from samestep.verification.all_rows import look, look_on_rank, plan_trainings
from samestep.verification.few_samples import (
    choose_training_size,
    cut_down,
    evaluated_split,
    num_samples,
    without_streams,
)
from samestep.verification.recipe_under_test import (
    RecipeUnderTest,
    exact_precision,
    hold_model,
    nudge,
)
from samestep.verification.rows.metrics import ONE_DEVICE, evaluate_checkpoint
from samestep.verification.rows.model import unused_parameters
from samestep.verification.rows.one_writer import ONE_WRITER, RecipeOutput
from samestep.verification.short_trainings import (
    MAIN,
    RankFailure,
    RankReport,
    RecipeFacts,
    ShortTraining,
    StartInstructions,
    run_of,
    settings_of,
)
from samestep.verification.trace import Trace, recording

_HEAVY = 1_000_000
"""A model of more parameters gets fewer steps, so that a verification stays within a minute."""


def run_start(
    request: Request, instructions: StartInstructions, world: World, output: RecipeOutput
) -> None:
    """Run all short trainings of a start on this rank, which has joined the others.

    It hands back each trace, the facts if this is the first start, and at last a report, also of
    the error that it raises.
    """
    start = _Start(request, instructions, world)
    try:
        with switched(request.settings, world.device):
            start.run()
    finally:
        start.report.found[ONE_WRITER.name] = output
        hand_back(start.report)


class _Start:
    """The short trainings of one start on one rank, and the data that they share."""

    _recipe: Recipe
    _facts: RecipeFacts
    _few: Splits

    def __init__(self, request: Request, instructions: StartInstructions, world: World) -> None:
        self._instructions, self._start = instructions, instructions.start
        self._request, self._world = request, world
        self.report = RankReport()

    def run(self) -> None:
        """Look at the recipe if this is the first start, then run what is planned."""
        request, chosen = self._request, self._request.settings.precision
        options = self._world.on_main(lambda: request.recipe.complete_options(request.options))
        self._recipe = replace(request.recipe.with_options(options), complete=None)
        # The self-check would end the training with what is to be named here.
        settings = replace(request.settings, self_check=False)
        self._request = replace(request, options=options, settings=settings, resume=True)
        seed_alike(request.settings.seed)
        # A run prepares all of its data; here a few samples are used.
        splits = load_splits(self._recipe, options, self._world, prepare=False)
        self._hold_bits_still(splits)
        splits = without_streams(splits, request.settings.seed)
        self.report.num_samples = num_samples(splits.train)
        facts = self._instructions.facts or self._size(splits)
        self._facts = facts
        self._few = cut_down(splits, facts.size.num_samples, facts.size.num_evaluated)
        problem = ""
        if first := self._start.place == 0:
            exact, why, problem = exact_precision(self._tested(), chosen)
            self._facts = replace(facts, exact=exact, inexact=why)
        # Before anything else is tried: the other processes do the same.
        self.report.found |= look_on_rank(self._tested(), self._world)
        if first:
            if not problem:
                self._facts = look(self._tested(), self._facts)
            hand_back(self._facts)
        quick = self._instructions.quick
        for training in plan_trainings(self._start, self._facts, chosen, quick=quick):
            trace = Trace(training=training.name)
            try:
                self._take(training, trace)
            except Exception as error:
                self.report.failures.append(_failure(trace, error))
                if self._world.world_size > 1 or training.name == MAIN:
                    raise
            else:
                hand_back(trace)
        if self._start.closing:
            run = run_of(self._instructions.folder, self._start.place - 1, MAIN)
            self.report.found[ONE_DEVICE.name] = evaluate_checkpoint(self._tested(), run)

    def _hold_bits_still(self, splits: Splits) -> None:
        """Compute with virtual ranks' number of threads; refuse data that they cannot share."""
        settings, train = self._request.settings, splits.train
        if settings.virtual_ranks is not None:
            num = 0 if is_stream(train) else num_samples(train)
            check_virtual(settings, num, self._world.world_size)
            torch.set_num_threads(settings.threads or 1)

    def _size(self, splits: Splits) -> RecipeFacts:
        """Choose how much of the data is trained and evaluated."""
        name, settings = evaluated_split(splits), self._request.settings
        seed_alike(settings.seed)
        try:
            model = self._recipe.build_model(self._request.options)
            heavy = sum(p.numel() for p in model.parameters()) > _HEAVY
        except UserError:  # the first short training reports it
            heavy = False
        size = choose_training_size(
            self.report.num_samples,
            num_samples(getattr(splits, name)),
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

    def _take(self, training: ShortTraining, trace: Trace) -> None:
        place, name = self._start.place, training.name
        if training.resumes:
            place, name = place - 1, MAIN
        held = None if self._facts.virtual_ranks else ALL_KINDS - training.free
        run = run_of(self._instructions.folder, place, name)
        settings = settings_of(
            training, self._request.settings, self._facts, self._world.world_size, run
        )
        if self._world.device.type != "cuda":
            settings = replace(settings, sync_batchnorm=False)

        def prepare(model: nn.Module) -> None:
            if held is None:
                return

            def calibrate() -> Any:
                tested = self._tested(settings.precision)
                return tested.calibrate(model, tested.batch())

            # A checkpoint brings the statistics that it was trained with.
            hold_model(model, RandomDraws(), held, None if training.resumes else calibrate)
            model.forward = self._tested(settings.precision).exactly(model.forward)
            if training.nudged:
                nudge(model, settings.precision)

        recipe = self._held_recipe(held, settings.precision, evaluates=training.evaluates)
        run_session(
            replace(self._request, recipe=recipe, settings=settings),
            self._world,
            received=ReceivedSignal(),
            show=trace.keep,
            begin=lambda _path: None,
            started_at=time.time(),
            engine=recording(training, self._facts.size.stop, trace, prepare),
        )

    def _held_recipe(
        self, held: frozenset[Kind] | None, precision: Precision, *, evaluates: bool
    ) -> Recipe:
        """Return the recipe with its few samples, and without parameters that nothing uses.

        Nothing of it is held still, or looked into, if `held` is None.
        """
        few = self._few if evaluates else replace(self._few, validation=None)
        recipe, allowed = self._recipe, self._request.settings.allows_unused
        unused = [] if allowed else unused_parameters(self._facts)

        def model(options: Any = None) -> nn.Module:
            built: nn.Module = with_options("model", recipe.model, options)()
            for name, parameter in built.named_parameters():
                if name in unused:
                    parameter.requires_grad = False
            return built

        loss, forward = recipe.loss, recipe.forward
        if held is not None:
            tested = self._tested(precision)
            loss = watched(tested.placed_loss, RandomDraws(), held)
            forward = None if forward is None else tested.exactly(forward)
        return replace(recipe, model=model, data=lambda *_: few, loss=loss, forward=forward)


def _failure(trace: Trace, error: Exception) -> RankFailure:
    if trace.begun > 1:  # what fails now and not at once depends on the batch
        error = caused(error)
    mistake = isinstance(error, UserError)
    text = str(error).strip()
    if not mistake:
        # Without the dispatcher's list of what it could do.
        first = text.partition("\n")[0].partition(" This could be because the operator")[0]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = f"{type(error).__name__}: {first}{where}"
    lost = not mistake and bool(LOST_PEER.search(str(error)))
    return RankFailure(
        training=trace.training, step=trace.begun, message=text, mistake=mistake, lost_peer=lost
    )
