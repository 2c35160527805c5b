"""The hand-written DDP script: under torchrun, killed and resumed, beside samestep."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.examples import programs
from tests.examples.programs import TRAIN_DISTRIBUTED, defined, epochs, forked, kill_at, refusal
from tests.idx_files import write_mnist
from tests.image_files import write_images

# The run of one process is made once, for all tests of this file.
# A plain script of the handbook: it runs in the second target, as the commands of the pages do.
pytestmark = [pytest.mark.xdist_group("mnist torchrun"), pytest.mark.slow]

WITHOUT_DROPOUT = str(Path(__file__).parent / "without_dropout.py")
LEARNS = ("--epochs", "6", "--batch-size", "10")


@pytest.fixture
def folder(tmp_path):
    write_mnist(tmp_path / "data" / "mnist")
    return tmp_path


def train(folder, *arguments, world_size=1, start=forked):
    done = start(TRAIN_DISTRIBUTED, *arguments, folder=folder, world_size=world_size)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_mnist(folder / "data" / "mnist")
    return folder, train(folder, *LEARNS)


def saved(folder, epoch):
    return torch.load(folder / f"checkpoint_epoch_{epoch}.pt", weights_only=True)


def test_it_prints_how_it_starts_and_one_line_an_epoch_on_rank_0_alone(folder):
    printed = train(folder, "--epochs", "2", "--batch-size", "20", world_size=2, start=programs.run)
    first, *_ = lines = printed.splitlines()
    units = ["GPUs"] if torch.cuda.is_available() else ["CPU", "ranks"]
    assert first.split()[4:] == ["2", *units]
    assert not any("GPU" in line for line in lines[1:])
    assert "Master node: 127.0.0.1" in lines
    assert [found[0] for found in epochs(printed)] == [1, 2]
    assert re.fullmatch(r"Test - Avg Loss: \d\.\d+, Accuracy: \d+\.\d\d%", lines[-1])
    assert len(lines) == 7
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"}


def test_it_learns_also_in_half_precision_which_computes_other_numbers(trained, folder):
    found = epochs(trained[1])
    assert found[-1][4] > 90
    assert found[-1][1] < 0.5 * found[0][1]
    half = epochs(train(folder, *LEARNS, "--amp"))
    assert half != epochs(trained[1])
    assert half[-1][4] > 90
    weights = saved(folder / "checkpoints", 6)["model"].values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}


def test_killed_in_an_epoch_it_goes_on_from_the_last_whole_one(trained, folder):
    kill_at("Epoch 2 ", TRAIN_DISTRIBUTED, *LEARNS, folder=folder)
    rest = train(folder, *LEARNS)
    assert "checkpoints/checkpoint_epoch_" in rest
    found, whole = epochs(rest), trained[1]
    assert len(found) < 6
    assert found == epochs(whole)[6 - len(found) :]
    assert rest.splitlines()[-1] == whole.splitlines()[-1]


def test_a_finished_run_is_measured_again_and_goes_on_with_another_learning_rate(trained):
    folder, whole = trained
    again = train(folder, *LEARNS)
    assert not epochs(again)
    assert again.splitlines()[-1] == whole.splitlines()[-1]
    train(folder, "--epochs", "7", "--lr", "0.0005")
    groups = saved(folder / "checkpoints", 7)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.0005]


def test_its_losses_are_those_of_samestep_train_mnist(tmp_path):
    # Of 133 images 11 are held out, which two ranks cannot share equally, and 122 are one global
    # batch, so that the order within an epoch does not matter. Four epochs are four steps.
    data = str(write_mnist(tmp_path / "data", num_train=133))
    same = ("--epochs", "4", "--lr", "0.001", "--seed", "42", "--data-dir", data)
    by_hand = forked(
        *(WITHOUT_DROPOUT, TRAIN_DISTRIBUTED, *same, "--batch-size", "61"),
        folder=tmp_path,
        world_size=2,
    )
    assert by_hand.returncode == 0, by_hand.stderr
    by_samestep = forked(
        *(WITHOUT_DROPOUT, "samestep", "train", "mnist", "--model", "convnet", *same),
        *("--batch-size", "122", "--run-dir", "run", "--device", "cpu"),
        folder=tmp_path,
        world_size=2,
    )
    assert by_samestep.returncode == 0, by_samestep.stderr
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [r["loss"] for r in records if r["event"] == "epoch"]
    held_out = [r for r in records if r["event"] == "evaluation" and r["split"] == "validation"]
    found = epochs(by_hand.stdout)
    assert len(found) == len(losses) == len(held_out) == 4
    # The accuracy is printed to a hundredth of a per cent.
    assert [e[1] for e in found] == pytest.approx(losses, abs=1e-5)
    assert [e[3] for e in found] == pytest.approx([r["loss"] for r in held_out], abs=1e-5)
    assert [e[4] for e in found] == pytest.approx([100 * r["accuracy"] for r in held_out], abs=0.01)
    assert found[3][1] < 0.9 * found[0][1]  # or equal losses would say little


@pytest.fixture(scope="module")
def load_data():
    return defined(TRAIN_DISTRIBUTED)["load_data"]


def test_folders_of_images_are_read_class_by_class(folder, load_data):
    *_, test, _ = load_data(folder / "data" / "mnist")
    by_class = sorted(test, key=lambda sample: int(sample[1]))
    for number, (image, label) in enumerate(by_class):
        for split in ("train", "test"):
            path = folder / "photos" / split / f"class {label}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.numpy()).save(path)
    (folder / "photos" / "test" / "class 3" / "notes.txt").touch()
    *_, found, _ = load_data(folder / "photos")
    for (image, label), (must, number) in zip(found, by_class, strict=True):
        assert (torch.equal(image, must), label) == (True, number)


def test_the_model_has_as_many_classes_as_there_are_folders_and_each_image_counts_once(folder):
    # Of 3 × 5 images one is held out and 14 are trained; two ranks cannot share 15 test images.
    for split in ("train", "test"):
        write_images(folder / "photos", split, count=5, classes=("bird", "ship", "truck"))
    told = ("--data-dir", "photos", "--epochs", "1", "--batch-size", "7")
    printed = train(folder, *told, world_size=2)
    assert saved(folder / "checkpoints", 1)["model"]["fc2.weight"].shape == (3, 128)
    # Nothing is left to train, so one rank measures the same model: on every image, once.
    again = train(folder, *told, "--num-workers", "2")
    assert again.splitlines()[-1] == printed.splitlines()[-1]


WITH_SCALER = """
import runpy, sys, torch
real = torch.amp.GradScaler
torch.amp.GradScaler = lambda device, enabled: real(device, growth_interval=2)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_scaler_changes_no_number_and_its_scale_is_that_of_the_checkpoint(trained, folder):
    # Only float16 on a GPU has a scaler; this one is put in and doubles its scale every 2 steps.
    script = folder / "with_scaler.py"
    script.write_text(WITH_SCALER)
    for some in ("1", "2"):
        told = (TRAIN_DISTRIBUTED, "--epochs", some, "--batch-size", "10")
        done = forked(str(script), *told, folder=folder)
        assert done.returncode == 0, done.stderr
    (second,) = epochs(done.stdout)
    assert second == epochs(trained[1])[1]  # a power of two scales without rounding
    scales = [saved(folder / "checkpoints", n)["scaler"]["scale"] for n in (1, 2)]
    assert scales == [2.0**21, 2.0**27]  # from 2^16, by 11 steps of 10 images in each epoch


