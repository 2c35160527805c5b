"""The rows of the table, a file each; `all_rows` lists them."""
