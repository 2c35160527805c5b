"""Write what `cricket.py` measured as a page, and say how much it measures."""

import statistics
from typing import Any

BATCH, NUM_BALLS, ROUNDS = 256, 8_192, 7
STEPS, TURNS = 6, 11
WAIT_STEPS = 64
READ_LIMIT, PEER_LIMIT, WAIT_LIMIT = 20_000, 1.5, 0.10


def ratio(turns: list[dict[str, float]]) -> tuple[float, str]:
    """Return the median of the turns' ratios, peer to samestep, and it with its range."""
    ratios = [turn["peer"] / turn["samestep"] for turn in turns]
    median = statistics.median(ratios)
    return median, f"{median:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def rate(turns: list[dict[str, float]], name: str, balls: int) -> str:
    """Return the median of balls per second."""
    return f"{balls / statistics.median(turn[name] for turn in turns):,.0f}"


def reached(good: bool) -> str:
    """Return how a target is told."""
    return "reached" if good else "NOT REACHED"


def page(found: dict[str, Any]) -> str:
    """Return benchmarks/results/cricket-speed.md."""
    lines = [
        "# Cricket: reading matches, graphs beside PyG's DataLoader, the wait for data",
        "",
        "    python benchmarks/cricket.py --data-dir cricsheet-t20s.tar.xz",
        "",
        ", ".join(f"{key} {value}" for key, value in found["machine"].items()) + ".",
        "",
    ]
    for name, words in (("read", of_reading), ("loader", of_loader), ("train", of_training)):
        if name in found:
            lines += [*words(found[name]), ""]
    if "wait" in found:
        lines += [*of_waiting(found["wait"]), ""]
    return "\n".join(lines)


def of_reading(found: dict[str, Any]) -> list[str]:
    """Return what is said of reading matches."""
    wall, core = (statistics.median(found[n]) for n in ("balls_per_s", "balls_per_core_s"))
    tables = "columns in memory"
    return [
        "## Reading matches",
        "",
        (
            f"One process reads {found['matches']:,} matches, {found['balls']:,} balls, from the "
            "compressed archive into an empty cache; the median of 3."
        ),
        "",
        "| | |",
        "|---|---:|",
        f"| balls/s | {wall:,.0f} |",
        f"| balls/s of processor time | {core:,.0f} |",
        f"| bytes per ball in the cache | {found['cache_bytes_per_ball']:.1f} |",
        f"| bytes per ball, {tables} | {found['columns_bytes_per_ball']:.1f} |",
        f"| seconds to open the cache again | {found['again_s']:.2f} |",
        "",
        f"- Target: {READ_LIMIT:,} balls/s per core or more: {reached(wall >= READ_LIMIT)}.",
    ]


def of_loader(found: dict[str, Any]) -> list[str]:
    """Return what is said of batches alone."""
    lines = [
        "## Batches alone",
        "",
        (
            f"{NUM_BALLS:,} balls of the training part in batches of {BATCH}, each time in a new "
            "order. PyG's side has its graphs in memory, built beforehand. samestep builds them "
            "from columns, batch by batch."
        ),
        "",
        "| workers | PyG's DataLoader, balls/s | samestep, balls/s | ratio (min-max) |",
        "|---:|---:|---:|---:|",
    ]
    medians = []
    for workers in (0, 2):
        turns = found[f"workers_{workers}"]
        median, text = ratio(turns)
        medians.append(median)
        peer, ours = (rate(turns, name, NUM_BALLS) for name in ("peer", "samestep"))
        lines.append(f"| {workers} | {peer} | {ours} | {text} |")
    return [
        *lines,
        "",
        (
            f"- Target: {PEER_LIMIT} x PyG's DataLoader or more: "
            f"{reached(min(medians) >= PEER_LIMIT)} ({medians[0]:.2f} without workers, "
            f"{medians[1]:.2f} with 2)."
        ),
        f"- {ROUNDS} rounds in one process, by turns; a ratio is the median of the rounds' ratios.",
        (
            f"- Memory: PyG's graphs have {found['peer_bytes_per_ball']:,.0f} bytes of tensors per "
            f"ball; samestep's columns have {found['tables_bytes_per_ball']:,.0f}. Building PyG's "
            f"graphs beforehand is not timed; it took 1 s for {found['built_per_s']:,.0f} of them."
        ),
    ]


def of_training(found: dict[str, Any]) -> list[str]:
    """Return what is said of whole steps."""
    turns, parts = found["turns"], found["parts"]
    median, text = ratio(turns)
    peer, ours = (rate(turns, name, STEPS * BATCH) for name in ("peer", "samestep"))
    return [
        "## Whole steps, one core",
        "",
        (
            "The recipe's network and optimizer on the same balls, without workers: a plain loop "
            "over PyG's DataLoader, and samestep."
        ),
        "",
        "| | balls/s | ratio (min-max) |",
        "|---|---:|---:|",
        f"| PyG's DataLoader, plain loop | {peer} | 1.00 |",
        f"| samestep | {ours} | {text} |",
        "",
        f"- Target: {PEER_LIMIT} x or more: {reached(median >= PEER_LIMIT)}.",
        (
            f"- {TURNS} turns of {STEPS} steps each in one process; a ratio is the median of the "
            "turns' ratios."
        ),
        (
            f"- Of a batch of {BATCH}: building the graphs {parts['graphs'] * 1e3:.0f} ms, the "
            f"network forward {parts['forward'] * 1e3:.0f} ms, forward and backward "
            f"{parts['forward and backward'] * 1e3:.0f} ms."
        ),
    ]


def of_waiting(found: dict[str, Any]) -> list[str]:
    """Return what is said of the wait for data."""
    lines = [
        "## The wait for data",
        "",
        f"{WAIT_STEPS} steps of the recipe from the cache, by the phases that every run records.",
        "",
        "| `--num-workers` | threads | ms per step | waiting for data | share |",
        "|---:|---:|---:|---:|---:|",
    ]
    shares = {}
    for workers, each in found.items():
        phases = each["phases"]
        whole = sum(phases.values())
        shares[workers] = phases["data"] / whole
        step, data = (seconds / WAIT_STEPS * 1e3 for seconds in (whole, phases["data"]))
        lines.append(
            f"| {workers} | {each['threads']} | {step:.0f} | {data:.1f} ms | "
            f"{shares[workers]:.1%} |"
        )
    told = [f"{n}: {reached(share <= WAIT_LIMIT)}" for n, share in shares.items()]
    return [
        *lines,
        "",
        f"- Target: {WAIT_LIMIT:.0%} or less, by the number of workers: {', '.join(told)}.",
        "- 0 is the default: on 2 cores the workers of 2 ranks take time from the ranks.",
    ]
