"""Scripts with a mistake planted into them, checked on forked ranks: about a second each."""

import os
from collections.abc import Sequence
from pathlib import Path

from samestep.scripts.checking.check_report import CheckReport
from samestep.scripts.checking.check_script import check_script, job_of
from samestep.scripts.checking.findings import Mistake
from samestep.scripts.checking.ranks_of_script import RankProcess
from tests.processes import _context, _main, ensure_server

BASE = """\
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    train_set = TensorDataset(x[:64], (x[:64].sum(1) > 0).long())
    val_set = TensorDataset(x[64:], (x[64:].sum(1) > 0).long())
    sampler = DistributedSampler(train_set, shuffle=True, seed=0)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loss_of = nn.CrossEntropyLoss()
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for inputs, labels in val_loader:
                right = model(inputs).argmax(1) == labels
                counts += torch.tensor([float(right.sum()), len(labels)])
        dist.all_reduce(counts)
        accuracy = float(counts[0] / counts[1])
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        if accuracy > best:
            best = accuracy
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
        dist.barrier()
    del model, optimizer, scheduler
    gc.collect()  # the process group may hang as it is destroyed while DDP lives
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
"""A script without a mistake: the clean twin of those that differ from it in a few lines."""


class Forked:  # a forked rank, seen as a process of `subprocess`
    def __init__(self, process) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _rank(job: str, cwd: str, variables: dict[str, str]) -> None:
    import sys

    from samestep.scripts.checking.rank import main

    os.environ.update(variables)
    os.chdir(cwd)
    sys.exit(main(job))


def forked(job: Path, variables: Sequence[dict[str, str]], cwd: Path) -> list[RankProcess]:
    """Start the ranks of a check from the fork server."""
    processes = []
    ensure_server()
    for rank, own in enumerate(variables):
        arguments = (_rank, (str(job), str(cwd), own), own, job.parent, rank)
        process = _context.Process(target=_main, args=arguments, daemon=False)
        process.start()
        processes.append(Forked(process))
    return processes


def planted(*changes: tuple[str, str], base: str = BASE) -> str:
    """Return a script with some of its text replaced; each old text has to be there."""
    for old, new in changes:
        assert base.count(old) == 1, f"{old!r} is {base.count(old)} times in the script"
        base = base.replace(old, new)
    return base


def check(folder: Path, text: str, *arguments: str, nproc=2, steps=10, **options) -> CheckReport:
    """Write a script into a folder of its own and check it."""
    place = folder / "project"
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(text)
    job = job_of(place / "train.py", arguments, nproc=nproc, steps=steps)
    return check_script(job, start=forked, **options)


def found_in(
    folder: Path,
    text: str,
    code: str,
    line: str,
    *evidence: str,
    beside: Sequence[str] = (),
    **options,
) -> Mistake:
    """Check a script in which this is wrong, in the line that has this text, and nothing else.

    `beside`: codes of what the same mistake leads to, and which may be found, too.
    """
    report = check(folder, text, **options)
    assert codes(report) - set(beside) == {code}
    (found,) = (finding for finding in report.findings if finding.code == code)
    assert (found.file, found.line) == ("train.py", line_of(text, line))
    for words in evidence:
        assert words in found.evidence
    return found


def remedied(text: str, found: Mistake) -> str:
    """Return a script with the change that a finding prints."""
    diff = [line for line in found.remedy.splitlines() if line[:2] in ("- ", "+ ", "  ")]
    old = [line[2:] for line in diff if line[0] != "+"]
    lines = text.splitlines()
    places = [one.line - 1 for one in (found, *found.related)]
    (place,) = [n for n in places if [line.strip() for line in lines[n : n + len(old)]] == old]
    indent = lines[place][: -len(lines[place].lstrip())]
    lines[place : place + len(old)] = [indent + line[2:] for line in diff if line[0] != "-"]
    return "\n".join(lines) + "\n"


def codes(report: CheckReport) -> set[str]:  # return the codes of what was found
    return {finding.code for finding in report.findings}


def line_of(text: str, part: str) -> int:  # return the number of the only line that has this text
    (found,) = (n for n, line in enumerate(text.splitlines(), 1) if part in line)
    return found
