"""The verbs and the Python functions: what the user typed, and what is printed.

It knows all parts, and none knows it. Begin with `cli.py`, then the verb in `commands/`.
"""
