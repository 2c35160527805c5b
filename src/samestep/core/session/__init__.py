"""One run from open to end: of `samestep train`, and of the Lightning engine."""
