"""Train twice in two ways that promise the same bits, and compare: `python benchmarks/gpu_bits.py`.

    python benchmarks/gpu_bits.py CASE --data-dir DIR [--dry]

Prints one JSON line: whether weights and recorded numbers are equal to the last bit, and the steps.
Cases: `convnet` (dropout), `resnet` (batch normalisation) and `gpt`, each in fp32 or bf16, with
virtual ranks on one rank and on two that share the device; `resumed` and `resumed-compiled`, a run
that was killed and resumed, against one that was not, with `--deterministic`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECIPES = {
    "convnet": ("mnist", "--model", "convnet", "--batch-size", "64"),
    "resnet": ("cifar10", "--batch-size", "64"),
    "gpt": (str(ROOT / "examples" / "char_gpt.py"), "--batch-size", "32"),
}
DATA = {"convnet": "mnist", "resnet": "cifar10"}
POLL_S = 0.002


def main() -> int:
    """Run one case; return 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", help="NAME-PRECISION, resumed or resumed-compiled")
    parser.add_argument("--data-dir", type=Path, required=True, help="holds mnist/ and cifar10/")
    parser.add_argument("--dry", action="store_true", help="few steps, on the CPU")
    asked = parser.parse_args()
    steps = 4 if asked.dry else 40
    with tempfile.TemporaryDirectory(prefix="samestep-bits-") as place:
        folder = Path(place)
        pair = _resumed if asked.case.startswith("resumed") else _on_one_and_two
        one, other = pair(asked, folder, steps)
        found = {"equal": one == other, "steps": len(one["steps"]), "weights": one["weights"]}
    print(json.dumps(found))
    return int(not found["equal"])


def _on_one_and_two(asked: argparse.Namespace, folder: Path, steps: int) -> tuple[Any, Any]:
    name, precision = asked.case.split("-")
    flags = ("--virtual-ranks", "4", "--precision", precision, "--max-steps", str(steps))
    words = (*_words(asked, name), *flags)
    _train(words, folder / "one")
    shared = () if asked.dry else ("--oversubscribe",)
    _train((*words, "--nproc", "2", *shared), folder / "two")
    return _numbers(folder / "one"), _numbers(folder / "two")


def _resumed(asked: argparse.Namespace, folder: Path, steps: int) -> tuple[Any, Any]:
    words = (*_words(asked, "convnet"), "--deterministic", "--checkpoint-every-steps", "8")
    words += ("--compile", "on") if asked.case.endswith("compiled") else ()
    words += ("--max-steps", str(10 * steps), "--log-every", "1")
    _train(words, folder / "whole")
    parts = folder / "parts"
    _kill_after_checkpoint((*words, "--run-dir", str(parts)), parts)
    _train((str(parts), "--resume"))
    return _numbers(folder / "whole"), _numbers(parts)


def _kill_after_checkpoint(words: tuple[str, ...], run: Path) -> None:
    """Train until the second checkpoint is announced, and kill the training."""
    events = run / "events.jsonl"
    with subprocess.Popen(_command(words), stdout=subprocess.DEVNULL) as process:
        while not events.is_file() or events.read_bytes().count(b'"checkpoint"') < 2:
            if process.poll() is not None:
                sys.exit(f"the training ended with {process.returncode} before it was killed")
            time.sleep(POLL_S)
        process.kill()


def _words(asked: argparse.Namespace, name: str) -> tuple[str, ...]:
    data = (asked.data_dir / DATA[name],) if name in DATA else ()
    width = ("--width", "2") if asked.dry and name == "resnet" else ()
    device = ("--device", "cpu" if asked.dry else "cuda")
    return (*RECIPES[name], *(("--data-dir", str(*data)) if data else ()), *width, *device)


def _command(words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "samestep", "train", *words]


def _train(words: tuple[str, ...], run: Path | None = None) -> None:
    command = _command((*words, "--run-dir", str(run)) if run else words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def _numbers(run: Path) -> dict[str, Any]:
    """Return the hash of a run's weights, and loss and norm of each recorded step."""
    lines = (run / "events.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]  # one may be cut off
    steps = {r["step"]: (r["loss"], r["grad_norm"]) for r in records if r["event"] == "step"}
    weights = json.loads((run / "result.json").read_text())["weights_sha256"]
    return {"steps": steps, "weights": weights}


if __name__ == "__main__":
    raise SystemExit(main())
