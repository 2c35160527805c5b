"""The training loop, the steps that it calls, and evaluation."""
