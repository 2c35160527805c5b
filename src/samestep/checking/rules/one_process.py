"""Rules about one_process."""
