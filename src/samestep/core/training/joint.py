"""Several optimizers of a recipe, over disjoint parameters, as one that steps them together."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from samestep.base.errors import UserError, listed


class Joint(torch.optim.Optimizer):
    """Optimizers that take each step together.

    What takes one optimizer (a scheduler, a gradient scaler, Lightning) sees the groups of all.
    It is also the sequence of them, for a schedule that makes a scheduler for each.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Join optimizers in this order."""
        # Without `super().__init__`, which keeps the groups: a member makes new ones as it loads.
        self.optimizers = list(optimizers)
        self.__setstate__({"defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, the first optimizer's first."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """What they keep of each parameter."""
        return {key: kept for one in self.optimizers for key, kept in one.state.items()}

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __getitem__(self, place: int) -> torch.optim.Optimizer:
        return self.optimizers[place]

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step of each; a closure, as Lightning gives one, is called once before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by its own `state_dict`."""
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for one, saved in zip(self.optimizers, state_dict["optimizers"], strict=True):
            one.load_state_dict(saved)


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step together; a single one is its only member."""
    return optimizer.optimizers if isinstance(optimizer, Joint) else [optimizer]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, for a reader; of several "Muon + AdamW"."""
    return " + ".join(type(one).__name__ for one in members_of(optimizer))


def joined(
    optimizers: Sequence[torch.optim.Optimizer],
    model: nn.Module,
    place: str,
    *,
    may_unfreeze: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizers of a recipe as one; `place` is the function that returned them.

    `may_unfreeze`: whether what is frozen now may be trained later.

    Raises:
        UserError: two of them step the same parameter, one trains nothing, or there is none.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, str] = {}
    for number, one in enumerate(optimizers, 1):
        told = f"number {number}, {type(one).__name__},"
        held = [p for group in one.param_groups for p in group["params"]]
        if not (may_unfreeze or any(p.requires_grad for p in held)):
            raise UserError(
                f"Of the recipe's optimizers{place}, {told} is given nothing to train. Give it "
                "parameters that require a gradient, or leave it out."
            )
        if both := [id(p) for p in held if id(p) in owners]:
            shared = listed([names.get(key, "a parameter") for key in both])
            raise UserError(
                f"The recipe's optimizers{place} overlap: {owners[both[0]]} and {told} are both "
                f"given {shared}. Give each parameter to one of them."
            )
        owners |= dict.fromkeys(map(id, held), told)
    if not optimizers:
        raise UserError(f"The recipe's optimizer{place} returned an empty list.")
    return Joint(optimizers) if len(optimizers) > 1 else optimizers[0]
