"""In a real Jupyter kernel: the bar, the stop button pressed once and twice, mistakes."""

import os
from collections.abc import Callable, Iterator

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.examples.programs import ROOT
from tests.processes import TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kernel")]

SETUP = """
import samestep
from tests.api.recipes import made

long = {"epochs": 100_000, "checkpoint_every_epochs": 500, "log_every": 1_000}
"""


class Kernel:
    """A kernel of its own, and what its cells show."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, meanwhile: Callable[[dict], None] = lambda _: None) -> list[dict]:
        """Execute a cell; return what it shows, and call a function with each part as it comes."""
        asked = self.client.execute(code)
        shown = []
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return shown
            if kind in ("stream", "display_data", "update_display_data", "execute_result", "error"):
                shown.append({"kind": kind, **content})
                meanwhile(shown[-1])

    def value(self, code: str) -> str:
        """Return the value of a cell's last line."""
        return self.run(code)[-1]["data"]["text/plain"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    own = {name: str(folder / name) for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    manager = KernelManager(connection_file=str(folder / "kernel.json"))
    manager.start_kernel(cwd=str(folder), env={**os.environ, **own, "PYTHONPATH": path})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=TIMEOUT_S)
    found = Kernel(manager, client)
    assert not found.run(SETUP)
    yield found
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def pressing(kernel: Kernel, times: int, at: str) -> Callable[[dict], None]:
    """Return what presses the stop button at the first parts of a kind that a cell shows."""
    left = times

    def watch(part: dict) -> None:
        nonlocal left
        if part["kind"] == at and left:
            left -= 1
            kernel.manager.interrupt_kernel()

    return watch


def test_a_bar_moves_below_the_cell_and_leaves_nothing_behind(kernel):
    shown = kernel.run("run = samestep.train('spiral', epochs=8)")
    bars = [part["data"]["text/html"] for part in shown if "display" in part["kind"]]
    assert len(bars) > 2
    assert all("<progress" in bar for bar in bars[:-1])
    assert bars[-1] == ""
    printed = "".join(part["text"] for part in shown if part["kind"] == "stream")
    assert "\x1b" not in printed
    assert kernel.value("run.result['status']") == "'completed'"


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_stop_button_saves_and_returns_the_run_which_goes_on(kernel, nproc):
    code = f"run = samestep.train(made(), nproc={nproc}, run_dir='once-{nproc}', **long)"
    shown = kernel.run(code, pressing(kernel, 1, at="update_display_data"))
    assert not [part for part in shown if part["kind"] == "error"]
    assert kernel.value("run.result['status']") == "'stopped'"
    steps = int(kernel.value("run.result['steps']"))
    go_on = f"samestep.train(run, recipe=made(), resume=True, max_steps={steps + 5}, quiet=True)"
    assert kernel.value(f"{go_on}.result['steps']") == str(steps + 5)


def test_pressed_twice_the_training_ends_in_one_line_and_the_kernel_lives(kernel):
    # The step hangs, and each dot is where the button is pressed.
    hangs = """
import time
from torch import nn

class Hangs(nn.Linear):
    def forward(self, x):
        while self.training and len(x) == 10:
            print(".", flush=True)
            time.sleep(0.1)  # the step hangs until the test presses stop
        return super().forward(x)

samestep.train(made(lambda: Hangs(4, 2)), run_dir='twice', quiet=True, **long)
"""
    shown = kernel.run(hangs, pressing(kernel, 2, at="stream"))
    (error,) = [part for part in shown if part["kind"] == "error"]
    assert error["ename"] == "UserError"
    assert len("\n".join(error["traceback"]).splitlines()) == 1
    assert kernel.value("1 + 1") == "2"


def test_a_mistake_in_a_cell_is_one_line_that_names_the_cell(kernel):
    code = "def broken():\n    raise ValueError('mine')\n\nsamestep.train(made(broken))"
    (error,) = [part for part in kernel.run(code) if part["kind"] == "error"]
    (line,) = error["traceback"]
    assert "mine" in line
    assert "In[" in line
    assert "line 2" in line
