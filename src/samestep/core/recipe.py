"""What a recipe is, and how one is found: by name among those here, or in a user's own file.

A recipe says what to train in plain PyTorch. It knows nothing of ranks, devices or precision.
"""

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from samestep.base.errors import (
    UserError,
    blame,
    defined_at,
    did_you_mean,
    error_text,
    made_by,
    no_exit,
    raised_at,
    what_to_install,
)
from samestep.base.plugins import Names
from samestep.base.settings import ALSO_ACCEPTED, Settings, documented
from samestep.core import recipe_checks
from samestep.core.recipe_checks import moment_asks, shown

Accepted = Literal["batchnorm", "dropout"]
"""What may intentionally differ with the number of ranks."""
LossOver = Literal["samples", "batch"]
"""Whether a loss is a mean of what each sample adds, or compares the samples of a batch."""
Reduction = Literal["mean", "sum"]
"""What a loss does with those of the samples of a batch."""
InMemory = tuple[Tensor, Tensor]
"""Inputs (samples, …) and targets (samples, …), as they are stored."""
Samples = InMemory | torch.utils.data.Dataset[Any] | torch.utils.data.DataLoader[Any]
Transform = Callable[[Tensor], Tensor]
"""Stored inputs → model inputs, a whole batch on the device: normalisation."""
Augment = Callable[[Tensor, Tensor], Tensor]
"""(inputs, keys (batch,) int64) → inputs; draw from the keys with `samestep.uniform`."""
Collate = Callable[[list[Any]], Any]
"""Samples of a data set → a batch: a tree of tensors, or an object with `to(device)`."""
PerSample = Sequence[float] | Tensor | Callable[[Any], Any]
"""A number for each training sample, (samples,), or training data → these numbers."""
Forward = Callable[..., Any]
"""(model, batch) → outputs; with `carry` (model, batch, carried) → (outputs, carried)."""


@documented
@dataclass(frozen=True, kw_only=True)
class Splits:
    """The data sets of one recipe: each a pair of tensors, a map-style `Dataset`, or a stream.

    A pair of tensors stays in memory and is gathered a whole batch at a time. A `Dataset` yields
    (input, target) and goes through `torch.utils.data.DataLoader`. Of a `DataLoader` its data set,
    its `collate_fn` and the order of its sampler are used.
    """

    train: Samples
    validation: Samples | Mapping[str, Any] | None = None
    """Or several, by name: `{"seen": …, "unseen": …}`. The first is the one that the loss and the
    metrics of a validation are of, and each is measured as `seen/loss`, `unseen/accuracy` …"""
    test: Samples | None = None
    classes: tuple[str, ...] = ()
    """Class names; targets are indices into it, outputs are (batch, classes). With them, a test
    reports the accuracy of each class and the confusion matrix; checkpoints keep them."""
    notes: tuple[str, ...] = ()
    """Sentences about the data that the user should read; shown when the run begins."""
    left_out: tuple[str, ...] = ()
    """Samples that cannot be used, each with the reason; kept with the run."""
    by_name: Mapping[str, Any] = field(default_factory=dict)
    """All of several validation sets; `validation` is the first of them, then."""

    def __post_init__(self) -> None:
        if _is_by_name(self.validation, self.train):
            object.__setattr__(self, "by_name", self.validation)
            object.__setattr__(self, "validation", next(iter(self.by_name.values())))
        elif next(iter(self.by_name.values()), None) is not self.validation:  # another was put in
            object.__setattr__(self, "by_name", {})
        named = isinstance(self.classes, tuple | list)
        names = tuple(self.classes) if named else ()
        if names and not all(isinstance(name, str) for name in names):
            named = False
        if not named or len(names) == 1 or len(set(names)) < len(names):
            raise UserError(
                f"Splits(classes={self.classes!r:.200}): name two or more classes, each "
                "differently: classes=('cat', 'dog')."
            )
        object.__setattr__(self, "classes", names)

    def changed_validation(self, change: Callable[[Any], Any]) -> Any:
        """Apply a function to the validation data, or to each set of several."""
        by_name = {name: change(data) for name, data in self.by_name.items()}
        return by_name or change(self.validation)

    def plain_name(self, metric: str) -> str:
        """Return the name of a metric without that of a validation set: `loss` of `seen/loss`."""
        of, _, name = metric.partition("/")
        return name if of in self.by_name else metric


