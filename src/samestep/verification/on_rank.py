"""What each rank of a start does: the short trainings one by one, each kept in a file."""

import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.data.recipe_splits import load_splits
from samestep.data.stream_lanes import is_stream
from samestep.errors import LOST_PEER, UserError, caused, is_users
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
from samestep.verification.exchange import (
    RankFailure,
    RankReport,
    RecipeFacts,
    StartInstructions,
    encoded,
    folder_of,
    read_left,
    run_of,
    write_left,
)
from samestep.verification.few_samples import (
    cut_down,
    evaluated_split,
    num_samples,
    without_streams,
)
from samestep.verification.randomness import hold_model, nudge
from samestep.verification.recipe_under_test import RecipeUnderTest, exact_precision, few_inputs
from samestep.verification.record import keep_record, recording
from samestep.verification.rows import one_device, one_writer
from samestep.verification.rows.unused_parameters import unused_parameters
from samestep.verification.short_trainings import MAIN, ShortTraining, settings_of
from samestep.verification.trace import Trace
from samestep.verification.training_size import choose_training_size

_HEAVY = 1_000_000
"""Parameters of a model so large that a minute needs fewer steps."""


def run_start(
    request: Request,
    instructions: StartInstructions,
    folder: Path,
    world: World,
    output: one_writer.RecipeOutput,
) -> None:
    """Run all short trainings of a start on this rank, which has joined the others.

    Raises:
        Exception: whatever a short training failed with; it is in the rank's report.
    """
    start = _Start(request, instructions, folder, world)
    start.own.mkdir(parents=True, exist_ok=True)
    try:
        with switched(request.settings, world.device):
            start.run()
    finally:
        start.report.found[one_writer.NAME] = encoded(output)
        write_left(start.own / "report", start.report)


class _Start:
    """The short trainings of one start on one rank, and the data that they share."""

    def __init__(
        self, request: Request, instructions: StartInstructions, folder: Path, world: World
    ) -> None:
        self._request, self._instructions, self._folder = request, instructions, folder
        self._world, self._start = world, instructions.start
        self.report = RankReport()
        self.own = folder_of(folder, self._start.place, world.rank)

    def run(self) -> None:
        """Look at the recipe if this is the first start, then run what is planned."""
        request, chosen = self._request, self._request.settings.precision
        options = self._world.on_main(lambda: request.recipe.complete_options(request.options))
        self._recipe: Recipe = replace(request.recipe.with_options(options), complete=None)
        # What is to be named here must not end the training.
        settings = replace(request.settings, self_check=False)
        self._request = replace(request, options=options, settings=settings, resume=True)
        seed_alike(request.settings.seed)
        # A run prepares all of its data; here a few samples are used.
        splits = load_splits(self._recipe, options, self._world, prepare=False)
        self._hold_bits_still(splits)
        self._splits = without_streams(splits, request.settings.seed)
        self.report.num_samples = num_samples(self._splits.train)
        first = self._start.place == 0
        found = None if first else read_left(self._folder / "facts", RecipeFacts)
        self._use(found or self._size())
        problem = self._choose(chosen) if first else ""
        # Before anything else has been tried: the other processes do the same.
        self.report.found |= look_on_rank(self._tested(), self._world)
        if first:
            self._look(problem)
        quick = self._instructions.quick
        for training in plan_trainings(self._start, self._facts, chosen, quick=quick):
            trace = Trace()
            try:
                self._take(training, trace)
            except Exception as error:
                self.report.failures.append(_failure(training, trace, error))
                if self._world.world_size > 1 or training.name == MAIN:
                    raise
            else:
                torch.save(vars(trace), self.own / f"{training.name}.pt")
        if self._start.closing:
            run = run_of(self._folder, self._start.place - 1, MAIN)
            loaded = one_device.evaluate_checkpoint(self._tested(), run)
            self.report.found[one_device.NAME] = encoded(loaded)

    def _hold_bits_still(self, splits: Splits) -> None:
        """Compute with virtual ranks' number of threads; refuse data that they cannot share."""
        settings, train = self._request.settings, splits.train
        if settings.virtual_ranks is not None:
            num = 0 if is_stream(train) else num_samples(train)
            check_virtual(settings, num, self._world.world_size)
            torch.set_num_threads(settings.threads or 1)

    def _use(self, facts: RecipeFacts) -> None:
        self._facts = facts
        self._few = cut_down(self._splits, facts.size.num_samples, facts.size.num_evaluated)

    def _size(self) -> RecipeFacts:
        """Return how much of the data is trained and evaluated."""
        name, total = evaluated_split(self._splits), self.report.num_samples
        settings, lightning = self._request.settings, self._instructions.lightning
        seed_alike(settings.seed)
        try:
            model = self._recipe.build_model(self._request.options)
            heavy = sum(p.numel() for p in model.parameters()) > _HEAVY
        except UserError:  # the run will tell of it
            heavy = False
        size = choose_training_size(
            total,
            num_samples(getattr(self._splits, name)),
            self._instructions.sizes,
            batch=self._instructions.batch,
            virtual=settings.virtual_ranks,
            drop_last=settings.drop_last,
            heavy=heavy,
        )
        return RecipeFacts(
            num_samples=total,
            size=size,
            evaluates=name,
            lightning=lightning,
            virtual_ranks=settings.virtual_ranks,
        )

    def _choose(self, chosen: Precision) -> str:
        """Choose the precision to compare in; return why none will do, if that is so."""
        exact, why, problem = exact_precision(self._tested(), chosen)
        self._facts = replace(self._facts, exact=exact, inexact=why)
        return problem

    def _look(self, problem: str) -> None:
        """Find out what one process can tell, and leave it for the others."""
        if not problem:
            self._facts = look(self._tested(), self._facts)
        write_left(self._folder / "facts", self._facts)

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
        run = run_of(self._folder, place, name)
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
                return tested.forward(model, few_inputs(tested, tested.batch()))

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
            show=partial(keep_record, trace),
            begin=lambda _path: None,
            started_at=time.time(),
            engine=recording(training, self._facts.size.stop, trace, prepare),
        )

    def _held_recipe(
        self, held: frozenset[Kind] | None, precision: Precision, *, evaluates: bool
    ) -> Recipe:
        """Return the recipe with its few samples, and without parameters that nothing uses.

        Nothing of it is held still, or looked into, where `held` is None.
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


def _first_sentence(text: str) -> str:
    """Return the first line of a message, without the dispatcher's list of what it could do."""
    return text.partition("\n")[0].partition(" This could be because the operator")[0]


def _failure(training: ShortTraining, trace: Trace, error: Exception) -> RankFailure:
    if trace.begun > 1:  # what fails now and not at once depends on the batch
        error = caused(error)
    mistake = isinstance(error, UserError)
    text = str(error).strip()
    if not mistake:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = f"{type(error).__name__}: {_first_sentence(text)}{where}"
    lost = not mistake and bool(LOST_PEER.search(str(error)))
    return RankFailure(
        training=training.name, step=trace.begun, message=text, mistake=mistake, lost_peer=lost
    )
