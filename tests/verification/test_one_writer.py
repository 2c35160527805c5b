"""Which writes are a recipe's doing, and of which of its lines."""

import sys

import pytest

from tests.command_line import typed

# One worker runs them all: the process that they look at imports torch.
pytestmark = pytest.mark.xdist_group("one_writer")

# What a line does → the file that is its doing, if one is.
WRITES = {
    "open('opened.txt', 'w').close()": "opened.txt",
    "pathlib.Path('path.txt').write_text('x')": "path.txt",
    "numpy.save('array', [1])": "array.npy",
    "os.rename('there.txt', 'moved.txt')": "there.txt",
    "open('moved.txt').read()": None,
    "os.makedirs('made/in', exist_ok=True)": None,
    "open('new.txt', 'x').close()": None,
    "import writes_when_imported": None,
    "tempfile.gettempdir()": None,
    "tempfile.NamedTemporaryFile().close()": None,
    "cached.write()": None,
}
SCRIPT = """
import os, pathlib, sys, tempfile
import numpy, torch
from samestep import errors
from samestep.prove.verification.rows import one_writer
python, library = (str(pathlib.Path(name).absolute()) + os.sep for name in ("python", "library"))
one_writer._PYTHON += (python,)
one_writer._LIBRARIES += (library,)
errors._LIBRARIES = (*errors._LIBRARIES, python, library)
sys.path += [python, library]
import cached
found = one_writer.watch_output(pathlib.Path("elsewhere").absolute())
"""
REPORT = """
for path, line in found.written.items():
    print(line, pathlib.Path(path).name, file=sys.__stdout__)
"""


@pytest.fixture(scope="module")
def told(disk) -> dict[str, list[str]]:
    """Run all lines in one process; return for each what it is said to have written."""
    for name in ("python/writes_when_imported.py", "library/cached.py"):
        (disk / name).parent.mkdir()
    (disk / "there.txt").write_text("x")
    (disk / "python/writes_when_imported.py").write_text("open('import.txt', 'w').close()\n")
    (disk / "library/cached.py").write_text("def write(): open('cache.txt', 'w').close()\n")
    script = disk / "script.py"
    script.write_text(SCRIPT + "\n".join(WRITES) + REPORT)
    done = typed(sys.executable, script.name, folder=disk, TMPDIR=str(disk))
    assert (disk / "import.txt").is_file()
    assert (disk / "cache.txt").is_file()
    lines = script.read_text().splitlines()
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        place, name = line.split()
        file, number = place.split(":")
        assert file == "script.py"
        found.setdefault(lines[int(number) - 1], []).append(name)
    return found


@pytest.mark.parametrize("line", WRITES)
def test_a_write_is_the_doing_of_the_line_that_asked_for_it(line, told):
    expected = WRITES[line]
    assert told.get(line, []) == ([expected] if expected else [])
