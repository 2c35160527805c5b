"""Networks that more than one recipe builds: a file each, plain PyTorch."""
