"""Run the benchmarks side by side and write `benchmarks/results/`.

Every row is a process of its own; the rows of a table take turns, round after round, so that a
busy neighbour slows them alike; what is quoted is the ratio to the baseline in the same round.
"""

import argparse
import gzip
import importlib.util
import json
import os
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from measure import FailedError, Measurement, environment
from report import Rounds, baseline_of, judge, machine, markdown, ratios
from tables import Row, Table, all_tables

THREADS = 1  # per process; the models are tiny, and a second thread waits for a busy neighbour
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
PART = 7_680
"""Training images of the two-rank table: 60 steps of 2 x 64."""
IMAGES_PER_FILE = 128
"""Of the table of images: five files are 640, of which 576 train."""
JPEGS_PER_CLASS = 1_000
NO_JPEGS = "skipped: no folder train/CLASS in {}. Name CIFAR-10 as JPEG files with --jpeg-dir DIR."
NO_DATA = "skipped: no IDX files in {}. `apt install dataset-fashion-mnist`, or --data-dir DIR."


def main() -> int:
    """Measure the tables asked for; return 1 if a row failed or a target was missed."""
    arguments = _arguments()
    facts = machine()
    command = " ".join(["python", "benchmarks/run.py", *sys.argv[1:]])
    data_dir = arguments.data_dir
    good = True
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as directory:
        scratch = Path(directory)
        for table in all_tables(quick=arguments.quick):
            if arguments.only and table.name not in arguments.only:
                continue
            print(f"== {table.title}", flush=True)
            if table.data == "jpegs" and not (arguments.jpeg_dir / "train").is_dir():
                _skip(table, arguments.out, NO_JPEGS.format(arguments.jpeg_dir))
                continue
            if table.data in ("whole", "part") and not _found(data_dir, "train-images-idx3-ubyte"):
                _skip(table, arguments.out, NO_DATA.format(data_dir))
                continue
            data = _prepare(table.data, arguments, scratch)
            env = environment(scratch, THREADS)
            *_, (rounds, failures) = take_turns(table, arguments.rounds, data, scratch, env)
            text = markdown(table, rounds, failures, facts, command)
            print(text, flush=True)
            record = {"command": command, "machine": facts, "rounds": rounds, "failed": failures}
            _write(arguments.out, table.name, text, record)
            baseline = baseline_of(table, rounds)
            reached = [judge(target, rounds, baseline)[0] for target in table.targets]
            good = good and all(reached) and not failures
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    here = Path(__file__).parent
    names = [table.name for table in all_tables(quick=True)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), help=",".join(names))
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("BENCH_DATA_DIR", DEBIAN_FASHION_MNIST)),
        help="directory of the IDX files (default: $BENCH_DATA_DIR, or Debian's package)",
    )
    parser.add_argument(
        "--jpeg-dir",
        type=Path,
        default=Path(os.environ.get("BENCH_JPEG_DIR", "data/cifar10-jpeg")),
        help="directory of train/CLASS/*.jpg (default: $BENCH_JPEG_DIR, or data/cifar10-jpeg)",
    )
    parser.add_argument("--out", type=Path, help="default benchmarks/results; quick: nowhere")
    asked = parser.parse_args()
    unknown = set(asked.only or ()) - set(names)
    if unknown:
        parser.error(f"unknown table {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    asked.rounds = asked.rounds or (1 if asked.quick else 3)
    asked.out = asked.out or (None if asked.quick else here / "results")
    return asked


def take_turns(
    table: Table, num_rounds: int, data: Path, scratch: Path, env: dict[str, str]
) -> Iterator[tuple[Rounds, dict[str, str]]]:
    """Take turns, every other round in reverse; yield what is known after each row and round.

    A row that fails once is left out of the rounds that follow.
    """
    rounds: Rounds = {}
    failures: dict[str, str] = {}
    warm_up = table.rounds_factor > 1
    for number in range(num_rounds * table.rounds_factor + warm_up):
        for row in reversed(table.rows) if number % 2 else table.rows:
            if row.name in failures:
                continue
            if row.needs and not _has(row.needs):
                failures[row.name] = f"{row.needs} is not installed"
                continue
            try:
                found = measure_row(row, data, scratch, env, _best_workers(table, rounds))
            except FailedError as error:
                failures[row.name] = str(error)
                rounds.pop(row.name, None)
                print(f"round {number}: {row.name} failed: {error}", flush=True)
                continue
            if number or not warm_up:
                rounds.setdefault(row.name, []).append(found)
            yield rounds, failures
        _progress(table.rows, rounds)
        yield rounds, failures


def measure_row(
    row: Row, data: Path, scratch: Path, env: dict[str, str], workers: int
) -> Measurement:
    run = scratch / "run"
    shutil.rmtree(run, ignore_errors=True)
    filled = [part.format(data=data, run=run, workers=workers) for part in row.command]
    return row.measure(filled, run, env)


def _has(package: str) -> bool:
    """Whether a package can be imported; `make bench` puts torchvision into a folder of its own."""
    return importlib.util.find_spec(package) is not None or (Path(sys.prefix) / package).is_dir()


def _best_workers(table: Table, rounds: Rounds) -> int:
    """Return the number of workers of the DataLoader row that was fastest in the first round."""
    loaders = [row for row in table.rows if row.loader and row.name in rounds]
    best = max(loaders, key=lambda row: rounds[row.name][0]["value"], default=None)
    return int(best.command[best.command.index("--workers") + 1]) if best else 0


def _progress(rows: Sequence[Row], rounds: Rounds) -> None:
    first = next((row.name for row in rows if row.name in rounds), None)
    if first is not None:
        latest = {name: ratios(rounds, name, first)[-1] for name in rounds}
        print("  " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in latest.items()), flush=True)


