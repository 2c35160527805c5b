"""The trainer: recipe, data, steps, checkpoints, one run from its beginning to its end.

It knows `base` and `launch`. Begin with `training/loop.py`; `session/training_run.py` calls it.
"""
