"""A LightningModule and its data as a recipe: their steps, in samestep's training.

The module is called as Lightning calls it: `training_step` in training, `validation_step` and
`test_step` in evaluations. What stands in for the Trainer knows what such a step may ask. Order,
shares, seeds, precision and checkpoints are samestep's; what would need more is refused by name.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.settings import Settings
from samestep.bridges.lightning.configured import (
    Unchanged,
    check_around_step,
    check_batch,
    check_rate,
    configured,
    settings_of_weights,
    stepped,
    unpack_optimizers,
)
from samestep.bridges.lightning.logged import (
    NTH,
    Evaluated,
    all_gather,
    called,
    free_name,
    gathering_nothing,
    keep_best,
    log,
    mean_of,
    noted,
    plain_name,
    prepare_metrics,
    recall_best,
)
from samestep.bridges.lightning.module_hooks import call, in_first_modes, in_kept_modes, keep_modes
from samestep.bridges.lightning.own_hooks import (
    AROUND_STEP,
    BEFORE_BATCH,
    BEFORE_EVALUATION,
    LOADERS,
    SCHEDULER_STEP,
    base_of,
    check_hooks,
    check_validations,
    has_own,
    is_empty,
)
from samestep.bridges.lightning.stand_in import NEWEST, OPTIMIZER_STEP, StandIn
from samestep.bridges.lightning.trainer_arguments import LIMITS, limited, refuse_own_names
from samestep.bridges.lightning.whole import (
    AT_END,
    WholeMetrics,
    keeping_nothing,
    lists_of,
    take_collected,
    take_states,
)
from samestep.core.data.recipe_data import Unpacked, as_pytorch, reads_each_once
from samestep.core.data.samplers import SamplerOrder
from samestep.core.learner.after_epoch import keeps_trained
from samestep.core.learner.agreement import rng_state, set_rng_state
from samestep.core.learner.model_state import copied
from samestep.core.learner.unkept import ASKS_TRAINED
from samestep.core.recipe import Recipe, Splits

_ALONE: AbstractContextManager[None] = nullcontext()
_DROPS = (
    "The training loader's drop_last=True is not used. To skip an incomplete step, use --drop-last."
)


def recipe(module: Any, datamodule: Any = None, **settings: Any) -> Recipe:
    """Return a LightningModule and its data as a recipe.

        recipe = samestep.lightning.recipe(LitModel, LitData(), epochs=10, batch_size=256)

    Args:
        module: a LightningModule, or better a function (its class) that makes one: samestep seeds
            before the call.
        datamodule: a LightningDataModule or a function that makes one, a DataLoader to train on, or
            a dict of them by "train", "validation", "test"; the module's own loaders if not given.
        settings: as of `Recipe(settings=…)`; `batch_size` counts the samples of all ranks.

    Logged values are means over all samples, called as the module logs them without `val_`, `test_`
    or `train_`. The validation loss is what `validation_step` returns, or logs as a loss.

    Raises:
        UserError: `batch_size` is not given, or the module asks for what samestep does not do:
            steps of its own (`automatic_optimization=False`), several optimizers, other hooks.
    """
    refuse_own_names(settings)
    if not {"batch_size", "batch_size_per_rank", "batch_tokens"} & settings.keys():
        raise UserError(
            "samestep.lightning.recipe(…) needs batch_size=…: the samples per optimizer step over "
            "all ranks. The batch_size of a DataLoader counts those of one rank."
        )
    if isinstance(module, nn.Module):
        settings = settings_of_weights(module) | settings
    brought = _Brought(module, datamodule, settings)
    return Recipe(
        model=brought.model,
        data=brought.data,
        collate=_collate,
        forward=brought.forward,
        loss=_loss,
        after_epoch=brought.ended,
        evaluate_batch=brought.measured,
        optimizer=brought.optimizer,
        schedule=brought.schedule,
        metrics={"torchmetrics": WholeMetrics(brought.trainer)},
        options=_Options,
        settings=settings,
    )


@dataclass(frozen=True)
class _Options:
    """What a module brought from Lightning has as flags."""

    download: bool = True
    """Call `prepare_data`, once per node."""


class _Sample(NamedTuple):
    value: Any
    of: "_Data"


class _Batch(NamedTuple):
    """A batch as the user's collate made it, and what it is of."""

    value: Any
    stage: str
    """Or, of several validation loaders, `dataloader_idx_0` and so on."""
    samples: int


