"""Slurm: submit a job as a readable script, watch it, stop it, and a sandbox to learn on."""
