"""One optimizer step of virtual ranks: the same bits on any number of ranks.

A global batch is cut into a fixed number of shares, the virtual ranks. A rank takes those that it
holds one after the other, each with its own random numbers and buffers, and all gradients are added
up along one fixed tree. The name follows VirtualFlow's virtual nodes (Or et al., MLSys 2022); that
gradients are added in a fixed order whatever the number of workers is also what EasyScale does
(Li et al., SC 2023).
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, defined_at, is_not_deterministic, listed
from samestep.base.settings import Settings
from samestep.core.data.keyed_random import RankSeeds, mix, seed_reading, seed_torch
from samestep.core.data.order import Block
from samestep.core.learner.agreement import bits_of
from samestep.core.learner.buffers import StepBuffers, WriteCheck
from samestep.core.learner.device import data_dtype
from samestep.core.learner.side_effects import (
    Prints,
    closure_prints,
    differing,
    model_prints,
    refused_operation,
)
from samestep.core.learner.tree import Tensors, TreeReduce, TreeSum, add_tensors
from samestep.core.training.step import EagerStep, check_used
from samestep.core.training.work import Learner
from samestep.launch.ranks.world import as_if_alone

_OUTSIDE = (
    "keeps something outside the model (a list, a global variable), reads the clock, or draws from "
    "a generator other than the global ones of torch, Python and NumPy"
)
_DEPENDS = "so the weights would depend on the number of ranks"
_OR = "or, if no weight depends on it, add --no-self-check"


class SelfCheck:
    """Check a process's first step.

    A rank's first share is computed again, after the others and as if there were no other ranks. It
    has to give the same bits and leave the same state: else something counts the shares that a rank
    computes, or depends on the ranks or the clock.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._kept: tuple[int, tuple[Block, ...]] | None = None
        self._bits: torch.Tensor | None = None
        self._prints: tuple[Prints, Prints] = ({}, {})

    def keep(self, part: int, micro_steps: Sequence[Block]) -> None:
        """Keep the samples of the first share before forward may write to them."""
        if self._kept is None:
            held = copy.deepcopy([(m.inputs, m.targets) for m in micro_steps])
            both = zip(micro_steps, held, strict=True)
            self._kept = part, tuple(replace(m, inputs=i, targets=t) for m, (i, t) in both)

    def keep_result(self, share: Tensors) -> None:
        """Keep the result of the first share, before anything is added to it."""
        if self._bits is None:
            self._bits, self._prints = bits_of(share), self._print()

    def repeat(self, compute: Callable[[int, Sequence[Block]], Tensors]) -> None:
        """Compute the first share again and compare."""
        if self._kept is None or self._bits is None:
            return  # this rank has no samples in this step
        part, micro_steps = self._kept
        with as_if_alone():
            alone = bits_of(compute(part, copy.deepcopy(micro_steps)))
        pairs = zip(self._prints, self._print(), strict=True)
        attributes, closure = (differing(first, other) for first, other in pairs)
        same = torch.equal(alone, self._bits)
        named = attributes if same else attributes + closure
        if named:
            raise UserError(
                f"--virtual-ranks: each forward changes {listed(named, 1)}, and a rank computes as "
                f"many forwards as it has virtual ranks, {_DEPENDS}. Keep it in a buffer that each "
                f"forward of a training step writes (register_buffer), {_OR}."
            )
        if not same:
            again = torch.equal(bits_of(compute(part, micro_steps)), self._bits)
            problem = "asks for its rank or for the number of ranks" if again else _OUTSIDE
            raise UserError(
                "--virtual-ranks: the same samples, weights and random numbers gave different "
                f"gradients the second time, {_DEPENDS}. Probably the model"
                f"{defined_at(*self._learner.makers[:1])} or the loss"
                f"{defined_at(self._learner.loss)} {problem}. Remove that, or leave out "
                "--virtual-ranks."
            )
        self._kept, self._prints = None, ({}, {})

    def _print(self) -> tuple[Prints, Prints]:
        loss = self._learner.loss
        return model_prints(self._learner.model, loss), closure_prints(loss)


