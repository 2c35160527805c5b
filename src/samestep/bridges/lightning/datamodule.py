"""A recipe's data as a LightningDataModule: samestep's order, batches and shares."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.base.settings import Settings, merge_layers
from samestep.base.trees import check_rows, narrow
from samestep.core.data.keyed_random import seed_alike
from samestep.core.data.order import Block, Lap, cut_rows, untimed
from samestep.core.data.recipe_data import SPLITS, load_splits, open_split
from samestep.core.data.source import Batch, Source
from samestep.core.learner.apply import Terms, as_scalar, terms_of
from samestep.core.learner.batch_transform import BatchTransform
from samestep.core.learner.device import data_dtype
from samestep.core.plan import Plan, make_plan
from samestep.core.recipe import Recipe, find_recipe
from samestep.core.recipes import cifar10
from samestep.core.training.evaluation import evaluation_batch
from samestep.core.training.work import Work
from samestep.launch.ranks.world import World


class MicroBatch(NamedTuple):
    """What one rank computes at once, in one micro-step of an optimizer step."""

    inputs: Any
    """(batch, …)."""
    targets: Any
    """(batch, …)."""
    weight: float
    """Its samples / all samples of the step; the parts of all ranks add up to 1."""
    size: int
    """Samples of the step over all ranks."""
    last: bool
    """Whether the step ends with it."""
    rows: int
    """Samples of this part."""
    share: Tensor | None = None
    """Its terms / all terms of the step, where the loss is not a mean over samples."""
    terms: Tensor | None = None
    """All terms of the step, of all ranks."""


def resolve(
    recipe: Recipe | str, settings: Settings | None = None, **changed: object
) -> tuple[Recipe, Settings]:
    """Return the recipe, and its own settings with some changed if none are given."""
    resolved = find_recipe(recipe) if isinstance(recipe, str) else recipe
    own = merge_layers(dict(resolved.settings), changed)
    return resolved, settings or Settings(**own)  # type: ignore[arg-type]


def choose_options(recipe: Recipe, options: object) -> Any:
    """Return the given options or the recipe's defaults, completed by what the data tells."""
    chosen = recipe.make_options() if options is None else options
    return recipe.complete_options(chosen)


