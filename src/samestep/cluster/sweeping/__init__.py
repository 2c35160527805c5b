"""Many trainings of one recipe: which they are, and running them side by side."""
