"""In a real Jupyter kernel: the bar, and the stop button pressed once and twice."""

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


class Kernel:  # a kernel of its own, and what its cells show
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


def test_a_bar_moves_below_the_cell_and_leaves_nothing_behind(kernel):
    shown = kernel.run("run = samestep.train('spiral', epochs=8)")
    bars = [part["data"]["text/html"] for part in shown if "display" in part["kind"]]
    assert len(bars) > 2
    assert all("<progress" in bar for bar in bars[:-1])
    assert bars[-1] == ""
    printed = "".join(part["text"] for part in shown if part["kind"] == "stream")
    assert "\x1b" not in printed
    assert kernel.value("run.result['status']") == "'completed'"


def test_the_stop_button_saves_and_returns_the_run_which_goes_on(kernel):
    code = "run = samestep.train(made(), nproc=2, run_dir='once', **long)"
    pressed = []

    def press(part: dict) -> None:
        if part["kind"] == "update_display_data" and not pressed:
            pressed.append(kernel.manager.interrupt_kernel())

    shown = kernel.run(code, press)
    assert not [part for part in shown if part["kind"] == "error"]
    assert kernel.value("run.result['status']") == "'stopped'"
    steps = int(kernel.value("run.result['steps']"))
    saved = "[r['step'] for r in run.history if r['event'] == 'checkpoint'][-1]"
    assert kernel.value(saved) == str(steps)
    go_on = f"samestep.train(run, recipe=made(), resume=True, max_steps={steps + 5}, quiet=True)"
    assert kernel.value(f"{go_on}.result['steps']") == str(steps + 5)


def test_pressed_twice_the_training_ends_in_one_line_and_the_kernel_lives(kernel):
    hangs = """
import os, signal, time, torch
from torch import nn
class Hangs(nn.Linear):
    def forward(self, x):
        while self.training and len(x) == 5 and torch.distributed.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.5)  # the step hangs; each press is a signal of its own
        return super().forward(x)
samestep.train(made(lambda: Hangs(4, 2)), nproc=2, run_dir='twice', quiet=True)
"""
    (error,) = [part for part in kernel.run(hangs) if part["kind"] == "error"]
    assert error["ename"] == "UserError"
    assert len("\n".join(error["traceback"]).splitlines()) == 1
    more = "run_dir='twice', resume=True, allow_change='recipe', quiet=True"
    assert kernel.value(f"samestep.train(made(), {more}).result['status']") == "'completed'"
