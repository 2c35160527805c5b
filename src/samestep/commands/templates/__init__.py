"""The files that `samestep new` writes: the user's code from then on, so nothing here imports them.

`NAME.py` in a template becomes the name of the file that is written.
"""
