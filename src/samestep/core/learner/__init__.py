"""What learns, on one rank and on many: the model and its optimizer, their state, its equality."""
