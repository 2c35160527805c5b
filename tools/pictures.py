"""Make every screenshot that the docs show: train, report, photograph. `make pictures`.

    python tools/pictures.py [--out docs/pictures]

It needs Debian's chromium and chromium-driver.
"""

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import MISSING, chromium
from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI

import samestep

COLOURS = 128
# file → the theme, and how wide and how high a part of the page it shows.
SHOTS = {
    "report.png": ("light", 1100, 860),
    "report-dark.png": ("dark", 1100, 860),
    "report-phone.png": ("light", 360, 860),
}
SHOWN = "samestep train spiral --epochs 3 --nproc 2 --virtual-ranks 4"
"""What the picture of a terminal shows."""


def main() -> int:
    """Make them, and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    out = parser.parse_args().out
    if MISSING:
        sys.stderr.write(
            f"{' and '.join(MISSING)} not installed: apt-get install chromium chromium-driver\n"
        )
        return 2
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        terminal(out / "terminal.svg")
        run = samestep.train("spiral", epochs=12, run_dir="runs/spiral")
        page = run.report().as_uri()
        for name, (theme, width, height) in SHOTS.items():
            with chromium(Path(folder, name), theme) as browser:
                browser.open(page, width)
                browser.picture(out / name)
            _keep(out / name, width, height)
        run.plot().savefig(out / "run-plot.png", dpi=80)
        shutil.copy(run.path / "pictures" / "boundary.png", out)
        for name in ("run-plot.png", "boundary.png"):
            _keep(out / name)
    return 0


def terminal(file: Path) -> None:
    """Draw a terminal in which a command has run, as SVG without fonts from elsewhere."""
    command = [str(Path(sys.executable).parent / "samestep"), *SHOWN.split()[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=100, file=nowhere, highlight=False)
        console.print(f"$ {SHOWN}\n{done.stdout}", markup=False)
    drawn = console.export_svg(title="samestep", theme=MONOKAI, unique_id="terminal")
    drawn = re.sub(r"@font-face \{.*?\}\n?", "", drawn, flags=re.DOTALL)
    # A picture without a size of its own shrinks in a table.
    drawn = re.sub(
        r'viewBox="0 0 (\d+)[\d.]* (\d+)', r'width="\1" height="\2" \g<0>', drawn, count=1
    )
    file.write_text(drawn.replace("Fira Code, monospace", "monospace"))


def _keep(file: Path, width: int = 0, height: int = 0) -> None:
    """Keep the upper part of a picture, or all of it, in fewer colours: a fraction of the bytes."""
    with Image.open(file) as picture:
        part = picture.crop((0, 0, width, height)) if width else picture
        part.convert("RGB").quantize(COLOURS).save(file, optimize=True)
    sys.stdout.write(f"{file} {file.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    sys.exit(main())
