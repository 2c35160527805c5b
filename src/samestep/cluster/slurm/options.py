"""What a job asks for: flags of `slurm submit`, above samestep.toml and the last job."""

import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from samestep.base.errors import UserError, did_you_mean, in_words
from samestep.base.flags import InShell
from samestep.base.run.directory import names_secret
from samestep.base.run.files import read_object, toml_of, write_object
from samestep.base.words import count

# The forms of sbatch's --time: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]].
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
_AFTER = re.compile(r"(?P<job>[0-9]+(?:_[0-9]+)?)(?::(?P<how>ok|notok|any))?")
_NODES = re.compile(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?")
_MEMORY = re.compile(r"[0-9]+[KMGT]?")
_INTERFACES = re.compile(r"[\^=]{0,2}[\w.@:-]+(?:,[\w.@:-]+)*")
# Values that are never secrets, such as those of --max-tokens and --use-auth-token.
_HARMLESS = re.compile(r"[0-9.]*|true|false", re.IGNORECASE)
# Options that make several jobs of one; sbatch also accepts them shortened.
_SEVERAL_JOBS = re.compile(r"(?:^|\s)(-a|--ar\w*|--het[\w-]*)|(hetjob|packjob)")
# Options of when one job may start; the run's next one has its own.
_OF_ONE_JOB = re.compile(r"-[Hbd](?!-)|--(ho|beg|dep|dead)\w*")
_COMMENT = re.compile(r"(?:^|\s)--com\w*")
_LEAST = {
    "ntasks_per_node": 1,
    "cpus_per_task": 1,
    "gpus_per_node": 0,
    "restarts": 0,
    "max_restarts": 0,
    "signal_s": 10,
}

ENVIRONMENTS = ("venv", "conda", "container", "container_image")
"""Options that name the ranks' environment; a job has at most one of them."""

OPTIONS = "job.json"  # in a run directory: the options of its newest job

_DEFAULTS = "samestep.toml"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job asks of Slurm and how its ranks start."""

    job_name: str | None = None
    """Name in the queue; by default the recipe's or the script's."""
    partition: str | None = None
    """Partition; by default the cluster's own."""
    account: str | None = None
    """Account that pays for the job."""
    qos: str | None = None
    """Quality of service."""
    nodes: Annotated[str, InShell("N|FEWEST-MOST")] = "1"
    """Number of nodes: 4; or 1-4 for one to four, as many as are free at each start of the job."""
    gpus_per_node: int = 0
    """GPUs on each node; 0 asks for none."""
    ntasks_per_node: int | None = None
    """Ranks on each node; by default one per GPU, or one without GPUs."""
    cpus_per_task: int | None = None
    """CPU cores of each rank; by default the cluster decides."""
    mem: str | None = None
    """Memory of each node, such as 64G: a number with K, M, G or T."""
    time: str | None = None
    """Time limit: minutes, HH:MM:SS or D-HH:MM:SS."""
    output: str | None = None
    """Log file; %j stands for the job's number. By default slurm-%j.out in the run directory."""
    requeue: bool = True
    """Let the job continue by itself after its time limit, preemption or a failed node."""
    signal_s: int = 120
    """Seconds before the time limit at which the ranks get the signal to save and end; Slurm may
    be up to 60 s early."""
    restarts: int = 2
    """Give up after this many restarts in a row without a new checkpoint."""
    after: Annotated[tuple[str, ...], InShell("JOB", repeats=True)] = ()
    """Start only after this job has ended: JOB, JOB:ok, JOB:notok or JOB:any. Repeatable."""
    module: Annotated[tuple[str, ...], InShell("NAME", repeats=True)] = ()
    """Environment module to load. Repeatable."""
    venv: str | None = None
    """Virtual environment to activate; by default the one that this command runs in."""
    conda: str | None = None
    """Conda environment to activate, instead of a virtual environment."""
    container: str | None = None
    """Apptainer image in which the ranks run; samestep must be installed in it."""
    container_image: str | None = None
    """With Pyxis, image in which the ranks run, such as /images/pytorch.sqsh; samestep must be
    installed in it."""
    env: Annotated[tuple[str, ...], InShell("NAME=VALUE", repeats=True)] = ()
    """Environment variable to set for the ranks. Repeatable."""
    interface: str | None = None
    """Network interface between the ranks: ib0, or ib0,ib1 for several, or ^docker,lo for all but
    these (NCCL only)."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """What starts the ranks: srun starts each rank; torchrun starts those of its node."""
    max_restarts: int = 1
    """With --launcher torchrun, how often it restarts all ranks within one start of the job."""
    elastic: Annotated[str | None, InShell("[MIN:MAX]")] = None
    """Let a recipe continue without lost ranks or nodes, on MIN to MAX ranks; default 1 to all."""
    preflight: bool = False
    """Run `samestep doctor` on all nodes before each start, and exclude nodes that fail."""
    snapshot: bool = True
    """Copy the code into the run directory now, and run that copy."""
    allow_edit: bool = False
    """With --no-snapshot, start even if a file has changed since the job was submitted."""
    sbatch: Annotated[tuple[str, ...], InShell("OPTION", repeats=True)] = ()
    """Further option to pass to sbatch, as in --sbatch=--constraint=a100. Repeatable."""

    def __post_init__(self) -> None:
        """Check what sbatch would refuse, and what it would take and misunderstand."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{_flag(name)} is {value}; it must be {least} or more.")
        _nodes(self.nodes)
        if self.time is not None:
            limit_s = read_time(self.time)
            if not limit_s:
                raise UserError(
                    f"--time {self.time} cannot be read as a time limit. Write minutes (90), "
                    "HH:MM:SS (01:30:00), D-HH (2-12) or D-HH:MM:SS (2-12:00:00)."
                )
            if limit_s <= self.signal_s:
                raise UserError(
                    f"--time {self.time} is no longer than --signal-s {self.signal_s}: the ranks "
                    "would get the signal before they start. Raise --time or lower --signal-s."
                )
        if self.mem is not None and not _MEMORY.fullmatch(self.mem):
            raise UserError(f"--mem {self.mem} should be a number with K, M, G or T, such as 64G.")
        if sum(getattr(self, name) is not None for name in ENVIRONMENTS) > 1:
            flags = ", ".join(map(_flag, ENVIRONMENTS[:-1]))
            raise UserError(f"Give one of {flags} and {_flag(ENVIRONMENTS[-1])}, not several.")
        if self.interface is not None and not _INTERFACES.fullmatch(self.interface):
            raise UserError(
                f"--interface {self.interface!r}: write a name (ib0), several (ib0,ib1), or ^ and "
                "the names to exclude (^docker,lo)."
            )
        self._check_words()

    def _check_words(self) -> None:
        if self.allow_edit and self.snapshot:
            raise UserError(
                "--allow-edit has no effect with a copy of the code, which cannot be edited: leave "
                "it out, or run the files themselves with --no-snapshot."
            )
        for after in self.after:
            dependency(after)
        for text in self.env:
            _refuse_secret(f"--env {assignment(text)[0]}=…", assignment(text)[0])
        for option in self.sbatch:
            _check_sbatch(option)
        for name in ("job_name", "partition", "account", "qos", "output", "container_image"):
            if "\n" in (getattr(self, name) or ""):
                raise UserError(f"{_flag(name)} must be one line.")
        if self.elastic is not None and (self.container or self.container_image):
            raise UserError("--elastic starts ranks with srun, which containers do not have.")
        if self.elastic is not None and self.launcher == "torchrun":
            raise UserError("--elastic needs --launcher srun: in torchrun, one failure stops all.")

    @property
    def ranks_per_node(self) -> int:
        """How many ranks run on each node."""
        return self.ntasks_per_node or self.gpus_per_node or 1

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest nodes on which the job starts, and the most that it takes."""
        return _nodes(self.nodes)

    @property
    def has_range(self) -> bool:
        """Whether each start of the job may have another number of nodes."""
        fewest, most = self.node_range
        return fewest < most

    @property
    def most_ranks(self) -> int:
        """How many ranks run on the most nodes."""
        return self.node_range[1] * self.ranks_per_node

    @property
    def num_steps(self) -> int:
        """How many steps a start of the job has: the ranks, and a preflight before them."""
        return 1 + self.preflight

    @property
    def size(self) -> str:
        """Nodes × ranks in words."""
        nodes = "node" if self.node_range[1] == 1 else "nodes"
        return f"{self.nodes} {nodes} × {count(self.ranks_per_node, 'rank')}"


_TYPES = typing.get_type_hints(JobOptions)


class UncheckedOptions(JobOptions):
    """What a job asks of Slurm and how its ranks start."""

    def __post_init__(self) -> None:
        """Check nothing: only the layers together make a job."""


def read_time(text: str) -> int | None:
    """Return a time in seconds, from any form that Slurm reads or prints; None for any other."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(n * unit for n, unit in zip(parts, units, strict=False))


