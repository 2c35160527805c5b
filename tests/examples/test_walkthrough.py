"""The CIFAR-10 notebook: run small from end to end, its parts by themselves, its kept outputs."""

import csv
import importlib
import json
import os
import re
import sys

import nbformat
import pytest
import torch

from samestep.core.recipes import cifar10
from samestep.core.recipes.resnet import resnet18
from tests.cifar_files import images_and_labels, write_binary
from tests.command_line import typed
from tests.examples.programs import ROOT
from tests.processes import env

FOLDER = ROOT / "examples" / "cifar10_lightning"
NOTEBOOK = FOLDER / "walkthrough.ipynb"
# 430 images leave 43 to validate, which two ranks cannot share equally.
SMALL = env("SUBSET=430 EPOCHS=1 WIDTH=4 BATCH_SIZE=48 RANKS=2 ROUNDS=1")

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

# The notebook is executed once, for all tests of this file.
pytestmark = pytest.mark.xdist_group("walkthrough")


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Return the folder of a notebook that nbclient has executed in place, on made-up images."""
    folder = tmp_path_factory.mktemp("walkthrough")
    for name in ("cifar10.py", "train.py", "walkthrough.ipynb"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    settings = {f"CIFAR10_{name}": value for name, value in SMALL.items()}
    # As `jupyter execute --inplace` does it. A process of its own: sockets, event loop and kernel
    # are gone with it.
    code = f"import nbclient.cli; nbclient.cli.main(['--inplace', '{NOTEBOOK.name}'])"
    settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    settings |= {"JUPYTER_RUNTIME_DIR": f"{folder}/jupyter", "IPYTHONDIR": f"{folder}/ipython"}
    # Unbuffered, two ranks would print into each other's lines.
    unset = [f"--unset={name}" for name in ("CIFAR10_DIR", "CIFAR10_RUNS", "PYTHONUNBUFFERED")]
    done = typed("env", *unset, sys.executable, "-c", code, folder=folder, **settings)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def notebook(executed):
    return nbformat.read(executed / NOTEBOOK.name, as_version=4)


@pytest.fixture
def example(monkeypatch):
    """Return the example's module, as train.py and the notebook import it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("cifar10")
    sys.modules.pop("cifar10")


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def printed(notebook):
    return "".join(o["text"] for o in outputs(notebook) if o["output_type"] == "stream")