def _is_by_name(validation: object, train: object) -> bool:
    """Whether these are several data sets, not one whose columns have names."""
    if not isinstance(validation, Mapping) or not validation:
        return False
    columns = isinstance(train, Mapping) and train.keys() & validation.keys()
    if columns or any(hasattr(value, "dtype") for value in validation.values()):
        return False
    for name, data in validation.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or data is None:
            raise UserError(
                f"Splits(validation={{{name!r}: …}}): each of several validation sets needs a name "
                "of letters, digits, '_', '-' and '.', and data."
            )
    return True


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each sample whose largest output (batch, classes) is its target, else 0."""
    return outputs.argmax(dim=1) == targets


def is_cross_entropy(loss: object) -> bool:
    """Whether a loss is PyTorch's cross-entropy, or its second half: the targets are classes."""
    loss = getattr(loss, "__wrapped__", loss)
    function = loss.func if isinstance(loss, partial) else loss
    named = function in (nn.functional.cross_entropy, nn.functional.nll_loss)
    return named or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


_BY_DEFAULT = {"accuracy": accuracy}


@documented
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data, its loss and its default settings.

    Each function gets the recipe's options if it has a parameter named `options`.
    """

    model: Callable[..., nn.Module]
    """Builds the model; the global torch seed is set before the call."""
    data: Callable[..., Splits]
    """Reads or makes the data."""
    loss: Callable[..., Any] = nn.functional.cross_entropy
    """(outputs, targets) → mean loss over the samples of the batch, a scalar. With `forward` it is
    given (outputs, batch), and so are the metrics. A dict of scalars is logged by name; their sum
    is trained. It may also ask for `step` and `epoch` by name, counted from 0."""
    evaluation_loss: Callable[..., Any] | None = None
    """What validations and tests measure as the loss, if that is not `loss`: without its label
    smoothing or auxiliary terms. It is called as `loss` is; `reduction`, `loss_terms`, `loss_over`
    and those of the `loss_weights` that it has apply to it, too."""
    loss_weights: Mapping[str, float] | None = None
    """Name → weight of that loss in the sum, where `loss` returns a dict; 1 for the others."""
    reduction: Reduction = "mean"
    """"sum" where the loss is a sum over the samples of the batch: the gradient is then that of the
    sum over the global batch. Records still have the mean per sample."""
    loss_terms: Callable[[Any], Any] | None = None
    """batch → the denominator of your loss, if that is not the number of samples: e.g. the number
    of non-padding words, or a sum of weights. The mean over all ranks is then exact."""
    loss_over: LossOver = "samples"
    """"batch" for a loss that compares the samples of a batch (contrastive, triplets, soft Dice):
    it is given outputs and targets of the whole global batch, a row for each sample, on every
    rank."""
    collate: Collate | None = None
    """Puts the samples of a `Dataset` into a batch, where they differ in size or form: a pair
    (inputs, targets), or with `forward` any tree of tensors."""
    weights: PerSample | None = None
    """A number for each training sample, or a function of the training data that returns them.
    Samples are drawn in proportion to them: this sets `--order weighted`."""
    lengths: PerSample | None = None
    """How long each training sample is, in tokens or the like, or a function of the training data
    that returns it, for `--group-by-length` and `--batch-tokens`."""
    forward: Forward | None = None
    """(model, batch) → outputs, for batches that are more than one argument of the model. It may
    also ask for `step` and `epoch` by name, counted from 0."""
    carry: Callable[..., Any] | None = None
    """rows → tensors with a row for each slot of the global batch (hidden state, a memory bank), in
    a tree. `forward` is then (model, batch, carried) → (outputs, carried). Each epoch begins anew;
    with a parameter `carried` it is given what the epoch before has left, or None."""
    shard: tuple[type, ...] = ()
    """Classes of the model's repeated blocks: with `--strategy fsdp` each block's weights are
    gathered and freed at once. By default samestep looks for blocks in the model."""
    optimizer: Callable[[nn.Module, Settings], Any] | None = None
    """(model, settings) → the optimizer, instead of `--optimizer`, or a list of several over
    different parameters. Learning rates of their groups are scaled by `--lr-scaling` and follow the
    schedule."""
    schedule: Callable[..., Any] | None = None
    """(step from 0, total steps) → the factor of the learning rate, instead of `--schedule`; a
    warm-up comes on top. It may also ask for `epoch`, `steps_per_epoch`, `metrics` by name. Or
    (optimizer, plan) → a scheduler of PyTorch."""
    metrics: Mapping[str, Any] = field(default_factory=lambda: _BY_DEFAULT)
    """name → (outputs, targets) → one value per sample (batch,), averaged exactly over all samples.
    Or a metric of torchmetrics, for what needs all predictions at once. By default accuracy,
    where the loss is cross-entropy and the targets are classes."""
    after_epoch: Callable[[nn.Module, Any], Mapping[str, float] | None] | None = None
    """(model, end) → name → number, or nothing: called after each epoch and its validation, between
    two steps, on all ranks. `end` has `epoch`, `step` and `metrics`. The values are in the epoch's
    record. It may set `requires_grad` of parameters; a resumed run continues with that."""
    evaluate_batch: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    """(model, batch) → name → one value per sample (batch,), for what needs the model itself, such
    as text that it generates. Called in evaluations only; the batch is (inputs, targets), or with
    `forward` the whole batch."""
    on_record: Callable[[Mapping[str, Any]], object] | None = None
    """Given each record of a training as it is written, such as `step`, on rank 0: a log of your
    own. With `--elastic`, another rank 0 is given the run's `start` first. It must change nothing
    of the training."""
    lower_is_better: tuple[str, ...] = ()
    """Names of metrics that are better when lower, such as errors; losses always are."""
    transform: Transform | None = None
    """Turns stored inputs into model inputs, in training and evaluation."""
    augment: Augment | None = None
    """Changes inputs at random before `transform`, in training only."""
    batch_transform: Callable[..., Any] | None = None
    """(inputs, targets) → inputs and targets of the whole global batch, or with `forward` batch →
    batch, in training only: mixup, CutMix. What it draws from the generators of torch, NumPy and
    Python is decided by the seed, the epoch and the step."""
    options: type | None = None
    """A frozen dataclass of the recipe's own options; each becomes a flag."""
    complete: Callable[[Any], Any] | None = None
    """options → options. Fills in those that depend on the data, such as the vocabulary size, where
    they are None or empty. The run keeps them, so its model can be built without the data."""
    read: Callable[..., Any] | None = None
    """(options, file) → a sample of the file for `samestep predict`, or several in a list, an
    iterator or a `Dataset`. Return just the input; with `collate` or `forward`, the full sample,
    with a dummy target if needed. `ValueError` says why a file cannot be read."""
    show: Callable[[Any, Any], Sequence[Mapping[str, Any]]] | None = None
    """(outputs, targets) → a dict for each sample: what `samestep predict` shows of it. Targets are
    None where `read` gave only inputs; with `forward` it is given (outputs, batch)."""
    plot: Callable[..., None] | None = None
    """(options, file, rows, figure) → draws what `samestep predict --plot` was asked for into a
    figure of matplotlib; the rows are what `predict` shows of the file, in its order."""
    pictures: Mapping[str, Callable[[nn.Module, Splits], Any]] = field(default_factory=dict)
    """name → (model, data) → a picture of the run: a matplotlib figure or HTML text. Rank 0
    calls it when a run ends, with the best weights, in eval mode."""
    baselines: Callable[..., Mapping[str, Mapping[str, float] | str]] | None = None
    """options → name → metric → value: baselines that a model has to beat. Rank 0 calls it once,
    after the test. Instead of the metrics, a sentence can say why one was not measured."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Default settings that differ from samestep's."""
    accepts: tuple[Accepted, ...] = ()
    """What may intentionally differ with the number of ranks: `samestep verify` checks that
    nothing else differs."""
    name: str = ""
    """The prefix of its run directories; by default the file's name."""
    file: str = field(default="", repr=False, compare=False)
    """The recipe's file, if it comes from one; set by samestep."""

    def __post_init__(self) -> None:
        if self.metrics is _BY_DEFAULT:
            losses = (self.loss, self.evaluation_loss)
            own = dict(_BY_DEFAULT) if any(map(is_cross_entropy, losses)) else {}
            object.__setattr__(self, "metrics", own)
        if self.weights is not None:
            object.__setattr__(self, "settings", {"order": "weighted", **self.settings})
        known = {f.name for f in fields(Settings)} | ALSO_ACCEPTED
        for key in self.settings:
            if key not in known:
                raise UserError(
                    f"The recipe's settings name {key!r}, which is not a setting. "
                    f"{did_you_mean(key, known)}The settings are: {', '.join(sorted(known))}."
                )
        for accepted in self.accepts:
            if accepted not in get_args(Accepted):
                names = ", ".join(get_args(Accepted))
                raise UserError(f"Recipe(accepts={self.accepts}): {accepted!r} is none of {names}.")
        recipe_checks.check_batch_fields(self, get_args(LossOver))
        recipe_checks.check_functions(self)
        recipe_checks.check_loss_fields(self)
        recipe_checks.check_shard(self.shard)
        named_later = self.evaluate_batch is not None
        recipe_checks.check_metrics(self.metrics, self.lower_is_better, named_later=named_later)
        recipe_checks.check_pictures(self.pictures)
        if self.options is not None:
            recipe_checks.check_options(self.options, known)

    @property
    def evaluated_loss(self) -> Callable[..., Any]:
        """The loss of evaluations: `evaluation_loss`, or else `loss`."""
        return self.loss if self.evaluation_loss is None else self.evaluation_loss

    def own_parts(self) -> tuple[str, ...]:
        """Return the names of parts (collate, forward, optimizer, …) that are the recipe's own."""
        names = ["collate", "forward", "loss_terms", "carry", "optimizer"]
        names += ["batch_transform", "after_epoch"]
        parts = {name: getattr(self, name) is not None for name in names} | {
            "loss that names the step": moment_asks(self.loss),
            "forward that names the step": self.forward and moment_asks(self.forward),
            "loss over the batch": self.loss_over == "batch",
            "scheduler": "optimizer" in self.schedule_asks(),
        }
        return tuple(name for name, is_own in parts.items() if is_own)

    def schedule_asks(self) -> tuple[str, ...]:
        """Return the names of the schedule's parameters; with `optimizer` it makes a scheduler."""
        return () if self.schedule is None else recipe_checks.schedule_asks(self.schedule)

    def counted_classes(self, splits: Splits) -> tuple[str, ...]:
        """Return the classes that a test counts; with `forward`, targets may be anywhere."""
        return splits.classes if self.forward is None else ()

    def falling(self) -> tuple[str, ...]:
        """Return the names of what is better the lower it is: the loss, and the metrics named."""
        # What torchmetrics offers says so itself.
        objects = [n for n, m in self.metrics.items() if getattr(m, "higher_is_better", 1) is False]
        return tuple(dict.fromkeys(("loss", *self.lower_is_better, *objects)))

    def make_options(self, **values: Any) -> Any:
        """Return the recipe's options, of which some are given; None if it has none."""
        if self.options is None:
            return None
        with recipe_checks.telling_options(self.options):
            return self.options(**values)

    def with_options(self, options: object) -> "Recipe":
        """Return the recipe with the options in each function that asks for them."""
        functions = recipe_checks.all_with_options(self, options)
        same = all(getattr(self, name) == function for name, function in functions.items())
        return self if same else replace(self, **functions)

    def build_model(self, options: object, *, on_meta: bool = False) -> nn.Module:
        """Return the model that these options describe; `on_meta` without any numbers in it."""
        with recipe_checks.one_thread(), torch.device("meta") if on_meta else nullcontext():
            model = self._call("model", options)
        with made_by(self.model):
            recipe_checks.check_model(model, on_meta=on_meta)
        return model  # type: ignore[no-any-return]

    def complete_options(self, options: Any) -> Any:
        """Return the options, with those that depend on the data filled in."""
        return self._call("complete", options) if self.complete is not None else options

    def load_data(self, options: object) -> Splits:
        """Return the data that these options describe."""
        with recipe_checks.one_thread():
            data = self._call("data", options)
        if not isinstance(data, Splits):
            raise UserError(
                f"The recipe's data(){defined_at(self.data)} returned {shown(data)}; it must "
                "return Splits(train=…, validation=…, test=…)."
            )
        return data

    def measure_baselines(self, options: object) -> Any:
        """Return the scores of the recipe's baselines on the test data, unchecked."""
        return self._call("baselines", options)

    def _call(self, name: str, options: object) -> Any:
        """Call one of the functions; an error in its code names the user's line."""
        function = getattr(self, name)
        called = recipe_checks.with_options(name, function, options)
        try:
            with no_exit(), made_by(function):
                return called()
        except Exception as error:
            if isinstance(error, FileNotFoundError) and error.filename is not None:
                where = raised_at(error) or defined_at(function)
                raise UserError(
                    f"The recipe's {name}() opens {error.filename}{where}, and there is no such "
                    "file. Put it there, or correct the path."
                ) from error
            remedy = f"It is called with {'no arguments' if called is function else 'the options'}."
            blame(f"The recipe's {name}() failed", error, function, remedy=remedy)


