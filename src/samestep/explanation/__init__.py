"""What a training will do, told before it runs: by the functions that train."""
