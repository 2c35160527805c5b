"""The package keeps its shape: imports point one way, torch stays lazy, no file grows too long."""

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "samestep"

DRAWING = SOURCE.parents[1] / "docs" / "project" / "architecture.md"


def floors_drawn() -> list[list[str]]:
    """Return the rooms of each floor in the drawing, the lowest floor first."""
    drawing = DRAWING.read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    found = {
        int(number): names.split(" · ")
        for number, names in re.findall(r"^ *(\d+) │ (.*?) *│", drawing, re.MULTILINE)
    }
    return [found[number] for number in range(1, len(found) + 1)]


# A room may import rooms of the floors below its own, and no other.
FLOORS = floors_drawn()

# Who may import a part of torch that knows of ranks, beside world.
DISTRIBUTED = {
    "ranks.world": {"torch.distributed"},
    "ranks.mesh": {"torch.distributed"},  # FSDP2 and its sharded tensors
    "ranks.start": {"torch.distributed"},  # torchrun's agent, which starts ranks and is none itself
    "stall.collectives": {"torch.distributed", "torch.nn.parallel"},  # notes who calls what
    "checking.watch.evaluation": {"torch.distributed"},  # notes what is reduced
    "checking.watch.model": {"torch.nn.parallel"},
    "run.shards": {"torch.distributed"},  # DCP's files
    "training.prepare": {"torch.nn.parallel"},
    "checking.watch.data": {"torch.distributed"},  # whether ranks may have batches left over
    # A script may start its ranks itself.
    "checking.processes": {"torch.distributed", "torch.multiprocessing"},
    # CUDA and NCCL are answered by the CPU and Gloo.
    "checking.substitute": {"torch.distributed", "torch.nn.parallel"},
    "checking.watch.life": {"torch.distributed"},  # notes what a script calls, and calls nothing
}

# A file is one subject: big enough to be worth opening, small enough to hold in the head.
SHORTEST_FILE, LONGEST_FILE = 60, 500
# name → the reason why it may be longer
LONG_FILES = {"session.own_run": "one class, whose public methods are documented in full"}
# name → the reason why it may be shorter; a verb always has a file of its own
SHORT_FILES = {
    "__main__": "`python -m samestep`",
    "version": "the build reads it",
    "api.arguments": "what the public functions share, without torch",
    "api.run_lists": "the public functions that need no torch",
    "recipes.small_convnet": "a network, as recipes.resnet is",
    "api.sweep_checks": "what the verb and the function check of a sweep alike",
    "data.augment": "public functions for recipes",
    "data.recipe_splits": "recipes import it, without the sources",
    "checking.rank": "what `python -m` runs as a rank",
    "doctor.timeouts": "six modules share it",
    "ranks.peak_rates": "data sheets, which the doctor and training share",
    "slurm.preflight": "the script and the verdict share it",
}
MOST_REPEATED_FILE_NAMES = 7


def room_of(module: str) -> str:
    """Return the room of a module: its folder, or itself in the hall."""
    return module.partition(".")[0]


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if not name.endswith("__init__"):
            found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.AST) -> set[str]:
    """Return the dotted names that a module imports; `from a import b` as `a.b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(name: str) -> set[str]:
    """Return the modules of samestep that a module imports, without `samestep.`."""
    own = {
        t.removeprefix("samestep.") for t in imports(modules()[name]) if t.startswith("samestep.")
    }
    return {t if t in modules() else t.rpartition(".")[0] for t in own}


def test_every_room_is_on_one_floor():
    rooms = {room_of(name) for name in modules()}
    assert sorted(room for floor in FLOORS for room in floor) == sorted(rooms)


def test_imports_point_one_way_and_lead_back_nowhere():
    floor_of = {room: place for place, floor in enumerate(FLOORS) for room in floor}
    wrong = {
        f"{name} imports {target}"
        for name in modules()
        for target in own_imports(name)
        if room_of(target) != room_of(name) and floor_of[room_of(target)] >= floor_of[room_of(name)]
    }
    assert not wrong
    graphlib.TopologicalSorter({name: own_imports(name) for name in modules()}).prepare()


def test_only_the_world_talks_to_torch_distributed_and_no_recipe_asks_for_its_rank():
    parts = ("torch.distributed", "torch.nn.parallel", "torch.multiprocessing")
    found = {}
    for name, tree in modules().items():
        used = {part for target in imports(tree) for part in parts if target.startswith(part)}
        attributes = {
            f"torch.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"
        }
        if everything := used | (attributes & set(parts)):
            found[name] = everything
    assert found == DISTRIBUTED
    asked = {"rank", "local_rank", "world_size", "is_main"}
    for name, tree in modules().items():
        if name.startswith("recipes."):
            found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} & asked
            assert not found, name


def test_what_needs_no_torch_does_not_import_it():
    """One process imports them all: these verbs and readers begin in tenths of a second."""
    names = [
        *("", ".cli", ".errors", ".machine", ".settings", ".version", ".data.catalog"),
        *(".data.download", ".ranks.launch", ".ranks.nproc", ".ranks.process"),
        *(".run.directory", ".run.files", ".run.index", ".run.records", ".reporting.words"),
        *(".commands.checkpoint", ".commands.compare", ".commands.data", ".commands.new"),
        *(".commands.report", ".commands.runs", ".commands.track", ".commands.watch"),
        *(".stall.judge", ".stall.pulse", ".stall.stacks"),
        *(".tracking.follower", ".tracking.processes", ".recipes.cricket.corpus"),
    ]
    program = (
        f"import sys, {', '.join('samestep' + n for n in names)}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_file_is_one_subject_and_a_name_means_one_thing():
    lengths = {
        name: len((SOURCE / f"{name.replace('.', '/')}.py").read_text().splitlines())
        for name in modules()
    }
    long = {name: n for name, n in lengths.items() if n > LONGEST_FILE}
    assert long.keys() == LONG_FILES.keys(), long
    verbs = {name for name in lengths if name.startswith("commands.")}
    short = {name: n for name, n in lengths.items() if n < SHORTEST_FILE and name not in verbs}
    assert short.keys() <= SHORT_FILES.keys(), short
    classes = [
        node.name
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, times in Counter(classes).items() if times > 1] == []
    # A watcher and the rules that read its events have one name, that of their subject.
    pairs = ("checking.rules.", "checking.watch.")
    files = Counter(name.rpartition(".")[2] for name in modules() if not name.startswith(pairs))
    assert sum(times > 1 for times in files.values()) <= MOST_REPEATED_FILE_NAMES, files


def test_every_public_name_is_there_and_every_setting_an_argument_that_editors_complete():
    import samestep

    for name in samestep.__all__:
        assert getattr(samestep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        samestep.nothing  # noqa: B018
    assert {*dir(samestep)} <= {*samestep.__all__}
    assert "train" in dir(samestep)
    from samestep.shell.api.call import SettingsArguments
    from samestep.base.settings import MERGED, Settings

    assert {*SettingsArguments.__annotations__} == {f.name for f in fields(Settings)} | {*MERGED}


def test_every_file_that_the_page_on_architecture_names_is_there():
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", DRAWING.read_text(encoding="utf-8"))
    root = SOURCE.parents[1]
    assert [
        name for name in named if not ((SOURCE / name).is_file() or (root / name).is_file())
    ] == []
    assert named