def _recipes() -> Names:
    # Imported by name: the recipes are built upon this module.
    recipes: Names = importlib.import_module("samestep.core.recipes").RECIPES
    return recipes


def find_recipe(name: str, original: str | None = None) -> Recipe:
    """Return the recipe of this name, or the one in this Python file, maybe copied from another."""
    if name.endswith(".py"):
        return _from_file(Path(name), Path(original or name))
    recipes = _recipes()
    if name not in recipes:
        from samestep.base.nearby import nearby  # noqa: PLC0415 - for messages only

        if "/" in name or os.sep in name:
            raise UserError(
                f"There is no run at {name}: no settings.toml is in it. Give the directory of a "
                f"run, a recipe file ending in .py, or a recipe: {', '.join(recipes)}."
                f"{nearby(name, 'run')}"
            )
        raise UserError(
            f"There is no recipe {name!r}. {did_you_mean(name, recipes)}The recipes are: "
            f"{', '.join(recipes)}; or give the path of your own file, ending in .py."
            f"{nearby(name, 'run') or nearby(f'{name}.py', 'file')}"
        )
    loaded = recipes.load(name)
    recipe = getattr(loaded, "recipe", loaded)
    if not isinstance(recipe, Recipe):
        raise UserError(f"{recipes[name]}, which brings the recipe {name}, holds no `recipe`.")
    return replace(recipe, name=name)


