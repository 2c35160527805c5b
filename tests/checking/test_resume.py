"""`check --resume`: trainings that are killed and resumed, with a mistake planted into each."""

import re

import pytest

from samestep.base.errors import UserError
from samestep.scripts.checking.check_resume import check_resume
from samestep.scripts.checking.check_script import job_of
from tests.checking.planted import forked, planted
from tests.command_line import start

PLAIN = """\
import argparse
import copy
import os
import shutil
import threading
import time
from glob import glob
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1: dist.init_process_group("gloo")
torch.manual_seed(rank)
numbers = torch.Generator().manual_seed(3)
x = torch.randn(48, 6, generator=numbers)
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data, world, rank, seed=1)
loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
model = DistributedDataParallel(net) if world > 1 else net
average = copy.deepcopy(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
first, best, done = 0, 9.0, 0
previous = start = copy.deepcopy(net.state_dict())
class Slow:
    def __init__(self, path): self.file, self.name = open(path, "wb"), path
    def write(self, content):
        time.sleep(0.002)  # a slow disk: the training continues meanwhile
        return self.file.write(content)
    def __getattr__(self, name): return getattr(self.file, name)
def write(state, path):
    file = Slow(path + ".tmp")
    torch.save(state, file)
    file.close()
    os.replace(path + ".tmp", path)
def save(path, epoch):
    everyones = [torch.get_rng_state()]
    if world > 1:
        everyones = [torch.empty_like(everyones[0]) for _ in range(world)]
        dist.all_gather(everyones, torch.get_rng_state())
    if rank: return
    state = {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "average": average.state_dict(),
        "random": everyones,
        "best": best,
        "done": done,
        "epoch": epoch,
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)
if args.resume:
    kept = torch.load(args.resume)
    net.load_state_dict(kept["net"])
    optimizer.load_state_dict(kept["optimizer"])
    scheduler.load_state_dict(kept["scheduler"])
    scaler.load_state_dict(kept["scaler"])
    average.load_state_dict(kept["average"])
    torch.set_rng_state(kept["random"][rank % len(kept["random"])])
    first, best, done = kept["epoch"], kept["best"], kept["done"]
os.makedirs("out", exist_ok=True)
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), net.parameters()): mean.lerp_(weight, 0.1)
            for ours, own in zip(average.buffers(), net.buffers()): ours.copy_(own)
        done += 1
    scheduler.step()
    best = min(best, float(loss.detach()))
    save("out/last.pt", epoch + 1)
"""
WITHIN = """\
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
class Rows(Dataset):
    def __len__(self): return 48
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * epoch + index)
        own = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=own) + torch.randn(6, generator=generator)
class Stream(IterableDataset):
    def __init__(self): self.place, self.buffer = 0, []
    def __iter__(self):
        order = torch.Generator().manual_seed(7)
        while self.place < 48 or self.buffer:
            while self.place < 48 and len(self.buffer) < 16:
                self.buffer.append(self.place)
                self.place += 1
            pick = torch.rand(1, generator=torch.Generator().manual_seed(self.place)).item()
            yield torch.full((6,), float(self.buffer.pop(int(pick * len(self.buffer)))))
STREAMS = False
torch.manual_seed(0)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
epoch = step = skip = 0
stream = Stream()
if os.path.exists("last.pt"):
    kept = torch.load("last.pt")
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    epoch, step, skip = kept["epoch"], kept["step"], kept["within"]
    stream.place, stream.buffer = kept["place"], kept["buffer"]
def batches(epoch, skip):
    if STREAMS: return DataLoader(stream, batch_size=4)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch)).tolist()
    return DataLoader(Rows(), batch_size=4, sampler=order[4 * skip :])
while epoch < 2:
    within = skip
    for batch in batches(epoch, skip):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        step, within = step + 1, within + 1
        if step % 5 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch, "step": step, "within": within}
            state |= {"place": stream.place, "buffer": stream.buffer}
            torch.save(state, "new.pt")
            os.replace("new.pt", "last.pt")
    epoch, skip = epoch + 1, 0
    stream.place = 0
"""
SHARDED = """\
import argparse
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
torch.manual_seed(0)
model, step = nn.Linear(6, 1), 0
optimizer = torch.optim.Adam(model.parameters())
def state():
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}
if args.resume:
    kept = state()  # it gives the optimizer a state, by a step without gradients
    dcp.load(kept, checkpoint_id=args.resume)
    set_state_dict(
        model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"]
    )
    step = kept["step"]
while step < 18:
    optimizer.zero_grad()
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()
    optimizer.step()
    step += 1
    if step % 6 == 0: dcp.save(state(), checkpoint_id=f"out/{step}")
"""
STREAM = WITHIN.replace("STREAMS = False", "STREAMS = True").replace("48", "96")
STREAM = STREAM.replace("epoch < 2", "epoch < 1")
LOADS = {
    "net": '    net.load_state_dict(kept["net"])\n',
    "optimizer": '    optimizer.load_state_dict(kept["optimizer"])\n',
    "scheduler": '    scheduler.load_state_dict(kept["scheduler"])\n',
    "scaler": '    scaler.load_state_dict(kept["scaler"])\n',
    "average": '    average.load_state_dict(kept["average"])\n',
    "random": '    torch.set_rng_state(kept["random"][rank % len(kept["random"])])\n',
}
COUNTERS = 'first, best, done = kept["epoch"], kept["best"], kept["done"]\n'
WRITES = '    torch.save(state, path + ".tmp")\n    os.replace(path + ".tmp", path)\n'
IN_A_THREAD = """
    threads and threads.pop().join()
    threads.append(threading.Thread(target=write, args=(STATE, path)))
    threads[0].start()
"""
THREADS = ("first, best, done = 0", "threads = []\nfirst, best, done = 0")
BY_EPOCH = [
    ('save("out/last.pt", epoch + 1)', 'save(f"out/{epoch + 1}.pt", epoch + 1)'),
    ("kept = torch.load(args.resume)", 'kept = torch.load(sorted(glob("out/*.pt"))[PLACE])'),
    ("if args.resume:", 'if glob("out/*.pt"):'),
]
TORN = (WRITES, "    torch.save(state, path)\n")
READS = "    kept = torch.load(args.resume)\n"
TOLERANT = """    try:
        kept = torch.load(args.resume)
    except Exception:
        kept = None
if args.resume and kept:
"""
PLACE = "stream.place, stream.buffer = kept["

