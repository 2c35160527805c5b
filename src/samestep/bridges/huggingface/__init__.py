"""What `transformers.Trainer` takes, as a recipe: a model, its arguments and data sets.

    import samestep.huggingface

    recipe = samestep.huggingface.recipe(model, args, train_dataset, eval_dataset)

Import it before `TrainingArguments(…)` is called: in a file that samestep reads as a recipe they
would otherwise connect the ranks to each other, which is samestep's part.
"""

from samestep.base.errors import UserError

try:
    from samestep.bridges.huggingface.trainer_recipe import from_trainer, recipe
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] not in ("transformers", "accelerate"):
        raise
    raise UserError(
        f"{missing.name} is not installed. Install it with: pip install 'samestep[huggingface]'"
    ) from missing

__all__ = ["from_trainer", "recipe"]
