"""A real Slurm on this one machine, as this user, to learn and to test on."""
