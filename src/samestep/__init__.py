"""Train the same step on one process and on many."""
