"""Which writes are a recipe's doing, and of which of its lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITES = {
    "open": ("open('x.txt', 'w').close()", {"x.txt"}),
    "pathlib": ("pathlib.Path('x.txt').write_text('x')", {"x.txt"}),
    "numpy.save": ("numpy.save('x', [1])", {"x.npy"}),
    "rename": ("os.rename('there', 'x.txt')", {"there"}),
    "reading": ("open('there').read()", set()),
    "a folder": ("os.makedirs('made/in', exist_ok=True)", set()),
    "only where it is new": ("open('x.txt', 'x').close()", set()),
    "an import": ("import writes_when_imported", set()),
    "the place of temporary files": ("tempfile.gettempdir()", set()),
    "a temporary file": ("tempfile.NamedTemporaryFile().close()", set()),
    "PyTorch's own caches": ("torch.hub.set_dir('x'); import torch._dynamo", set()),
    "another library's caches": ("cached.write()", set()),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_the_lines_that_asked_for_it(name, tmp_path):
    line, expected = WRITES[name]
    (tmp_path / "there").write_text("x")
    (tmp_path / "writes_when_imported.py").write_text("import colorsys, tempfile\n")
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, pathlib, sys, tempfile
import numpy, torch
from samestep.verify import writes
writes._LIBRARIES = (*writes._LIBRARIES, str(pathlib.Path("library").absolute()) + os.sep)
code = "def write(): open('of_a_library.txt', 'w').close()"
cached = type(sys)("cached")
exec(compile(code, str(pathlib.Path("library/cached.py").absolute()), "exec"), cached.__dict__)
from samestep.verify import hold
hold._NOT_THE_USERS = (*hold._NOT_THE_USERS, writes._LIBRARIES[-1])
found = writes.watch_writes(pathlib.Path("elsewhere").absolute())
{line}
for path, where in sorted(found.written.items()):
    print(pathlib.Path(path).name, where, file=sys.__stdout__)
""")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    number = script.read_text().splitlines().index(line) + 1
    assert done.stdout.splitlines() == [f"{path} script.py:{number}" for path in expected]
    assert Path(tmp_path / "made/in").is_dir() is (name == "a folder")
