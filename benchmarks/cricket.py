"""Measure the cricket recipe: reading matches, graphs beside PyG's DataLoader, the wait for data.

PyG's side is what its users write: a `HeteroData` for each ball, built beforehand and in memory,
and `torch_geometric.loader.DataLoader`. Both sides take turns in one process, on the same balls.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from cricket_page import BATCH, NUM_BALLS, ROUNDS, STEPS, TURNS, WAIT_STEPS, page
from report import machine
from torch import nn
from torch_geometric.loader import DataLoader

from samestep.base.trees import tree_leaves
from samestep.core.data.recipe_data import open_source
from samestep.core.recipe import Splits
from samestep.core.recipes.cricket.cache import open_corpus
from samestep.core.recipes.cricket.graphs import BallGraphs, GraphSource, build, collate
from samestep.core.session import build as execution
from samestep.core.session.request import Request
from samestep.core.training.loop import rehearse
from samestep.launch.ranks.world import World
from samestep.shell.commands.train import parse

RESULTS = Path(__file__).parent / "results"


def read(data_dir: str) -> dict[str, Any]:
    """Measure reading all matches in one process, each time into an empty cache."""
    seconds, cores = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder:
            wall, core = time.perf_counter(), time.process_time()
            kept = open_corpus(Path(data_dir), folder=Path(folder), jobs=1, shown=False)
            seconds.append(time.perf_counter() - wall)
            cores.append(time.process_time() - core)
            size = sum(path.stat().st_size for path in Path(folder).glob("*.npz"))
            start = time.perf_counter()
            open_corpus(Path(data_dir), folder=Path(folder), shown=False)
            again = time.perf_counter() - start
    balls = kept.corpus.num_balls
    tables = (kept.corpus.balls, kept.corpus.innings, kept.corpus.matches)
    columns = sum(column.nbytes for table in tables for column in table.values())
    return {
        "balls": balls,
        "matches": len(kept.corpus.matches["date"]),
        "balls_per_s": [balls / each for each in seconds],
        "balls_per_core_s": [balls / each for each in cores],
        "cache_bytes_per_ball": size / balls,
        "columns_bytes_per_ball": columns / balls,
        "again_s": again,
    }


def request_for(data_dir: str, *more: str) -> Request:
    """Return what `samestep train cricket` would train."""
    batch = ("--batch-size", str(BATCH))
    flags = ("--data-dir", data_dir, "--device", "cpu", *batch, *more)
    _, request = parse(["cricket", *flags])
    return replace(request, options=request.recipe.complete_options(request.options))


def some_balls(request: Request) -> BallGraphs:
    """Return balls of the training part, drawn once."""
    splits = request.recipe.load_data(request.options)
    graphs: Any = splits.train
    drawn = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(42))[:NUM_BALLS]
    return BallGraphs(graphs.source, graphs.rows[drawn.numpy()])


def one_graph(source: GraphSource, row: int) -> Any:
    """Return the graph of a ball as it is before batches are made of it."""
    graph = build(source, torch.tensor([row]))
    for kind in graph.node_types:
        del graph[kind].batch
    del graph.num_graphs
    return graph


def bytes_of(graph: Any) -> int:
    """Return the bytes of a graph's tensors."""
    return sum(value.nbytes for store in graph.stores for value in store.values())


def seconds_of(batches: Iterable[Any]) -> float:
    """Return how long it takes to read all balls once."""
    start = time.perf_counter()
    assert sum(batch.num_graphs for batch in batches) == NUM_BALLS
    return time.perf_counter() - start


