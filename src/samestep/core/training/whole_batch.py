"""A loss made over the whole global batch: every rank sees the outputs of all of them.

Outputs and targets of all ranks and micro-steps are gathered, the loss goes back to the outputs,
and each micro-step continues from there into the model: the gradient caching of Gao et al. (2021),
"Scaling deep contrastive learning batch size under memory limited setup" (arXiv:2101.06983).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import call
from typing import Any

import torch
from torch import Tensor

from samestep.base.errors import UserError, listed
from samestep.base.trees import tree_leaves
from samestep.core.data.order import Block
from samestep.core.learner.agreement import rng_state, set_rng_state
from samestep.core.learner.apply import parts_of, with_parts
from samestep.core.learner.device import autocast
from samestep.core.learner.gathered import gather_rows, joined, rebuilt, rows_of
from samestep.core.learner.prepare import share_buffers
from samestep.core.learner.side_effects import keep_buffers
from samestep.core.training.step import Objective, check_trainable


@dataclass(frozen=True)
class OutputGradient:
    """What the loss over the whole batch says of a micro-step's outputs."""

    leaves: Sequence[Tensor | None]
    """The gradient of each leaf of the outputs; None where there is none."""
    loss: Tensor
    """The loss over the whole batch, for the first micro-step of all; 0 for the others. With
    losses by name (1 + names,)."""
    outputs: Any = None
    """The outputs, where they still have their graph."""

    def of(self, outputs: Any) -> Tensor:
        """Return a scalar whose gradient by the outputs is the kept one."""
        pairs = zip(tree_leaves(outputs), self.leaves, strict=True)
        parts = [(leaf * gradient).sum() for leaf, gradient in pairs if gradient is not None]
        total: Tensor = sum(parts[1:], start=parts[0])
        return total


