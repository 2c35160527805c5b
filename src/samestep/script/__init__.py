"""Any training script, run unchanged: its steps found by its calls into PyTorch."""
