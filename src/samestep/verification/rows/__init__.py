"""The rows of the table, grouped by the experiment that they share; `all_rows` lists them."""
