"""`samestep new`: write a recipe file, or a script, that trains as it is."""

import importlib.util
import itertools
import keyword
import re
import shlex
import sys
from pathlib import Path

from samestep.base.errors import AlreadyTold, UserError, did_you_mean
from samestep.shell.cli import example_text, show_general_help

KINDS = {
    "regression": "a table: predict a number",
    "classification": "a table: predict a class",
    "text": "sentences of any length: predict a class",
    "graph": "graphs of any size: predict a class (needs samestep[graphs])",
    "images": "images, shifted and mirrored at random: predict a class",
    "own-loop": "a script with a training loop of your own",
}
"""Kind → what it is for; its file is starters/KIND.py."""

STARTERS = Path(__file__).parent / "starters"  # a link to examples/starters

_HELP = """\
usage: samestep new KIND NAME.py

Write a commented file to start from. It trains at once on synthetic data; then
put in your own data and model. Existing files are never overwritten.

kinds:
{kinds}

"""
_EXAMPLES = ("new regression houses.py", "new own-loop experiments/gan.py")


def main(arguments: list[str]) -> int:
    """Write a file to start from, and say how to train it."""
    kinds = "\n".join(f"  {kind:<16} {purpose}" for kind, purpose in KINDS.items())
    text = _HELP.format(kinds=kinds) + example_text(*_EXAMPLES)
    show_general_help(arguments, text)
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(text)
        return 0
    for flag in (word for word in arguments if word.startswith("-")):
        raise UserError(f"samestep new has no flag {flag}. Type: samestep new KIND NAME.py")
    kind, *names = arguments
    if kind not in KINDS and names and names[0] in KINDS:
        raise UserError(f"The kind comes first. Type: samestep new {names[0]} {shlex.quote(kind)}")
    if kind not in KINDS:
        raise UserError(
            f"There is no kind {kind!r}. {did_you_mean(kind, KINDS)}The kinds are: "
            f"{', '.join(KINDS)}."
        )
    if not names:
        sys.stdout.write(text)
        raise AlreadyTold(2)
    if len(names) > 1:
        raise UserError(
            f"samestep new writes one file, and {len(names)} names were given: {' '.join(names)}. "
            f"Type: samestep new {kind} {names[0]}"
        )
    path = Path(names[0])
    _check_name(kind, path)
    _write(kind, path)
    name = shlex.quote(names[0])
    commands = (f"samestep train {name}", f"samestep verify {name}")
    if kind == "own-loop":
        commands = (f"python {name}", f"samestep verify {name}")
    missing = kind == "graph" and importlib.util.find_spec("torch_geometric") is None
    first = "first   pip install 'samestep[graphs]'\n" if missing else ""
    sys.stdout.write(
        f"wrote   {path}\n{first}next    {commands[0]}\n        {commands[1]}\n"
        "then    put in your own data: look for `your data here`\n"
    )
    return 0


def _check_name(kind: str, path: Path) -> None:
    """Check that this file can be trained, and that it hides no other module."""
    stem = path.name.removesuffix(".py")
    if not path.name.endswith(".py"):
        raise UserError(f"{path} does not end in .py. {_better(kind, path, _as_module(stem))}")
    own = kind == "own-loop"  # which is run, not imported
    legal = re.fullmatch(r"\w[\w-]*", stem) if own else stem.isidentifier()
    if not legal or (keyword.iskeyword(stem) and not own):
        problem = "use letters, digits, _ and - only" if own else "Python cannot import this name"
        raise UserError(f"{path}: {problem}. {_better(kind, path, _as_module(stem))}")
    if hidden := _module_that_is_hidden(stem, path.parent):
        raise UserError(
            f"{path} would hide {hidden}: Python looks for modules in the folder of a script "
            f"first, so every `import {stem}`, in PyTorch's code too, would load your file. "
            f"{_better(kind, path, f'my_{stem}')}"
        )


def _better(kind: str, path: Path, stem: str) -> str:
    """Suggest the command with another file name in the same folder."""
    return f"Type: samestep new {kind} {shlex.quote(str(path.parent / f'{stem}.py'))}"


def _as_module(name: str) -> str:
    """Return a similar name that Python can import and that hides no module."""
    words = re.sub(r"\W+", "_", name).strip("_") or "recipe"
    taken = words[0].isdigit() or keyword.iskeyword(words)
    return f"my_{words}" if taken or _module_that_is_hidden(words, Path()) else words


def _module_that_is_hidden(name: str, folder: Path) -> str:
    """Return the module of this name outside the folder, or an empty text."""
    if name in sys.stdlib_module_names or name == "__main__":
        return f"Python's own module {name}"
    spec = importlib.util.find_spec(name)
    if spec is None:
        return ""
    # A package without __init__.py has no origin, and may lie in several folders.
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations
    near = {folder.resolve(), Path.cwd()}
    if all(Path(str(place)).resolve().parent in near for place in places or ()):
        return ""
    return f"the installed package {name}"


def _write(kind: str, path: Path) -> None:
    """Write the template, in which NAME.py stands for the file's name."""
    template = STARTERS / f"{kind.replace('-', '_')}.py"
    text = template.read_text(encoding="utf-8").replace("NAME.py", path.name)
    try:
        with path.open("x", encoding="utf-8") as file:  # an existing file stays
            file.write(text)
    except FileExistsError as error:
        stems = (f"{path.stem}_{number}" for number in itertools.count(2))
        free = next(stem for stem in stems if not path.with_stem(stem).exists())
        raise UserError(
            f"{path} already exists and was not changed. Choose another name. "
            f"{_better(kind, path, free)}"
        ) from error
    except FileNotFoundError as error:
        folder = shlex.quote(str(path.parent))
        raise UserError(
            f"There is no folder {path.parent} for {path.name}. Create it first: mkdir -p {folder}"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Choose another.") from error
