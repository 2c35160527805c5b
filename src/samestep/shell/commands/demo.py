"""`samestep demo`: one training on one rank; the same one killed on two ranks, resumed on three.

It uses what a user has: `samestep.train`, and the command line for processes to kill.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from rich.console import Console

import samestep
from samestep.base.errors import UserError
from samestep.base.run.directory import new_run_path
from samestep.base.run.records import Record, RecordFile
from samestep.base.settings import flag_name
from samestep.base.words import BOTH, FIRST, LABEL, SECOND, curve_lines, duration, wrapped
from samestep.launch.ranks.nproc import refuse_inside_launcher
from samestep.shell.commands.forms import rich_console, verb
from samestep.show.reporting.comparison import SameTraining, compare_runs

if TYPE_CHECKING:
    from samestep.shell.api.trained_run import TrainedRun

SETTINGS: dict[str, Any] = {
    "epochs": 10,
    "batch_size": 192,
    "virtual_ranks": 6,
    "lr": 0.004,
    "log_every": 1,
}
STEPS = 370
KILL_AT = STEPS // 2 + 8
"""A step between two checkpoints: the steps after the last checkpoint must be trained again."""
_POLL_EVERY_S, _PATIENCE_S = 0.02, 300.0
_RANKS, _OTHER_RANKS = 2, 3
_WIDTH, _HEIGHT = 72, 8
_BECAUSE = (
    "on different numbers of ranks, through a kill, with dropout, thanks to `--virtual-ranks`; "
    "without it the losses are equal to rounding, and dropout draws different numbers."
)


class Killed(NamedTuple):
    """A training that was killed: its last recorded step, and that of its newest checkpoint."""

    path: Path
    step: int
    checkpoint: int
    processes: int


@verb("demo", "demo", "demo --runs /tmp/runs")
def main(*, runs: Path = Path("runs")) -> int:
    """Show in a minute that neither a kill nor the number of ranks changes a training.

    It trains a small network on one rank. Then it trains it again on two ranks, kills all their
    processes in the middle, resumes on three, and compares both trainings.

    Args:
        runs: Folder for the two runs, which are kept.
    """
    refuse_inside_launcher("samestep demo", "Start it as one process.")
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--runs {runs} cannot be used: {error.strerror}.") from error
    console, began = rich_console(), time.monotonic()
    one, two = (new_run_path(f"demo-{name}", runs) for name in ("whole", "killed"))
    with _step(console, "1 rank", "trains the spiral: two classes of points, one per arm") as done:
        undisturbed = _completed(train_whole(one))
        test = undisturbed.result["test"]
        done.append(f"{STEPS} steps, accuracy {test['accuracy']:.4f} on the test set")
    with _step(console, f"{_RANKS} ranks", "repeat the training from the start") as done:
        killed = train_and_kill(two, _RANKS)
        killed_at = f"step {killed.step}, checkpoint of step {killed.checkpoint}"
        done.append(f"SIGKILL for all {killed.processes} processes at {killed_at}")
    with _step(console, f"{_OTHER_RANKS} ranks", f"continue from step {killed.checkpoint}") as done:
        resumed = _completed(resume(two, _OTHER_RANKS))
        done.append(
            f"{resumed.result['steps']} steps, accuracy {resumed.result['test']['accuracy']:.4f}"
        )
    comparison = proof(undisturbed, resumed)
    ours, theirs = (
        [r["loss"] for r in run.history if r["event"] == "step"] for run in (undisturbed, resumed)
    )
    out = sys.stdout.write
    out("\nThe loss of each step, and where the second training was killed:\n\n")
    out("\n".join(curve_lines(ours, theirs, _WIDTH, _HEIGHT)) + "\n")
    columns = _WIDTH - LABEL
    before = round(killed.step / STEPS * columns)
    left = f"{_RANKS} ranks ".ljust(before - 1, "─")
    right = f" {_OTHER_RANKS} ranks ".ljust(columns - before, "─")
    out(f"{' ' * LABEL}{left}✗{right}\n")
    out(f"{' ' * LABEL}{BOTH} both   {FIRST} only the first   {SECOND} only the second\n\n")
    digests = [run.result["weights_sha256"] for run in (undisturbed, resumed)]
    out(f"losses   {comparison.steps} steps in both, largest difference {comparison.largest:g}\n")
    out(f"weights  {digests[0][:16]}… and {digests[1][:16]}… (SHA-256)\n\n")
    same = comparison.verdict == "equal" and len({*digests}) == 1
    verdict = "The two trainings differ. This is a bug: please report it, with both runs."
    if same:
        seconds = time.monotonic() - began
        verdict = f"The same training to the last bit, in {duration(seconds)}: {_BECAUSE}"
    out("\n".join(wrapped(verdict, "", _WIDTH + 8)) + "\n")
    out(
        f"\nruns     {one}\n         {two}\n"
        f"try      samestep compare {one} \\\n"
        f"                          {two}\n"
        "         samestep train spiral --nproc 2\n"
        "         samestep new regression mine.py   # a recipe of your own\n"
    )
    return 0 if same else 1


def _completed(run: "TrainedRun") -> "TrainedRun":
    if run.result["status"] != "completed":  # Ctrl-C has stopped it
        raise KeyboardInterrupt
    return run


@contextmanager
def _step(console: Console, who: str, action: str) -> Iterator[list[str]]:
    """Print who does what; at the end, print what the body has put into the list."""
    began = time.monotonic()
    results = list[str]()
    ending = "" if console.is_terminal else " …"
    console.print(f"[bold]{who:<8}[/] {action}{ending}", soft_wrap=True)
    sys.stdout.flush()
    with console.status("        ") if console.is_terminal else nullcontext():
        yield results
    seconds = time.monotonic() - began
    console.print(f"         {' '.join(results)} ({duration(seconds)})", soft_wrap=True)


def command_line(run: Path, nproc: int) -> list[str]:
    """Return the arguments that train on several ranks."""
    flags = {**SETTINGS, "nproc": nproc, "run_dir": run}
    words = (word for name, value in flags.items() for word in (f"--{flag_name(name)}", str(value)))
    return ["train", "spiral", *words]


def train_whole(run: Path) -> "TrainedRun":
    """Train on one rank, in this process."""
    return samestep.train("spiral", run_dir=run, quiet=True, **SETTINGS)


def train_and_kill(run: Path, nproc: int) -> Killed:
    """Train on several ranks, and SIGKILL all their processes between two checkpoints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", *command_line(run, nproc)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not any(record["step"] >= KILL_AT for record in _records(run, "step")):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = process.communicate()[1].strip() if ended else "it hangs"
                raise UserError(f"Training on {_RANKS} ranks did not reach step {KILL_AT}: {why}")
            time.sleep(_POLL_EVERY_S)
    finally:
        killed = _kill(process)
    steps = [record["step"] for record in _records(run, "step")]
    saved = [record["step"] for record in _records(run, "checkpoint")]
    return Killed(path=run, step=max(steps), checkpoint=max(saved), processes=killed)


def resume(run: Path, nproc: int) -> "TrainedRun":
    """Resume it on another number of ranks."""
    return samestep.train(run, resume=True, nproc=nproc, quiet=True)


def proof(first: "TrainedRun", other: "TrainedRun") -> SameTraining:
    """Compare each loss, and the weights at the end."""
    (comparison,) = compare_runs([first.path, other.path]).same_training
    return comparison


def _kill(process: "subprocess.Popen[str]") -> int:
    """Kill a process and its descendants; return how many there were."""
    try:
        victims = [*psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        victims = []
    process.kill()
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue  # it ended with its parent
    process.wait()
    psutil.wait_procs(victims, timeout=10)
    return 1 + len(victims)


def _records(run: Path, event: str) -> list[Record]:
    """Return the whole records of one kind, while another process writes them."""
    records = RecordFile(run / "events.jsonl").read_all()
    return [record for record in records if record["event"] == event]
