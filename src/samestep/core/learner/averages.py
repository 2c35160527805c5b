"""Averages of the trained weights, which evaluations and checkpoints take instead of these."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from samestep.core.learner.optimizer import switch
from samestep.core.learner.optimizer_state import parameters_in
from samestep.launch.ranks.mesh import parts_of_rank, sharded_as


def _names_of(model: nn.Module) -> dict[str, str]:
    """Return the first name of each weight by all that it has: a state has tied ones by each."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}


def _by_all_names(names: Mapping[str, str], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: kept[first] for name, first in names.items() if first in kept}


class Average:
    """The exponential moving average of a model's trained weights (Polyak & Juditsky 1992).

    After each step: average = decay · average + (1 - decay) · weights. It starts as the weights.
    It is in float32 at least: what a step adds to it is less than bfloat16 resolves. Buffers, such
    as BatchNorm's statistics, are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float, *, frozen: bool = False) -> None:
        """Begin; with `frozen` also the average of what is not trained yet."""
        self._decay, self._names, named = decay, _names_of(model), model.named_parameters()
        self._named = {
            n: p
            for n, p in named
            if p.requires_grad or (frozen and (p.is_floating_point() or p.is_complex()))
        }
        self._weights = parts_of_rank(self._named.values())
        self._kept = {name: _wide(p.detach()).clone() for name, p in self._named.items()}
        self._averages = parts_of_rank(self._kept.values())
        self._widens = any(w is not _wide(w) for w in self._weights)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        weights = [*map(_wide, self._weights)] if self._widens else self._weights
        torch._foreach_lerp_(self._averages, weights, 1.0 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """Return the average of each weight by its name, of a tied one by each."""
        return _by_all_names(self._names, self._kept)

    @torch.no_grad()
    def load(self, saved: dict[str, Tensor] | None) -> None:
        """Load the averages of a checkpoint; if it has none, start at the weights."""
        source = self._named if saved is None else saved
        for name, average in self._kept.items():
            average.copy_(sharded_as(source[name], average))

    def hold(self) -> None:
        """Take the model's weights, which are those of a checkpoint's evaluation."""
        self.load(None)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages within this context."""
        originals = [weight.clone() for weight in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, originals)


def _wide(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


class OwnAverage:
    """The weights that an optimizer itself has for evaluations; the interface of `Average`.

    Its `eval()` puts them into the model and `train()` the trained ones, which come back rounded:
    so they are kept meanwhile, and an evaluation changes no bit of the training.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, has_stepped: bool = False
    ) -> None:
        self._optimizer = optimizer
        ids = {*map(id, parameters_in(optimizer))}
        self._named = {n: p for n, p in model.named_parameters() if id(p) in ids}
        self._names = _names_of(model)
        self._held = False
        self._has_stepped = has_stepped

    def update(self) -> None:
        """Note a step, which has made them: before the first, the weights are those trained."""
        self._has_stepped = True

    def state(self) -> dict[str, Tensor]:
        """Return a copy of each weight as it is evaluated, by its name, of a tied one by each."""
        with self.in_place():
            kept = {name: p.detach().clone() for name, p in self._named.items()}
        return _by_all_names(self._names, kept)

    def load(self, _: dict[str, Tensor] | None) -> None:
        """Note that steps were taken: a checkpoint's weights and optimizer make them."""
        self._has_stepped = True

    def hold(self) -> None:
        """Take the model's weights, which are those of a checkpoint's evaluation."""
        self._held = True

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the weights to evaluate within this context."""
        if self._held or not self._has_stepped:
            yield
            return
        weights = parts_of_rank(self._named.values())
        originals = [weight.clone() for weight in weights]
        switch(self._optimizer, "eval")
        try:
            yield
        finally:
            switch(self._optimizer, "train")
            with torch.no_grad():
                torch._foreach_copy_(weights, originals)
