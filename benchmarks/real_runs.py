"""Write what real runs came to, from their run directories.

    python benchmarks/real_runs.py runs/fashion runs/cifar

Writes `benchmarks/results/real-runs.md`: the command of each run, its epochs, and its result on
the test set. How long a run takes is no benchmark: the machine may have had other work.
"""

import json
import sys
import tomllib
from pathlib import Path

PAGE = Path(__file__).parent / "results" / "real-runs.md"
EPOCH_ROWS = 12


def main() -> int:
    """Write the page; refuse a run that has not ended."""
    runs = [Path(word) for word in sys.argv[1:]]
    unfinished = [run for run in runs if not (run / "result.json").is_file()]
    if not runs or unfinished:
        print(__doc__ if not runs else f"not finished: {unfinished}", file=sys.stderr)
        return 2
    head = [
        "# Real runs",
        "",
        "Full data sets, to the end of what each run was asked for. Written by",
        "`python benchmarks/real_runs.py RUN…` from the run directories.",
    ]
    PAGE.write_text("\n".join([*head, *(line for run in runs for line in _section(run)), ""]))
    return 0


def _section(run: Path) -> list[str]:
    result = json.loads((run / "result.json").read_text())
    environment = json.loads((run / "environment.json").read_text())
    records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    start = next(r for r in records if r["event"] == "start")
    engine = tomllib.loads((run / "settings.toml").read_text())["engine"]
    test = result["test"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    what = (
        f"{start['parameters']:,} parameters, {start['num_samples']:,} training samples, "
        f"{start['world_size']} rank(s), {start['global_batch_size']} samples per step, engine "
        f"{engine}; {environment['cores']} cores, {environment['device']}, {versions}."
    )
    became = (
        f"{result['status']} ({result['reason']}) after {result['epochs']} epochs, "
        f"{result['steps']:,} steps. **Test accuracy {test['accuracy']:.4f}** on "
        f"{test['samples']:,} samples, loss {test['loss']:.4f}, of {test['checkpoint']}."
    )
    head = [f"## {run.name}", f"    {_command(environment['command'])}", what, became]
    return [
        *(line for paragraph in head for line in ("", paragraph)),
        "",
        "| epoch | training loss | validation loss | validation accuracy | samples/s |",
        "|---:|---:|---:|---:|---:|",
        *_epochs(records),
        "",
        "By class: " + ", ".join(f"{name} {part:.3f}" for name, part in test["per_class"].items()),
    ]


def _epochs(records: list[dict]) -> list[str]:
    """Return a row for each epoch, for at most so many of them, the last among them."""
    trained = {r["epoch"]: r for r in records if r["event"] == "epoch"}
    measured = {r["epoch"]: r for r in records if r.get("split") == "validation"}
    every = -(-len(trained) // EPOCH_ROWS)
    shown = [n for n in trained if (max(trained) - n) % every == 0 and n in measured]
    return [
        f"| {n} | {trained[n]['loss']:.4f} | {measured[n]['loss']:.4f} "
        f"| {measured[n]['accuracy']:.4f} | {trained[n]['samples_per_s']:,.0f} |"
        for n in shown
    ]


def _command(words: list[str]) -> str:
    """Return the command without the folders of one machine."""
    paths = {"--data-dir": "DIR", "--run-dir": None}
    shown, before = ["samestep"], ""
    for word in words[1:]:
        replaced = paths.get(before, word)
        if before == "--run-dir":
            shown.pop()
        else:
            shown.append(str(replaced))
        before = word
    return " ".join(shown)


if __name__ == "__main__":
    sys.exit(main())
