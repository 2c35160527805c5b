"""What is shown to the user: progress, tables, words with numbers."""
