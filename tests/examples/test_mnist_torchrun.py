"""The hand-written DDP script: alone, under torchrun, stopped and resumed, beside samestep."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import command_line
from tests.examples.programs import TRAIN_DISTRIBUTED, environment, epochs, forked, python, run
from tests.idx_files import write_mnist
from tests.image_files import write_images

WITHOUT_DROPOUT = str(Path(__file__).parent / "without_dropout.py")


@pytest.fixture
def folder(tmp_path):
    """Give a folder with a small data set where the script looks for one."""
    write_mnist(tmp_path / "data" / "mnist")
    return tmp_path


def train(folder, *arguments, world_size=1, start=forked):
    """Run the script to its good end; return what it printed."""
    done = start(TRAIN_DISTRIBUTED, *arguments, folder=folder, world_size=world_size)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def read_events(run_folder):
    """Return the records of a run of samestep's."""
    return [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_prints_how_it_starts_and_one_line_an_epoch_on_rank_0_alone(folder, world_size):
    flags = ("--epochs", "2", "--batch-size", "20")
    printed = train(folder, *flags, world_size=world_size, start=run)
    first, *_ = lines = printed.splitlines()
    units = ["GPUs"] if torch.cuda.is_available() else ["CPU", "ranks"]
    assert first.split()[4:] == [f"{world_size}", *units]
    assert not any("GPU" in line for line in lines[1:])
    assert "Master node: 127.0.0.1" in lines
    assert [found[0] for found in epochs(printed)] == [1, 2]
    assert re.fullmatch(r"Test - Avg Loss: \d\.\d+, Accuracy: \d+\.\d\d%", lines[-1])
    assert len(lines) == 7
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"}


def test_it_learns(folder):
    printed = train(folder, "--epochs", "4", "--batch-size", "10")
    assert epochs(printed)[-1][4] > 90
    assert epochs(printed)[-1][1] < 0.5 * epochs(printed)[0][1]


def test_stopped_after_an_epoch_and_started_again_it_prints_what_it_would_have(folder):
    batch = ("--batch-size", "20")
    whole = train(folder, "--epochs", "3", *batch, "--checkpoint-dir", "a")
    train(folder, "--epochs", "1", *batch, "--checkpoint-dir", "b")
    rest = train(folder, "--epochs", "3", *batch, "--checkpoint-dir", "b")
    assert "b/checkpoint_epoch_1.pt" in rest
    assert epochs(rest) == epochs(whole)[1:]
    assert rest.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.slow
def test_killed_in_an_epoch_it_goes_on_from_the_last_whole_one(folder):
    whole = train(folder, "--epochs", "7", "--batch-size", "10", "--checkpoint-dir", "a")
    again = (TRAIN_DISTRIBUTED, "--epochs", "7", "--batch-size", "10", "--checkpoint-dir", "b")
    with subprocess.Popen(
        [*python(), *again], cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        while not process.stdout.readline().startswith("Epoch 3 "):
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL
    rest = train(folder, *again[1:])
    assert "b/checkpoint_epoch_" in rest
    found = epochs(rest)
    assert len(found) < 7
    assert found == epochs(whole)[7 - len(found) :]


def test_a_finished_run_is_measured_again_and_nothing_is_trained(folder):
    whole = train(folder, "--epochs", "1")
    again = train(folder, "--epochs", "1")
    assert not epochs(again)
    assert again.splitlines()[-1] == whole.splitlines()[-1]


def test_resumed_with_another_learning_rate_it_uses_that_one(folder):
    train(folder, "--epochs", "1", "--lr", "0.001")
    train(folder, "--epochs", "2", "--lr", "0.0005")
    saved = torch.load(folder / "checkpoints" / "checkpoint_epoch_2.pt", weights_only=True)
    assert [group["lr"] for group in saved["optimizer"]["param_groups"]] == [0.0005]


@pytest.mark.parametrize("world_size", [1, 2])
def test_its_losses_are_those_of_samestep_train_mnist(tmp_path, world_size):
    # Of 133 images 11 are held out, which two ranks cannot share equally, and 122 are one global
    # batch, so that the order within an epoch does not matter. Four epochs are four steps.
    data = str(write_mnist(tmp_path / "data", num_train=133))
    same = ("--epochs", "4", "--lr", "0.001", "--seed", "42", "--data-dir", data)
    by_hand = forked(
        WITHOUT_DROPOUT,
        TRAIN_DISTRIBUTED,
        *same,
        "--batch-size",
        str(122 // world_size),
        folder=tmp_path,
        world_size=world_size,
    )
    assert by_hand.returncode == 0, by_hand.stderr
    by_samestep = forked(
        *(WITHOUT_DROPOUT, "samestep", "train", "mnist", "--model", "convnet", *same),
        *("--batch-size", "122", "--run-dir", "run", "--device", "cpu"),
        folder=tmp_path,
        world_size=world_size,
    )
    assert by_samestep.returncode == 0, by_samestep.stderr
    records = read_events(tmp_path / "run")
    trained = [r for r in records if r["event"] == "epoch"]
    held_out = [r for r in records if r["event"] == "evaluation" and r["split"] == "validation"]
    found = epochs(by_hand.stdout)
    assert len(found) == len(trained) == len(held_out) == 4
    # The accuracy is printed to a hundredth of a per cent.
    assert [e[1] for e in found] == pytest.approx([r["loss"] for r in trained], abs=1e-5)
    assert [e[3] for e in found] == pytest.approx([r["loss"] for r in held_out], abs=1e-5)
    assert [e[4] for e in found] == pytest.approx([100 * r["accuracy"] for r in held_out], abs=0.01)
    assert found[3][1] < 0.9 * found[0][1]  # or equal losses would say little


@pytest.mark.slow
def test_with_dropout_and_small_batches_it_learns_as_fast_as_samestep(tmp_path):
    data = str(write_mnist(tmp_path / "data", num_train=1200))
    same = ("--epochs", "1", "--batch-size", "50", "--data-dir", data)
    ((_, loss, *_),) = epochs(train(tmp_path, *same))
    ours = ("train", "mnist", "--model", "convnet", "--run-dir", str(tmp_path / "run"))
    command_line.run(*ours, *same, folder=tmp_path / "outputs")
    records = read_events(tmp_path / "run")
    (expected,) = [r["loss"] for r in records if r["event"] == "epoch"]
    assert loss == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("place", ["raw", "MNIST/raw"])
def test_it_reads_plain_files_also_where_torchvision_puts_them(folder, place):
    whole = train(folder, "--epochs", "1", "--checkpoint-dir", "a")
    plain = folder / "plain" / place
    plain.mkdir(parents=True)
    for path in (folder / "data" / "mnist").iterdir():
        (plain / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    told = ("--data-dir", "plain", "--checkpoint-dir", "b")
    assert epochs(train(folder, "--epochs", "1", *told)) == epochs(whole)


def write_as_images(source, folder):
    """Write the images of IDX files as FOLDER/SPLIT/CLASS/NNN.png, and sort the files alike."""
    for split, name in (("train", "train"), ("test", "t10k")):
        values = {}
        for kind, start in (("images-idx3", 16), ("labels-idx1", 8)):
            path = source / f"{name}-{kind}-ubyte.gz"
            content = gzip.decompress(path.read_bytes())
            values[kind] = (path, content[:start], np.frombuffer(content[start:], np.uint8))
        _, _, labels = values["labels-idx1"]
        order = np.argsort(labels, kind="stable")
        images = values["images-idx3"][2].reshape(-1, 28, 28)
        for place, (image, label) in enumerate(zip(images[order], labels[order], strict=True)):
            path = folder / split / f"class {label}" / f"{place:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
        for (path, header, _), ordered in zip(
            values.values(), (images[order], labels[order]), strict=True
        ):
            path.write_bytes(gzip.compress(header + ordered.tobytes()))
    return folder


def test_folders_of_images_train_as_mnists_own_files_do_with_and_without_workers(folder):
    images = write_as_images(folder / "data" / "mnist", folder / "photos")
    (images / "train" / "class 3" / "notes.txt").touch()
    two = ("--epochs", "2", "--batch-size", "20")
    whole = train(folder, *two, "--checkpoint-dir", "a")
    told = ("--data-dir", "photos", "--checkpoint-dir", "b", "--num-workers", "2")
    assert train(folder, *two, *told) == whole


def test_the_model_has_as_many_classes_as_there_are_folders_and_each_image_counts_once(folder):
    # Of 3 × 5 images one is held out and 14 are trained; two ranks cannot share 15 test images.
    for split in ("train", "test"):
        write_images(folder / "photos", split, count=5, classes=("bird", "ship", "truck"))
    told = ("--data-dir", "photos", "--epochs", "1", "--batch-size", "7")
    printed = train(folder, *told, world_size=2)
    state = torch.load(folder / "checkpoints" / "checkpoint_epoch_1.pt", weights_only=True)
    assert state["model"]["fc2.weight"].shape == (3, 128)
    # Nothing is left to train, so one rank measures the same model: on every image, once.
    assert train(folder, *told).splitlines()[-1] == printed.splitlines()[-1]


def test_half_precision_learns_and_is_not_what_single_precision_computes(folder):
    told = ("--epochs", "4", "--batch-size", "10")
    single = epochs(train(folder, *told, "--checkpoint-dir", "a"))
    half = epochs(train(folder, *told, "--amp", "--checkpoint-dir", "b"))
    assert half != single
    assert half[-1][4] > 90
    state = torch.load(folder / "b" / "checkpoint_epoch_4.pt", weights_only=True)
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}


WITH_SCALER = """
import runpy, sys, torch
real = torch.amp.GradScaler
torch.amp.GradScaler = lambda device, enabled: real(device, growth_interval=2)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_scaler_changes_no_number_and_its_scale_is_that_of_the_checkpoint(folder):
    # Only float16 on a GPU has a scaler; this one is put in and doubles its scale every 2 steps.
    (folder / "with_scaler.py").write_text(WITH_SCALER)
    told = ("--epochs", "2", "--batch-size", "20")
    whole = train(folder, *told, "--checkpoint-dir", "a")
    for some in ("1", "2"):
        done = forked(
            *(str(folder / "with_scaler.py"), TRAIN_DISTRIBUTED, "--epochs", some, *told[2:]),
            *("--checkpoint-dir", "b"),
            folder=folder,
        )
        assert done.returncode == 0, done.stderr
    assert epochs(done.stdout) == epochs(whole)[1:]  # a power of two scales without rounding
    scales = [
        torch.load(folder / "b" / f"checkpoint_epoch_{n}.pt", weights_only=True)["scaler"]["scale"]
        for n in (1, 2)
    ]
    assert scales == [2.0**19, 2.0**22]  # from 2^16, by 6 steps of 20 images in each epoch


# What is wrong → the arguments, and words of the message.
MISTAKES = {
    "no data": (["--data-dir", "nowhere"], "train-images-idx3-ubyte"),
    "no images": (["--data-dir", "empty"], "empty/train"),
    "no epochs": (["--epochs", "0"], "--epochs"),
    "half an image": (["--batch-size", "1.5"], "--batch-size"),
    "less than no workers": (["--num-workers", "-1"], "--num-workers"),
    "no rate": (["--lr", "nan"], "--lr"),
    "no such flag": (["--speed", "9"], "--speed 9"),
    "a file, not a folder": (["--checkpoint-dir", "taken"], "taken"),
}


def refusal(folder, *arguments, world_size=1, start=forked, **more):
    """Run the script where it must refuse; return its one message."""
    done = start(TRAIN_DISTRIBUTED, *arguments, folder=folder, world_size=world_size, **more)
    under_torchrun = start is run and world_size > 1
    assert done.returncode == (1 if under_torchrun else 2), done.stderr  # torchrun's own is 1
    messages = re.findall(r"^train_distributed\.py: .*", done.stderr, re.MULTILINE)
    assert len(messages) == 1, done.stderr
    if world_size == 1:
        assert done.stderr == messages[0] + "\n"
    assert not epochs(done.stdout)
    return messages[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_message_and_exit_code_2(folder, name):
    (folder / "taken").touch()
    (folder / "empty" / "train" / "cat").mkdir(parents=True)
    arguments, words = MISTAKES[name]
    assert words in refusal(folder, *arguments)


@pytest.mark.parametrize(
    ("name", "start"), [pytest.param("no data", run, marks=pytest.mark.slow), ("no epochs", forked)]
)
def test_ranks_that_all_find_a_mistake_say_it_once(folder, name, start):
    arguments, words = MISTAKES[name]
    assert words in refusal(folder, *arguments, world_size=2, start=start)


def test_a_damaged_file_is_named(folder):
    path = folder / "data" / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:1000])
    assert str(path.relative_to(folder)) in refusal(folder)


def test_files_that_do_not_belong_together_are_refused(folder):
    write_mnist(folder / "other", num_train=60)
    labels = "train-labels-idx1-ubyte.gz"
    shutil.copy(folder / "other" / labels, folder / "data" / "mnist" / labels)
    message = refusal(folder)
    assert "120 " in message
    assert "60 " in message


class Mischief:
    """Make a folder when unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return (os.mkdir, (str(self.folder),))


def test_a_checkpoint_that_would_run_code_is_refused_and_does_not_run(folder):
    path = folder / "checkpoints" / "checkpoint_epoch_1.pt"
    path.parent.mkdir()
    torch.save({"epoch": 1, "model": Mischief(folder / "ran")}, path)
    done = forked(TRAIN_DISTRIBUTED, folder=folder)
    assert done.returncode == 1
    assert "UnpicklingError" in done.stderr
    assert not (folder / "ran").exists()
    torch.load(path, weights_only=False)
    assert (folder / "ran").exists()  # so there was something to refuse


def test_tasks_of_srun_without_torchrun_do_not_each_train_a_model(folder):
    message = refusal(folder, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0")
    assert "srun" in message
    assert "torchrun" in message
