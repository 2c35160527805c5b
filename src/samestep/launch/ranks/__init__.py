"""Ranks: where this process stands among others, and how ranks start, meet, fail and end."""
