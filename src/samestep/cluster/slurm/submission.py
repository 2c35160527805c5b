"""Submit a job, or runs as one job array: find what runs, write the scripts, call sbatch."""

import ast
import itertools
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from samestep.base.errors import UserError, listed
from samestep.base.file_kinds import names_recipe, trainer_of
from samestep.base.nearby import nearby
from samestep.base.run import code_copy
from samestep.base.run.directory import is_run, new_run_path
from samestep.base.run.files import cannot_write, write_text
from samestep.cluster.slurm.checks import check_after, check_partitions, check_place
from samestep.cluster.slurm.options import (
    ENVIRONMENTS,
    OPTIONS,
    JobOptions,
    keep_options,
    refuse_secret_flags,
)
from samestep.cluster.slurm.queue import ProgramError, QueuedJob, call, my_jobs
from samestep.cluster.slurm.script import (
    ARRAY_LINKS,
    START,
    STARTER,
    JobScript,
    array_options,
    array_text,
    sbatch_options,
    script_text,
)

# Directive → the words by which sbatch's refusals mean it.
_MEANS = {
    **{word: word for word in ("partition", "account", "qos")},
    "time": r"time limit|time specification",
    "nodes": r"node count|more processors|too many nodes",
    "mem": "memory",
    "dependency": "dependency",
    "gpus-per-node": "gres|gpu|tres",
    "cpus-per-task": "cpu count|cpus",
    **dict.fromkeys(("ntasks-per-node", "mincpus"), "node configuration"),
}

_PARTITION = re.compile(r"(?:--partition[= ]|-p ?)(\S+)")
_AWAY_S, _ASK_AGAIN_S = 60, 5
# A run has one job, and submit does not wait for its end.
_NOT_FOR_A_RUN = ("SBATCH_ARRAY_INX", "SBATCH_WAIT")
_TASKS = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::([1-9]\d{0,6}))?)?")
_MOST_TASKS = 10_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What each rank runs, and its run directory as an absolute path."""

    name: str
    kind: Literal["recipe", "script"]
    run: Path
    command: tuple[str, ...]  # words for the Python interpreter
    file: Path | None = None  # the user's, in the command; None for a recipe's name or a run

    def in_run(self, run: Path) -> "Workload":
        """Return the same in another run directory."""
        command = tuple(str(run) if word == str(self.run) else word for word in self.command)
        return replace(self, run=run, command=command)


def runs_trainer(workload: Workload) -> bool:
    """Whether a workload runs a script that trains by a Trainer of its own."""
    file = workload.file
    return workload.kind == "script" and file is not None and bool(trainer_of(file, file.parent))


def find_workload(
    text: str, arguments: list[str], recipes: list[str], *, as_recipe: bool = False
) -> Workload:
    """Return the workload named by a recipe's name, a file or a run directory.

    With `as_recipe` a script that builds a Trainer is one; its arguments follow a second `--`.
    """
    path = Path(text)
    if text in recipes:  # it wins over a file or a folder of this name
        is_file = continues = False
    else:
        is_file, continues = path.is_file(), is_run(path)
        if path.suffix == ".py" and not is_file:
            raise UserError(
                f"There is no file {text}. Give a script or a recipe file that exists, a run "
                f"directory, or a recipe: {', '.join(recipes)}.{nearby(path, 'file')}"
            )
        if path.is_dir() and not continues:
            script = path / "job.sbatch"
            again = f" To submit its job once more: sbatch {shlex.quote(str(script))}"
            raise UserError(
                f"{path} has no settings.toml, so no training has begun there that could continue."
                f"{again if script.is_file() else ''}"
            )
    if is_file and not _is_recipe_file(path):
        as_it_is = Workload(
            name=path.stem,
            kind="script",
            run=new_run_path(path.stem).absolute(),
            command=(str(path.absolute()), *arguments),
            file=path.absolute(),
        )
        if not as_recipe:
            return as_it_is
        as_recipe = not runs_trainer(as_it_is)
    if as_recipe:
        raise UserError(
            "--as-recipe is for a script that trains by a Trainer of Hugging Face or Lightning: "
            f"{text} does not. Leave it out."
        )
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, of_script = arguments[:cut], arguments[cut:]
    if any(word.split("=")[0] == "--nproc" for word in arguments):
        raise UserError("--nproc is for one machine; a job takes --nodes and --ntasks-per-node.")
    target = str(path.absolute()) if is_file or continues else text
    run_dir: tuple[str, ...] = ()
    if continues:
        run, name = path.absolute(), path.absolute().name
    else:
        name = path.stem if path.suffix == ".py" else text
        wanted, arguments = without_run_dir(arguments)
        run = Path(wanted).absolute() if wanted else new_run_path(name).absolute()
        run_dir = ("--run-dir", str(run))
    store = [b for a, b in itertools.pairwise(arguments) if a == "--resume" and "://" in b]
    words = [word for word in arguments if word not in ("--resume", "--recipe-of-run", *store)]
    resume = ["--resume", *store]
    if text not in recipes:  # its file may be edited meanwhile
        resume.append("--recipe-of-run")
    command = ("-m", "samestep", "train", target, *words, *run_dir, *resume, *of_script)
    file = path.absolute() if is_file else None
    return Workload(name=name, kind="recipe", run=run, command=command, file=file)


def is_script(run: Path) -> bool:
    """Whether the job of a run directory runs a script of the user's."""
    try:
        return "--kind script" in (run / "job.sbatch").read_text()
    except OSError:
        return False


