"""Every command that the README and the handbook show is run as it stands there.

The torchrun of docs/index.md is typed. What else `python`, `torchrun` and `samestep` would start
is forked from one process, which has torch: each rank imports it for seconds.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import samestep
from samestep.core.recipes.cricket.synthetic import documents
from samestep.launch.ranks import launch
from tests import cricket_files
from tests.cifar_files import write_binary
from tests.command_line import start
from tests.examples.programs import forked as script
from tests.idx_files import write_mnist
from tests.image_files import write_images
from tests.processes import TIMEOUT_S
from tools.reference import REFERENCE, outdated

ROOT = Path(__file__).parent.parent
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[str]:
    """Return the command lines of a page's console blocks, in their order."""
    text = re.sub(r" \\\n +", " ", page.read_text())  # a long command goes on in the next line
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [line.split(" #")[0].strip() for line in lines]


OF_THE_HANDBOOK = {line for page in PAGES[1:] for line in commands(page) if "runs/ID" not in line}
"""Where the README shows them too, they are run for the handbook's page alone."""
KIND = {
    "data.md": "images",
    "any-batch.md": "csv_regression",
    "cricket.md": "cricket",
    "your-model.md": "prices",
    "two-nodes.md": "my_recipe",
}
"""The recipe of which a page shows a run, where it is not the spiral."""
SANDBOX = ["samestep", "slurm", "sandbox"]
OF_ONE_PROCESS = {
    *("train", "evaluate", "predict", "explain", "new", "completion", "track", "runs", "compare"),
    *("report", "data", "doctor", "slurm", "checkpoint"),
}
"""The verbs that start no ranks of their own, but with --nproc."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory as a reader of the page has it: the examples, and data in two places."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "examples" / "my_recipe.py", tmp_path)
    write_mnist(tmp_path / "DIR")
    write_mnist(tmp_path / "data" / "mnist")
    for split, count in (("train", 40), ("test", 4)):
        write_images(tmp_path / "PHOTOS", split, count=count, classes=("bird", "ship", "truck"))
    (tmp_path / "PHOTOS" / "train" / "ship" / "half.jpg").write_bytes(b"")
    (tmp_path / "PHOTOS" / "test" / "ship" / "000.JPG").rename(
        tmp_path / "PHOTOS" / "test" / "ship" / "0000.jpg"
    )
    write_binary(tmp_path / "data" / "cifar10")
    rows = ("area,rooms,age,district,price", "100,3,20,north,340", "60,2,50,harbour,270")
    (tmp_path / "houses.csv").write_text("\n".join(rows))
    matches = dict(documents(10, seed=1))
    cricket_files.write(tmp_path / "MATCHES", matches)
    later = {f"new-{n}": file.replace(b'"2020-', b'"2024-') for n, file in documents(2, seed=9)}
    cricket_files.write(tmp_path / "LATER", later)
    (tmp_path / "match.json").write_bytes(next(iter(matches.values())))
    return tmp_path


# Pages with a Slurm of their own: the jobs of both begin at 1, and so take the same ports.
SLURM = pytest.mark.xdist_group("slurm pages")
RUN_PAGES = [
    pytest.param(page, marks=SLURM if "slurm" in page.name or page.name == "two-nodes.md" else ())
    for page in PAGES
    if commands(page)
]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_page_works_in_its_order(page, folder, monkeypatch, request):
    bin_folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.chdir(folder)
    # As in a new terminal; what a page exports is taken back afterwards.
    monkeypatch.delenv("SLURM_CONF", raising=False)
    sandbox = ""
    if page.name == "two-nodes.md":
        sandbox = str(Path(tempfile.mkdtemp(prefix="nodes-"), "s"))  # a socket's path is limited
        if shutil.which("slurmd") is None:
            pytest.skip("needs Slurm: apt-get install slurm-wlm munge")
        request.addfinalizer(lambda: typed([*SANDBOX, "down", "--dir", sandbox], folder))
    for shown in commands(page):
        line = shown.replace("$PWD/my-slurm", sandbox).replace("my-slurm", sandbox)
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            monkeypatch.setenv(name, value)
            continue
        if line.startswith("make "):
            continue  # `make test-all` runs this test; `make train` is the README's next command
        if page == README and line in OF_THE_HANDBOOK:
            continue
        kind = KIND.get(page.name, "spiral")
        runs = sorted((folder / "runs").glob(f"{kind}-*"), key=lambda run: run.stat().st_mtime)
        words = line.replace("runs/ID", str(runs[-1]) if runs else "runs/ID").split()
        words = shlex.split(line) if '"' in line else words
        as_typed = page == INDEX and words[0] == "torchrun"
        code, said = (typed if as_typed else forked)(words, folder)
        assert "Traceback" not in said, f"{line}\n{said}"
        # Our small files have other hashes, and no mirror is reached from a test.
        allowed = (0, 2) if line.startswith("samestep data get") else (0,)
        # The examples to check have mistakes.
        has_mistakes = re.match(r"samestep check .*examples/(check|resume)_me\.py", line)
        allowed = (1,) if has_mistakes else allowed
        assert code in allowed, f"{line}\n{said}"


def typed(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command as it is typed; return its exit code and what it said."""
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return done.returncode, done.stdout + done.stderr


