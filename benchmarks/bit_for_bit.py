"""Train each recipe on 1, 2, 3 and 4 ranks, each also stopped and resumed on another number.

    python benchmarks/bit_for_bit.py

Writes `benchmarks/results/bit-for-bit.md`: one SHA-256 of the final weights per recipe, if all runs
gave that one. The data is made up and small; the last batch of an epoch is uneven.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import machine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tests.cifar_files import write_binary  # noqa: E402 - the tests' own small files
from tests.idx_files import write_mnist  # noqa: E402
from tests.image_files import write_images  # noqa: E402

VIRTUAL_RANKS = 4
RESUMED_ON = {1: 4, 2: 3, 3: 1, 4: 2}
"""Where a run that was stopped on so many ranks goes on."""
NUMBERS = ("step", "loss", "grad_norm", "accuracy")

NOTES = """\
Each row is eight trainings of two epochs with `--virtual-ranks {virtual}`: on 1, 2, 3 and 4 ranks,
and each of them stopped within the second epoch and resumed on another number ({resumed}). The hash
is `weights_sha256` of `result.json`; it stands here alone only if all eight are equal. Recorded
numbers are the loss and gradient norm of every step, and the loss and accuracy of every evaluation.

The data is made up and small. The last batch of an epoch is uneven; of `images` it has fewer
samples than there are virtual ranks.
"""


@dataclass(frozen=True)
class Case:
    """A recipe and what it is trained with."""

    recipe: str
    flags: str
    stop_at: int
    """The step after which it is stopped, within the second epoch."""


CASES = (
    Case("spiral", "--num-samples 1010 --batch-size 64", 15),
    Case("mnist", "--model convnet --batch-size 32", 5),
    Case("cifar10", "--width 16 --batch-size 32", 5),
    Case("images", "--width 16 --batch-size 16", 7),
)


def write_data(folder: Path) -> dict[str, Path]:
    """Write the data sets; return the folder of each recipe that reads one."""
    return {
        "mnist": write_mnist(folder / "mnist", num_train=130),
        "cifar10": write_binary(folder / "cifar10", per_file=25),
        "images": write_images(folder / "images", count=41),
    }


def train(arguments: list[str], ranks: int) -> None:
    """Run `samestep train`."""
    command = [sys.executable, "-m", "samestep", "train", *arguments, "--nproc", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")


def numbers_of(run: Path) -> dict[tuple[str, int], list[Any]]:
    """Return what a run has recorded of its steps and evaluations, but for their times."""
    records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kept = [r for r in records if r["event"] in ("step", "evaluation")]
    return {(r["event"], r["step"]): [r.get(name) for name in NUMBERS] for r in kept}


def runs_of(case: Case, data: Path | None, folder: Path) -> dict[str, dict[str, Any]]:
    """Train a case on each number of ranks, and each stopped and resumed on another."""
    flags = [*case.flags.split(), "--virtual-ranks", str(VIRTUAL_RANKS), "--log-every", "1"]
    flags += ["--epochs", "2", "--device", "cpu", "--schedule", "constant"]
    flags += ["--data-dir", str(data)] if data else []
    found = {}
    for ranks, others in RESUMED_ON.items():
        whole, parts = folder / f"{case.recipe}-{ranks}", folder / f"{case.recipe}-{ranks}-{others}"
        train([case.recipe, *flags, "--run-dir", str(whole)], ranks)
        half = ["--max-steps", str(case.stop_at)]
        train([case.recipe, *flags, *half, "--run-dir", str(parts)], ranks)
        result = json.loads((whole / "result.json").read_text())
        train([str(parts), "--resume", "--max-steps", str(result["steps"])], others)
        for name, run in ((f"{ranks}", whole), (f"{ranks}, then {others}", parts)):
            result = json.loads((run / "result.json").read_text())
            found[name] = {
                "weights_sha256": result["weights_sha256"],
                "steps": result["steps"],
                "numbers": numbers_of(run),
            }
            print(f"{case.recipe} on {name}: {result['weights_sha256']}", flush=True)
    return found


def row(case: Case, found: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """Return a line of the table, and whether all runs are equal."""
    digests = {name: one["weights_sha256"] for name, one in found.items()}
    whole, steps = found["1"]["numbers"], found["1"]["steps"]
    # Where a run was stopped, it has evaluated, too.
    alike = all({k: one["numbers"].get(k) for k in whole} == whole for one in found.values())
    good = len(set(digests.values())) == 1 and alike
    shown = f"`{digests['1']}`"
    if len(set(digests.values())) > 1:
        others = [f"{name}: `{d[:12]}…`" for name, d in digests.items()]
        shown = "DIFFERENT: " + ", ".join(others)
    recorded = "all equal" if alike else "DIFFERENT"
    return f"| {case.recipe} | `{case.flags}` | {steps} | {recorded} | {shown} |", good


def main() -> int:
    """Train, compare, write; return 1 if any run differs."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows, good = [], True
    with tempfile.TemporaryDirectory(prefix="samestep-bits-") as directory:
        folder = Path(directory)
        data = write_data(folder)
        for case in CASES:
            line, equal = row(case, runs_of(case, data.get(case.recipe), folder))
            rows.append(line)
            good = good and equal
            print(line, flush=True)
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    resumed = ", ".join(f"{ranks} → {others}" for ranks, others in RESUMED_ON.items())
    page = [
        "# Virtual ranks: the same bits on any number of ranks",
        "",
        "    python benchmarks/bit_for_bit.py",
        "",
        f"{facts}.",
        "",
        NOTES.format(virtual=VIRTUAL_RANKS, resumed=resumed),
        "| recipe | flags | steps | recorded numbers | SHA-256 of the final weights |",
        "|---|---|---:|---|---|",
        *rows,
        "",
    ]
    (HERE / "results" / "bit-for-bit.md").write_text("\n".join(page))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
