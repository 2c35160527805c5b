"""Whether it is well: pure functions of the facts, each one row of the table."""
