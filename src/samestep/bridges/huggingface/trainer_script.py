"""A training script that builds a Trainer and calls its `train()`: the Trainer, as a recipe."""

import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from transformers import Trainer

from samestep.base.errors import UserError
from samestep.base.patches import patched
from samestep.bridges.huggingface.trainer_recipe import from_trainer
from samestep.core.recipe_checks import take_script_words

_MORE = re.compile(r"\.(train|evaluate|predict|save_model|save_pretrained)\(")


class _FoundTrainer(BaseException):
    """Ends the script where it would train; no `except Exception` of it keeps that."""


def _search(*_: Any, **__: Any) -> NoReturn:
    raise UserError(
        "trainer.hyperparameter_search(…) cannot be taken over: call train() in its place.",
        remedy="Try several settings with: samestep sweep SCRIPT --lr 1e-4,1e-3",
    )


@contextmanager
def as_recipe(module: ModuleType, path: Path) -> Iterator[None]:
    """Run a script within this, as the main program: at its `train()` it gets a `recipe`.

    It sees the arguments after `--`: the others are samestep's.

    Raises:
        UserError: it has come to its end without that, or `from_trainer` refuses the Trainer.
    """
    trainers: list[Trainer] = []

    def train(_: object, trainer: Trainer, *arguments: Any, **named: Any) -> NoReturn:
        given = dict(zip(["resume_from_checkpoint"], arguments, strict=False)) | named
        if wanted := [name for name, value in given.items() if value]:
            raise UserError(
                f"trainer.train({wanted[0]}=…) cannot be taken over.",
                remedy="Leave it out, and continue a run with: samestep train RUN --resume",
            )
        trainers.append(trainer)
        called = sys._getframe(2)  # noqa: SLF001 - by what called it
        while called.f_back and called.f_locals.get("self") is trainer:  # a train() of its class
            called = called.f_back
        file, line = called.f_code.co_filename, called.f_lineno
        if _MORE.search("".join(linecache.getlines(file)[line:])):
            note = f"The script ends at its train(), {Path(file).name}:{line}: what follows it is "
            note += "not run. samestep evaluate, predict and export use the weights of the run."
            vars(trainer)["_not_run"] = [note]
        raise _FoundTrainer

    name, arguments, module.__name__ = module.__name__, sys.argv, "__main__"
    words = take_script_words()
    sys.argv = [str(path), *words]
    try:
        with patched((Trainer, "train", train), (Trainer, "hyperparameter_search", _search)):
            yield
    except _FoundTrainer:
        pass
    except SystemExit as error:
        raise UserError(
            f"{path} ends itself by exit({error.code or ''}) before it calls a Trainer's train().",
            remedy=f"It is run with {' '.join(words) or 'no arguments'}: give those that "
            f"it parses a default, or name them: samestep train {path} -- …",
        ) from error
    finally:
        sys.argv, module.__name__ = arguments, name
    for own in vars(module).values():
        # Loader workers look a class up where it says that it is.
        if getattr(own, "__module__", "") == "__main__" and isinstance(own, type):
            own.__module__ = name
    if not trainers:
        raise UserError(
            f"{path} names a Trainer, and has ended without calling its train().",
            remedy=f"It is run with {' '.join(words) or 'no arguments'}: name those that it needs "
            f"to train, as in samestep train {path} -- --do_train; or end the file with: recipe = "
            "samestep.huggingface.from_trainer(trainer)",
        )
    vars(module)["recipe"] = from_trainer(trainers[0])
