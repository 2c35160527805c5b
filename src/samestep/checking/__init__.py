"""What is wrong with anyone's distributed script, found while it runs."""
