"""Training loops that users write: what `samestep.open_run` gives them."""
