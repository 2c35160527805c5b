"""Write the reference of the handbook from the source: python tools/reference.py.

Flags, settings, fields, signatures and records have their only source in src/, and the list of
codes of `samestep check` in their pages. What a page says above its marker is written by hand.
"""

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import samestep
import samestep.scripts.checking.rules  # registers them
from samestep.base.errors import AlreadyTold
from samestep.base.run import records
from samestep.base.settings import MERGED, Settings, field_docs, flag_name, free_names
from samestep.base.words import as_typed
from samestep.core.loops.loop_data import OwnBatch
from samestep.core.recipes import RECIPES
from samestep.scripts.checking.findings import RULES
from samestep.shell.api import arguments
from samestep.shell.cli import OWN, main
from samestep.shell.commands.forms import GROUPS, flags_of, form_of

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
MARKER = "<!-- What follows is written by tools/reference.py. -->\n"
_FENCE = "```"
_ON_OTHER_PAGES = {"Recipe", "Settings", "Splits", "__version__"}
_FLAGS = "flag | default | what it does"


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown; nothing if it has no rows."""
    marks = re.compile(r"`[^`]*`|[*<]|(?<![\w-])--[a-z][a-z-]*[a-z](?:=\S*\w)?")

    def marked(found: re.Match[str]) -> str:
        """Return a flag as code, and a mark of Markdown as the letter that it is."""
        text = found[0]
        return f"`{text}`" if text[0] == "-" else "\\" * (len(text) == 1) + text

    lines = []
    for row in rows:
        texts = (marks.sub(marked, cell) for cell in row)
        cells = (" ".join(text.split()).replace("|", "\\|") for text in texts)
        lines.append(f"| {' | '.join(cells)} |")
    rule = "|" + "---|" * (header.count("|") + 1)
    return "\n".join([f"| {header} |", rule, *lines, "", ""]) if lines else ""


def paragraph(text: str, indent: str = "") -> str:
    """Return a text as a paragraph of the handbook."""
    one, end = " ".join(text.split()), "\n" if indent else "\n\n"
    return textwrap.fill(one, 120, break_on_hyphens=False, subsequent_indent=indent) + end


def code(text: str, language: str = "text") -> str:
    """Return a block of code."""
    return f"{_FENCE}{language}\n{text.rstrip()}\n{_FENCE}\n\n" if text.strip() else ""


def default_of(field: Field[Any]) -> str:
    """Return the default of a field; empty for None, False and empty values."""
    value = field.default if field.default_factory is MISSING else None
    if value is MISSING or isinstance(value, bool):
        return {MISSING: "needed", True: "on", False: ""}[value]
    return "" if value in (None, "", (), []) else f"`{as_typed(getattr(value, '__name__', value))}`"


def flag_rows(form: type) -> Iterator[tuple[str, str, str]]:
    """Yield the flags of a dataclass: name and what it takes, default, text."""
    for flag in flags_of(form):
        name = f"`--{flag_name(flag.name)}`"
        typed = [name, *(f"`{word}`" for word in flag.takes.split("|") if word)]
        if flag.mark.positional:
            typed = [f"`{flag.takes}`"]
        elif flag.default is True:
            typed.append(f"`--no-{flag_name(flag.name)}`")
        default = f"`{flag.shown_default}`" if flag.shown_default else "needed" * flag.needed
        yield " ".join(typed), "on" if flag.default is True else default, flag.text


def help_of(verb: str) -> tuple[str, str, str]:
    """Return what `--help` of a verb prints: usage, description, examples."""
    out, os.environ["COLUMNS"] = io.StringIO(), "100"
    with contextlib.redirect_stdout(out), contextlib.suppress(AlreadyTold, SystemExit):
        main([*verb.split(), "--help"])
    shown, _, examples = out.getvalue().partition("examples:\n")
    if " " in verb:  # those of its group
        examples = "\n".join(x for x in examples.splitlines() if f" {verb} " in f"{x} ")
    usage, _, about = shown.strip().partition("\n\n")
    about = re.split(r"\n\n(?=arguments:\n|[\w ]+:\n  -|  -h)", about)[0]
    return usage, re.split(r"\s+TARGET\sis\sa\srecipe\s\(", about)[0], examples


def commands() -> Iterator[str]:
    """Yield every verb with its flags."""
    for verb in (verb for verb, (follows, _) in OWN.items() if follows != "hidden"):
        usage, about, examples = help_of(verb)
        yield f"## samestep {verb}\n\n{code(usage)}"
        form = form_of(verb)
        is_text = form is not None or "  " not in about
        yield "".join(map(paragraph, about.split("\n\n"))) if is_text else code(about)
        if form is not None:
            yield table(_FLAGS, flag_rows(form.kind))
        if form is not None and form.settings:
            left = [f"`--{flag_name(name)}`" for name in form.no_effect]
            but = f", except for these: {', '.join(left)}" if left else ""
            yield paragraph(f"All [settings](settings.md) are flags as well{but}.")
        yield code(textwrap.dedent(examples))


def settings() -> Iterator[str]:
    """Yield every setting, in the groups of `--help-all`."""
    free, to_the_bit, group = free_names(Settings), free_names(Settings, virtual_ranks=1), ""
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for name, default, text in flag_rows(Settings):
        field = name.split("`")[1].removeprefix("--").replace("-", "_")
        group = GROUPS.get(field, group)
        changes = (
            "to rounding" if field in free - to_the_bit else "free" * (field in {*free, *MERGED})
        )
        grouped.setdefault(group, []).append((name, default, changes, text))
    for title, rows in grouped.items():
        yield f"## {title.capitalize()}\n\n"
        yield table("setting | default | on resume | what it does", rows)


def body_of(thing: Any) -> Any:
    """Return the syntax of a function or a class."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body[0]


