"""What more ranks are worth here: measured with real runs, and where the rest of it goes."""
