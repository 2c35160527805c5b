"""A training script that builds a Trainer and calls its `train()`: the Trainer, as a recipe."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from transformers import Trainer

from samestep.base.errors import UserError
from samestep.bridges.huggingface.trainer_recipe import from_trainer
from samestep.core.taken_over import TrainingReached, note_on_the_rest, until_training


def _search(*_: Any, **__: Any) -> NoReturn:
    raise UserError(
        "samestep cannot run trainer.hyperparameter_search(…).",
        remedy="Call train() instead, and try several settings with: samestep sweep SCRIPT "
        "--lr 1e-4,1e-3",
    )


@contextmanager
def as_recipe(module: ModuleType, path: Path) -> Iterator[None]:
    """Run a script within this, as the main program: at its `train()` it gets a `recipe`.

    Raises:
        UserError: it has come to its end without that, or `from_trainer` refuses the Trainer.
    """
    trainers: list[Trainer] = []

    def train(_: object, trainer: Trainer, *arguments: Any, **named: Any) -> NoReturn:
        given = dict(zip(["resume_from_checkpoint"], arguments, strict=False)) | named
        if wanted := [name for name, value in given.items() if value]:
            raise UserError(
                f"trainer.train({wanted[0]}={given[wanted[0]]!r:.60}): samestep cannot resume from "
                "checkpoints of the Trainer.",
                remedy="Leave it out, or give another output_dir if the script finds them there. "
                "A run of samestep continues with: samestep train RUN --resume",
            )
        trainers.append(trainer)
        called = sys._getframe(2)  # noqa: SLF001 - by what called it
        vars(trainer)["_not_run"] = note_on_the_rest(trainer, called, "train()")
        raise TrainingReached

    train_here = [(Trainer, "train", train), (Trainer, "hyperparameter_search", _search)]
    with until_training(module, path, train_here, "a Trainer's train()") as arguments:
        yield
    if not trainers:
        raise UserError(
            f"{path}, run with {arguments}, ended without calling a Trainer's train().",
            remedy=f"Give the arguments with which it trains, as in samestep train {path} -- "
            "--do_train; or end the file with: recipe = "
            "samestep.huggingface.from_trainer(trainer)",
        )
    vars(module)["recipe"] = from_trainer(trainers[0])
