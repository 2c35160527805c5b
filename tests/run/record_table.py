"""The handbook's table of records, made from the classes of run/records.py."""

import ast
import inspect

from samestep.run import records


def handbook_table() -> str:
    """Return the table in Markdown: a row per kind, with each field and its docstring."""
    rows = ["| record | what it says | fields |", "|---|---|---|"]
    for node in ast.parse(inspect.getsource(records)).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Record"):
            event = getattr(records, node.name).__struct_config__.tag
            told = [
                f"`{field.target.id}`: {' '.join(text.value.value.split())}"
                for field, text in zip(node.body[1::2], node.body[2::2], strict=True)
            ]
            rows.append(f"| `{event}` | {ast.get_docstring(node)} | {' '.join(told)} |")
    return "\n".join(rows)
