"""Cricket matches ball by ball: Cricsheet's files read, kept compactly, and turned into graphs."""
