"""Images as files: a folder a class, decoded by Pillow, kept in memory where they fit."""
