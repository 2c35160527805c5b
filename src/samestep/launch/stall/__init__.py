"""Who is missing when a job hangs: each rank's pulse, where its threads stand, and the verdict."""