def _found(data_dir: Path, name: str) -> bool:
    return (data_dir / name).exists() or (data_dir / f"{name}.gz").exists()


def _prepare(kind: str, arguments: argparse.Namespace, scratch: Path) -> Path:
    """Return the directory of a table's data, made if it is not the user's own."""
    if kind == "part":
        return _part(arguments.data_dir, scratch / "part")
    if kind == "jpegs":
        return _some_jpegs(arguments.jpeg_dir, scratch / "jpegs")
    if kind == "cifar10":
        return _random_cifar10(scratch / "cifar10")
    return Path(arguments.data_dir)


def _random_cifar10(folder: Path) -> Path:
    """Write CIFAR-10's binary files with a few random images."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(42)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = (bytes([i % 10]) + draw.randbytes(3072) for i in range(IMAGES_PER_FILE))
        (folder / name).write_bytes(b"".join(records))
    return folder


def _part(data_dir: Path, part: Path) -> Path:
    """Write IDX files with the first images only, for every competitor alike."""
    part.mkdir(exist_ok=True)
    for split, count in (("train", PART), ("t10k", 1_000)):
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            name = f"{split}-{kind}-ubyte"
            packed = data_dir / f"{name}.gz"
            raw = (
                gzip.decompress(packed.read_bytes())
                if packed.exists()
                else (data_dir / name).read_bytes()
            )
            head = raw[:4] + struct.pack(">I", count) + raw[8:header]
            (part / name).write_bytes(head + raw[header : header + count * size])
    return part


def _some_jpegs(jpeg_dir: Path, part: Path) -> Path:
    """Copy the first images of each class, for every competitor alike."""
    for place in sorted(place for place in (jpeg_dir / "train").iterdir() if place.is_dir()):
        (part / "train" / place.name).mkdir(parents=True, exist_ok=True)
        for path in sorted(place.iterdir())[:JPEGS_PER_CLASS]:
            shutil.copy(path, part / "train" / place.name)
    return part


def _skip(table: Table, out: Path | None, why: str) -> None:
    text = f"# {table.title}\n\n{why}\n"
    _write(out, table.name, text, {"skipped": True})
    print(text)


def _write(out: Path | None, name: str, text: str, record: Mapping[str, object]) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text(text)
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
