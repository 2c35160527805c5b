"""The recipes that come with samestep, with their models and what only they read."""

from samestep.base.plugins import Names

_OWN = {
    "cifar10": "samestep.core.recipes.cifar10",
    "cricket": "samestep.core.recipes.cricket.recipe",
    "images": "samestep.core.recipes.images",
    "mnist": "samestep.core.recipes.mnist",
    "spiral": "samestep.core.recipes.spiral",
}
RECIPES = Names(_OWN, "recipes")
"""Name → the module that holds its `recipe`."""
