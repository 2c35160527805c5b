"""What each rank of a start does: the situations one after the other, each kept in a file."""

import time
import traceback
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from samestep.data.batches import open_source
from samestep.data.order import share
from samestep.data.recipe_splits import load_splits
from samestep.data.trees import narrow
from samestep.errors import LOST_PEER, UserError
from samestep.execution.request import Request
from samestep.execution.session import NATIVE, Engine, run_session
from samestep.ranks.world import World
from samestep.recipe import Recipe
from samestep.run import checkpoints
from samestep.run.files import write_text
from samestep.training.evaluation import evaluate
from samestep.training.snapshot import load_model, seed_alike
from samestep.training.stopping import Received
from samestep.verification.digest import sample_marks
from samestep.verification.experiments import exact_precision, look_at
from samestep.verification.facts import Facts, read_facts, write_facts
from samestep.verification.messages import Failure, Order, Told, folder_of, run_of
from samestep.verification.randomness import ALL_KINDS, Seen, hold_model, is_users, watched
from samestep.verification.record import keep_record, recording
from samestep.verification.situations import MAIN, Situation, plan_situations, settings_of
from samestep.verification.sizes import choose_cut
from samestep.verification.subject import Subject, few_inputs, held_model
from samestep.verification.subset import cut_down, evaluated_split, num_samples
from samestep.verification.trace import Trace, save_trace
from samestep.verification.writes import Writes

_HEAVY = 1_000_000


def run_start(request: Request, order: Order, folder: Path, world: World, writes: Writes) -> None:
    """Run all situations of a start on this rank, which has joined the others.

    Raises:
        Exception: whatever a situation failed with; it has been told already.
    """
    own = folder_of(folder, order.start.place, world.rank)
    own.mkdir(parents=True, exist_ok=True)
    told = Told(printed=writes.printed, written=writes.written)
    try:
        _Start(request, order, folder, world, told).run()
    finally:
        write_text(own / "told.json", msgspec.json.encode(asdict(told)).decode())


