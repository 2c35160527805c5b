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
        "trainer.hyperparameter_search(…) cannot be taken over: call train() in its place.",
        remedy="Try several settings with: samestep sweep SCRIPT --lr 1e-4,1e-3",
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
                f"trainer.train({wanted[0]}={given[wanted[0]]!r:.60}) cannot be taken over: the "
                "Trainer's checkpoints are none of samestep's.",
                remedy="Leave it out, or give another output_dir, where the script looks for them. "
                "A run continues with: samestep train RUN --resume",
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
            f"{path} names a Trainer, and has ended without calling its train().",
            remedy=f"It is run with {arguments}: name those that it needs to train, as in samestep "
            f"train {path} -- --do_train; or end the file with: recipe = "
            "samestep.huggingface.from_trainer(trainer)",
        )
    vars(module)["recipe"] = from_trainer(trainers[0])
