"""Rules about step."""
