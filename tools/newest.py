"""Run tests, and print the installed versions and the result as a row of docs/project/versions.md.

    python tools/newest.py -m "not slow and not cluster"

`make newest` calls it in an environment with the newest versions. Lint is left out: its tools are
those of `constraints.txt`.
"""

import platform
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Run pytest with the arguments, print the row, and end with pytest's exit code."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "result.xml"
        pytest = [sys.executable, "-m", "pytest", f"--junitxml={result}", *sys.argv[1:]]
        done = subprocess.run([*pytest, "--ignore", "tests/test_lint.py"], cwd=ROOT, check=False)
        if result.is_file():  # else it has not begun
            print(row(ET.parse(result).getroot()[0].attrib))  # noqa: S314 - made above
    sys.exit(done.returncode)


def row(result: dict[str, str]) -> str:
    """Return the row of a table of versions; `result` is a test suite's, as JUnit counts."""
    tests, errors, failures, skipped = (
        int(result[name]) for name in ("tests", "errors", "failures", "skipped")
    )
    failed = errors + failures
    counts = [f"{number:,}" for number in (tests - failed - skipped, failed, skipped)]
    others = ", ".join(f"{name} {version(name)}" for name in optional_packages())
    when = f"{datetime.now(UTC):%Y-%m-%d}"
    cells = [version("torch"), others, platform.python_version(), when, *counts, ""]
    return f"| {' | '.join(cells)} |"


def optional_packages() -> list[str]:
    """Return the names of the packages that samestep's extras ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["optional-dependencies"].values()
    return sorted({Requirement(text).name for extra in asked for text in extra})


if __name__ == "__main__":
    main()
