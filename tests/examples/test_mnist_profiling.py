"""The profiling example: as a newcomer types it, what its traces hold, what is made of them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.command_line import typed
from tests.examples.programs import MNIST_PROFILING, defined, forked, run
from tests.idx_files import write_mnist

TRAIN = str(MNIST_PROFILING / "single_gpu_train.py")
PER_STEP = str(MNIST_PROFILING / "per_step.py")
IMAGES = 120

# The two traces are made once, for all tests of this file.
# A plain script of the handbook: its commands run in the second target, as those of the pages do.
pytestmark = [pytest.mark.xdist_group("mnist profiling"), pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(MNIST_PROFILING, folder / "examples" / "mnist_profiling")
    write_mnist(folder / "data" / "mnist", num_train=IMAGES)
    return folder


@pytest.fixture(scope="module")
def from_its_folder(folder):
    """Return what it prints and its trace, typed in its own folder, without workers."""
    return profiled(folder / "examples" / "mnist_profiling", "single_gpu_train.py", 0, start=run)


@pytest.fixture(scope="module")
def from_elsewhere(folder):
    return profiled(folder, "examples/mnist_profiling/single_gpu_train.py", 2, "--batch_size", "32")


def profiled(folder, script, workers, *more, start=forked):
    size = () if more else ("--batch_size", "1")
    done = start(script, "--num_workers", str(workers), *size, *more, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / f"trace_single_gpu_workers_{workers}.json"


def spans(trace: Path, prefix: str) -> list[dict]:
    events = json.loads(trace.read_text())["traceEvents"]
    found = [e for e in events if e["ph"] == "X" and e["name"].startswith(prefix)]
    return sorted(found, key=lambda event: event["ts"])


def test_typed_in_its_own_folder_it_trains_five_epochs_prints_and_predicts(from_its_folder):
    printed, _ = from_its_folder
    lines = printed.splitlines()
    assert re.findall(r"\d+", lines[0])[:3] == ["120", "1", "0"]  # batches, images, workers
    losses = [line for line in lines if ": loss " in line]
    assert [line.split(":")[0] for line in losses] == [
        f"Epoch {epoch}, batch 100/120" for epoch in (1, 2, 3, 4, 5)
    ]
    assert float(losses[4].split()[-1]) < float(losses[0].split()[-1])  # it learns
    assert [line.split(" took")[0] for line in lines if " took " in line] == [
        f"Epoch {epoch}" for epoch in (1, 3, 4, 5)
    ]
    profiled = [line for line in lines if line.startswith("Epoch 2: ")]
    assert [re.findall(r"\d+", line) for line in profiled] == [["2", "120"], ["2", "120"]]
    assert any("trace_single_gpu_workers_0.json" in line for line in lines)
    ((kind, digit, probability, label),) = PREDICTED.findall(from_its_folder[0].strip())
    assert (kind, digit, label) == ("test", "0", "0")  # write_mnist's labels begin with 0
    assert 0.1 < float(probability) <= 1


def test_the_trace_is_of_one_epoch_with_workers_if_there_are_some(from_its_folder, from_elsewhere):
    _, trace = from_its_folder
    content = json.loads(trace.read_text())
    assert {"traceEvents", "displayTimeUnit"} <= content.keys()
    for name in ("enumerate(DataLoader)#", "to device", "forward", "backward", "Optimizer.step#"):
        found = spans(trace, name)
        assert len(found) == IMAGES, name
        ends = [event["ts"] + event["dur"] for event in found]
        starts = [event["ts"] for event in found]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), name
    assert not trace.with_suffix(".tmp").exists()
    assert spans(from_its_folder[1], "enumerate(DataLoader)#_SingleProcess")
    assert spans(from_elsewhere[1], "enumerate(DataLoader)#_MultiProcessing")


PREDICTED = re.compile(r"First (\w+) image: predicted (\d) with probability (\S+), label (\d)$")


def test_an_image_is_normalised_by_mnists_numbers_and_another_each_time_if_augmented(folder):
    dataset = defined(TRAIN)["MnistDataset"](folder / "data" / "mnist")
    image, label = dataset[3]
    assert (image.shape, image.dtype, label) == ((1, 28, 28), torch.float32, 3)
    scaled = torch.from_numpy(dataset.images[3] / 255)
    expected = (scaled - 0.1307) / 0.3081
    torch.testing.assert_close(image[0].double(), expected, rtol=1e-5, atol=1e-6)
    names = defined(TRAIN)
    batches = names["get_mnist_dataloader"](2, 0, folder / "data" / "mnist", augment=True)
    (first, label), (second, other) = (batches.dataset[3] for _ in range(2))
    assert (first.shape, first.dtype, label, other) == ((1, 28, 28), torch.float32, 3, 3)
    plain = names["MnistDataset"](folder / "data" / "mnist")[3][0]
    assert len({image.sum().item() for image in (first, second, plain)}) == 3
    assert plain.min() <= first.min() <= first.max() <= plain.max()


def table(*traces: Path) -> tuple[dict[str, list[str]], str]:
    """Return the table's rows, those of one step with their unit, and the text below it."""
    done = forked(PER_STEP, *map(str, traces), folder=traces[0].parent)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    rows, unit = {}, ""
    lines = done.stdout.splitlines()
    end = next(n for n, line in enumerate(lines) if " against " in line)
    for line in lines[:end]:
        name, *cells = re.split(r" {2,}", line.strip())
        unit = "" if not line.startswith(" ") else unit
        if not cells:
            unit = name.split()[-1]
        rows[f"{name} {unit}".strip()] = cells
    return rows, " ".join(" ".join(lines[end:]).split())