LAYERS = "nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))"
UNLOADED = "[torch.stack([Rows()[n] for n in order[at : at + 4]]) for at in range(0, 48, 4)]"


def at(place):
    return [(old, new.replace("PLACE", place)) for old, new in BY_EPOCH]


def threaded(state):
    return [THREADS, (WRITES, IN_A_THREAD.replace("STATE", state))]


def script(base, *changes, **how):
    return base, changes, how


NOT_RUNNING = '{k: v for k, v in kept["net"].items() if "running" not in k}, strict=False'
PLANTS = {
    "SS801": script(WITHIN, ("sampler=order[4 * skip :]", "sampler=order")),
    "SS802": script(WITHIN, ("order[4 * skip :]", "order[8 * skip :]")),
    "SS803": script(PLAIN, ("set_epoch(epoch)", "set_epoch(epoch - first)")),
    "SS804": script(WITHIN, ("within = skip", "within = 0"), ("epoch < 2", "epoch < 1")),
    "SS805": script(STREAM, (PLACE + '"place"], kept["buffer"]', "pass")),
    "SS806": script(STREAM, ('kept["place"], kept["buffer"]', 'kept["place"], []')),
    "SS807": script(
        WITHIN,
        ("manual_seed(1000 * epoch + index)", "manual_seed(next(calls))"),
        ("class Rows", "from itertools import count\ncalls = count()\n\n\nclass Rows"),
    ),
    "SS811": script(PLAIN, ('_state_dict(kept["net"]', f"_state_dict({NOT_RUNNING}")),
    "SS812": script(PLAIN, (LOADS["optimizer"], "")),
    "SS813": script(PLAIN, (LOADS["scheduler"], "")),
    "SS814": script(PLAIN, (LOADS["scheduler"], LOADS["scheduler"] + "    scheduler.step()\n")),
    "SS815": script(PLAIN, (LOADS["scaler"], "")),
    "SS816": script(PLAIN, (LOADS["average"], "")),
    "SS817": script(PLAIN, (LOADS["random"], "")),
    "SS818": script(PLAIN, (COUNTERS, 'first, best = kept["epoch"], kept["best"]\n')),
    "SS818 that only the loss shows": script(
        PLAIN,
        ("first, best, done = 0, 9.0, 0", "first, best, done, scale = 0, 9.0, 0, 1.0"),
        ("model(inputs), labels)", "model(inputs), labels) * scale"),
        ("        done += 1\n", "        done += 1\n        scale += 0.1\n"),
    ),
    "SS821": script(
        PLAIN,
        ('"net": net.state_dict()', '"net": previous'),
        ("scheduler.step()\n", "scheduler.step()\n    last = copy.deepcopy(net.state_dict())\n"),
        ('"out/last.pt", epoch + 1)\n', '"out/last.pt", epoch + 1)\n    previous = last\n'),
    ),
    "SS822": script(PLAIN, ('"net": net.state_dict()', '"net": start')),
    "SS823": script(PLAIN, *threaded("state")),
    "SS824": script(PLAIN, TORN, (READS, TOLERANT)),
    "SS825": script(PLAIN, *at("0"), resume="auto"),
    "SS831": script(
        PLAIN, ("if args.resume:", 'if args.resume and os.path.exists("out/latest.pt"):')
    ),
    "SS832": script(
        PLAIN, (LOADS["optimizer"], f"    if rank == 0:\n    {LOADS['optimizer']}"), nproc=2
    ),
    "SS833": script(PLAIN, ("batch_size=8 // world", "batch_size=4"), nproc=2, resume_nproc=[1]),
    "SS834": script(PLAIN, ('os.makedirs("out"', 'shutil.rmtree("out", True)\nos.makedirs("out"')),
    "SS801 without a loader": script(
        WITHIN,
        ("1000 * epoch + index", "index"),
        ("DataLoader(Rows(), batch_size=4, sampler=order[4 * skip :])", UNLOADED),
        ("epoch < 2", "epoch < 3"),
    ),
    "SS816 of a model made anew": script(
        PLAIN,
        (LOADS["average"], ""),
        ("average = copy.deepcopy(net)", "average = nn.Sequential(" + LAYERS),
    ),
    "SS817 on rank 1 only": script(
        PLAIN, ('kept["random"][rank % len(kept["random"])]', 'kept["random"][0]'), nproc=2
    ),
}
"""Of each code a base, the change that plants the mistake, and how the script is checked."""
LOOP = """\
import samestep, torch
with samestep.open_run("out", seed=0, resume=True) as run:
    x = torch.randn(96, 3)
    model = run.place(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in run.epochs(3, state={"model": model, "optimizer": optimizer}):
        for batch in run.batches(x, 16):
            optimizer.zero_grad()
            loss = run.backward((model(batch.data) - batch.normal(1)).square().mean(), model)
            optimizer.step()
            run.log(loss=loss)
"""
WAITS = 'if done == 6 and os.environ["START"] == "killed": time.sleep(60)'
SLOW_STEP = ("        scaler.scale", f"        {WAITS}\n        scaler.scale")
MADE = 'os.makedirs("out", exist_ok=True)\n'
RIGHT = {
    "a loop of open_run": script(LOOP, resume="auto"),
    "at an epoch's end, on other ranks, too": script(PLAIN, nproc=2, resume_nproc=[1]),
    "within an epoch": script(WITHIN, resume="auto"),
    "a stream with its buffer": script(STREAM, resume="auto"),
    "a file that may be torn is an error": script(PLAIN, TORN),
    "ended by the clock amid a step, after a checkpoint": script(PLAIN, SLOW_STEP, seconds=3.0),
    "the newest of several": script(PLAIN, *at("-1"), resume="auto"),
    "a folder of shards": script(SHARDED, resume="--resume {checkpoint}"),
    "a folder of two files": script(
        PLAIN,
        ('save("out/last.pt", epoch + 1)', 'save(f"out/{epoch}/all.pt", epoch + 1)'),
        ("    state = {", "    os.makedirs(os.path.dirname(path))\n    state = {"),
        (WRITES, WRITES + '    torch.save(torch.ones(1), path.replace("all", "some"))\n'),
        ("torch.load(args.resume)", 'torch.load(args.resume + "/all.pt")'),
        resume="--resume {checkpoint}",
    ),
    "its checkpoint is written anew": script(PLAIN, (MADE, MADE + 'save("out/last.pt", first)\n')),
    "an older one, by the user's word": script(PLAIN, at("-1")[0], resume="--resume out/1.pt"),
    "copies in a thread": script(PLAIN, *threaded("copy.deepcopy(state)")),
}