class PartSeeds(RankSeeds):
    """Seed what each virtual rank draws in a step, whatever rank computes it."""

    def begin(self, step: int) -> None:
        """Seed nothing: each virtual rank is seeded by itself."""
        self.step = step

    def begin_part(self, part: int) -> None:
        """Seed every generator for the forwards of a virtual rank."""
        drawn = mix(self._seed, self.step, part)
        seed_reading(drawn)  # also Python's generator and NumPy's, for models that ask them
        if self._world.device.type != "cpu":
            seed_torch(drawn, self._world.device)

    def begin_loss(self) -> None:
        """Seed what a loss over the whole batch draws."""
        self.begin_part(self._world.num_parts + 1)

    def begin_update(self) -> None:
        """Seed what the update draws."""
        self.begin_part(self._world.num_parts)


class VirtualStep(EagerStep):
    """Take steps one by one, each virtual rank with PyTorch's own autograd."""

    def __init__(self, learner: Learner, settings: Settings, *others: Any) -> None:
        super().__init__(learner, settings, *others)
        self._overlaps = False  # nothing is sent off within a backward
        self._unchecked = False
        self._to_check = not settings.allows_unused
        self._adds_once: bool | None = None
        """Whether a backward adds to each gradient once; not known before the first."""
        self._dtype = data_dtype(settings.precision)
        self._buffers = StepBuffers(learner.model, self._dtype)
        self._still = WriteCheck(learner.model, learner.loss)
        self._check = SelfCheck(learner) if settings.self_check else None
        """Until it has seen enough."""
        self._reduce: TreeReduce | None = None
        self._numbers = -1
        """How many numbers travel with the gradients."""

    def _backward(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Add up all virtual ranks; return the mean loss on rank 0, 0 elsewhere, and its terms."""
        present = min(self._world.num_parts, block.global_size)
        self._objective.begin(block.parts, block.global_size)
        self._buffers.begin()
        self._still.begin()
        if not block.parts and not self._objective.agreed:
            self._objective.agree_without_samples()
        tree = TreeSum(add_tensors)
        checks = self._check
        for part, parts in groupby(block.parts, key=lambda micro_step: micro_step.place):
            micro_steps = tuple(parts)
            if checks is not None:
                checks.keep(part, micro_steps)
            in_place = len(micro_steps) == 1 and self._may_add_in_place()
            left = tree.left_of(part) if in_place else None
            if left is not None:
                tree.push(self._add_share(left, part, micro_steps), part // 2, level=1)
            else:
                share = self._share(part, micro_steps)
                if checks is not None:
                    checks.keep_result(share)
                tree.push(share, part)
        self._to_check = False
        if checks is not None:  # the first share again, once all ranks have theirs
            self._check = None
            seen = len(self._seen)
            self._world.on_every(lambda: checks.repeat(self._share))
            del self._seen[seen:]
        *gradients, numbers = self._reducer()(tree.roots, present)
        loss, terms = self._settle(gradients, numbers, block.global_size, present)
        self._phases.lap("all_reduce" if self._world.connected else "backward")
        # The ranks' parts of a loss are added up where it is read.
        whole = self._world.is_main or self._world.elastic
        return loss if whole else torch.zeros_like(loss), terms

    def _add_share(self, left: Tensors, part: int, micro_steps: Sequence[Block]) -> Tensors:
        """Return the sum of the virtual rank to the left and this one, added up by autograd.

        It adds in place, as `add_tensors` does, while the gradient is in the processor's cache.
        """
        for parameter, gradient in zip(self._parameters, left, strict=False):
            parameter.grad = gradient
        before = [(id(gradient), gradient._version) for gradient in left]  # noqa: SLF001
        total = self._share(part, micro_steps)
        for gradient, (identity, version) in zip(total[:-1], before, strict=False):
            additions = gradient._version - version if id(gradient) == identity else 1  # noqa: SLF001
            if additions == 0:
                gradient.add_(0.0)  # not used by this virtual rank: -0.0 + 0.0 is 0.0
            elif additions > 1:
                raise UserError(
                    f"--virtual-ranks: a backward of step {self._objective.seeds.step + 1} adds to "
                    f"one gradient {additions} times, where the first one added once, so its bits "
                    "would depend on the number of ranks. A segment under torch.utils.checkpoint "
                    "needs use_reentrant=False; else leave --virtual-ranks out."
                )
        total[-1].add_(left[-1])
        return total

    def _may_add_in_place(self) -> bool:
        """Whether autograd may add up two virtual ranks.

        Not where a hook reads each gradient, nor where a backward adds to one several times, as
        reentrant checkpoints do: (left + a) + b is not left + (a + b).
        """
        if self._to_check or not self._adds_once or self._settings.allows_unused:
            return False
        return not any(p._post_accumulate_grad_hooks for p in self._parameters)  # noqa: SLF001

    def _share(self, part: int, micro_steps: Sequence[Block]) -> Tensors:
        """Return a virtual rank's gradients, and the numbers that travel with them."""
        objective = self._objective
        objective.seeds.begin_part(part)
        losses = []
        for micro_step, weight in zip(micro_steps, objective.weigh(micro_steps), strict=True):
            try:
                losses.append(self._micro_step(micro_step, weight))
            except Exception as error:
                if is_not_deterministic(error):
                    again = partial(self._micro_step, micro_step, weight)
                    place = refused_operation(self._learner.model, error, again)
                    operation = str(error).split(" does not have")[0]
                    raise UserError(
                        f"--virtual-ranks: PyTorch's {operation} returns different bits each time; "
                        f"it is called{place}. Use another operation there, or leave "
                        "--virtual-ranks out."
                    ) from error
                objective.explain(error, micro_step.inputs, micro_step.targets)
        loss = sum(losses[1:], start=losses[0])
        numbers = [loss if loss.dtype == self._dtype else loss.to(self._dtype)]
        if objective.terms is not None:
            numbers.append(objective.terms.to(self._dtype))
        more = [*self._used(), *(self._buffers.take_changes(part) if self._buffers.size else ())]
        self._still.check()
        if self._adds_once is None and len(micro_steps) == 1:
            # Version 0: autograd has stored the gradient and has not added to it.
            versions = [p.grad._version for p in self._parameters if p.grad is not None]  # noqa: SLF001
            self._adds_once = not any(versions)
        if self._to_check:
            check_used(self._learner.model)
        gradients = [self._gradient(p) for p in self._parameters]
        # Without other numbers the loss stays a scalar, which saves two views per step.
        if len(numbers) == 1 and not more:
            return [*gradients, numbers[0]]
        return [*gradients, torch.cat([*(number.view(-1) for number in numbers), *more])]

    def _used(self) -> list[Tensor]:
        """Return a mask of the parameters that have a gradient, if some may have none."""
        if not self._settings.allows_unused:
            return []
        used = [p.grad is not None for p in self._parameters]
        return [torch.tensor(used, dtype=self._dtype, device=self._world.device)]

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(parameter)
        if gradient.layout != torch.strided:
            named = self._learner.model.named_parameters()
            name = next(name for name, other in named if other is parameter)
            raise UserError(
                f"--virtual-ranks: the gradient of {name} is sparse, and samestep adds up dense "
                "ones in a fixed order. Build its layer with sparse=False, or leave "
                "--virtual-ranks out."
            )
        return gradient

    def _reducer(self) -> TreeReduce:
        """Return the reduction over ranks: the first step sums more numbers than the others."""
        terms = self._learner.terms is not None
        used = len(self._parameters) if self._settings.allows_unused else 0
        numbers = 1 + len(self._learner.parts) + terms + used + self._buffers.size
        if self._reduce is None or numbers != self._numbers:
            self._numbers = numbers
            shape = () if numbers == 1 else (numbers,)
            numbers_like = torch.empty(shape, dtype=self._dtype, device="meta")
            like = [torch.empty_like(p, device="meta") for p in self._parameters]
            self._reduce = TreeReduce(
                self._world, [*like, numbers_like], self._settings.bucket_cap_mb
            )
        return self._reduce

    def _settle(
        self, gradients: Tensors, numbers: Tensor, size: int, present: int
    ) -> tuple[Tensor, Tensor | None]:
        """Set gradients and buffers to the sums; return the mean loss, and its terms if any."""
        start = 1 + len(self._learner.parts)
        terms = None
        first = numbers[0] if numbers.dim() else numbers
        loss = numbers[:start] if start > 1 else first
        if self._learner.reduction == "sum":
            loss = loss / size
        if self._learner.terms is not None:
            terms = numbers[start]
            torch._foreach_mul_(gradients, size / terms)
            loss, start = loss * (size / terms), start + 1
        used = [True] * len(self._parameters)
        if self._settings.allows_unused:
            used = (numbers[start : start + len(used)] > 0).tolist()
            start += len(used)
        if self._buffers.size:
            self._buffers.settle(numbers[start:], present)
        for parameter, gradient, is_used in zip(self._parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used else None
        return loss, terms
