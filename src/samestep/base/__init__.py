"""What every part may use: errors, words, settings, this machine, the run directory.

It knows nothing of samestep. Begin with `run/records.py`, what a run writes, and `settings.py`.
"""