def loader(data_dir: str) -> dict[str, Any]:
    """Measure batches as the network would get them, without training."""
    balls = some_balls(request_for(data_dir))
    start = time.perf_counter()
    each = [one_graph(balls.source, int(row)) for row in balls.rows]
    tables = balls.source.tables
    leaves = tree_leaves(vars(tables))
    found: dict[str, Any] = {
        "built_per_s": len(each) / (time.perf_counter() - start),
        "peer_bytes_per_ball": statistics.mean(bytes_of(graph) for graph in each),
        "tables_bytes_per_ball": sum(leaf.nbytes for leaf in leaves) / len(tables.target),
    }
    for workers in (0, 2):
        peer = DataLoader(
            each,
            batch_size=BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        ours = open_source(
            balls,
            World(),
            seed=42,
            dtype=torch.float32,
            num_workers=workers,
            collate=collate,
            whole=True,
        )
        turns = []
        for epoch in range(ROUNDS + 1):
            blocks = ours.blocks(epoch, 0, global_batch=BATCH, drop_last=False)
            sides: dict[str, Iterable[Any]] = {
                "peer": peer,
                "samestep": (part.inputs for block in blocks for part in block.parts),
            }
            order = sorted(sides, reverse=bool(epoch % 2))
            turns.append({name: seconds_of(sides[name]) for name in order})
        ours.close()
        found[f"workers_{workers}"] = turns[1:]
    return found


def trained_on(balls: BallGraphs, request: Request) -> execution.Built:
    """Return the recipe's training on these balls, without evaluations."""
    recipe = replace(request.recipe, data=lambda _options: Splits(train=balls, validation=balls))
    return execution.build(replace(request, recipe=recipe), World())


def peer_steps(request: Request, each: list[Any]) -> Iterator[object]:
    """Yield after each step of a plain loop over PyG's DataLoader."""
    torch.manual_seed(42)
    network = request.recipe.build_model(request.options)
    settings = request.settings
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    batches = DataLoader(each, batch_size=BATCH, shuffle=True)
    while True:
        for graphs in batches:
            loss = request.recipe.loss(network(graphs), graphs)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), settings.clip_norm)
            optimizer.step()
            yield loss.item()


def train(data_dir: str) -> dict[str, Any]:
    """Measure steps of the same network, in one process on one core."""
    request = request_for(data_dir, "--threads", "1", "--epochs", "100")
    balls = some_balls(request)
    each = [one_graph(balls.source, int(row)) for row in balls.rows]
    training = trained_on(balls, request)
    sides = {
        "samestep": rehearse(training.work.endless(), training.state),
        "peer": peer_steps(request, each),
    }
    turns = []
    for number in range(TURNS + 1):
        found = {}
        for name in sorted(sides, reverse=bool(number % 2)):
            start = time.perf_counter()
            for _ in islice(sides[name], STEPS):
                pass
            found[name] = time.perf_counter() - start
        turns.append(found)
    rows = torch.from_numpy(balls.rows[:BATCH])
    graphs = build(balls.source, rows)
    network = training.work.learner.model
    parts: dict[str, list[float]] = {"graphs": [], "forward": [], "forward and backward": []}
    for _ in range(15):
        parts["graphs"].append(timed(lambda: build(balls.source, rows)))
        with torch.no_grad():
            parts["forward"].append(timed(lambda: network(graphs)))
        parts["forward and backward"].append(timed(lambda: network(graphs).sum().backward()))
    return {"turns": turns[1:], "parts": {n: statistics.median(p) for n, p in parts.items()}}


def wait(data_dir: str) -> dict[str, Any]:
    """Read from the phases that samestep records how long steps wait for their data."""
    found = {}
    for workers in (0, 1, 2):
        request = request_for(data_dir, "--num-workers", str(workers), "--epochs", "100")
        training = trained_on(some_balls(request), request)
        steps, phases = rehearse(training.work.endless(), training.state), training.work.phases
        for _ in islice(steps, 8):  # the first batches of an epoch come later than the others
            pass
        before = phases.running()
        for _ in islice(steps, WAIT_STEPS):
            pass
        spent = {name: s - before.get(name, 0.0) for name, s in phases.running().items()}
        training.work.train.close()
        found[str(workers)] = {"threads": training.threads, "phases": spent}
    return found


PARTS = {"read": read, "loader": loader, "train": train, "wait": wait}


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Measure the parts asked for, each in a process of its own, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="Cricsheet's matches")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        print(json.dumps(PARTS[asked.part](asked.data_dir)))
        return
    kept = RESULTS / "cricket-speed.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    found["machine"] = machine()
    for name in asked.only:
        command = [sys.executable, __file__, "--data-dir", asked.data_dir, "--part", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    kept.write_text(json.dumps(found, indent=1) + "\n")
    text = page(found)
    kept.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
