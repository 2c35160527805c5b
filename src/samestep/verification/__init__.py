"""Is it the same training? A recipe's own model and data, on 1 and on N ranks, for a few steps."""
