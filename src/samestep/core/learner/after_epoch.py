"""A recipe's `after_epoch`: called between two steps, once for each epoch, on all ranks.

It returns values to record, and may freeze parameters or train frozen ones from now on.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, blame, defined_at, listed
from samestep.base.run.records import TAKEN_NAMES
from samestep.base.trees import describe
from samestep.core.data.keyed_random import mix
from samestep.core.learner.agreement import check_same, random_numbers
from samestep.core.learner.model_state import parameters_of
from samestep.core.learner.optimizer_state import equal_values, groups_of, parameters_in
from samestep.core.recipe_checks import check_names
from samestep.launch.ranks.mesh import any_sharded, whole, whole_numbers
from samestep.launch.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """Where a training stands when the recipe's `after_epoch` is called."""

    epoch: int
    """The epochs that are trained, from 1."""
    step: int
    """The optimizer steps that are taken."""
    metrics: Mapping[str, float]
    """The loss and the metrics of the newest validation; empty before the first."""


@contextmanager
def keeps_trained(model: nn.Module, subject: str, function: object) -> Iterator[None]:
    """Refuse a function that freezes or unfreezes parameters: the step would not follow.

    Raises:
        UserError: it is another set of parameters that is trained afterwards; `subject` names the
            function.
    """
    parameters = parameters_of(model)
    before = [p.requires_grad for p in parameters]
    yield
    if before != [p.requires_grad for p in parameters]:
        raise UserError(
            f"{subject}{defined_at(function)} freezes or unfreezes parameters during an epoch.",
            remedy="Freeze them as the model is made, and unfreeze them after an epoch: "
            "Recipe(after_epoch=…), or on_train_epoch_end of a LightningModule.",
        )


class AfterEpoch:
    """Calls a recipe's function, and lets the step follow what that freezes or trains anew."""

    def __init__(
        self,
        function: Callable[[nn.Module, EpochEnd], Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        seed: int,
        taken: Collection[str],
        renew: Callable[[], None],
    ) -> None:
        """`taken` are names that no value may have; `renew` builds the step anew."""
        self._function, self._world, self._seed, self._renew = function, world, seed, renew
        self._model, self._optimizer = model, optimizer
        self._taken = {*TAKEN_NAMES, *taken}

    def __call__(
        self,
        epoch: int,
        step: int,
        metrics: Mapping[str, float],
        called: Callable[[dict[str, float]], None],
    ) -> None:
        """Call the function after an epoch, and `called` with its values. All ranks call it.

        It is called at once: another rank may be lost before all have agreed.
        """
        end = EpochEnd(epoch=epoch, step=step, metrics=dict(metrics))
        before = self.frozen()
        with random_numbers(mix(self._seed, 3, end.epoch, 0, 0, 0), self._world.device):
            self._world.on_every(lambda: called(self._values(end)))
        self._follow(before)

    def _values(self, end: EpochEnd) -> dict[str, float]:
        parameters, groups = self._parameters(), self._groups()
        try:
            with torch.no_grad(), self._numbers():
                result = self._function(self._model, end)
        except Exception as error:
            blame(f"The recipe's after_epoch failed after epoch {end.epoch}", error, self._function)
        self._model.train()  # it may have asked the model for something in eval mode
        where = f"The recipe's after_epoch{defined_at(self._function)}"
        if self._parameters() != parameters:
            raise UserError(
                f"{where} has put other parameters into the model, which neither the optimizer nor "
                "the ranks have. Change weights in place: parameter.copy_(…)."
            )
        if not equal_values(groups, self._groups()):
            raise UserError(
                f"{where} has changed the groups of the optimizer, and a resumed run would not "
                "have that. Give the optimizer all parameters, also those to be unfrozen; rates "
                "that change belong into a schedule that names `epoch`."
            )
        where += " returned"
        if result is None:
            return {}
        if not isinstance(result, Mapping):
            raise UserError(
                f"{where} {describe(result)}; it must return a dict of numbers by name, or nothing."
            )
        check_names("The recipe's after_epoch returned", result, self._taken)
        for name, value in result.items():
            single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
            if not (single or isinstance(value, Real)):
                raise UserError(
                    f"{where} {describe(value)} as {name!r}; a value must be a single number."
                )
        # What FSDP shares out is added up here.
        values = {n: whole(v) if isinstance(v, Tensor) else v for n, v in result.items()}
        return {name: float(value) for name, value in values.items()}

    def _numbers(self) -> AbstractContextManager[None]:
        return whole_numbers() if any_sharded(self._model) else nullcontext()

    def _parameters(self) -> list[object]:
        """Return the model's parameters, by name if forward replaces them by whole ones."""
        by_name = any_sharded(self._model)
        return [name if by_name else id(p) for name, p in self._model.named_parameters()]

    def _groups(self) -> list[object]:
        """Return the parameters and the settings of the optimizer's groups."""
        groups = self._optimizer.param_groups
        return [[[id(p) for p in group["params"]] for group in groups], groups_of(self._optimizer)]

    def frozen(self) -> list[str]:
        """Return the names of the parameters that are not trained."""
        return [n for n, p in self._model.named_parameters() if not p.requires_grad]

    def freeze(self, names: Collection[str]) -> None:
        """Freeze these parameters and no others, as a checkpoint has it; all ranks call it."""
        before = self.frozen()
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(name not in names)
        self._follow(before)

    def _follow(self, before: list[str]) -> None:
        """Take the next step with what is trained now, if that is something else."""
        now, place = self.frozen(), defined_at(self._function)
        subject = f"What the recipe's after_epoch{place} has frozen"
        check_same({"frozen": now}, self._world, subject)
        if now == before:
            return
        in_optimizer = {*map(id, parameters_in(self._optimizer))}
        named = dict(self._model.named_parameters())
        missing = [n for n, p in named.items() if p.requires_grad and id(p) not in in_optimizer]
        if missing or len(now) == len(named):
            raise UserError(
                f"The recipe's after_epoch{place} trains {listed(missing)} from now on, which the "
                "recipe's optimizer does not have. Give it all parameters; it leaves alone what "
                "is frozen."
                if missing
                else f"The recipe's after_epoch{place} has frozen all parameters. Leave some to "
                "train.",
                on_all_ranks=True,
            )
        for parameter in named.values():
            parameter.grad = None  # the optimizer would take an old one again
        self._renew()