def check_complete(notebook):
    """Check that all cells were run in their order, and that none complained."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for o in outputs(notebook) if o["output_type"] == "error"]
    assert not [o["text"] for o in outputs(notebook) if o.get("name") == "stderr"]
    assert not re.search(r"\Srank \d+(:| sees)", printed(notebook)), "a rank writes whole lines"
    assert sum("image/png" in o.get("data", {}) for o in outputs(notebook)) == 7


def pairs_of_ranks(text):
    """Return the process numbers of ranks 0 and 1, for each start of two that shows them."""
    found = re.findall(r"rank ([01]) of 2: process (\d+), \d+ thread", text)
    return [dict(found[at : at + 2]) for at in range(0, len(found), 2)]


def column(run, name):
    with (run / "logs" / "version_0" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def evaluate(module, images, labels):
    module.eval()
    pixels = (images / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        logits = module(pixels)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return loss.item(), (logits.argmax(1) == labels).double().mean().item()


@pytest.mark.slow
def test_it_has_twelve_sections_runs_from_end_to_end_and_measures_in_turns(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = re.findall(r"^## (\d+)\. ", text, re.MULTILINE)
    assert found == [str(number) for number in range(1, 13)]
    check_complete(notebook)
    text = printed(notebook)
    assert "MADE-UP images" in text
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // 2)
    for side in ("2 ranks, ", "2 ranks, gradients", f"1 process, {threads} t"):
        assert f"--- round 1: {side}" in text
        values = re.search(
            rf"^{side}.*\n +images_per_s +([\d.]+) .*\n +step_ms +([\d.]+) ", text, re.MULTILINE
        )
        assert min(map(float, values.groups())) > 0
    speed_up, efficiency = re.search(r"speed-up .*: (\d+\.\d+); efficiency: (\d+)%", text).groups()
    assert float(efficiency) == pytest.approx(50 * float(speed_up), abs=1)


@pytest.mark.slow
def test_its_ranks_end_with_equal_weights_and_each_image_tested_once(executed, notebook, example):
    text = printed(notebook)
    (ranks,) = pairs_of_ranks(text)
    assert set(ranks) == {"0", "1"}
    assert ranks["0"] != ranks["1"]
    found = re.findall(
        r"rank (\d) sees MASTER_ADDR=127.0.0.1 MASTER_PORT=(\d+) WORLD_SIZE=2 RANK=(\d)"
        r" LOCAL_RANK=(\d) - sum over the ranks: (\d)",
        text,
    )
    (_, port, *_), _ = found
    assert found == [(rank, port, rank, rank, "3") for rank in ("0", "1")]
    (kernel,) = re.findall(r"^this kernel sees (.*)$", text, re.MULTILINE)
    assert kernel.count("=None") == 5
    results = [json.loads(file.read_text()) for file in executed.glob("runs/*/*/result.json")]
    assert len(results) == 3 + 1 + (4 if len(os.sched_getaffinity(0)) > 1 else 3)
    assert all(found["same_weights"] for found in results)
    (run,) = (executed / "runs").glob("*/ddp")
    (best,) = run.glob("checkpoints/epoch*.ckpt")
    module = example.LitResNet.load_from_checkpoint(best, map_location="cpu")
    data = example.CIFAR10DataModule(str(run.parent / "made-up"), subset=430)
    data.setup("fit")
    assert (len(data.validation), len(data.training)) == (43, 387)
    loss, accuracy = evaluate(module, *data.validation.tensors)
    assert column(run, "val_loss") == [pytest.approx(loss, rel=1e-5)]
    assert best.stem == f"epoch=00-val_accuracy={accuracy:.4f}"
    loss, accuracy = evaluate(module, *example.read(run.parent / "made-up", example.TEST_FILES))
    assert f"{best.name}, 500 test images\n" in text
    assert f"test loss {loss:.4f}, accuracy {accuracy:.4f}\n" in text
    found = dict(re.findall(r"^([a-z]+) +(\d\.\d{3})\b", text, re.MULTILINE))
    assert tuple(found) == cifar10.CLASSES


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_weights_and_losses_of_one_that_was_not(executed, example):
    (first,) = executed.glob("runs/*/undisturbed")
    other = first.parent / "stopped"
    weights, again = (
        example.LitResNet.load_from_checkpoint(run / "checkpoints" / "last.ckpt").state_dict()
        for run in (first, other)
    )
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    # On a busy machine the stop can come after the last epoch: then there is nothing to resume.
    logs = list(other.glob("logs/version_1/metrics.csv"))
    lines = [line for log in logs for line in log.read_text().splitlines()]
    rows = [row for row in csv.DictReader(lines) if row["val_loss"]]
    resumed = [float(row["val_loss"]) for row in rows]
    assert len(resumed) < 3  # it did not begin again
    assert resumed == column(first, "val_loss")[3 - len(resumed) :]


def test_the_outputs_that_are_kept_are_whole_of_the_files_and_of_no_machine():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    check_complete(notebook)
    text = printed(notebook)
    assert "from CIFAR10_DIR.\n50,000 " in text
    assert ".ckpt, 10,000 test images\n" in text
    assert len(pairs_of_ranks(text)) == 1
    assert "same weights with and without the stop: True\n" in text
    assert NOTEBOOK.stat().st_size < 450_000
    for output in outputs(notebook):
        words = output.get("text") or "".join(
            value for kind, value in output["data"].items() if kind.startswith("text/")
        )
        assert not re.search(r"/(tmp|root|home|work|Users|var|usr)\b|site-packages|\w@\w", words)
    source = (FOLDER / "cifar10.py").read_text() + (FOLDER / "train.py").read_text()
    data = [output.get("data", {}) for output in outputs(notebook)]
    shown = [kinds["text/markdown"] for kinds in data if "text/markdown" in kinds]
    assert len(shown) == 14
    for text in shown:
        assert text.removeprefix("```python\n").removesuffix("```") in source


def test_it_reads_what_the_binary_version_has_and_its_network_is_samesteps(tmp_path, example):
    write_binary(tmp_path, per_file=7, num_test=30)
    images, labels = example.read(tmp_path, example.TRAIN_FILES)
    assert images.shape == (35, 3, 32, 32)
    for number in range(5):
        expected, classes = images_and_labels(7, seed=number)
        part = slice(7 * number, 7 * number + 7)
        assert torch.equal(images[part], torch.from_numpy(expected))
        assert labels[part].tolist() == classes.tolist()
    torch.manual_seed(0)
    theirs, ours = resnet18(10, stem="small", width=4), example.resnet18(4)
    values = theirs.state_dict().values()
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_image_is_validated_once_and_all_ranks_have_as_many_batches(world_size, example):
    for count, size in ((4, 4), (5, 1), (5, 4), (12, 4), (31, 4), (101, 4)):
        ranks = [list(example.Shares(count, size, (r, world_size))) for r in range(world_size)]
        assert len({len(batches) for batches in ranks}) == 1
        batches = [batch.tolist() for batches in ranks for batch in batches]
        assert all(0 < len(batch) <= max(size, 2) for batch in batches)
        assert sorted(number for batch in batches for number in batch) == list(range(count))


def test_a_step_trains_the_same_images_on_any_ranks_in_the_order_of_the_epoch_that_was_set(example):
    def steps(ranks, epoch):
        shares = [example.Shares(101, 24 // ranks, (rank, ranks), seed=5) for rank in range(ranks)]
        for share in shares:
            share.set_epoch(epoch)
        return [sorted(torch.cat(parts).tolist()) for parts in zip(*map(list, shares), strict=True)]

    assert steps(3, 0) == steps(1, 0)
    assert steps(3, 1) == steps(1, 1) != steps(1, 0)
    share, other = (example.Shares(40, 4, (0, 2), seed=1) for _ in range(2))
    batches = iter(share)
    share.set_epoch(3)
    other.set_epoch(3)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in other]
