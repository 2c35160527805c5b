"""What a step keeps, draws or asks for beside what checkpoints hold and samestep seeds, by name.

Such a finding is no difference by itself: it names the cause where trainings differ.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn

from samestep.data.blocks import Block
from samestep.errors import is_users
from samestep.training.optimizer import optimizer_of
from samestep.training.side_effects import (
    RandomDraws,
    closure_prints,
    differing,
    leaves_of,
    model_prints,
    optimizer_prints,
    users_line,
    watched,
)
from samestep.verification.recipe_under_test import RecipeUnderTest, held_model

_CLOCKS = (time.time, time.time_ns, time.perf_counter, time.monotonic, time.process_time, os.getpid)
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
_RANK_CALLS = ("get_rank", "get_world_size")


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What was found, each in words."""

    kept: list[str] = field(default_factory=list)
    """Plain attributes that other samples in between leave changed, of the model or the loss."""
    optimizer: list[str] = field(default_factory=list)
    """What each step of the optimizer changes outside its `state`."""
    draws: list[str] = field(default_factory=list)
    """What the optimizer draws from, with the line."""
    learned: list[str] = field(default_factory=list)
    """Parameters that get a gradient and are not the model's."""
    asks: dict[str, str] = field(default_factory=dict)
    """What forward or loss asks its process for, a rank or the time → the line."""


def find_hidden(tested: RecipeUnderTest) -> Hidden | None:
    """Take a few steps of a recipe in this process, and look; None where they fail."""
    try:
        kept, asks, learned = _of_forward(tested)
        optimizer, draws = _of_optimizer(tested)
    except Exception:  # the short trainings say how it fails
        return None
    return Hidden(kept=kept, optimizer=optimizer, draws=draws, learned=learned, asks=asks)


def other_batch(tested: RecipeUnderTest) -> Block:
    """Return samples beside those of the first step: the next ones, or some of them again."""
    return tested.batch(1) if tested.size.full > 1 else tested.part(tested.batch(), 0, 1)


def _of_forward(tested: RecipeUnderTest) -> tuple[list[str], dict[str, str], list[str]]:
    block, other = tested.batch(), other_batch(tested)
    model, loss = held_model(tested, block), inspect.unwrap(tested.placed_loss)

    def forward(block: Block) -> Tensor:
        return tested.loss(tested.forward(model, block.inputs), block.targets)

    def prints() -> dict[str, str]:
        return {**model_prints(model, loss), **closure_prints(loss)}

    value, asks = _asked(lambda: forward(block))
    before = prints()
    forward(other)
    forward(block)
    # What samestep has put around the model's own forward is no attribute of the user's.
    kept = [name for name in differing(before, prints()) if not name.endswith(" forward")]
    known = {id(p) for p in model.parameters()}
    learned = [_described(leaf, model, loss) for leaf in leaves_of(value) if id(leaf) not in known]
    return kept, asks, learned


def _of_optimizer(tested: RecipeUnderTest) -> tuple[list[str], list[str]]:
    """Return what an optimizer of the recipe's own keeps outside its state, and what it draws."""
    if tested.recipe.optimizer is None:
        return [], []
    model, block, settings = tested.build(), tested.batch(), tested.settings
    optimizer = optimizer_of(tested.recipe, model, settings, settings.lr, tested.world.device)
    seen, prints = RandomDraws(), []
    for _ in range(2):
        model.zero_grad()
        tested.free_loss(model, block, tested.placed_loss).backward()  # type: ignore[no-untyped-call]
        watched(optimizer.step, seen)()
        prints.append(optimizer_prints(optimizer))
    lines = {f"torch ({line})" if line else "torch" for line in seen.draws.values()}
    return differing(*prints), sorted(lines | seen.generators)


def _asked(function: Callable[[], Tensor]) -> tuple[Tensor, dict[str, str]]:
    """Return what a function returns, and what the user's lines asked their process for."""
    found: dict[str, str] = {}

    def note(frame: FrameType, event: str, called: Any) -> None:
        what, code = "", frame.f_code
        if event == "c_call" and is_users(code.co_filename):
            own = getattr(called, "__qualname__", "")
            if called in _CLOCKS or own in ("datetime.now", "datetime.utcnow"):
                what = f"{called.__module__ or 'datetime'}.{called.__name__}()"
        elif event == "call" and code.co_name in _RANK_CALLS:
            what = f"{code.co_name}()"
        elif event == "call" and code is _ENVIRONMENT and frame.f_locals.get("key") in _OF_RANKS:
            what = f"os.environ[{frame.f_locals['key']!r}]"
        if what and (line := users_line(frame)):
            found.setdefault(what, line)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        return function(), found
    finally:
        sys.setprofile(before)


_ENVIRONMENT = type(os.environ).__getitem__.__code__


def _described(leaf: Tensor, model: nn.Module, loss: object) -> str:
    """Return a parameter by the name under which the model or the loss has it, if that is found."""
    places = (
        ("the model's", vars(model)),
        ("the loss's", getattr(loss, "__dict__", {})),
        ("the global", getattr(loss, "__globals__", {})),
        ("the global", getattr(type(model).forward, "__globals__", {})),
    )
    for owner, names in places:
        for name, kept in names.items():
            several = kept if isinstance(kept, list | tuple) else (kept,)
            if any(each is leaf for each in several):
                return f"{owner} {name}"
    return f"a parameter of shape {tuple(leaf.shape)}"
