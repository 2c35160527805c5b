"""The package keeps its shape: imports point one way, torch stays lazy, files stay short."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "samestep"

# A module may import modules of its own row and of the rows above it, never of a row below.
ROWS = [
    ["class_table", "errors", "garbage", "phases", "text", "version"],
    ["address", "early", "launch", "files", "settings", "rank_log"],
    ["world", "run", "recipe", "failure"],
    ["data", "models", "tracking"],
    ["recipes"],
    [
        *("training.checkpoint", "training.clock", "training.memory", "training.optimizer"),
        "training.parallel",
        "training.phases",
        *("training.confusion", "training.plan", "training.precision", "training.prepare"),
        *("training.stopping", "training.threads", "training.window"),
    ],
    ["training.evaluate", "training.step"],
    ["training.compiled", "training.loop"],
    ["training.state"],
    ["config", "process_group", "ranks", "screen"],
    ["outcome"],
    ["saving", "evaluation"],
    ["session", "prediction"],
    ["lightning"],
    ["verify"],
    ["slurm"],
    ["doctor"],
    ["profiling"],
    ["compare"],
    ["scale"],
    ["commands"],
    ["cli"],
    ["__main__"],
]

# Who may import a part of torch that knows of ranks, beside world.
DISTRIBUTED = {
    "world": {"torch.distributed"},
    "ranks": {"torch.distributed"},  # torchrun's agent, which starts ranks and is none itself
    "training.parallel": {"torch.nn.parallel"},
}

LONGEST_FILE, LONGEST_FUNCTION = 400, 60
# name → the reason why it may be longer
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {
    "slurm.sandbox.conf.slurm_conf": "it is one file's text, read top to bottom",
}

PACKAGES = {"commands", "compare", "data", "doctor", "lightning", "models", "profiling", "recipes",
            "scale", "slurm", "tracking", "training", "verify"}  # fmt: skip


def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if not name.endswith("__init__"):
            found[name] = ast.parse(path.read_text())
    return found


MODULES = modules()


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
    own = {t.removeprefix("samestep.") for t in imports(MODULES[name]) if t.startswith("samestep.")}
    return {t if t in MODULES else t.rpartition(".")[0] for t in own}


def row_of(module: str) -> int:
    """Return the row of a module: the one that names it, or its folder."""
    for candidate in (module, module.split(".", maxsplit=1)[0]):
        for place, row in enumerate(ROWS):
            if candidate in row:
                return place
    raise AssertionError(f"{module} has no row: add it to ROWS where it belongs")


def test_every_module_has_a_row_and_every_row_names_modules_that_exist():
    for name in MODULES:
        row_of(name)
    named = {name for row in ROWS for name in row}
    assert named <= MODULES.keys() | PACKAGES


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    wrong = [target for target in own_imports(name) if row_of(target) > row_of(name)]
    assert not wrong, f"{name} imports {wrong}, of a later row"


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter({name: own_imports(name) for name in MODULES}).prepare()


@pytest.mark.parametrize("name", MODULES)
def test_only_the_world_talks_to_torch_distributed(name):
    parts = ("torch.distributed", "torch.nn.parallel", "torch.multiprocessing")
    used = {part for target in imports(MODULES[name]) for part in parts if target.startswith(part)}
    attributes = {
        f"torch.{node.attr}"
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"
    }
    assert used | (attributes & set(parts)) == DISTRIBUTED.get(name, set())


def test_no_recipe_and_no_data_source_asks_for_its_rank():
    asked = {"rank", "local_rank", "world_size", "is_main"}
    for name, tree in MODULES.items():
        if name.startswith("recipes."):
            found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} & asked
            assert not found, name


@pytest.mark.parametrize(
    "name", ["", "cli", "errors", "failure", "files", "launch", "rank_log", "run", "settings",
             "version", "data.catalog", "data.download", "commands.compare", "commands.data",
             "commands.track", "tracking.follow", "tracking.process", "tracking.send"],
)  # fmt: skip
def test_importing_it_does_not_import_torch(name):
    module = f"samestep.{name}".rstrip(".")
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_files_stay_short():
    lengths = {
        name: len((SOURCE / f"{name.replace('.', '/')}.py").read_text().splitlines())
        for name in MODULES
    }
    long = {name: n for name, n in lengths.items() if n > LONGEST_FILE}
    assert long.keys() == LONG_FILES.keys(), long


def test_functions_stay_short():
    long = {
        f"{name}.{node.name}": length
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    }
    assert long.keys() == LONG_FUNCTIONS.keys(), long


def test_every_public_name_of_the_package_is_there_and_no_other():
    import samestep

    for name in samestep.__all__:
        assert getattr(samestep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        samestep.nothing  # noqa: B018