def forked(line: list[str], folder: Path) -> tuple[int, str]:
    """Run a command without its seconds of imports; type it if it starts ranks of its own.

    What is forked has the environment of the first test, so a page with a sandbox is typed, too.
    Lightning tells rank 0 apart when it is imported: a script that relies on that is typed.
    """
    program, *words = line
    if program not in {"python", "torchrun", "samestep"} or line[:3] == SANDBOX:
        return typed(line, folder)
    if "SLURM_CONF" in os.environ:
        return typed(line, folder)
    ranks = 1
    if program == "torchrun":
        option, *words = words
        ranks = int(option.partition("=")[2] or words.pop(0))
        program = "python"
    if words[:2] == ["-m", "samestep"]:
        program, *words = words[1:]
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    if program == "python" and (ranks == 1 or "cifar10_lightning" not in words[0]):
        done = script(*words, folder=folder, world_size=ranks, **cache)
        return done.returncode, done.stdout + done.stderr
    if words[0] not in OF_ONE_PROCESS or "--nproc" in words:
        return typed(line, folder)
    outputs = folder.parent / f"{folder.name}-outputs"
    started = start(*words, world_size=ranks, folder=outputs, environment=cache)
    return max(started.wait(), key=abs), started.output()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page):
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^):]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not heading or heading in headings(file), f"{target}#{heading}"


def headings(page: Path) -> set[str]:
    """Return the names by which a link leads to the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_readme_shows_the_numbers_of_its_recipe_on_one_and_two_ranks(ranks, tmp_path):
    readme = README.read_text()
    shown = dict(re.findall(r"^(\d) ranks? +(epoch 2  .*)$", readme, re.MULTILINE))
    (code_of_recipe,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "my_recipe.py").write_text(code_of_recipe)
    nproc = ["--nproc", str(ranks)] if ranks > 1 else []
    program = str(Path(sys.executable).parent / "samestep")
    words = [program, "train", str(tmp_path / "my_recipe.py"), "--epochs", "2", *nproc]
    code, said = forked([*words, "--run-dir", str(tmp_path / "run")], tmp_path)
    assert code == 0, said
    (line,) = re.findall(r"^epoch 2 .*$", said, re.MULTILINE)
    numbers = re.compile(r"[01]\.\d{4}")
    expected = [pytest.approx(float(n), abs=1.5e-4) for n in numbers.findall(shown[str(ranks)])]
    assert [float(n) for n in numbers.findall(line)] == expected
    assert len(expected) == 4


SOURCE = Path(samestep.__file__).parent
VARIABLE = re.compile(
    r"(SAMESTEP|SLURMD?|SBATCH|OMPI|PMIX?|MPI|OMP|NCCL|GLOO|CUDA|CUBLAS|TORCH[A-Z]*|XDG|COMET|WANDB"
    r"|MLFLOW|KINETO|HF)_[A-Z_a-z]*[A-Za-z]|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_(RANK|WORLD_SIZE)"
    r"|MASTER_(ADDR|PORT)|TMPDIR|NETRC|HTTPS_PROXY|PYTHONPATH|MPLBACKEND"
)
"""What the source names in quotes and an environment may have."""
NOT_READ = {"SLURM_TASK_PID"}
"""Of other processes, to tell tasks of the sandbox apart."""


@pytest.fixture(scope="module")
def page() -> str:
    return (REFERENCE / "environment.md").read_text()


def test_each_generated_page_is_up_to_date():
    """Where it is not, `python tools/reference.py` writes it."""
    assert [str(path) for path, _ in outdated()] == []


def test_each_variable_of_the_source_is_in_the_reference_and_no_other(page):
    named = {*launch.OPEN_MPI, *launch.PMI, *launch.MPI_JOB_IDS}
    for file in SOURCE.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        named |= {text for text in texts if VARIABLE.fullmatch(text)}
    assert len(named) > 80
    assert {name for name in named - NOT_READ if f"`{name}`" not in page} == set()
    written = "\n".join(file.read_text() for file in SOURCE.rglob("*.py"))
    tables = page.partition("## What a run records")[0]
    tables = tables.replace("Variables of the libraries, such as `NCCL_DEBUG`", "")
    for name in re.findall(r"`([A-Z]+(?:_[A-Za-z]+)+|RANK|TMPDIR|NETRC)`", tables):
        # Some names are put together there, from a prefix and a list.
        assert any(
            part in written
            for part in (name, re.sub(r"^[A-Z]+_(?:COMM_WORLD_|TRACKING_)?", "", name))
        ), name
