"""Slurm, the sandbox, the doctor, sweeps: what surrounds a training.

It knows `base` and `launch`. Begin with `slurm/submission.py`.
"""