def world_of(trainer: "pl.Trainer") -> World:
    """Return this rank among the others, as a Trainer sees it."""
    return World(
        rank=trainer.global_rank,
        local_rank=trainer.local_rank,
        world_size=trainer.world_size,
        local_world_size=max(1, trainer.world_size // trainer.num_nodes),
        node=trainer.node_rank,
        num_nodes=trainer.num_nodes,
        device=trainer.strategy.root_device,
    )


class LitData(pl.LightningDataModule):
    """A recipe's data in samestep's order: each rank's exact share, none twice, none left out.

    Args:
        recipe: a recipe, or its name, or the path of its file.
        settings: how to train; the recipe's defaults if not given. Epochs, steps and accumulation
            are taken from the Trainer.
        options: the recipe's options; their defaults if not given.
    """

    def __init__(
        self, recipe: Recipe | str, settings: Settings | None = None, options: object = None
    ) -> None:
        super().__init__()
        self.recipe, self.settings = resolve(recipe, settings)
        self.options = choose_options(self.recipe, options)
        self.recipe = self.recipe.with_options(self.options)
        self.plan: Plan | None = None
        """Batch sizes, steps and learning rate, once it is set up."""
        self.world = World()
        self._sources: dict[str, Source] = {}
        self._is_built = False
        self._lap: Lap = untimed

    @classmethod
    def of_work(cls, work: Work, recipe: Recipe, options: object) -> "LitData":
        """Return the data of a training that samestep has built."""
        data = cls(recipe, work.settings, options)
        data.plan, data.world, data._is_built = work.plan, work.world, True
        data._lap = work.phases.lap
        data._sources = {"train": work.train}
        if work.validation is not None:
            data._sources["validation"] = work.validation
        return data

    def setup(self, stage: str) -> None:
        """Load the data and derive the numbers of the run.

        Raises:
            UserError: the sizes contradict each other, or the Trainer accumulates otherwise.
        """
        if self._is_built:
            return
        trainer = self.trainer  # None if somebody looks at the batches without one
        world = World() if trainer is None else world_of(trainer)
        if not self._sources or world != self.world:
            self.world = world
            seed_alike(self.settings.seed)
            splits = load_splits(self.recipe, self.options, world)
            shared = world, self.recipe, self.settings, torch.float32
            data_of = {n: data for n in SPLITS if (data := getattr(splits, n)) is not None}
            called = {"train": "training"}
            self._sources = {
                name: open_split(data, *shared, split=called.get(name, name))
                for name, data in data_of.items()
            }
        if stage == "fit":
            self.plan = self._plan_for(trainer)

    def _plan_for(self, trainer: "pl.Trainer | None") -> Plan:
        settings, asked = self.settings, self.settings.accumulate or 1
        if trainer is not None:
            asked = trainer.accumulate_grad_batches
            epochs = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None
            steps = trainer.max_steps if trainer.max_steps > 0 else None
            if epochs is None and steps is None:
                raise UserError(
                    "The learning rate schedule needs the length of the training: give the Trainer "
                    "max_epochs or max_steps, as a maximum, also with max_time."
                )
            settings = replace(settings, epochs=epochs, max_steps=steps)
        if settings.micro_batch_size is None:
            settings = replace(settings, accumulate=asked)
        num_samples = self._sources["train"].num_samples
        settings = settings if num_samples else replace(settings, engine="lightning")  # refused
        schedule = self.recipe.schedule
        plan = make_plan(settings, num_samples, self.world.world_size, schedule=schedule)
        if plan.accumulate != asked:
            raise UserError(
                f"The batch sizes need {plan.accumulate} micro-steps, but the Trainer takes "
                f"{asked}: create it with Trainer(accumulate_grad_batches={plan.accumulate})."
            )
        return plan

    def train_dataloader(self) -> "Parts":
        """Return a loader of this rank's parts of the running epoch."""
        assert self.plan is not None, 'setup("fit") comes first'
        drop_last = self.settings.drop_last
        shared = self.world, self.recipe, self.settings
        return Parts(self._sources["train"], self.plan, self.trainer, drop_last, self._lap, *shared)

    def val_dataloader(self) -> "_Share | list[Any]":
        """Return a loader of this rank's share of the validation samples."""
        return self._share("validation")

    def test_dataloader(self) -> "_Share | list[Any]":
        """Return a loader of this rank's share of the test samples."""
        return self._share("test")

    def _share(self, name: str) -> "_Share | list[Any]":
        if name not in self._sources:
            return []
        most = self.plan.micro_batch_size if self.plan else None
        return _Share(self._sources[name], evaluation_batch(self.settings, most), self.world)


class SpiralDataModule(LitData):
    """The two spirals for any LightningModule; a batch begins with inputs and targets.

    Args:
        num_samples: points in all; 70 % train, 15 % validation, 15 % test.
        noise: standard deviation that is added to each coordinate.
        batch_size: samples per step over all ranks.
        seed: of the points and their order.
    """

    def __init__(
        self, num_samples: int = 10_000, noise: float = 0.2, batch_size: int = 32, seed: int = 42
    ) -> None:
        recipe, settings = resolve("spiral", batch_size=batch_size, seed=seed)
        options = recipe.make_options(num_samples=num_samples, noise=noise, data_seed=seed)
        super().__init__(recipe, settings, options)


class CIFAR10DataModule(LitData):
    """CIFAR-10 for any LightningModule; a batch begins with images and labels.

    Images are (batch, 3, 32, 32), normalised; those to train on are cropped and mirrored.

    Args:
        data_dir: folder of the binary version, or of train/CLASS/*.jpg and test/CLASS/*.jpg.
        batch_size: samples per step over all ranks.
        download: whether to fetch the binary version first if no data is there.
        seed: of the order and the augmentation.
    """

    def __init__(
        self,
        data_dir: str = "data/cifar10",
        batch_size: int = 128,
        *,
        download: bool = False,
        seed: int = 42,
    ) -> None:
        recipe, settings = resolve("cifar10", batch_size=batch_size, seed=seed)
        options = recipe.make_options(data_dir=data_dir, download=download)
        super().__init__(recipe, settings, options)

    def prepare_data(self) -> None:
        """Fetch what is not there; Lightning calls this once per node."""
        cifar10.fetch(self.options)


class Parts:
    """The micro-batches of one rank, epoch by epoch; its position can be saved and restored."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        trainer: "pl.Trainer | None",
        drop_last: bool,
        lap: Lap,
        world: World,
        recipe: Recipe,
        settings: Settings,
    ) -> None:
        self._source, self._plan, self._trainer, self._lap = source, plan, trainer, lap
        self._drop_last, self._world, self._terms = drop_last, world, terms_of(recipe)
        self._change: BatchTransform | None = None
        if recipe.batch_transform is not None:
            self._change = BatchTransform(recipe, settings, world)
        self._scalar = data_dtype(settings.precision), world.device
        self._first_step = self._step = 0

    def __len__(self) -> int:
        full, rest = divmod(self._plan.num_samples, self._plan.global_batch_size)
        return full * self._plan.accumulate + (0 if self._drop_last else self._parts_of(rest))

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the epoch, from the restored position on."""
        self._step, self._first_step = self._first_step, 0
        epoch = 0 if self._trainer is None else self._trainer.current_epoch
        blocks = self._source.blocks(
            epoch,
            self._step,
            global_batch=self._plan.global_batch_size,
            drop_last=self._drop_last,
            cut=self._cuts,
        )
        for block in blocks:
            for step in block.singles():
                self._step = step.first_step + 1
                parts = self._cut(self._changed(step, epoch))
                self._lap("data")
                yield from parts
                self._lap("other")

    def _changed(self, step: Block, epoch: int) -> Block:
        """Return a step as the recipe's `batch_transform` leaves it; all ranks call it."""
        if self._change is None:
            return step
        return self._change(step, epoch, epoch * self._plan.steps_per_epoch + step.first_step)

    def _parts_of(self, size: int) -> int:
        largest_share = -(-size // self._plan.world_size)
        return -(-largest_share // self._plan.micro_batch_size)

    def _cuts(self, rows: int, global_size: int) -> list[tuple[int, int, int]]:
        """Cut a step; every rank gets the same number of parts, since Lightning counts them."""
        cuts = cut_rows(rows, global_size, batch_size=self._plan.micro_batch_size)
        # A rank that has no samples left takes one with weight 0.
        return cuts + [(0, 1, 0)] * (self._parts_of(global_size) - len(cuts))

    def _cut(self, step: Block) -> list[MicroBatch]:
        whole, size = (step.inputs, step.targets), step.global_size
        cuts = self._cuts(step.rows, size)
        if len(cuts) > 1 and not step.parts:
            check_rows(whole, step.rows)
        parts: list[Any] = [(part.inputs, part.targets) for part in step.parts or ()]
        parts = parts or [[narrow(tree, s, n) for tree in whole] for s, n, _ in cuts]
        last = len(cuts) - 1
        micro_batches = [
            MicroBatch(inputs, targets, step.weight * counted / size, size, n == last, count)
            for n, ((inputs, targets), (_, count, counted)) in enumerate(
                zip(parts, cuts, strict=True)
            )
        ]
        return micro_batches if self._terms is None else self._by_terms(micro_batches, self._terms)

    def _by_terms(self, parts: list[MicroBatch], count: Terms) -> list[MicroBatch]:
        """Weigh the micro-batches of a step by what the loss is a mean over; all ranks call it."""
        counts = [
            as_scalar(count(part.inputs, part.targets), *self._scalar) * float(part.weight > 0)
            for part in parts
        ]
        total = self._world.reduce(torch.stack(counts).sum())
        pairs = zip(parts, counts, strict=True)
        return [part._replace(share=mine / total, terms=total) for part, mine in pairs]

    def state_dict(self) -> dict[str, int]:
        """Return the steps of the epoch that were handed out."""
        return {"step_in_epoch": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from there."""
        self._first_step = state["step_in_epoch"] % self._plan.steps_per_epoch


class _Share:
    """One rank's share of a split, in order, without the samples that a sampler would add."""

    def __init__(self, source: Source, batch_size: int, world: World) -> None:
        self._source, self._batch_size = source, batch_size
        share = -(-source.num_samples // world.world_size)
        self._length = -(-share // batch_size)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return self._source.evaluation(self._batch_size)