def in_python(text: str) -> str:
    """Replace types that say what an argument is in the shell, too, by the types in Python."""
    source = inspect.getsource(arguments)
    for name, kind in re.findall(r"^(\w+) = Annotated\[\"?(.+?)\"?, InShell", source, re.MULTILINE):
        text = re.sub(rf"\b{name}\b(?!\.)", kind, text)
    text = re.sub(r"Annotated\[(.+?), InShell\(.*?\)\]", r"\1", text)
    return re.sub(r"(: |-> )'([^']+)'", r"\1\2", text)


def signature(name: str, function: Any) -> str:
    """Return a function with its parameters as the source has them."""
    node, parts, depth = body_of(function), [""], 0
    for letter in in_python(ast.unparse(node.args)):
        depth += (letter in "[({") - (letter in "])}")
        parts = [*parts, ""] if letter == "," and not depth else [*parts[:-1], parts[-1] + letter]
    given = [re.sub(r"^([^=:]+:[^=]+)=", r"\1 = ", part.strip()) for part in parts]
    given = [part for part in given if part not in ("", "self")]
    inner, end = ", ".join(given), in_python(f") -> {ast.unparse(node.returns)}")
    if len(name + inner + end) > 100:
        inner = "\n" + "".join(f"    {part},\n" for part in given)
    return code(f"{name}({inner}{end}", "python")


def docstring(text: str) -> str:
    """Return a docstring of Google's form in Markdown."""
    found = ""
    for block in inspect.cleandoc(text).split("\n\n"):
        head, _, rest = block.partition("\n")
        if head in ("Args:", "Returns:", "Raises:"):
            rest = textwrap.dedent(rest)
            items = [rest] if head == "Returns:" else re.split(r"\n(?=\S)", rest)
            named = (re.sub(r"^(\w+): ", r"`\1`: ", item) for item in items)
            found += f"{head}\n\n{''.join(paragraph(f'- {item}', '  ') for item in named)}\n"
        else:
            is_code = head.startswith("    ")
            found += code(textwrap.dedent(block), "python") if is_code else paragraph(block)
    return found


