"""The run directory: its files, how they are written whole, and how they are read."""
