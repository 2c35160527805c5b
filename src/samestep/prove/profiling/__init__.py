"""Where the time of training steps goes, and what to change: measured, not guessed."""
