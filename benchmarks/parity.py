"""Train each recipe in both engines, on one rank and on two, and write how far they are apart.

    python benchmarks/parity.py --mnist DIR --cifar10 DIR

Writes `benchmarks/results/parity.md`: the largest relative difference of any step's loss and
gradient norm, and of the evaluations. A recipe whose data is not given is left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import machine

RESULTS = Path(__file__).parent / "results"
EVENTS = ("step", "evaluation")
COLUMNS = ("loss", "grad_norm", "accuracy")


def main() -> int:
    """Measure and write; return 1 if a recipe differs by more than 1e-5."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, help="directory of IDX files")
    parser.add_argument("--cifar10", type=Path, help="directory that the cifar10 recipe reads")
    parser.add_argument("--images", type=Path, help="directory of train/CLASS/*.jpg")
    asked = parser.parse_args()
    rows, worst = [], 0.0
    for recipe, flags in _cases(asked).items():
        for ranks in (1, 2):
            differences, steps, accuracy = _compare(recipe, flags, ranks)
            worst = max(worst, *differences)
            numbers = " | ".join(f"{number:.1e}" for number in differences)
            command = " ".join(flag if "/" not in flag else "DIR" for flag in flags)
            rows.append(f"| {recipe} | `{command}` | {ranks} | {steps} | {accuracy} | {numbers} |")
            print(rows[-1], flush=True)
    (RESULTS / "parity.md").write_text(_page(rows))
    return int(worst > 1e-5)


def _cases(asked: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    cases: dict[str, tuple[str, ...]] = {"spiral": ("--epochs", "5")}
    if asked.mnist:
        data = ("--data-dir", str(asked.mnist))
        cases["mnist"] = (*data, "--model", "convnet", "--max-steps", "400")
    if asked.cifar10:
        data = ("--data-dir", str(asked.cifar10), "--validation-fraction", "0.02")
        cases["cifar10"] = (*data, "--width", "16", "--max-steps", "60")
    if asked.images:
        cases["images"] = ("--data-dir", str(asked.images), "--max-steps", "40")
    return cases


def _compare(recipe: str, flags: tuple[str, ...], ranks: int) -> tuple[list[float], int, str]:
    """Return the largest relative differences, the steps compared, and the last accuracies."""
    with tempfile.TemporaryDirectory(prefix="samestep-parity-") as folder:
        native, lightning = (
            _train(recipe, (*flags, "--engine", engine), ranks, Path(folder) / engine)
            for engine in ("native", "lightning")
        )
    assert [r["step"] for r in native] == [r["step"] for r in lightning]
    differences = [
        max(
            abs(a[name] - b[name]) / max(abs(a[name]), 1e-12)
            for a, b in zip(native, lightning, strict=True)
            if a.get(name) is not None
        )
        for name in COLUMNS
    ]
    last = [
        next(r["accuracy"] for r in reversed(run) if "accuracy" in r) for run in (native, lightning)
    ]
    steps = sum(r["event"] == "step" for r in native)
    return differences, steps, " = ".join(f"{value:.4f}" for value in dict.fromkeys(last))


def _train(recipe: str, flags: tuple[str, ...], ranks: int, run: Path) -> list[dict]:
    command = [sys.executable, "-m", "samestep", "train", recipe, *flags, "--log-every", "1"]
    command += ["--device", "cpu", "--run-dir", str(run), "--nproc", str(ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (run / "events.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] in EVENTS]


def _page(rows: list[str]) -> str:
    words = ["DIR" if "/" in word else word for word in sys.argv[1:]]
    command = " ".join(["python", "benchmarks/parity.py", *words])
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    head = " | ".join(f"{name}, largest difference" for name in COLUMNS)
    return "\n".join(
        [
            "# The same recipe in both engines",
            "",
            f"    {command}",
            "",
            f"{facts}.",
            "",
            "The native loop against Lightning's Trainer, every step; differences are relative.",
            "",
            f"| recipe | flags | ranks | steps | validation accuracy at the end | {head} |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
