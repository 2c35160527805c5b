"""Doctor: what this machine, or every node of an allocation, lacks for training."""