class _Start:
    """The situations of one start on one rank, and the data that they share."""

    def __init__(
        self, request: Request, order: Order, folder: Path, world: World, told: Told
    ) -> None:
        self._order, self._folder, self._world, self._told = order, folder, world, told
        self._start, self._chosen = order.start, request.settings.precision
        options = world.on_main(lambda: request.recipe.complete_options(request.options))
        self._recipe: Recipe = replace(request.recipe, complete=None)
        self._request = replace(request, options=options, resume=True)

    def run(self) -> None:
        """Look at the recipe if this is the first start, then run what is planned."""
        self._load()
        first = self._start.place == 0
        found = read_facts(self._folder / "facts.json")
        self._facts = self._look() if first or found is None else found
        told = self._told
        told.marks = self._marks()
        if self._world.world_size > 1:
            told.across = self._metrics_across()
        for situation in plan_situations(self._start, self._facts, self._chosen):
            trace = Trace()
            try:
                self._take(situation, trace)
            except Exception as error:
                told.failures.append(_failure(situation, trace, error))
                if self._world.world_size > 1 or situation.name == MAIN:
                    raise
            else:
                own = folder_of(self._folder, self._start.place, self._world.rank)
                save_trace(own / f"{situation.name}.pt", trace)
        if self._start.closing:
            told.loaded = self._load_on_one_device()

    def _load(self) -> None:
        """Load the data as a run does, without preparing all of it: a few samples are used."""
        seed_alike(self._request.settings.seed)
        self._splits = load_splits(self._recipe, self._request.options, self._world, prepare=False)
        self._told.num_samples = num_samples(self._splits.train)

    def _cut_down(self, facts: Facts) -> None:
        self._few = cut_down(self._splits, facts.cut.num_samples, facts.cut.num_evaluated)

    def _look(self) -> Facts:
        """Find out what one process can tell, and leave it for the others."""
        name = evaluated_split(self._splits)
        settings = self._request.settings
        facts = Facts(
            num_samples=num_samples(self._splits.train),
            cut=choose_cut(
                num_samples(self._splits.train),
                num_samples(getattr(self._splits, name)),
                self._order.sizes,
                batch=self._order.batch,
                drop_last=settings.drop_last,
                heavy=self._is_heavy(),
            ),
            evaluates=name,
            lightning=self._order.lightning,
        )
        self._facts = facts
        self._cut_down(facts)
        exact, why, problem = exact_precision(self._subject(), self._chosen)
        facts = replace(facts, exact=exact, inexact=why, problem=problem)
        if not problem:
            self._facts = facts
            facts = look_at(self._subject(), facts)
        write_facts(self._folder / "facts.json", facts)
        return facts

    def _is_heavy(self) -> bool:
        """Whether the model is so large that a minute needs fewer steps."""
        seed_alike(self._request.settings.seed)
        try:
            model = self._recipe.build_model(self._request.options)
        except UserError:  # the run will tell of it
            return False
        return sum(p.numel() for p in model.parameters()) > _HEAVY

    def _subject(self, precision: str | None = None) -> Subject:
        settings = replace(
            self._request.settings,
            precision=precision or self._facts.exact,  # type: ignore[arg-type]
        )
        return Subject(
            recipe=self._recipe,
            options=self._request.options,
            settings=settings,
            splits=self._few,
            cut=self._facts.cut,
            world=World(device=self._world.device),
        )

    def _marks(self) -> list[str]:
        """Return the marks of the first samples as they are stored."""
        self._cut_down(self._facts)
        bare = replace(self._recipe, augment=None, transform=None)
        try:
            block = self._subject().batch(recipe=bare)
            return sample_marks(block.inputs, block.targets)
        except Exception:  # the run will tell of it
            return []

    def _take(self, situation: Situation, trace: Trace) -> None:
        """Run one situation; what happened is in the trace."""
        place = situation.resumes if situation.resumes is not None else self._start.place
        name = MAIN if situation.resumes is not None else situation.name
        run = run_of(self._folder, place, name)
        held = ALL_KINDS - situation.free
        cut = self._facts.cut
        settings = settings_of(
            situation, self._request.settings, self._facts, self._world.world_size, run
        )
        if self._world.device.type != "cuda":
            settings = replace(settings, sync_batchnorm=False)
        request = replace(
            self._request,
            recipe=self._held_recipe(held, evaluates=situation.evaluates),
            settings=settings,
        )

        def inputs() -> Any:
            return few_inputs(self._subject(situation.precision).batch())

        def prepare(model: nn.Module) -> None:
            # A checkpoint brings the statistics that it was trained with.
            calibrate = inputs if situation.resumes is None else None
            hold_model(model, Seen(), held, calibrate)

        engine = recording(
            self._engine(lightning=situation.lightning),
            trace,
            prepare=prepare,
            saves_at=cut.stop if situation.saves else None,
            ends_at=cut.stop if situation.short else None,
            evaluates=situation.evaluates and not situation.lightning,
        )
        run_session(
            request,
            self._world,
            received=Received(),
            show=partial(keep_record, trace),
            begin=lambda _path: None,
            started_at=time.time(),
            engine=engine,
        )

    def _held_recipe(self, held: frozenset[Any], *, evaluates: bool) -> Recipe:
        """Return the recipe with its few samples, and without parameters that nothing uses."""
        few = self._few if evaluates else replace(self._few, validation=None)
        recipe, unused = self._recipe, set(self._facts.unused)

        def model(*options: Any) -> nn.Module:
            built = recipe.model(*options)
            for name, parameter in built.named_parameters():
                if name in unused:
                    parameter.requires_grad = False
            return built

        return replace(
            recipe, model=model, data=lambda *_: few, loss=watched(recipe.loss, Seen(), held)
        )

    def _engine(self, *, lightning: bool) -> Engine:
        if lightning:
            from samestep.lightning.engine import LIGHTNING  # noqa: PLC0415 - an extra

            return LIGHTNING
        return NATIVE

    def _metrics_across(self) -> dict[str, float]:
        """Measure this rank's samples while the others measure theirs, then all the same ones."""
        world, found = self._world, {}
        try:
            subject = self._subject()
            block = subject.batch()
            outputs = subject.forward(held_model(subject, block), block.inputs)
            parts = [
                share(range(block.rows), rank, world.world_size) for rank in range(world.world_size)
            ]
        except Exception:  # the situations will tell of it
            return {}
        for name, metric in self._recipe.metrics.items():
            values = [
                metric(
                    narrow(outputs, part.start, len(part)),
                    narrow(block.targets, part.start, len(part)),
                ).double()
                for part in (parts[world.rank], *parts)
            ]
            own, alone = values[0], values[1 + world.rank]
            found[name] = float((own - alone).abs().max())
        return found

    def _load_on_one_device(self) -> dict[str, float]:
        """Evaluate the checkpoint of the largest start without any rank beside this one."""
        assert self._start.resumes is not None
        run = run_of(self._folder, self._start.resumes, MAIN)
        newest = checkpoints.load_newest(run / "checkpoints")
        if newest is None or self._few.validation is None:
            return {}
        subject = self._subject()
        model = subject.build()
        load_model(model, newest[1])
        hold_model(model, Seen(), ALL_KINDS)
        source = open_source(
            self._few.validation,
            subject.world,
            seed=subject.settings.seed,
            dtype=subject.dtype,
            num_workers=0,
            transform=self._recipe.transform,
        )
        try:
            values = evaluate(
                model,
                source,
                subject.loss,
                self._recipe.metrics,
                world=subject.world,
                batch_size=256,
                precision=subject.settings.precision,
            )
        finally:
            source.close()
        return {name: value for name, value in values.items() if isinstance(value, float)}


def _failure(situation: Situation, trace: Trace, error: Exception) -> Failure:
    mistake = isinstance(error, UserError)
    text = str(error).strip()
    if not mistake:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = f"{type(error).__name__}: {text.partition(chr(10))[0]}{where}"
    return Failure(
        situation=situation.name,
        step=max(trace.samples, default=0),
        message=text,
        mistake=mistake,
        lost_peer=not mistake and bool(LOST_PEER.search(str(error))),
    )
