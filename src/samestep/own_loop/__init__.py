"""A training loop of one's own: what `samestep train` does around its loop, as a library."""