@dataclass(frozen=True)
class _Data(Dataset[_Sample]):
    """A data set of the user's whose samples know what they are for."""

    dataset: Any
    stage: str
    collate: Callable[[list[Any]], Any]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _Sample:
        return _Sample(self.dataset[index], self)


@dataclass(frozen=True)
class _TensorRows(_Data):
    """Tensors, of which a batch is gathered at once: what default_collate makes of their rows."""

    tensors: Sequence[Tensor]
    places: Sequence[int] | None
    """Of the rows among all; None for all of them."""

    def read_batch(self, indices: list[int]) -> _Batch:
        """Return the rows of a batch."""
        places = indices if self.places is None else [self.places[index] for index in indices]
        rows = torch.tensor(places, dtype=torch.int64)
        return _Batch([tensor[rows] for tensor in self.tensors], self.stage, len(places))


def _data_of(dataset: Any, stage: str, collate: Callable[[list[Any]], Any]) -> _Data:
    of, places = dataset, None
    while type(of) is Subset:
        places = of.indices if places is None else [of.indices[place] for place in places]
        of = of.dataset
    if type(of) is TensorDataset and collate is default_collate:
        return _TensorRows(dataset, stage, collate, of.tensors, places)
    return _Data(dataset, stage, collate)


def _collate(samples: list[_Sample] | _Batch) -> _Batch:
    if isinstance(samples, _Batch):
        return samples
    of = samples[0].of
    return _Batch(of.collate([sample.value for sample in samples]), of.stage, len(samples))


def _loss(outputs: dict[str, Any], _batch: _Batch) -> Any:
    return outputs["loss"]


