"""The recipes that come with samestep: a file each, a model and a recipe."""
