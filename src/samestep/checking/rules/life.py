"""Rules about life."""
