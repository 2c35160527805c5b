"""One run from open to end: of `samestep train`, of a user's own loop, of the Lightning engine."""
