"""The training loop and the small modules that it calls by name."""
