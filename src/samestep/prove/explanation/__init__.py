"""What a training will do, before it runs, computed by the functions that train."""
