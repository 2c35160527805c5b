"""Hold the version of this package, readable without importing anything else."""

__version__ = "0.1.0"
