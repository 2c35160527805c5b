"""The recipes that come with samestep, with their models and what only they read."""

from samestep.plugins import Names

_OWN = {
    "cifar10": "samestep.recipes.cifar10",
    "cricket": "samestep.recipes.cricket.recipe",
    "images": "samestep.recipes.images",
    "mnist": "samestep.recipes.mnist",
    "spiral": "samestep.recipes.spiral",
}
RECIPES = Names(_OWN, "recipes")
"""Name → the module that holds its `recipe`."""