def field_table(form: type) -> str:
    """Return the fields of a dataclass, with their types as the source has them."""
    nodes = [n for n in body_of(form).body if isinstance(n, ast.AnnAssign)]
    types = {ast.unparse(n.target): f"`{ast.unparse(n.annotation)}`" for n in nodes}
    docs = field_docs(form)
    names = ((one, one.name) for one in fields(form))
    rows = ((f"`{n}`", types[n], default_of(one), docs.get(n, "")) for one, n in names)
    return table("field | type | default | what it is", rows)


def members(name: str, owner: Any) -> Iterator[str]:
    """Yield the public properties and methods of a class, or the functions of a module."""
    bases = [b for b in getattr(owner, "__mro__", ()) if not b.__module__.startswith("samestep")]
    own_module = getattr(owner, "__module__", owner.__name__)
    for one, member in vars(owner).items():
        what = getattr(member, "fget", None) or getattr(member, "func", None) or member
        if one.startswith("_") or not inspect.isfunction(what) or what.__module__ != own_module:
            continue
        text = what.__doc__ or ""
        if not text.startswith("The old name") and not any(hasattr(base, one) for base in bases):
            head = signature(f"{name}.{one}", what) if what is member else ""
            yield f"### {name}.{one}\n\n{head}{docstring(text)}"


def python_names() -> Iterator[str]:
    """Yield what `samestep` offers in Python."""
    names = sorted({*samestep.__all__} - _ON_OTHER_PAGES, key=str.lower)
    things = {f"samestep.{name}": getattr(samestep, name) for name in names}
    for name, thing in {**things, "OwnBatch": OwnBatch}.items():
        is_made = name.startswith(("samestep.Lit", "samestep.Tracker"))
        made = vars(thing)["__init__"] if is_made else thing
        shown = signature(name, made) if inspect.isfunction(made) else ""
        yield f"## {name}\n\n{shown}{docstring(thing.__doc__ or '')}"
        yield field_table(thing) if isinstance(thing, type) and is_dataclass(thing) else ""
        owner = name if thing is samestep.dist else thing.__name__
        yield from () if made is thing and shown else members(owner, thing)


def recipe_fields() -> Iterator[str]:
    """Yield the fields of a recipe and of its splits, and the options of the built-in recipes."""
    yield f"## Recipe\n\n{field_table(samestep.Recipe)}## Splits\n\n{field_table(samestep.Splits)}"
    yield "## Options of the built-in recipes\n\n"
    for name in sorted(RECIPES):
        options = importlib.import_module(RECIPES[name]).recipe.options
        yield f"### {name}\n\n{table(_FLAGS, flag_rows(options))}" if options else ""


def record_fields() -> Iterator[str]:
    """Yield every kind of record with its fields."""
    for event, kind in records.KINDS.items():
        rows = ((f"`{name}`", text) for name, text in field_docs(kind).items())
        about = paragraph(ast.get_docstring(body_of(kind)) or "")
        yield f"### {event}\n\n{about}{table('field | what it says', rows)}"


def outdated() -> Iterator[tuple[Path, str]]:
    """Yield each file that does not say what the source says, and what it has to be."""
    written = {"commands": commands(), "settings": settings(), "recipe": recipe_fields()}
    written |= {"python": python_names(), "records": record_fields()}
    rows = (
        (f"[{name}](check/{name}.md)", rule.severity, rule.title)
        for name, rule in sorted(RULES.items())
    )
    written["check-codes"] = iter([table("code | severity | what is wrong", rows)])
    for name, parts in written.items():
        page = REFERENCE / f"{name}.md"
        by_hand = page.read_text().partition(MARKER)[0]
        if page.read_text() != (text := f"{by_hand}{MARKER}\n{''.join(parts).rstrip()}\n"):
            yield page, text


if __name__ == "__main__":
    for path, text in outdated():
        path.write_text(text)
        print(path)