_OF_TRAINERS = "samestep.bridges.{}.trainer_script"
_being_read: list[Path] = []


def being_read() -> Path | None:
    """Return the recipe file that this process is reading at the moment, if any."""
    return _being_read[-1] if _being_read else None


def _from_file(path: Path, original: Path) -> Recipe:
    from samestep.base.file_kinds import opens_run  # noqa: PLC0415 - of users' files only
    from samestep.base.nearby import nearby  # noqa: PLC0415
    from samestep.base.run.user_modules import imports_of  # noqa: PLC0415

    if not path.is_file():
        raise UserError(
            f"There is no file {path}. Give the path of a recipe file, or the name of a built-in "
            f"recipe: {', '.join(_recipes())}.{nearby(path, 'file')}"
        )
    source = path.read_bytes()
    if opened := opens_run(source):
        raise UserError(
            f"{path} is a loop of your own: line {opened} opens its run, and there is no `recipe`. "
            f"Start it as it is: python {path}, or torchrun --nproc-per-node 2 {path}. "
            "`samestep verify` and `samestep profile` take it as well; other verbs need a recipe."
        )
    trained_by = _trainer_of(path, original, source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Loader workers and dataclasses look a class's module up by its name.
    sys.modules.setdefault(path.stem, module)
    file, module.__file__ = str(path.resolve()), str(original.resolve())
    _being_read.append(path)
    try:
        # Imported by name, too: before the script makes TrainingArguments, which connect ranks.
        of_trainers = _OF_TRAINERS.format(trained_by)
        trainer = importlib.import_module(of_trainers) if trained_by else None
        code = cast("Any", spec.loader).get_code(spec.name)
        within = trainer.as_recipe(module, original) if trainer else nullcontext()
        with no_exit(), imports_of(path, original), within:
            exec(code, vars(module))  # noqa: S102 - the user's file, as an import runs it
    except SyntaxError as error:
        text = (error.text or "").strip()
        if error.lineno is None:  # bytes that are not text have no line
            raise UserError(f"{path} is not a Python file in UTF-8: {error.msg}.") from error
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}: {text}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = Path(file)  # frames name the file by its absolute path
        lines = [f.lineno for f in frames if Path(f.filename).resolve() == own]
        where = f"{path}:{lines[-1]}" if lines else f"{path}"
        if isinstance(error, UserError):
            raise (UserError(f"{where}: {error}") if lines else error) from error.__cause__
        raise UserError(
            f"{where}: {error_text(error)}. {what_to_install(error)}"
            "The recipe file could not be run."
        ) from error
    finally:
        _being_read.pop()
    recipe = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe):
        problem = "no `recipe`" if recipe is None else f"a `recipe` of type {type(recipe).__name__}"
        raise _no_recipe(path, problem, source)
    return replace(recipe, name=original.stem, file=file)


def _trainer_of(path: Path, original: Path, source: bytes) -> str:
    """Return by whose Trainer a script trains, or ""; refuse others without a recipe."""
    from samestep.base.file_kinds import cannot_have_recipe, trainer_of  # noqa: PLC0415

    kind = trainer_of(path, original.parent)  # it would train as it is imported
    if not kind and cannot_have_recipe(source):
        raise _no_recipe(path, "no `recipe`", source)
    return kind


def _no_recipe(path: Path, what: str, source: bytes) -> UserError:
    line = "recipe = Recipe(model=…, data=…), after `from samestep import Recipe`"
    lightning = rb"^\s*(import|from) ([\w., ]*, *)?(pytorch_)?lightning\b(?!\.fabric)"
    if re.search(lightning, source, re.MULTILINE) and b"Fabric(" not in source:
        line = "recipe = samestep.lightning.recipe(YourModule, YourDataModule, epochs=…), after "
        line += "`import samestep.lightning`, and put Trainer.fit under `if __name__ == '__main__'`"
    return UserError(
        f"{path} has {what}. End it with: {line}. A training script keeps its own loop with "
        f"samestep.open_run; `samestep check {path}` looks for mistakes in it as it is."
    )