def check(tmp_path, base, changes, **how):
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(planted(*changes, base=base))
    resume = how.pop("resume", "--resume out/last.pt" if base is PLAIN else "auto")
    job = job_of(project / "train.py", [], nproc=how.pop("nproc", 1))
    report = check_resume(job, resume=resume, start=told_its_name, **how)
    assert [path.name for path in project.iterdir()] == ["train.py"]
    return report


def told_its_name(job, variables, cwd):
    return forked(job, [own | {"START": job.parent.name} for own in variables], cwd)


FAST = ("SS801", "SS803", "SS812", "SS831")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in PLANTS if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_each_mistake_of_a_resume_is_found_by_its_code_at_a_line_of_the_script(tmp_path, name):
    code, (base, changes, how) = name[:5], PLANTS[name]
    report = check(tmp_path, base, changes, **how)
    found = {one.code: one for one in report.findings}
    assert code in found, str(report)
    assert found[code].file == "train.py"
    assert re.search(r"\d", found[code].evidence)
    assert report.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_a_resume_that_is_right(tmp_path, name):
    base, changes, how = RIGHT[name]
    report = check(tmp_path, base, changes, **how)
    assert (report.findings, report.exit_code) == ([], 0), str(report)
    assert "killed after step" in report.notes[0]


@pytest.mark.parametrize(
    ("changes", "how", "told"),
    [
        ([('    save("out/last.pt", epoch + 1)\n', "")], {}, "took 18 steps and wrote no check"),
        ([], {"resume": "--resume out/none.pt"}, r"no out/none.pt: it had saved out/last.pt"),
        ([], {"resume": "--go-on"}, "unrecognized arguments: --go-on"),
        ([("torch.manual_seed(rank)", "input()")], {}, "EOFError"),
    ],
)
def test_what_cannot_be_checked_is_a_mistake_that_says_why(tmp_path, changes, how, told):
    with pytest.raises(UserError, match=told):
        check(tmp_path, PLAIN, changes, **how)