# A script of MNIST, its arguments, and words of the message.
PROFILED = str(programs.MNIST_PROFILING / "single_gpu_train.py")
MISTAKES = [
    (TRAIN_DISTRIBUTED, "--data-dir nowhere", "train-images-idx3-ubyte"),
    (TRAIN_DISTRIBUTED, "--data-dir empty", "empty/train"),
    (TRAIN_DISTRIBUTED, "--epochs 0", "--epochs"),
    (TRAIN_DISTRIBUTED, "--batch-size 1.5", "--batch-size"),
    (TRAIN_DISTRIBUTED, "--lr nan", "--lr"),
    (TRAIN_DISTRIBUTED, "--speed 9", "--speed 9"),
    (TRAIN_DISTRIBUTED, "--checkpoint-dir taken", "taken"),
    (TRAIN_DISTRIBUTED, "--data-dir torn", "torn/train-images-idx3-ubyte.gz"),
    (TRAIN_DISTRIBUTED, "--data-dir mixed", "120 train images, 60 labels"),
    (PROFILED, "--data_dir nowhere", "train-images-idx3-ubyte[.gz]"),
    (PROFILED, "--epochs 1", "--epochs 1"),
    (PROFILED, "--profile_steps 0", "--profile_steps 0"),
    (PROFILED, "--batch_size 0", "batch_size=0"),
    (PROFILED, "--data_dir torn", "torn/train-images-idx3-ubyte.gz"),
    (PROFILED, "--num_workers 0", "trace_single_gpu_workers_0.json"),  # a folder
]


@pytest.mark.parametrize(("script", "words", "named"), MISTAKES)
def test_a_mistake_gets_one_message_and_exit_code_2(folder, script, words, named):
    (folder / "taken").touch()
    (folder / "trace_single_gpu_workers_0.json").mkdir()
    (folder / "empty" / "train" / "cat").mkdir(parents=True)
    torn = write_mnist(folder / "torn") / "train-images-idx3-ubyte.gz"
    torn.write_bytes(torn.read_bytes()[:500])
    few = write_mnist(folder / "few", num_train=60) / "train-labels-idx1-ubyte.gz"
    shutil.copy(few, write_mnist(folder / "mixed"))
    assert named in refusal(script, *words.split(), folder=folder)
    assert not list(folder.glob("*.tmp"))


class Mischief:
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
