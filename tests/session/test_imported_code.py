"""What a recipe imports of the user's own belongs to the recipe: kept, compared, and used again."""

import json
import os
import shutil
from pathlib import Path

import pytest

import samestep
from samestep import UserError
from samestep.base.run import user_modules
from samestep.base.run.code_copy import copy_code, find_code
from samestep.base.run.user_modules import kept_modules
from samestep.cluster.slurm.options import JobOptions, keep_options
from samestep.core.recipe import find_recipe
from samestep.core.session.recipe_changes import (
    keep_recipe,
    keep_script,
    recipe_changes,
    script_changes,
)
from tests.api.recipes import made
from tests.command_line import train_here
from tests.tiny import all_records

DATA = """
import torch
from torch import nn
from samestep import Recipe, Splits
def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(7))
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:30], y[:30]), validation=(x[30:], y[30:]), test=(x[30:], y[30:]))
SETTINGS = {"epochs": 1, "batch_size": 10}
"""
NET = '''
from torch import nn
class Net(nn.Linear):
    """A small net."""
    def __init__(self):
        super().__init__(4, 2)
    def forward(self, x):
        return super().forward(x) * x.mean(1, keepdim=True)
def unused(train=None):
    return 1
'''
GIVES = "recipe = Recipe(model=Net, data=data, settings=SETTINGS)"
BUILDS = "recipe = Recipe(model=lambda: {}, data=data, settings=SETTINGS)"
LATER = "def model():\n    {}\n    return {}\nrecipe = Recipe(model=model, data=data)"

TRAIN = """
import argparse
import mylib.parts as parts
from mylib.parts import scale
WIDTH, SEED = 2, 1
TABLE = {}
TABLE["width"] = 2
def main(scale=None):
    print("training", SEED)
if __name__ == "__main__":
    main()
"""
USES = TRAIN + NET.replace("super().__init__(4, 2)", 'super().__init__(4, TABLE["width"])').replace(
    "super().forward(x) *", "scale(super().forward(x)) *"
)
PARTS = (
    "from .deep import FACTOR\n\ndef scale(x):\n    from . import lazy\n    return lazy.twice(x)\n"
)
FILES = {
    "train.py": USES,
    "mylib/__init__.py": "",
    "mylib/parts.py": PARTS + "    return x * FACTOR\n",
    "mylib/deep.py": "FACTOR = 1.0\nOTHER = 1\n",
    "mylib/lazy.py": "def twice(x): return 2 * x\n",
}


def write(folder: Path, recipe: str, files: dict[str, str]) -> Path:
    for name, text in {**files, "small.py": DATA + recipe}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "small.py"


def keep(run: Path, file: Path) -> samestep.Recipe:
    """Keep a recipe in a run as training does: its model was built by then."""
    recipe = find_recipe(str(file))
    recipe.model()
    run.mkdir(exist_ok=True)
    keep_recipe(run, str(file), recipe, changed=False)
    return recipe


def changes_by(run: Path, file: Path, name: str, old: str, new: str) -> list[str]:
    """Return what an edit of a file beside the recipe changes; it is undone."""
    edited = file.with_name(name) if "/" not in name else file.parent / name
    text = edited.read_text()
    assert old in text
    edited.write_text(text.replace(old, new))
    try:
        return recipe_changes(run, str(file))
    finally:
        edited.write_text(text)