def without_run_dir(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split --run-dir from the training's flags."""
    run_dir, others = None, []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--run-dir":  # both are read as the same flag
            run_dir = value if equals else next(words, "")
            if not run_dir or run_dir.startswith("--"):
                raise UserError("--run-dir needs a directory behind it.")
        else:
            others.append(word)
    return run_dir, others


def _is_recipe_file(path: Path) -> bool:
    """Whether a Python file assigns `recipe` and imports samestep; it is read, not run."""
    with path.open("rb") as file:
        first = file.readline(200)
    shell = re.search(rb"^#!.*\b(ba|da|z|k)?sh\b", first)
    if shell or (first[:2] != b"#!" and path.suffix in (".sh", ".bash", ".sbatch", ".slurm")):
        raise UserError(
            f"{path} is a shell script; submit makes the job script itself. Submit yours with: "
            f"sbatch {shlex.quote(str(path))}; or name the Python file that it starts: samestep "
            "slurm submit train.py."
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None)
        raise UserError(
            f"{path}{f':{line}' if line else ''} cannot be read as Python: "
            f"{getattr(error, 'msg', error)}. Correct it, or name another file."
        ) from error
    nodes = list(ast.walk(tree))
    imported = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return names_recipe(tree) and any(name.split(".")[0] == "samestep" for name in imported)


def make_script(workload: Workload, options: JobOptions, folder: Path) -> JobScript:
    """Return the job that runs a workload with these options, from this interpreter."""
    refuse_secret_flags(workload.command)
    if options.elastic is not None and workload.kind == "script":
        raise UserError("--elastic is for recipes: a script of your own starts again as a whole.")
    check_place(options, workload.kind)
    venv = options.venv
    if not any(getattr(options, name) for name in ENVIRONMENTS) and sys.prefix != sys.base_prefix:
        venv = sys.prefix
    in_container = options.container or options.container_image
    job = JobScript(
        options=options,
        name=options.job_name or workload.name,
        title=f"{workload.name}, {workload.kind}: {options.size}.",
        run=str(workload.run),
        folder=str(folder.absolute()),
        command=workload.command,
        kind=workload.kind,
        python=sys.executable,
        venv=venv and str(Path(venv).absolute()),
        mounts=_mounts(workload, folder) if in_container else (),
    )
    return _with_code(job, workload, folder)


def _with_code(job: JobScript, workload: Workload, folder: Path) -> JobScript:
    """Return a job that runs a copy of the user's code, or checks that it is not edited."""
    run, file, continues = workload.run, workload.file, is_run(workload.run)
    if continues and (facts := code_copy.kept_code(run)):  # with its own
        root, entry, copied_files = Path(facts["root"]), str(facts["file"]), None
        job = replace(job, import_from=tuple(facts["import_from"]))
    elif file is not None and job.options.snapshot and not continues:
        code = code_copy.find_code(file)
        root, entry, copied_files = code.root, code.file, {*code.files}
        more = [folder] if job.kind == "recipe" else []  # its ranks import from there, too
        job = replace(job, code=code, import_from=code_copy.import_folders(code, run, *more))
        if job.mounts:  # what is linked lies there
            job = replace(job, mounts=_outer_folders([*map(Path, job.mounts), root]))
    else:
        uncopied = code_copy.hashed_file(run) if continues else file
        if uncopied is None:
            return job
        command = job.command
        if job.options.allow_edit and "--allow-change" not in command:
            changes = {"--recipe-of-run": ("--allow-change", "recipe")}
            command = tuple(new for word in command for new in changes.get(word, (word,)))
        return replace(job, uncopied=uncopied, command=command)

    def copied(before: str, word: str) -> str:
        """Return a word of the command; the file, and one of settings, are those of the copy."""
        if word == str(file):
            return str(run / code_copy.CODE / entry)
        flag, _, value = word.rpartition("=")
        path = (folder / value).resolve()
        is_config = job.kind == "recipe" and "--config" in (flag, before)
        if not is_config or not path.is_relative_to(root):
            return word
        name = path.relative_to(root).as_posix()
        copy = run / code_copy.CODE / name
        is_copied = copy.is_file() if copied_files is None else name in copied_files
        return word if not is_copied else f"{flag}={copy}" if flag else str(copy)

    words = [word for word in job.command if word != "--recipe-of-run"]
    return replace(job, command=tuple(map(copied, ["", *words], words)))


def _mounts(workload: Workload, folder: Path) -> tuple[str, ...]:
    """Return the folders that the ranks need in a container, none of them below another."""
    words = [word for text in workload.command for word in text.split("=", 1)]
    data = [
        folder / value
        for flag, value in itertools.pairwise(words)
        if flag.replace("_", "-") == "--data-dir" and (folder / value).is_dir()
    ]
    files = [Path(word).parent for word in words if Path(word).is_absolute() and word[-3:] == ".py"]
    return _outer_folders([folder, workload.run, *files, *data])


def _outer_folders(folders: Iterable[Path]) -> tuple[str, ...]:
    wanted = {path.absolute() for path in folders}
    return tuple(sorted(str(path) for path in wanted if not wanted & set(path.parents)))


def submit(job: JobScript) -> tuple[int, Path]:
    """Submit a job; return its number and its script in the run directory."""
    check_with_slurm(job.options)
    run = Path(job.run)
    new_runs = [] if run.exists() else [run]
    script = prepare(job)
    return hand_in(sbatch_options(job), job.options.sbatch, script, new_runs), script


def read_array(text: str) -> tuple[list[int], int | None]:
    """Return the tasks of `0-9:2,12%4`, sbatch's form of an array, and how many run at a time."""
    parts, limits, limit = text.partition("%")
    matches = [_TASKS.fullmatch(part) for part in parts.split(",")]
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1, int(m[3] or 1)) for m in matches if m]
    if (number := sum(map(len, ranges))) > _MOST_TASKS:
        raise UserError(
            f"--array {text} has {number:,} tasks, each with a run of its own; at most "
            f"{_MOST_TASKS:,} can be submitted at once."
        )
    tasks = [task for numbers in ranges for task in numbers]
    is_limit = limit.isdecimal() and int(limit) > 0 if limits else True
    if not (is_limit and all(matches) and all(ranges) and len({*tasks}) == len(tasks)):
        raise UserError(
            f"--array {text} should be the numbers of tasks: 0-9, 1,3,5 or 0-99:10, each once; "
            "0-9%2 runs two at a time."
        )
    return tasks, int(limit) if limits else None


