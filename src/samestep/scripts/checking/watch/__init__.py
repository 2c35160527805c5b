"""What is watched in a rank, by subject: each module has `watching(recorder)`."""