@dataclass(frozen=True)
class _Brought:
    """A LightningModule and its data, as the functions of a recipe."""

    module: Any
    datamodule: Any
    settings: Mapping[str, Any]
    trainer: StandIn = field(default_factory=StandIn)
    epochs: "WeakKeyDictionary[nn.Module, int]" = field(default_factory=WeakKeyDictionary)
    """The newest epoch of each module."""
    evaluated: "WeakKeyDictionary[nn.Module, Evaluated]" = field(default_factory=WeakKeyDictionary)
    """What the evaluation that runs has seen."""
    schedulers: "WeakKeyDictionary[Any, list[dict[str, Any]]]" = field(
        default_factory=WeakKeyDictionary
    )
    names: dict[str, str] = field(default_factory=dict)
    """Of what validations measure: the name in records → as the module logs it."""

    def model(self) -> nn.Module:
        """Make the module."""
        module = _made(self.module)
        base = base_of(module, "LightningModule")
        if not module.automatic_optimization:
            raise UserError(
                f"The LightningModule{defined_at(type(module))} steps its optimizers itself "
                "(automatic_optimization=False). Write your own loop with samestep.open_run: see "
                "page “Port your loop”."
            )
        check_hooks(module, base)
        if (kept := settings_of_weights(module)) and "precision" not in self.settings:
            raise UserError(
                f"The weights of {type(module).__name__}{defined_at(type(module))} are not "
                "float32, but samestep would train them in float32.",
                remedy="Keep their type: samestep.lightning.recipe(…, "
                f"{', '.join(f'{n}={value!r}' for n, value in kept.items())}).",
            )
        prepare_metrics(module)
        vars(module).update(_trainer=self.trainer, log=log, all_gather=all_gather)
        vars(self.trainer)["max_epochs"] = self.settings.get("epochs")
        self.trainer.set_up(module)
        module.configure_model()
        self.trainer.begin(module)
        keep_modes(module)
        self.trainer.built = weakref.ref(module)
        return module  # type: ignore[no-any-return]

    def data(self, options: _Options) -> Splits:
        """Prepare the data and open its loaders."""
        source: Any = {"train": one} if isinstance(one := self.datamodule, DataLoader) else one
        base: type = object
        own, drawn = source is None, rng_state()
        if not isinstance(source, Mapping):
            source = _made(self.module if own else source)
            base = base_of(source, "LightningModule" if own else "LightningDataModule")
            check_hooks(source, base)
            vars(source)["_trainer" if own else "trainer"] = self.trainer
            if options.download and self.trainer.local_rank == 0:  # first on each node
                source.prepare_data()
            self.trainer.datamodule = None if own else source
        train, validation, test = (self._opened(source, base, n, drawn) for n in LOADERS)
        if train is None:
            raise UserError(f"There is no train_dataloader{defined_at(type(source))}.")
        self.trainer.samples = len(train)
        if isinstance(train, Unpacked):
            self.trainer.samples = SamplerOrder(train.sampler, len(train), 0).num_drawn
        notes = [_DROPS] if self.trainer.drops and not self.settings.get("drop_last") else ()
        return Splits(train=train, validation=validation, test=test, notes=tuple(notes))

    def _opened(self, source: Any, base: type, stage: str, drawn: dict[str, Any]) -> Any:
        """Return the data of a stage, or, of several validation loaders, that of each by name."""
        if self.trainer.script.get(LIMITS[stage], 1) == 0:
            return None
        if isinstance(source, Mapping):
            loader = source.get(stage)
        elif has_own(source, base, LOADERS[stage]):
            if stage != "validation":  # a setup that splits at random does it once, and alike
                set_rng_state(drawn)  # for the test; prepare_data may have drawn on one rank
                source.setup("test" if stage == "test" else "fit")
            loader = getattr(source, LOADERS[stage])()
        else:
            return None
        where = f"The {stage} loader{defined_at(type(source))}"
        if isinstance(loader, list | tuple) and len(loader) == 1:
            loader = loader[0]
        if loader is None or (isinstance(loader, list | tuple) and not loader):
            return None
        if stage == "validation" and isinstance(loader, list | tuple | dict):
            several = loader.values() if isinstance(loader, dict) else loader
            named = {f"{NTH}{place}": data for place, data in enumerate(several)}
            return {name: self._data_in(data, name, where) for name, data in named.items()}
        return self._data_in(loader, stage, where)

    def _data_in(self, loader: Any, stage: str, where: str) -> _Data | Unpacked:
        if not isinstance(loader, DataLoader):
            raise UserError(f"{where} is a {type(loader).__name__}; it must be one DataLoader.")
        loader = as_pytorch(loader, f"{where}{defined_at(type(loader))}")
        if isinstance(loader.dataset, IterableDataset):
            raise UserError(
                f"{where} reads a stream. Write a Recipe whose data() returns the stream: see page "
                "“Your data”."
            )
        dataset, sampler = limited(loader, stage, self.trainer.script), loader.sampler
        if stage == "train":
            self.trainer.drops = loader.drop_last
            self.trainer.loaders_batch = getattr(loader.batch_sampler, "batch_size", None)
        kept = stage == "train" and type(sampler) is SequentialSampler and self.trainer.script
        if isinstance(sampler, SubsetRandomSampler):
            dataset = Subset(dataset, sampler.indices)
        elif "order" not in self.settings and (not reads_each_once(loader) or kept):
            own = sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
            if stage == "train":
                own = SequentialSampler(dataset) if reads_each_once(loader) else own
                return Unpacked(_data_of(dataset, stage, loader.collate_fn), default_collate, own)
            drawn = SamplerOrder(own, len(dataset), 0).order(0, 0)
            dataset = Subset(dataset, drawn.tolist())
        return _data_of(dataset, stage, loader.collate_fn)

    @partial(torch.compiler.disable, recursive=False)
    def forward(self, module: Any, batch: _Batch, *, step: int, epoch: int) -> dict[str, Any]:
        """Take a step of the module; return its loss, and what it logs by name in evaluations."""
        trainer = vars(module)["_trainer"] = self.trainer  # which a copy of the module has not
        trainer.global_step, trainer.current_epoch = step + (not module.training), epoch
        trainer.training, trainer.of = module.training, weakref.ref(module)
        trainer.testing = not module.training and batch.stage == "test"
        trainer.validating = not (trainer.training or trainer.testing)
        value = batch.value
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            for giver in (trainer.datamodule, module):
                value = getattr(giver, hook)(value, 0) if hasattr(giver, hook) else value
        if module.training:
            return self._trained(module, batch, value, step, epoch)
        if ASKS_TRAINED.get():
            outputs, _ = called(module, "training_step", value, 0, 0, seen=Evaluated())
            return {"loss": outputs["loss"]}
        seen = self.evaluated.setdefault(module, Evaluated())
        if seen.stage != batch.stage:
            seen = self.evaluated[module] = Evaluated(batch.stage)
        base = base_of(module, "LightningModule")
        wanted = ("test_step",) * trainer.testing + ("validation_step", "training_step")
        name = next(n for n in wanted if has_own(module, base, n))
        nth = int(batch.stage.removeprefix(NTH)) if batch.stage.startswith(NTH) else None
        hook = AT_END.get(name, "")
        if seen.batches == 0 and trainer.validating and not nth:
            for before in BEFORE_EVALUATION:
                self._begin(module, before)
        ends = has_own(module, base, hook) and not is_empty(getattr(type(module), hook))
        place, numbers = defined_at(getattr(type(module), name)), (seen.batches, nth or 0)
        checked = keeping_nothing(module, nth, f"{name}{place}") if ends else _ALONE
        sizes = {at: len(held) for at, held in lists_of(module).items()} if ends else None
        with checked if seen.batches == 0 else _ALONE:
            outputs, logged = called(module, name, value, *numbers, kept=True, seen=seen)
            values = {plain_name(n, nth): v for n, v in logged.items()}
            collected = take_collected(module, sizes, values)
        if trainer.validating:
            self._note_names({plain_name(n, nth): n for n in logged}, nth, f"{name}{place}")
        own, loss = values.pop("loss", None), outputs.get("loss")  # the record has it as the loss
        own = cast("Any", own).compute() if isinstance(own, nn.Module) else own
        metrics = *take_states(module, values), name, collected
        seen.values = {n: v for n, v in values.items() if n not in metrics[0]}
        seen.batches += 1
        if loss is None and own is None:
            outputs, _ = called(module, "training_step", value, *numbers, seen=seen)
            take_states(module, {})  # they are of the evaluation
            own = outputs["loss"]
        return {"loss": torch.as_tensor(own if loss is None else loss), "metrics": metrics}

    def _trained(
        self, module: Any, batch: _Batch, value: Any, step: int, epoch: int
    ) -> dict[str, Any]:
        """Take a step of the training; return its loss."""
        trainer = self.trainer
        self.evaluated.pop(module, None)
        is_new, own_step = module not in self.epochs, type(module).training_step
        if self.epochs.get(module) != epoch:
            self.epochs[module] = epoch
            in_first_modes(module)
            trainer.tell_in_training(module, "on_train_epoch_start")
            call(module, "on_train_epoch_start")
            keep_modes(module)
        in_kept_modes(module)
        gathers = gathering_nothing(module, f"training_step{defined_at(own_step)}")
        with keeps_trained(module, "training_step", own_step), gathers if is_new else _ALONE:
            number, last = trainer.nth(step, batch.samples)
            trainer.tell_in_training(module, BEFORE_BATCH, value, number)
            self._begin(module, BEFORE_BATCH, value, number)
            outputs, _ = called(module, "training_step", value, number, 0)
        detached = {n: v.detach() if isinstance(v, Tensor) else v for n, v in outputs.items()}
        NEWEST.set((detached, value, last))
        return {"loss": outputs["loss"]}

    def _begin(self, module: Any, name: str, *given: Any) -> None:
        """Call what the module has of hooks before a batch or an evaluation."""
        if not has_own(module, base_of(module, "LightningModule"), name):
            return
        if call(module, name, *given) == -1:
            raise UserError(
                f"{name}{defined_at(getattr(type(module), name))} returned -1, which ends the "
                "Trainer's epoch.",
                remedy="Use fewer samples, or --max-steps.",
            )

    def _note_names(self, logged: dict[str, str], nth: int | None, step: str) -> None:
        """Note what a batch logs, plain name → as logged; each batch must log the same."""
        of, its = ("", "") if nth is None else (f"{NTH}{nth}/", f"/{NTH}{nth}")
        first = "" if nth is None else f"{NTH}0/"
        known = {n.removeprefix(first): v for n, v in self.names.items() if n.startswith(first)}
        if known and known.keys() != logged.keys():
            raise UserError(
                f"{step} logs {listed([*logged.values()])} for one batch, and "
                f"{listed([*known.values()])} for another.",
                remedy="Log the same names for each batch. The number of a loader may come first "
                'or last: f"val_{dataloader_idx}_loss".',
            )
        for plain, name in logged.items():
            self.names[of + plain] = name + its if plain == plain_name(name) else name

    def measured(self, module: Any, batch: _Batch) -> dict[str, Tensor]:
        """Return the values that this batch's step has logged, one for each sample."""
        rows, values = batch.samples, self.evaluated[module].values.items()
        full = partial(torch.full, (rows,), dtype=torch.float64)
        return {name: full(fill_value=mean_of(v, rows)) for name, v in values}

    measured.calls_model = False  # type: ignore[attr-defined] # FSDP's ranks need not meet in it

    def ended(self, module: Any, end: Any) -> dict[str, Any]:
        """Call `on_train_epoch_end`; return what it logs."""
        names = self.names | self.trainer.ended
        own = {names.get(n, n): torch.tensor(v) for n, v in end.metrics.items()}
        self.trainer.callback_metrics = own
        recall_best(module)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The ``compute`` method of metric")  # of nothing
            try:
                _, told = noted(self.trainer.end_epoch, module, end.epoch, end.step)
                _, logged = noted(module.on_train_epoch_end)
            except UserWarning as warning:
                raise UserError(
                    f"on_train_epoch_end{defined_at(module.on_train_epoch_end)} computes "
                    f"{str(warning).split()[5]}, which has no samples there.",
                    remedy="Compute it in validation_step, or leave it out.",
                ) from warning
        keep_best(module)
        return {free_name(name): value for name, value in (told | logged).items()}

    def optimizer(self, module: Any, settings: Settings) -> torch.optim.Optimizer:
        """Make the module's optimizer, and keep its schedulers for `schedule`."""
        micro = self.settings.get("micro_batch_size")
        self.trainer.train_as(settings, micro and (self.trainer.loaders_batch or micro))
        where = defined_at(type(module).configure_optimizers)
        self.trainer.of = weakref.ref(module)
        optimizer, schedulers = unpack_optimizers(configured(module, self.module), settings, where)
        if settings.lr_scaling != "none" and schedulers:
            raise UserError(
                f"--lr-scaling does not change the rates of the module's scheduler{where}: scale "
                "them in configure_optimizers."
            )
        check_rate(optimizer, settings, where)
        check_batch(self.trainer, settings, self.settings)
        check_validations(self.trainer.hooks_of, settings)
        base = base_of(module, "LightningModule")
        steps = module.lr_scheduler_step if has_own(module, base, SCHEDULER_STEP) else None
        self.trainer.steps_by(optimizer, [dict(part) for part in schedulers])
        for part in schedulers:
            stepped(part, self.trainer, steps)
        self.schedulers[optimizer] = schedulers
        hooks = [n for n in (*AROUND_STEP, OPTIMIZER_STEP) if has_own(module, base, n)]
        for owner, names in (module, hooks), *self.trainer.hooks_of:
            around = AROUND_STEP.union([OPTIMIZER_STEP]).intersection(names)
            check_around_step(around, settings, defined_at(type(owner)))
        self.trainer.call_around_steps(module, optimizer, hooks)
        return optimizer

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the module's schedulers, or one that changes nothing, after each epoch."""
        unchanged = {"scheduler": Unchanged(optimizer), "interval": "epoch"}
        return self.schedulers.get(optimizer) or unchanged


def _made(given: Any) -> Any:
    """Return a function's result, a copy of a module, or data as it is."""
    if isinstance(given, nn.Module):
        return copied(given)
    return given if hasattr(given, "prepare_data") and not inspect.isclass(given) else given()
