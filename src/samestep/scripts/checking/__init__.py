"""Find what is wrong with any distributed training script while it runs."""
