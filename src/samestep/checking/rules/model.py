"""Rules about model."""
