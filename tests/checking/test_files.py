"""What several ranks do to files, and what a checkpoint is made of and loaded with."""

import torch

from tests.checking.planted import check, found_in, line_of, planted

IMPORTS = ("import os\n", "import logging\nimport os\nimport shutil\nimport sys\n")
# What the script does once it has trained; each line with a mistake names it.
END = "    del model, optimizer, scheduler\n"


def found_at(report, text):
    """Return the codes that were found at each line with a comment that names codes."""
    named = {}
    for number, line in enumerate(text.splitlines(), 1):
        if "# SS" in line:
            named[number] = set(line.rpartition("# ")[2].split())
    found = {}
    for finding in report.findings:
        if finding.file == "train.py":
            found.setdefault(finding.line, set()).add(finding.code)
    return found, named


def at_the_end(lines, *changes):
    body = "".join(f"    {line}\n" for line in lines.strip("\n").splitlines())
    return planted(IMPORTS, (END, body + END), *changes)


def test_files_that_several_ranks_write_and_checkpoints_of_the_wrong_rank_are_found(tmp_path):
    text = at_the_end("""
torch.save(model.module.state_dict(), "all.pt")  # SS501
with open("all.txt", "w") as file:  # SS501
    file.write("x")
open("rows.csv", "a").close()  # SS501
if rank == 1:
    torch.save(model.module.state_dict(), "one.pt")  # SS502
if rank == 0:
    torch.save({"model": model.state_dict()}, "wrapped.pt")  # SS503
""")
    report = check(tmp_path, text)
    found, named = found_at(report, text)
    assert found == named
    assert report.exit_code == 1
    first, opened, _ = (finding for finding in report.findings if finding.code == "SS501")
    assert "+ " not in opened.remedy  # a change of one line would leave what is in the block
    assert "ranks 0 and 1" in first.evidence
    assert "all.pt" in first.evidence


def test_checkpoints_that_go_back_to_one_gpu_or_may_run_code_are_found(tmp_path):
    text = at_the_end(
        """
state = torch.load("best.pt")  # SS504
other = torch.load("given.pt", weights_only=False, map_location="cpu")  # SS505
again = torch.load("best.pt", map_location="cpu", weights_only=False)
if rank == 0:
    alone = torch.load("best.pt")
""",
        (
            "    rank = dist.get_rank()\n",
            "    rank = dist.get_rank()\n    torch.cuda.is_available()\n",
        ),
    )
    (tmp_path / "project").mkdir()
    torch.save({"layer.weight": torch.zeros(1)}, tmp_path / "project" / "given.pt")
    report = check(tmp_path, text)
    found, named = found_at(report, text)
    assert found == named
    assert {finding.severity for finding in report.findings} == {"warning"}


FAKES = {
    "wandb.py": "def init(**settings): ...\n",
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": (
        "class MNIST:\n"
        "    def __init__(self, root, download=False):\n"
        "        if download:\n"
        "            self.download()\n"
        "    def download(self): ...\n"
    ),
}


def with_fakes(folder):
    for name, text in FAKES.items():
        path = folder / "project" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)


def test_downloads_trackers_and_bars_of_every_rank_are_found(tmp_path):
    with_fakes(tmp_path)
    text = at_the_end("""
import urllib.request
import wandb
from rich.progress import Progress
from torch.utils.tensorboard import SummaryWriter
from torchvision.datasets import MNIST
from tqdm import tqdm
urllib.request.urlopen("data:text/plain,set").close()  # SS506
MNIST("data", download=True)
wandb.init(project="p")  # SS507
SummaryWriter("runs").close()  # SS507
for _ in tqdm(range(3)):  # SS508
    pass
Progress()  # SS508
""")
    report = check(tmp_path, text)
    found, named = found_at(report, text)
    assert found == named
    by_line = {finding.line: finding for finding in report.findings}
    assert "text/plain,set" in by_line[line_of(text, "urlopen(")].evidence
    # The fake is the user's own code; what its data set would fetch is there already.
    there = next(finding for finding in report.findings if finding.file != "train.py")
    assert (there.code, there.severity) == ("SS506", "advice")
    assert "MNIST.download" in there.evidence


def test_what_ranks_do_rightly_with_files_is_no_finding(tmp_path):
    with_fakes(tmp_path)
    text = at_the_end("""
import tempfile
import numpy as np
import urllib.request
import wandb
from torch.utils.tensorboard import SummaryWriter
from torchvision.datasets import MNIST
from tqdm import tqdm
torch.save(model.module.state_dict(), f"part-{rank}.pt")
torch.save(model.module.state_dict(), f"new-{rank}.pt")
if rank == 0:
    os.replace("new-0.pt", "new.pt")
    with open("log.txt", "w") as file:
        file.write("x")
    np.save("shared.npy", np.zeros(4))
dist.barrier()
part = np.load("shared.npy", mmap_mode="r+")
part[rank] = 1
for turn in range(2):
    if turn == rank:
        open("rows.csv", "a").close()
    dist.barrier()
logging.getLogger("own").addHandler(logging.FileHandler("own.log"))
with tempfile.NamedTemporaryFile("w") as file:
    file.write("x")
open(os.devnull, "w").close()
os.makedirs("out", exist_ok=True)
if rank == 0:
    urllib.request.urlopen("data:text/plain,set").close()
    MNIST("data", download=True)
    wandb.init(project="p")
dist.barrier()
if rank != 0:
    MNIST("data", download=True)
wandb.init(project="p", group="ranks")
SummaryWriter(f"runs/{rank}").close()
for _ in tqdm(range(3), disable=rank != 0):
    pass
for _ in tqdm(range(3), position=rank):
    pass
torch.load("new.pt", map_location="cpu")
torch.load("new.pt", map_location="cpu", weights_only=False)
logging.shutdown()
""")
    report = check(tmp_path, text)
    assert report.findings == []


def test_the_shards_of_one_rank_are_no_checkpoint(tmp_path):
    saves = "scheduler.step()\n        if rank == 0: torch.save(model.state_dict(), f'{rank}.pt')\n"
    text = planted(
        ("model = DDP(", "model = torch.distributed.fsdp.fully_shard("),
        ("scheduler.step()\n", saves),
        ('torch.save(model.module.state_dict(), "best.pt")', "pass"),
    )
    found_in(tmp_path, text, "SS509", "torch.save(", "only rank 0 saves one", "2 parts")
    uneven = text.replace("nn.Linear(16, 2)", "nn.Linear(16, 3)")
    assert check(tmp_path, uneven.replace("rank == 0: torch", "True: torch")).findings == []


def test_what_saves_an_optimizer_is_pointed_at_the_check_of_its_resume(tmp_path):
    text = planted(("model.module.state_dict()", "[optimizer.state_dict()]"))
    assert [said for said in check(tmp_path, text).not_seen if "check --resume auto" in said]
