"""A warning during the import of PyTorch is not lost; children end; garbage waits for imports."""

import gc
import multiprocessing
import os
import signal
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from joblib import Parallel, delayed

from tests.command_line import RECIPE, read_json, typed
from tests.processes import TIMEOUT_S, run_ranks

# A process of the real command line gets the signal at the moment at which a module is imported.
SIGNALLED = """
import os, signal, sys
module, *words = sys.argv[1:]
sent = []
def strike(event, details):
    if event == "import" and details[0] == module and not sent:
        sent.append(module)
        os.kill(os.getpid(), signal.SIGUSR1)
sys.addaudithook(strike)
from samestep.shell.cli import main
code = main(words)
assert sent, f"{module} was never imported"
sys.exit(code)
"""


def run(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("-c", SIGNALLED, module, *words, folder=folder)


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "small.py").write_text(RECIPE)
    return tmp_path


def test_a_warning_during_the_import_of_torch_ends_the_training_with_a_checkpoint(here):
    done = run(here, "torch", "train", "small.py", "--run-dir", "run")
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    result = read_json(here / "run" / "result.json")
    assert (result["status"], result["reason"]) == ("stopped", "SIGUSR1")
    index = read_json(here / "run" / "checkpoints" / "index.json")
    assert (here / "run" / "checkpoints" / index["last"]["path"]).is_file()


def test_a_warning_before_any_rank_has_begun_starts_none_and_ends_another_verb(here):
    done = run(here, "torch", "train", "small.py", "--run-dir", "run", "--nproc", "2")
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    assert not (here / "run").exists()
    done = run(here, "msgspec", "data", "list")
    assert done.returncode == -signal.SIGUSR1


def test_ctrl_c_that_the_import_of_torch_drops_ends_the_command(here):
    drops = "try: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: pass\n"
    (here / "torch.py").write_text(f"import os, signal\n{drops}os._exit(0)\n")
    assert typed("-m", "samestep", "verify", "small.py", folder=here).returncode == 130


def _terminated(times: int) -> list[int | None]:
    """Start children that only sleep, end each at once; return their exit codes."""
    context, codes = multiprocessing.get_context("fork"), []
    for _ in range(times):
        child = context.Process(target=time.sleep, args=(TIMEOUT_S,), daemon=True)
        child.start()
        child.terminate()
        child.join(20)
        codes.append(child.exitcode)
        child.kill()
    return codes


def _count() -> list[list[int]]:
    found, context = [], multiprocessing.get_context("fork")
    with context.Pool(2) as pool, ProcessPoolExecutor(2, context) as executor:
        found += [pool.map(abs, range(64)), list(executor.map(abs, range(64)))]
    found.append(Parallel(2, backend="multiprocessing")(delayed(abs)(n) for n in range(64)))
    return found


def _handlers(sender) -> None:
    sender.send([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)])


def _handlers_of_child() -> list[object]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("fork").Process(target=_handlers, args=(sender,)).start()
    return list(receiver.recv())


def _of_a_caller(number: int, frame: object) -> None:
    raise AssertionError(number, frame)


def _children_of_a_training() -> tuple[list[int | None], list[list[int]], bool, bool]:
    from samestep.core.training.stopping import catch_signals

    signal.signal(signal.SIGTERM, _of_a_caller)
    before = _handlers_of_child()
    with catch_signals():
        codes, counted = _terminated(8), _count()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.5,))
        child.start()
        for number in (signal.SIGINT, signal.SIGUSR1):
            os.kill(child.pid, number)
        child.join()
    return codes, counted, child.exitcode == 0, _handlers_of_child() == before


def test_a_child_of_a_training_ends_with_sigterm_and_only_so(tmp_path):
    ((codes, counted, lived, as_before),) = run_ranks(_children_of_a_training, 1, tmp_path)
    assert codes == [-signal.SIGTERM] * 8
    assert counted == [list(range(64))] * 3
    assert lived, "Ctrl-C and a scheduler's warning stop the training, not what serves it"
    assert as_before, "a caller's own children have the caller's handlers"


USUAL = gc.get_threshold()
SAYS = (
    "import gc\nprint('state', gc.get_threshold(), gc.get_freeze_count() > 100_000, flush=True)\n"
)


def test_a_recipe_is_collected_as_usual_and_others_keep_their_collector(tmp_path):
    says = "\n".join(f"    {line}" for line in SAYS.splitlines())
    text = RECIPE.replace("def model():\n", f"def model():\n{says}\n")
    (tmp_path / "recipe.py").write_text(text)
    done = typed("-m", "samestep", "train", "recipe.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = {line for line in done.stdout.splitlines() if line.startswith("state ")}
    assert told == {f"state {USUAL} True"}
    found = run_ranks(_collector_of_a_script, 1, tmp_path / "output")
    assert found == [(USUAL, (70, 7, 7), 0)]


def _collector_of_a_script() -> tuple[object, object, int]:
    import samestep

    usual = gc.get_threshold()
    gc.unfreeze()  # what the fork server froze
    gc.set_threshold(70, 7, 7)
    samestep.dist.setup_distributed()
    samestep.dist.cleanup()
    return usual, gc.get_threshold(), gc.get_freeze_count()
