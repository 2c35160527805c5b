"""The execution of a run: from a request to its result, and what its checkpoints can be asked."""
