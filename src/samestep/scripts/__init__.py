"""Any training script, unchanged: hooks, mistakes found, where its seconds go.

It knows `base` and `launch`, and nothing of the trainer. Begin with `hooks.py`, then `checking/`.
"""
