"""What a training is worth: the same on all ranks, its memory before it runs, its speed.

It knows `scripts`, by whose clocks it measures, `core`, `show` and what they know. Begin with
`verification/rows/__init__.py`.
"""