def _nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of `4` or `1-4`."""
    match = _NODES.fullmatch(text)
    fewest, most = map(int, (match[1], match[2] or match[1])) if match else (1, 0)
    if fewest > most:
        raise UserError(
            f"--nodes {text} should be a number of 1 or more (4), or the minimum and maximum "
            "number of nodes (1-4)."
        )
    return fewest, most


def dependency(after: str) -> str:
    """Return sbatch's form of a dependency: `12:notok` is afternotok:12."""
    match = _AFTER.fullmatch(after)
    if match is None:
        raise UserError(f"--after {after} should be a job's number, or JOB:ok, JOB:notok, JOB:any.")
    return f"after{match['how'] or 'ok'}:{match['job']}"


def interface_names(interface: str | None) -> list[str]:
    """Return the interfaces that --interface names; none where it says which to leave out."""
    return [] if not interface or interface[0] == "^" else interface.lstrip("=").split(",")


def assignment(text: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        shown = re.split("[=\\s]", text)[0]  # the rest may be a secret
        raise UserError(f"--env {shown!r} should be NAME=VALUE, the name of letters, digits and _.")
    return name, value


def _check_sbatch(option: str) -> None:
    if several := _SEVERAL_JOBS.search(option):
        raise UserError(
            f"--sbatch={several[1] or several[2]} would make several jobs, but a run directory "
            "belongs to one. Submit several jobs instead, each with its own arguments."
        )
    if _COMMENT.search(option):
        raise UserError(
            "--sbatch=--comment: samestep stores the run directory in the job's comment, by which "
            "status, logs and cancel find the job. Use --job-name instead."
        )
    if not option.startswith("-") or "\n" in option:
        name = re.split("[=\\s]", option)[0]  # the rest may be a secret
        raise UserError(f"--sbatch {name!r} should be one option, such as --exclusive.")
    if option.startswith("--export"):
        for name in re.findall(r"(\w+)=", option):
            _refuse_secret(f"--sbatch=--export={name}=…", name)


def refuse_secret_flags(words: Sequence[str]) -> None:
    """Refuse a command with a secret in its flags, without showing it."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if not equals:
            value = "" if following.startswith("-") else following
        # A number is a count, unless the flag speaks of a password.
        harmless = _HARMLESS.fullmatch(value) and not (value and "pass" in flag.lower())
        if flag.startswith("-") and not harmless:
            _refuse_secret(f"{flag} …", flag)


def _refuse_secret(text: str, name: str) -> None:
    if names_secret(name):
        raise UserError(
            f"{text} looks like a secret, and others may be able to read the script. "
            "Export it in the shell that submits: Slurm passes the environment on."
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def defaults_files(folder: Path, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the user's samestep.toml and the nearest one in or above a folder, if they exist."""
    home = environment.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    users = [Path(home) / "samestep" / _DEFAULTS]
    above = [parent / _DEFAULTS for parent in (folder, *folder.parents)]
    return [*filter(Path.is_file, users), *[path for path in above if path.is_file()][:1]]


def options_before(run: Path | None) -> tuple[UncheckedOptions, list[Path]]:
    """Return the options that flags change, and the files that they are from.

    They are those of the run's last job; without one, those of samestep.toml here and above.
    """
    if run is not None and (before := kept_options(run)) is not None:
        return before, [run / OPTIONS]
    files = defaults_files(Path.cwd())
    return read_defaults(files), files


def read_defaults(paths: list[Path]) -> UncheckedOptions:
    """Return the options in these files' `[slurm]` tables: later ones win, and lists add up."""
    values: dict[str, Any] = {}
    for path in paths:
        layer = _layer(path)
        if any(name in layer for name in ENVIRONMENTS):
            values = {k: v for k, v in values.items() if k not in ENVIRONMENTS}
        for name, value in layer.items():
            values[name] = values.get(name, ()) + value if isinstance(value, tuple) else value
    return UncheckedOptions(**values)


def keep_options(run: Path, options: JobOptions) -> None:
    """Keep a job's options in its run directory: the run's next job takes them over."""
    write_object(run / OPTIONS, asdict(options))


def kept_options(run: Path) -> UncheckedOptions | None:
    """Return the options of a run's last job, but those for one job; None if they are unknown."""
    saved = read_object(run / OPTIONS)
    try:
        values = {k: option_value(k, v, "") for k, v in saved.items() if k in _TYPES}
    except UserError:
        return None
    if not values:
        return None
    lasting = tuple(option for option in values.get("sbatch", ()) if not _OF_ONE_JOB.match(option))
    return UncheckedOptions(**values | {"after": (), "allow_edit": False, "sbatch": lasting})


def apply_flags(
    defaults: UncheckedOptions, flags: UncheckedOptions, paths: list[Path]
) -> JobOptions:
    """Return the job's options: `flags`, which started from `defaults`, read from `paths`."""
    values = {field.name: getattr(flags, field.name) for field in fields(JobOptions)}
    typed = [name for name in ENVIRONMENTS if values[name] != getattr(defaults, name)]
    if typed:  # it replaces the defaults' environment
        values |= {name: None for name in ENVIRONMENTS if name not in typed}
    try:
        return JobOptions(**values)
    except UserError as error:
        if not paths:
            raise
        files = ", ".join(map(str, paths))
        raise UserError(f"{error} (Values from {files} also apply.)") from error


def _layer(path: Path) -> dict[str, Any]:
    document = toml_of(path)
    if unknown := sorted(document.keys() - {"slurm"}):
        raise UserError(f"{path}: unknown key {unknown[0]!r}; the only table is [slurm].")
    table = document.get("slurm", {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: slurm must be a table: [slurm].")
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _TYPES:
            raise UserError(
                f"{path}: [slurm] has no key {key!r}. {did_you_mean(name, _TYPES)}"
                f"The keys are: {', '.join(sorted(_TYPES))}."
            )
        values[name] = option_value(name, value, f"{path}: [slurm] {key}")
    for name in ("venv", "container"):
        if (place := values.get(name)) and place[0] != "~" and "://" not in place:
            values[name] = str(path.parent / place)
    return values


def option_value(name: str, value: Any, where: str) -> Any:
    """Return a value as the type of its option; a number of nodes or a switch needs no quotes.

    Raises UserError, which begins with `where` and does not show the value: it may be a secret.
    """
    if name == "nodes" and type(value) is int:
        value = str(value)
    if name == "elastic" and isinstance(value, bool):
        value = "auto" if value else None
    try:
        return msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as error:
        must = in_words(_TYPES[name])
        raise UserError(f"{where}: {f'it must be {must}' if must else error}.") from error