def edit(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def test_what_the_recipe_reaches_is_compared_and_named_and_nothing_else(tmp_path):
    run, file = tmp_path / "run", write(tmp_path, f"from train import Net\n{GIVES}", FILES)
    keep(run, file)
    assert recipe_changes(run, str(file)) == []
    for name, old, new, told in [
        ("train.py", ".mean(", ".amax(", "Net.forward() in train.py"),
        ("train.py", '["width"] = 2', '["width"] = 3', "`TABLE['width'] = 2` in train.py (gone)"),
        ("mylib/deep.py", "FACTOR = 1.0", "FACTOR = 2.0", "deep.py (was 1.0, is 2.0)"),
        ("mylib/lazy.py", "2 * x", "3 * x", "twice() in mylib/lazy.py"),
        ("mylib/__init__.py", "", "import torch\ntorch.manual_seed(1)", "manual_seed(1)` in"),
        ("train.py", "parts import scale", "deep import f as scale", "import of scale in train.py"),
        ("small.py", "from train", "from mylib.other", "Net (was train.Net, is mylib"),
        ("small.py", "x[:, 0] > 0", "x[:, 0] > 1", "data()"),
    ]:  # fmt: skip
        assert told in str(changes_by(run, file, name, old, new)), (name, old)
    for name, old, new in [
        ("train.py", "SEED = 2, 1", "SEED = 2, 1  # a comment"),
        ("train.py", '"training"', '"trains"'),
        ("train.py", "    main()", "    main(3)"),
        ("train.py", "import argparse", "import os, sys, json"),
        ("train.py", "A small net.", "A net."),
        ("train.py", "return 1", "return 2"),
        ("mylib/deep.py", "OTHER = 1", "OTHER = 2"),
        ("small.py", "import torch\n", "import torch\nimport os, mylib\nfrom torch import optim\n"),
    ]:
        assert changes_by(run, file, name, old, new) == [], (name, old)


REGISTER = "ALL = {}\ndef register(one):\n    ALL[one.__name__] = one\n    return one\n"
HOOK = "class Base:\n    def __init_subclass__(cls): Base.last = cls\n"
LAZY = """
from importlib import import_module
def __getattr__(name): return getattr(import_module("p.m"), name)
"""
MODULE, PACKAGE = {"m.py": NET}, {"p/__init__.py": "", "p/m.py": NET}
EXPORTED, LAZILY = (PACKAGE | {"p/__init__.py": x} for x in ("from .m import Net as Small", LAZY))
REGISTERED = {"r.py": REGISTER, "m.py": NET.replace("class", "import r\n@r.register\nclass")}
HOOKED = {"r.py": HOOK, "m.py": "from r import Base\n" + NET.replace("(nn.", "(Base, nn.")}
ANY = "try:\n    from missing import Net\nexcept ImportError:\n    from m import Net\n"
BY_NAME, OF_PACKAGE = (f"importlib.import_module({x}).Net()" for x in ("'m'", "f'p.{k}'"))
WAYS = {
    "package": (f"from p.m import Net\n{GIVES}", PACKAGE),
    "exported": (f"import p\n{BUILDS.format('p.Small()')}", EXPORTED),
    "dotted": (f"import p.m\n{BUILDS.format('p.m.Net()')}", PACKAGE),
    "namespace": (f"from a.b.m import Net\n{GIVES}", {"a/b/m.py": NET}),
    "star": (f"from m import *\n{GIVES}", MODULE),
    "in a function": (LATER.format("from m import Net", "Net()"), MODULE),
    "by a name": (LATER.format("import importlib", BY_NAME), MODULE),
    "by a made name": (LATER.format("import importlib; k = 'm'", OF_PACKAGE), PACKAGE),
    "by getattr": (f"import m\n{BUILDS.format('getattr(m, str.title(`net`))()')}", MODULE),
    "module getattr": (f"from p import Net\n{GIVES}", LAZILY),
    "registry": (f"import m\nfrom r import ALL\n{BUILDS.format('ALL[`Net`]()')}", REGISTERED),
    "base class": (f"import m\nfrom r import Base\n{BUILDS.format('Base.last()')}", HOOKED),
    "where one is missing": (f"{ANY}{GIVES}", MODULE),
    "imports that meet": (
        f"from m import Net\n{GIVES}", {"m.py": "import n\n" + NET, "n.py": "import m\n"}
    ),
    "the recipe itself": (
        "from p.r import recipe", PACKAGE | {"p/r.py": f"{DATA}from .m import Net\n{GIVES}"}
    ),
    "editable": (f"from e import Net\n{GIVES}", {"src/e.py": NET}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_it_is_found_however_it_is_imported(way, tmp_path, monkeypatch):
    recipe, files = WAYS[way]
    project, run = tmp_path / "project", tmp_path / "run"
    file = write(project, recipe.replace("`", "'"), files)
    monkeypatch.syspath_prepend(project / "src")
    keep(run, file)
    assert recipe_changes(run, str(file)) == []
    (edited,) = (name for name, text in files.items() if "class Net" in text)
    found = changes_by(run, file, edited, ".mean(", ".amax(")
    assert found == [f"Net.forward() in {edited.removeprefix('src/')}"]
    if "by" not in way:  # of what no statement imports, all counts
        assert (changes_by(run, file, edited, "return 1", "return 2") != []) == ("getattr" in way)
    project.rename(tmp_path / "moved")
    built = find_recipe(str(run / "recipe.py")).model()
    assert built.forward.__code__.co_filename.startswith(str(run / "code"))


@pytest.fixture
def trained(here) -> Path:
    file = write(here / "project", f"from train import Net\n{GIVES}", FILES)
    return Path(samestep.train(file, run_dir="run", quiet=True).path)


def test_an_edit_is_refused_wherever_the_recipe_is_used(trained, here, refused, output_of):
    before = samestep.evaluate("run")["loss"]
    edit(here / "project/train.py", ".mean(", ".amax(")
    edit(here / "project/train.py", "WIDTH", "open('was-run', 'w').close()\nWIDTH")
    for ask in (("evaluate", "run"), ("predict", "run", __file__)):
        assert " Net.forward() in train.py, " in refused(*ask), ask
    with pytest.raises(UserError, match=r"Net\.forward\(\) in train\.py"):
        samestep.load("run")
    assert not Path("was-run").exists()  # what is compared is not run
    for ask in (("explain", "run"), ("train", "run", "--resume", "--epochs", "2")):
        assert " Net.forward() in train.py, " in refused(*ask), ask
    Path("was-run").unlink()
    copy, new = (
        samestep.evaluate("run", recipe=f)["loss"] for f in ("run/recipe.py", "project/small.py")
    )
    assert copy == before != new
    samestep.train("run", resume=True, epochs=2, recipe_of_run=True, quiet=True)
    samestep.train("run", resume=True, epochs=3, allow_change="recipe", quiet=True)
    changes = [r.get("changes") for r in all_records(Path("run")) if r["event"] == "resume"]
    assert changes[0] is None
    assert "recipe: Net.forward() in train.py" in changes[1]
    assert ".amax(" in Path("run/code/train.py").read_text()
    assert ".mean(" in Path("run/code_before_1/train.py").read_text()
    shutil.move("project", "moved")
    assert samestep.train("run", resume=True, epochs=4, quiet=True).result["epochs"] == 4
    os.chdir("/")
    kept = str(here / "run/recipe_before_1.py")
    assert json.loads(output_of("evaluate", here / "run", "--recipe", kept, "--json"))["loss"]


def test_compare_names_the_file_and_the_function_that_differ(trained, here, output_of):
    edit(here / "project/train.py", ".mean(", ".amax(")
    samestep.train("project/small.py", run_dir="other", quiet=True)
    said = " ".join(output_of("compare", "run", "other").split())
    assert "B: Net.forward() in train.py." in said
    assert "The code differs: Net.forward() in train.py." in said
    (files,) = (
        one["files"] for one in json.loads(output_of("compare", "run", "other", "--json"))["code"]
    )
    assert [(one["file"], one["functions"]) for one in files] == [("train.py", ["Net.forward()"])]


def test_only_imported_files_are_kept_and_a_run_without_goes_on(trained, here):
    kept = {str(path.relative_to("run/code")) for path in Path("run/code").rglob("*.*")}
    assert kept == FILES.keys()
    shutil.rmtree("run/code")
    Path("run/code.json").unlink()  # as an earlier version wrote it
    edit(here / "project/train.py", ".mean(", ".amax(")
    assert samestep.train("run", resume=True, epochs=2, quiet=True).result["epochs"] == 2
    assert ".amax(" in Path("run/code/train.py").read_text()  # from now on it is watched


def test_of_too_many_files_the_nearest_are_kept_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(user_modules, "MOST_FILES", 3)
    run, file = tmp_path / "run", write(tmp_path, f"from train import Net\n{GIVES}", FILES)
    keep(run, file)
    assert [*kept_modules(run).files] == ["train", "mylib", "mylib.parts"]
    assert recipe_changes(run, str(file)) == []
    assert changes_by(run, file, "train.py", ".mean(", ".amax(") != []
    assert "more than 3 files" in train_here(str(file), "--run-dir", str(tmp_path / "new"))
    assert "more than 3 files" in all_records(tmp_path / "new")[0]["notes"][-1]


def test_code_that_is_run_by_its_path_is_told(tmp_path):
    runs = "import runpy\nNet = runpy.run_path(__file__.replace('small', 'm'))['Net']\n"
    file = write(tmp_path, runs + GIVES, {"m.py": NET})
    train_here(str(file), "--run-dir", str(tmp_path / "run"))
    assert "run_path() instead" in all_records(tmp_path / "run")[0]["notes"][-1]


def test_a_job_keeps_what_its_copy_of_the_code_does_not_hold(here, monkeypatch, output_of):
    """Of its own files the copy is used by hand, too, wherever the job imported them from."""
    file = write(here / "project/recipes", f"from train import Net\n{GIVES}", {})
    write(here / "project", "", FILES)
    edit(here / "project/train.py", "from mylib.parts", "from elsewhere")
    (here / "lib").mkdir()
    (here / "lib/elsewhere.py").write_text("def scale(x): return x * 2\n")
    (here / "project/.git").mkdir()
    run = here / "run"
    run.mkdir()
    keep_options(run, JobOptions())
    code = find_code(here / "project/small.py")
    copy_code(code, run)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(here / "lib")
        patch.syspath_prepend(run / "code")
        train_here(str(run / "code/recipes" / file.name), "--run-dir", str(run))
    before = samestep.evaluate(run)["loss"]
    edit(here / "lib/elsewhere.py", "x * 2", "x * 3")
    shutil.rmtree(here / "project")
    assert json.loads(output_of("evaluate", run, "--json"))["loss"] == before
    assert (run / "code/.imported/elsewhere.py").is_file()


def test_a_recipe_made_in_python_is_compared_by_its_modules(tmp_path, monkeypatch):
    write(tmp_path, "", {"parts13.py": NET, "lazy13.py": NET})
    monkeypatch.syspath_prepend(tmp_path)
    import parts13

    def model():
        from lazy13 import Net

        return parts13.Net() if parts13 else Net()

    recipe = made(model)
    keep_recipe(tmp_path, "python:made", recipe, changed=False)
    assert recipe_changes(tmp_path, "python:made", recipe) == []
    for name in ("parts13", "lazy13"):
        edit(tmp_path / f"{name}.py", ".mean(", ".amax(")
        assert recipe_changes(tmp_path, "python:made", recipe) == [f"Net.forward() in {name}.py"]
        edit(tmp_path / f"{name}.py", ".amax(", ".mean(")
    kept = tmp_path / "recipe.json"
    before = json.loads(kept.read_text())
    before["pieces"] = {n: text for n, text in before["pieces"].items() if n[-3:] != ".py"}
    kept.write_text(json.dumps(before | {"record": 2}))  # as an earlier version wrote it
    assert recipe_changes(tmp_path, "python:made", recipe) == []


def test_a_loop_of_its_own_is_compared_with_what_it_imports_and_its_main_block(tmp_path):
    main = "if __name__ == '__main__':\n    Net()\n"
    run, script = tmp_path / "run", write(tmp_path, f"from train import Net\n{main}", FILES)
    run.mkdir()
    keep_script(run, script)
    assert script_changes(run, script) == []
    edit(script, "    Net()", "    Net().double()")
    edit(tmp_path / "train.py", ".mean(", ".amax(")
    edit(tmp_path / "train.py", "    main()", "    main(3)")
    assert script_changes(run, script) == [
        "`if __name__ == '__main__':`",
        "Net.forward() in train.py",
    ]
