"""The package keeps its shape: imports point one way, torch stays lazy, no file grows too long."""

import ast
import graphlib
import inspect
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


def parts_drawn() -> dict[str, tuple[set[str], list[list[str]]]]:
    """Return, of each part in the drawing, which parts it may know, and its floors of rooms."""
    drawing = DRAWING.read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    rows = [[cell.strip() for cell in line.split("│")] for line in drawing.splitlines()[2:]]
    below = {part: {p for p, *_ in rows[place + 1 :]} for place, (part, *_) in enumerate(rows)}
    return {
        part: (
            below[part] if known == "all below" else {*known.split()},
            [floor.split() for floor in rooms.split("·")],
        )
        for part, known, rooms in rows
    }


PARTS = parts_drawn()

# Who may import a part of torch that knows of ranks, beside world.
DISTRIBUTED = {
    "launch.ranks.world": {"torch.distributed"},
    "launch.ranks.mesh": {"torch.distributed"},  # FSDP2 and its sharded tensors
    "launch.ranks.start": {"torch.distributed"},  # torchrun's agent: it starts ranks, is none
    "launch.ranks.keeper": {"torch.distributed"},  # the store, which outlives the ranks
    "launch.ranks.regroup": {"torch.distributed"},  # leaves a broken group and joins the next
    "launch.stall.collectives": {"torch.distributed", "torch.nn.parallel"},  # notes who calls what
    "scripts.probes": {"torch.distributed", "torch.nn.parallel"},  # what scripts call is watched
    "scripts.checking.watch.evaluation": {"torch.distributed"},  # notes what is reduced
    "base.run.shards": {"torch.distributed"},  # DCP's files
    "core.learner.prepare": {"torch.nn.parallel"},
    "scripts.checking.watch.data": {"torch.distributed"},  # whether ranks have batches left over
    # A script may start its ranks itself.
    "scripts.checking.processes": {"torch.distributed", "torch.multiprocessing"},
    # CUDA and NCCL are answered by the CPU and Gloo.
    "scripts.checking.substitute": {"torch.distributed", "torch.nn.parallel"},
    "scripts.checking.watch.life": {"torch.distributed"},  # notes what a script calls
}

# A file is one subject: big enough to be worth opening, small enough to hold in the head.
SHORTEST_FILE, LONGEST_FILE = 60, 500
# name → the reason why it may be shorter; a verb always has a file of its own
SHORT_FILES = {
    "__main__": "`python -m samestep`",
    "dist": "the public module of the process group",
    "base.counting": "a bar that readers of data share",
    "core.recipes.small_convnet": "a network, as recipes.resnet is",
    "bridges.huggingface.trainer_script": "what lightning.trainer_script is there",
    "core.training.elastic_step": "only elastic trainings import it",
    "core.data.augment": "public functions for recipes",
    "scripts.checking.rank": "what `python -m` runs as a rank",
    "show.tracking.trackio": "a tracker is a file",
}
MOST_REPEATED_FILE_NAMES = 7


def room_of(module: str) -> tuple[str, str]:
    """Return the part and the room of a module; of a file next to the parts, itself and nothing."""
    part, _, rest = module.partition(".")
    return part, rest.partition(".")[0]


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


def test_every_room_has_its_place_in_the_drawing_and_every_part_says_what_it_is_for():
    rooms = {room_of(name) for name in modules()} - {("__main__", ""), ("dist", "")}
    drawn = {(part, r) for part, (_, floors) in PARTS.items() for floor in floors for r in floor}
    assert rooms == drawn
    for part in PARTS:
        about = (SOURCE / part / "__init__.py").read_text()
        assert "It knows" in about, part
        assert "Begin with" in about, part


def test_imports_point_one_way_and_lead_back_nowhere():
    floor_of = {
        (part, room): place
        for part, (_, floors) in PARTS.items()
        for place, floor in enumerate(floors)
        for room in floor
    }

    def may(name: str, target: str) -> bool:
        (part, room), (other, theirs) = room_of(name), room_of(target)
        if part in ("__main__", "dist") or (part, room) == (other, theirs):
            return other != "dist"
        if part != other:
            return other in PARTS[part][0]
        return floor_of[other, theirs] < floor_of[part, room]

    assert not [(name, t) for name in modules() for t in own_imports(name) if not may(name, t)]
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
        if name.startswith("core.recipes."):
            found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} & asked
            assert not found, name


def test_what_needs_no_torch_does_not_import_it():
    """One process imports them all: these verbs and readers begin in tenths of a second."""
    names = """
        base.errors base.machine base.settings base.plugins base.words base.run.directory
        base.run.files base.run.index base.run.records core.data.catalog core.data.download
        core.recipes.cricket.corpus launch.ranks.launch launch.ranks.nproc launch.ranks.process
        launch.stall.stall_verdict launch.stall.pulse launch.stall.stacks shell.cli
        shell.commands.checkpoint shell.commands.compare shell.commands.data shell.commands.new
        shell.commands.report shell.commands.runs shell.commands.track shell.commands.watch
        show.tracking.follower show.tracking.processes
    """
    modules = ", ".join(f"samestep.{name}" for name in names.split())
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_before_its_first_step_a_plain_training_imports_only_what_it_needs(tmp_path):
    program = """import os, sys; from samestep.core.training.step import EagerStep
EagerStep.__call__ = lambda *_, **__: (print(*sys.modules, flush=True), os._exit(0))
from samestep.shell.cli import main; main(["train", "spiral", "--run-dir", sys.argv[1]])"""
    words = [sys.executable, "-c", program, str(tmp_path / "run")]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    loaded = {name for name in printed.split() if name.startswith("samestep")}
    others = "after_epoch batch_transform buffers carried compiled elastic_step gathered"
    others += " loader_source nproc picture_making regroup scheduler sharding stream_source tree"
    assert {name.rpartition(".")[2] for name in loaded} & {*others.split()} == set()
    assert 60 < len(loaded) <= 80


def test_a_file_is_one_subject_and_a_name_means_one_thing():
    lengths = {
        name: len((SOURCE / f"{name.replace('.', '/')}.py").read_text().splitlines())
        for name in modules()
    }
    assert not {name: n for name, n in lengths.items() if n > LONGEST_FILE}
    verbs = {name for name in lengths if name.startswith("shell.commands.")}
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
    pairs = ("scripts.checking.rules.", "scripts.checking.watch.")
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
    from samestep.base.settings import MERGED, Settings

    settings = {f.name for f in fields(Settings)} | {*MERGED}
    assert settings < {*inspect.signature(samestep.train).parameters}


def test_every_file_that_the_page_on_architecture_names_is_there():
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", DRAWING.read_text(encoding="utf-8"))
    root = SOURCE.parents[1]
    assert [
        name for name in named if not ((SOURCE / name).is_file() or (root / name).is_file())
    ] == []
    assert named


def test_a_room_that_users_import_is_one_module_under_its_short_name():
    program = (
        "import samestep.data.augment, samestep.core.data.augment as whole, samestep.tracking\n"
        "assert samestep.data.augment is whole\n"
        "assert whole.__spec__.name == 'samestep.core.data.augment'\n"
        "try: import samestep.data.no_such\n"
        "except ModuleNotFoundError as error: assert error.name == 'samestep.data.no_such'\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
