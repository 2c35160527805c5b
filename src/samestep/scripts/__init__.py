"""Any training script, unchanged: hooks, mistakes found, where its seconds go.

It knows `base` and `launch`, nothing of the trainer. Begin with `probes.py`, then `hooks.py`.
"""
