"""Runs side by side: what differs, whether they are the same training, what each cost."""