def test_the_table_is_right(tmp_path):
    one, other = (tmp_path / f"trace_single_gpu_workers_{n}.json" for n in (0, 4))
    write_trace(one, steps=3, data=4000, size=32)
    write_trace(other, steps=1, data=500, size=32, gpu=True)
    rows, text = table(one, other)
    # A step is the wait, then 100 µs each to the device, forward and backward, 200 of optimizer
    # and 100 of nothing between.
    assert rows == {
        "workers": ["0", "4"],
        "steps in the trace": ["3", "1"],
        "total, s s": [],
        "waiting for data s": ["0.01", "0.00"],
        "wall clock s": ["0.01", "0.00"],
        "per step, ms ms": [],
        "waiting for data ms": ["4.000", "0.500"],
        "to device ms": ["0.100", "0.100"],
        "forward ms": ["0.100", "0.100"],
        "backward ms": ["0.100", "0.100"],
        "optimizer ms": ["0.200", "0.200"],
        "other ms": ["0.100", "0.100"],
        "wall clock ms": ["4.600", "1.100"],
        "GPU busy ms": ["-", "0.150"],  # two kernels of 100 µs overlap by half
    }
    # Per step, and then by totals, which the text warns of.
    assert re.findall(r"(\d+\.\d\d) x", text) == ["8.00", "4.18", "24.00", "12.55"]


def write_trace(path: Path, *, steps: int, data: int, size: int, gpu: bool = False) -> None:
    """Write a trace of the same step several times over, in µs."""
    parts = [
        ("enumerate(DataLoader)#x.__next__", data),
        ("to device", 100),
        ("forward", 100),
        ("backward", 100),
        ("", 100),
        ("Optimizer.step#Adam.step", 200),
    ]
    events, now = [], 1000.0
    for _ in range(steps):
        for name, length in parts:
            if name:
                events.append(event(name, now, length, "user_annotation"))
                events.append(event("aten::mm", now, length / 2, "cpu_op"))
            now += length
        if gpu:
            events.append(event("forward", now, 1e6, "gpu_user_annotation"))
            events += [event("gemm", now, 100, "kernel"), event("relu", now + 50, 100, "kernel")]
    path.write_text(json.dumps({"traceEvents": events, "batch_size": size}))


def event(name: str, start: float, length: float, category: str) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


def test_the_job_is_refused_elsewhere_and_its_trainings_have_its_cores(tmp_path):
    script = MNIST_PROFILING / "profile_workers.slurm"
    done = typed("bash", str(script), folder=tmp_path)
    assert done.returncode == 2
    assert "examples/mnist_profiling" in done.stderr
    assert 'srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"' in script.read_text()