def submit_array(jobs: Mapping[int, JobScript], folder: Path, at_once: int | None) -> int:
    """Submit the jobs of runs as tasks of one array, by their numbers; return the array's number.

    Raises UserError if Slurm refuses it; the runs that were made for it are removed then.
    """
    options = next(iter(jobs.values())).options
    check_with_slurm(options)
    is_new, links = not folder.exists(), folder / ARRAY_LINKS
    new_runs = [Path(job.run) for job in jobs.values() if not Path(job.run).exists()]
    queue = my_jobs() if len(new_runs) < len(jobs) else []
    try:
        for job in jobs.values():
            prepare(job, queue)
        try:
            links.mkdir(exist_ok=True)
            for task, job in jobs.items():
                (links / str(task)).unlink(missing_ok=True)
                (links / str(task)).symlink_to(os.path.relpath(job.run, links))
        except OSError as error:
            raise cannot_write(links, error) from error
        script = folder / "array.sbatch"
        write_text(script, array_text(jobs, folder, at_once))
        return hand_in(array_options(jobs, folder, at_once), options.sbatch, script, new_runs)
    except UserError:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def check_with_slurm(options: JobOptions) -> None:
    """Check what only the cluster knows: its partitions, and the jobs to wait for."""
    named = (_PARTITION.match(option) for option in options.sbatch)
    partitions = [options.partition, *(match[1] for match in named if match)]
    partitions.append(os.environ.get("SBATCH_PARTITION"))
    _check_patiently(options, next(filter(None, partitions), None))
    check_after(options)