@pytest.mark.slow
def test_inside_a_job_its_own_ranks_are_killed_and_resumed_in_a_copy(tmp_path):
    short = ("range(first, 3)", "range(first, 2)")
    (tmp_path / "train.py").write_text(planted(short, base=PLAIN))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/last.pt").write_text("of an earlier run")
    words = ("check", f"{tmp_path}/train.py", "--here", "--json", "--resume=--resume out/last.pt")
    ranks = start(*words, world_size=2, folder=tmp_path / "ranks")
    assert ranks.wait() == [0, 0], ranks.output()
    assert '"killed after step 6 of 12, resumed from step 6"' in ranks.printed(0)
    assert (tmp_path / "out/last.pt").read_text() == "of an earlier run"


@pytest.mark.slow
def test_a_training_without_end_is_bounded_and_another_folder_is_left_as_it_is(tmp_path):
    """A checkpoint in a folder of temporary files is not the one that another start left there."""
    place = tmp_path / "kept"
    place.mkdir()
    changes = [
        ('"out/last.pt", epoch + 1', f'"{place}/last.pt", epoch + 1'),
        ("range(first, 3)", "range(first, 10**9)"),
        ("1 / (1 + epoch)", "1 / (1 + epoch % 5)"),
    ]
    report = check(tmp_path, PLAIN, changes, resume=f"--resume {place}/last.pt", seconds=1.0)
    assert report.findings == [], str(report)
    assert not list(place.iterdir())