class WholeBatchLoss(Objective):
    """A loss over the outputs of the whole global batch."""

    def __init__(self, *others: Any, batch_size: int) -> None:
        super().__init__(*others)
        self._batch_size = batch_size
        self._due: Sequence[tuple[int, OutputGradient]] = ()
        """Virtual rank of each micro-step, and the gradient of its outputs."""

    def begin(self, parts: Sequence[Block], global_size: int) -> None:
        """Compute the loss, back to the outputs of each micro-step."""
        world, before = self._world, rng_state()
        agreed: Callable[[Callable[[], Any]], Any] = call if self.agreed else world.on_every
        # Where each rank has one micro-step, its first forward is the only one. A share of virtual
        # ranks is computed alike whatever else its rank has.
        most = -(-global_size // world.world_size)
        once = most <= self._batch_size and not world.virtual_ranks
        outputs = agreed(lambda: self._forward_all(parts, keeps_graph=once))
        gathered = self._gathered(parts, outputs)
        self.seeds.begin_loss()
        gradients = agreed(lambda: self._gradients(parts, outputs, *gathered))
        graphs = outputs if once else [None] * len(parts)
        self._due = [
            (part.place, replace(gradient, outputs=graph))
            for part, gradient, graph in zip(parts, gradients, graphs, strict=True)
        ]
        self.agreed = True
        set_rng_state(before)
        self.seeds.begin(self.seeds.step)  # the second forward draws what the first one drew

    def weigh(self, parts: Sequence[Block]) -> Sequence[OutputGradient]:
        """Return the gradient of each micro-step's outputs."""
        return [gradient for place, gradient in self._due if place == parts[0].place]

    def loss(self, part: Block, weight: OutputGradient) -> tuple[Tensor, Tensor]:
        """Return the loss that takes that gradient to the model, and the share of its step's."""
        self.outputs = self._forward(part) if weight.outputs is None else weight.outputs
        loss = weight.of(self.outputs)
        check_trainable(loss, self._learner.loss)
        return loss, weight.loss

    def of_rank(self, total: Tensor) -> Tensor:
        """Return this rank's part of the step's loss: rank 0 has it as a whole."""
        return total

    def _forward_all(self, parts: Sequence[Block], *, keeps_graph: bool) -> list[Any]:
        model = self._learner.model
        outputs = []
        if not keeps_graph and self._averaged:
            share_buffers(model, self._world)  # DDP leaves it out without gradients
        put_back: Callable[[], None] = (lambda: None) if keeps_graph else keep_buffers(model)
        for place, micro_steps in groupby(parts, key=lambda part: part.place):
            self.seeds.begin_part(place)
            for part in micro_steps:
                try:
                    with torch.set_grad_enabled(keeps_graph):
                        outputs.append(self._forward(part))
                except Exception as error:
                    self.explain(error, part.inputs, part.targets)
            put_back()
        return outputs

    def _forward(self, part: Block) -> Any:
        with autocast(self._precision, self._world.device):
            self.outputs = self._call_model(part)
        torch.clear_autocast_cache()
        return self.outputs

    def _loss_of_all(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss over the outputs and targets of all ranks."""
        self.outputs = outputs
        try:
            with autocast(self._precision, self._world.device):
                loss = self._learner.loss(outputs, targets)
        except Exception as error:
            self.explain(error, outputs, targets)
        check_trainable(loss, self._learner.loss)
        return loss

    def _gathered(self, parts: Sequence[Block], outputs: Sequence[Any]) -> tuple[list[Tensor], int]:
        """Return outputs and targets of all ranks, and the place of this rank's first row in them.

        All ranks call it. A part without a weight stands in, so that its rank joins collectives.
        """
        pairs = [(part, output) for part, output in zip(parts, outputs, strict=True) if part.weight]
        columns = [
            [*rows_of(output, part.rows, "outputs"), *rows_of(part.targets, part.rows, "targets")]
            for part, output in pairs
        ]
        own = [joined(column) for column in zip(*columns, strict=True)]
        rows = sum(part.rows for part, _ in pairs)
        return gather_rows(own, rows, self._world, "Outputs and targets of the batch")

    def _gradients(
        self, parts: Sequence[Block], outputs: Sequence[Any], gathered: list[Tensor], row: int
    ) -> list[OutputGradient]:
        """Compute the loss and go back to the outputs; return what is due to each micro-step.

        `row` is this rank's first one of what all ranks have `gathered`. The first time it is
        checked that the loss does not read weights.
        """
        pairs = list(zip(parts, outputs, strict=True))
        real = next(((part, output) for part, output in pairs if part.weight), None)
        if real is None:
            return [self._nothing(output) for output in outputs]
        tensors = iter(gathered)
        leaves = [leaf for leaf in tree_leaves(real[1]) if isinstance(leaf, Tensor)]
        full_batch = [next(tensors) for _ in leaves]
        full_batch = [t.requires_grad_() if t.is_floating_point() else t for t in full_batch]
        loss = self._loss_of_all(
            rebuilt(real[1], iter(full_batch)), rebuilt(real[0].targets, tensors)
        )
        if not self.agreed:
            _refuse_weights(loss, dict(self._learner.model.named_parameters()))
        needed = [leaf for leaf in full_batch if leaf.requires_grad]
        computed = iter(torch.autograd.grad(self._scaled(loss), needed, allow_unused=True))
        gradients = [next(computed) if leaf.requires_grad else None for leaf in full_batch]
        due = []
        reported = with_parts(loss) if parts_of(loss) else loss.detach()
        for part, output in pairs:
            if not part.weight:
                due.append(self._nothing(output))
                continue
            own = iter(gradients)
            cut = [self._cut(leaf, own, row, part.rows) for leaf in tree_leaves(output)]
            due.append(OutputGradient(cut, reported if row == 0 else torch.zeros_like(reported)))
            row += part.rows
        return due

    def _cut(self, leaf: Any, gradients: Iterator[Tensor | None], row: int, rows: int) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        gradient = next(gradients)
        if gradient is None:
            return None
        if leaf.dim() == 0:  # one number for the whole batch: the first micro-step's counts
            return gradient.sum() if row == 0 else torch.zeros_like(leaf)
        # In memory of its own: a kernel may round otherwise where rows begin elsewhere.
        return gradient[row : row + rows].clone()

    def _nothing(self, output: Any) -> OutputGradient:
        floats = [isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(output)]
        zeros = zip(tree_leaves(output), floats, strict=True)
        leaves = [torch.zeros_like(leaf) if is_float else None for leaf, is_float in zeros]
        named = len(self._learner.parts)
        no_loss = torch.zeros((1 + named,) if named else (), device=self._world.device)
        return OutputGradient(leaves, no_loss)

    @property
    def _averaged(self) -> bool:
        """Whether DDP makes the mean of the ranks' gradients."""
        return self._world.connected and not self._world.virtual_ranks

    def _scaled(self, loss: Tensor) -> Tensor:
        loss = loss * (self._divisor if self._averaged else 1)
        scaler = self._learner.scaler
        return loss if scaler is None else scaler.scale(loss)


def _refuse_weights(loss: Tensor, named: Mapping[str, Tensor]) -> None:
    """Refuse a loss that reads weights of the model itself: their gradient would be lost."""
    trained = {name: p for name, p in named.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss, [*trained.values()], retain_graph=True, allow_unused=True)
    if read := [name for name, g in zip(trained, gradients, strict=True) if g is not None]:
        raise UserError(
            f'Recipe(loss_over="batch"): the loss reads {listed(read)} of the model directly, but '
            "its gradient flows back only through the outputs. Let the model return what the loss "
            "needs with its outputs: one number for the batch, or a row per sample."
        )