def prepare(job: JobScript, queue: Sequence[QueuedJob] | None = None) -> Path:
    """Write a job's script and all that it needs into its run directory; return the script.

    Without the `queue`, Slurm is asked for the jobs of the run.
    """
    text = script_text(job)
    run = Path(job.run)
    waits = False
    if run.exists():
        waits = _refuse_second_job(run, job.options, my_jobs() if queue is None else queue)
    fill_run(job, waits=waits)
    write_text(run / "job.sbatch", text)
    return run / "job.sbatch"


def hand_in(
    options: Mapping[str, str | None], more: Sequence[str], script: Path, new_runs: Sequence[Path]
) -> int:
    """Submit a script with its options; return the job's number.

    Raises UserError if sbatch refuses it; the runs that were made for it are removed then.
    """
    # The shell's SBATCH_* override the script, and typed options override both: this job's
    # options have to win.
    words = [
        f"--{name}" + ("" if value is None else f"={value}") for name, value in options.items()
    ]
    words += [word for option in more for word in shlex.split(option)]
    try:
        answer = call("sbatch", "--parsable", *words, str(script), without=_NOT_FOR_A_RUN)
    except ProgramError as error:
        text = script.read_text()
        for run in new_runs:
            for name in ("job.sbatch", OPTIONS, STARTER):
                (run / name).unlink(missing_ok=True)
            code_copy.remove_code(run)
            run.rmdir()
        raise _refused(error, text) from error
    return int(answer.strip().split(";")[0])


def _check_patiently(options: JobOptions, partition: str | None) -> None:
    """Check the partition; a controller that is away is asked again for a minute."""
    for left_s in range(_AWAY_S, -1, -_ASK_AGAIN_S):
        try:
            return check_partitions(options, partition)
        except ProgramError as error:
            if "Unable to contact slurm controller" not in error.said or not left_s:
                raise
            sys.stderr.write(f"Slurm's controller does not answer; asking for {left_s} s more.\n")
            time.sleep(_ASK_AGAIN_S)
    return None


def _refuse_second_job(run: Path, options: JobOptions, queue: Sequence[QueuedJob]) -> bool:
    """Refuse a job that does not wait for the run's others; return whether there are any."""
    after = {text.partition(":")[0] for text in options.after}
    of_run = (job for job in queue if job.run and job.run.resolve() == run.resolve())
    going = [job for job in of_run if not job.ended]
    if {job.target for job in going} <= after:
        return bool(going)
    first = min(going, key=lambda job: job.target in after)
    wait = " ".join(f"--after {job.target}:any" for job in going)
    raise UserError(
        f"Job {first.target} of this run has not ended ({first.state}), and two jobs would write "
        f"to {run} at once. Stop it first (samestep slurm cancel {first.target}), or let the new "
        f"job wait for it: {wait}."
    )


def fill_run(job: JobScript, *, waits: bool = False) -> None:
    """Make the run directory, where Slurm opens the job's log, with the code and the options.

    If the job `waits` for an earlier one of the run, the code that this will still run is left.
    """
    run = Path(job.run)
    if not job.options.allow_edit and (edited := code_copy.edited_since(run)) and is_run(run):
        raise UserError(
            f"{listed(edited, 3)} changed since {run} was submitted without a copy of its code: "
            "it would become another training. Undo the edit, or accept it with --allow-edit."
        )
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(run, error, instead="choose another with --run-dir") from error
    if job.code is not None and not (waits and code_copy.kept_code(run)):
        code_copy.copy_code(job.code, run, job.import_from)
    if job.uncopied is not None and not waits:
        code_copy.remove_code(run)
        code_copy.keep_hashes(job.uncopied, run)
    if job.kind == "script":
        write_text(run / STARTER, START)
    keep_options(run, replace(job.options, job_name=job.name))  # which the next one takes over


def _refused(error: ProgramError, script: str) -> UserError:
    """Return sbatch's own words with the line of the script that they mean."""
    meant = [word for word, text in _MEANS.items() if re.search(text, error.said, re.IGNORECASE)]
    named = (
        f"Line {number}: {line}"
        for directive in meant
        for number, line in enumerate(script.splitlines(), 1)
        if line.startswith(f"#SBATCH --{directive}=")
    )
    where = "The directives are the #SBATCH lines that `samestep slurm submit … --dry-run` prints."
    return UserError(f"sbatch refused the job:\n{error.said}\n{next(named, where)}")


def with_home_expanded(options: JobOptions) -> JobOptions:
    """Return options with `~` in their paths written out."""
    paths = {name: getattr(options, name) for name in ("venv", "container", "output")}
    # They are strings, perhaps with %j.
    changes = {name: path and os.path.expanduser(path) for name, path in paths.items()}  # noqa: PTH111
    return replace(options, **changes)
