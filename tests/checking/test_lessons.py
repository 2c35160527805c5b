"""The mistakes that the lessons warn of, planted into their own scripts."""

import pytest

from tests.checking.planted import check, line_of, planted
from tests.examples.programs import ROOT
from tests.idx_files import write_mnist

pytestmark = pytest.mark.slow
MNIST = (ROOT / "examples" / "mnist_torchrun" / "train_distributed.py").read_text()
ON_FEW = ("--epochs", "2", "--batch-size", "20", "--data-dir", "data/mnist")

MEAN_OF_MEANS = """\
    loss, correct, count = sums.tolist()
    means = torch.tensor([loss / count, correct / count])
    dist.all_reduce(means)
    means /= dist.get_world_size()
    return means[0].item(), means[1].item()
"""
SUMS = """\
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return loss / count, correct / count
"""
SAVE = """\
        if rank == 0:
            save_checkpoint(args.checkpoint_dir, epoch + 1, parts)
"""
EVALUATE = """\
        loss, accuracy = evaluate(model, held_out_share, autocast, device)
        say(f"  held out"""
WRONG = {
    # What docs/examples/plain-slurm.md says, the code, and the line to blame.
    "every epoch has the order of the first": (
        "SS103",
        [("sampler.set_epoch(epoch)  #", "#")],
        "for stored, stored_labels in batches:",
    ),
    "the mean of the ranks' means is wrong": (
        "SS402",
        [(SUMS, MEAN_OF_MEANS)],
        "dist.all_reduce(means)",
    ),
    "if rank == 0 in front of evaluate": (
        "SS601",
        [(EVALUATE, EVALUATE.replace("        loss,", "        if rank == 0:\n            loss,"))],
        "dist.barrier()  # no rank continues, or ends, before the checkpoint is there",
    ),
    "each rank trains on all of the data": (
        "SS101",
        [("loader(training, args, sampler)", "loader(training, args)")],
        "return DataLoader(",
    ),
    "every rank writes the checkpoint": (
        "SS501",
        [(SAVE, "        save_checkpoint(args.checkpoint_dir, epoch + 1, parts)\n")],
        'torch.save({"epoch": epoch, **state}, folder / "checkpoint.tmp")',
    ),
    "without DDP each rank trains its own model": (
        "SS201",
        [("ddp_model = DistributedDataParallel(model)", "ddp_model = model")],
        None,
    ),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "project").mkdir()
    write_mnist(tmp_path / "project" / "data" / "mnist")
    return tmp_path


def test_nothing_is_wrong_with_the_script_of_the_lesson(folder):
    report = check(folder, MNIST, *ON_FEW)
    assert report.findings == []


@pytest.mark.parametrize("case", WRONG)
def test_the_mistake_of_the_lesson_is_found_in_its_line(case, folder):
    code, changes, line = WRONG[case]
    text = planted(*changes, base=MNIST)
    # Of 10 images that are held out two ranks evaluate equally many, and three do not.
    nproc = 3 if code == "SS402" else 2
    report = check(folder, text, *ON_FEW, nproc=nproc, stall_s=3)
    found = [finding for finding in report.findings if finding.code == code]
    assert found, report.findings
    assert line is None or found[0].line == line_of(text, line)
