"""What is so here: read once, as frozen dataclasses that travel between ranks as JSON."""
