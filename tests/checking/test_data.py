"""What is wrong with the data that the ranks of a script read."""

import re

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from samestep.scripts.checking.samples import lost_rows
from tests.checking.planted import check, codes, found_in, planted

SAMPLER = "    sampler = DistributedSampler(train_set, shuffle=True, seed=0)\n"
LOADER = "    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)\n"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
TRAIN_SET = "    train_set = TensorDataset(x[:64], (x[:64].sum(1) > 0).long())\n"
LOOP = "for inputs, labels in train_loader"

DATA_SET = """
class Images(torch.utils.data.Dataset):
    def __init__(self, x): self.x = x
    def __len__(self): return len(self.x)
    def __getitem__(self, index):
        noise = np.random.randn(8).astype("float32") * 0.01
        return self.x[index] + torch.from_numpy(noise), (self.x[index].sum() > 0).long()
def seed(worker): np.random.seed(0)
def main():
"""
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, x): self.x = x
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        step = dist.get_world_size() * (worker.num_workers if worker else 1)
        first = dist.get_rank() + dist.get_world_size() * (worker.id if worker else 0)
        for row in self.x[first::step]: yield row, (row.sum() > 0).long()
def main():
"""
MAIN = "\n\ndef main():\n"
AUGMENTED = planted(
    ("import torch\n", "import numpy as np\nimport torch\n"),
    (MAIN, DATA_SET),
    (TRAIN_SET, "    train_set = Images(x[:64])\n"),
    ("    torch.manual_seed(0)\n", "    torch.manual_seed(0)\n    np.random.seed(rank)\n"),
)
STREAMED = planted(
    (MAIN, STREAM),
    (TRAIN_SET, "    train_set = Stream(x[:64])\n"),
    (SAMPLER, ""),
    (LOADER, "    train_loader = DataLoader(train_set, batch_size=8)\n"),
    (SET_EPOCH, ""),
)
WORKERS = (
    "train_set, batch_size=8, sampler=sampler",
    "train_set, batch_size=8, sampler=sampler, num_workers=2",
)


SHUFFLED = "train_loader = DataLoader(train_set, batch_size=8, shuffle=True)"


def unsampled(*more: tuple[str, str], loader: str = SHUFFLED) -> str:
    return planted((SAMPLER, ""), (SET_EPOCH, ""), (LOADER, f"    {loader}\n"), *more)


def and_then(line: str) -> tuple[str, str]:
    return TRAIN_SET, f"{TRAIN_SET}    {line}\n"


def subset(numbers: str) -> tuple[str, str]:
    return and_then(f"train_set = torch.utils.data.Subset(train_set, {numbers})")


DRAWN = "        for _ in range(4):\n            inputs, labels = x[:8].normal_(), ones\n"
SEEDED = "best, ones = 0.0, torch.ones(8).long()\n    torch.manual_seed(0)\n"
ALIKE = planted((f"        {LOOP}:\n", DRAWN), ("best = 0.0\n", SEEDED))
COPIES = unsampled(and_then("train_set.name = f'copy {rank}'"))
BY_SUBSET = unsampled(subset("range(rank * 16, rank * 16 + 48)"))
CUT_SLICE = planted((TRAIN_SET, TRAIN_SET.replace("x[:64]", "x[rank:64:2]")))
SHARD = "list(datasets.Dataset.from_dict({'n': range(64)}).shard(2, rank)['n'])"
CUT_SHARD = planted(and_then(f"import datasets; train_set = TensorDataset(*train_set[{SHARD}])"))
BY_SLICE = unsampled((TRAIN_SET, TRAIN_SET.replace("x[:64]", "x[rank * 16 : rank * 16 + 48]")))
UNSHUFFLED = planted(("train_set, shuffle=True", "train_set, shuffle=False"))
ALL_RANKS = planted(("first = dist.get_rank()", "first = 0"), base=STREAMED)
ALL_WORKERS = planted(
    ("* (worker.id if worker else 0)", "* 0"),
    ("(train_set, batch_size=8)", "(train_set, batch_size=8, num_workers=2)"),
    base=STREAMED,
)
CUT_STREAM = planted(("[first::step]", "[first::step][first::step]"), base=STREAMED)
PADDED = planted(("TensorDataset(x[64:], (x[64:]", "TensorDataset(x[63:], (x[63:]"))
WORKERS_ALIKE = planted((WORKERS[0], WORKERS[1] + ", worker_init_fn=seed"), base=AUGMENTED)
RANKS_ALIKE = planted(("np.random.seed(rank)", "np.random.seed(0)"), base=AUGMENTED)
SEED_OF_RANK = planted(("shuffle=True, seed=0", "shuffle=True, seed=rank"))
UNEVEN = unsampled(
    subset("range(0, 33) if rank else range(33, 64)"), loader=SHUFFLED.replace("8", "1")
)
FIRST_AGAIN = planted(
    (LOOP, "for (inputs, labels) in (next(iter(train_loader)) for _ in range(4))")
)
ONE_BATCH = planted(
    (f"        {LOOP}:\n", "        for _ in range(4):\n            inputs, labels = batch\n"),
    ("    best = 0.0\n", "    best = 0.0\n    batch = next(iter(train_loader))\n"),
)
VALID, VAL_SET = "DataLoader(val_set, batch_size=8, sampler=val_sampler", "val_set = TensorDataset("
DROPS_LAST = planted((VALID, f"{VALID.replace('8', '5')}, drop_last=True"))
NOISY = """
class Noisy(torch.utils.data.Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        inputs, label = self.data[index]
        return inputs.flip(0) if torch.rand(()) < 0.3 else inputs, label
def without_last(samples): return torch.utils.data.default_collate(samples[:-1])
def main():
"""
VALID_NOISY = planted((MAIN, NOISY), (VALID, VALID.replace("(val_set", "(Noisy(val_set)")))
LEAVES_OUT = planted((MAIN, NOISY), (VALID, f"{VALID}, collate_fn=without_last"))
LOADER_LINE, STREAM_LINE = "train_loader = ", "def __iter__"
# What is wrong → the script, its code, a part of the line to blame, and of the evidence.
EACH = "DataLoader(train_set, batch_size=8, sampler=DistributedSampler(train_set)):"
EACH_EPOCH = planted((SET_EPOCH, ""), ("in train_loader:", f"in {EACH}"))
JITTERS = "            inputs = inputs + torch.randn(inputs.shapeBY)\n"
IN_LOOP = (f"        {LOOP}:\n", f"        {LOOP}:\n            torch.manual_seed(SEED)\n{JITTERS}")
SEEDED_IN_STEPS = planted(IN_LOOP).replace("BY", "").replace("SEED", "rank")
SEEDED_AGAIN = unsampled(
    subset("range(rank, 64, 2)"),
    ("        model.train()\n", "        model.train(); torch.manual_seed(0)\n"),
)
PLANTED = {
    "a last batch is dropped": (DROPS_LAST, "SS112", "val_loader =", "of 16 samples", "last 1"),
    "augmented in evaluation": (VALID_NOISY, "SS113", "val_loader =", "of the first 16", "torch"),
    "rows that are lost": (LEAVES_OUT, "SS111", "val_loader =", "2 batches", "first 1 of 8"),
    "one loader for all": (unsampled(), "SS101", LOADER_LINE, "same 64 samples"),
    "the same copy on each rank": (COPIES, "SS101", LOADER_LINE, "same 64 samples"),
    "no loader and one seed": (ALIKE, "SS101", "loss = loss_of", "same 8 samples"),
    "shares by subset": (BY_SUBSET, "SS102", LOADER_LINE, "both read 32 of their 48"),
    "shares by slice": (BY_SLICE, "SS102", LOADER_LINE, "both read 32 of their 48"),
    "a sampler of a shard": (CUT_SHARD, "SS114", "shuffle=True, seed=0", "rank has a `shard`"),
    "a sampler of a slice": (CUT_SLICE, "SS114", "shuffle=True, seed=0", "a part of one tensor"),
    "a seed for each step": (SEEDED_IN_STEPS, "SS717", "torch.manual_seed(rank)", "of torch"),
    "a seed for each epoch": (SEEDED_AGAIN, "SS103", f"{LOOP}:", "in the same order"),
    "a loader for each epoch": (EACH_EPOCH, "SS103", EACH, "epochs 1 and 2", "was 0 and 0"),
    "no shuffling": (UNSHUFFLED, "SS104", "train_set, shuffle=False", "0, 2, 4, 6"),
    "a stream for all ranks": (ALL_RANKS, "SS105", STREAM_LINE, "of the first"),
    "a stream for all workers": (ALL_WORKERS, "SS106", STREAM_LINE, "all 2 workers"),
    "a stream cut twice": (CUT_STREAM, "SS114", STREAM_LINE, "one row of 2"),
    "padding": (PADDED, "SS107", "val_sampler = ", "33 samples were evaluated 34 times", "of 34"),
    "workers with one seed": (WORKERS_ALIKE, "SS108", LOADER_LINE, "2 workers of rank 0"),
    "ranks with one seed": (RANKS_ALIKE, "SS109", LOADER_LINE, "same state of numpy"),
    "seeded by rank": (SEED_OF_RANK, "SS110", "seed=rank", "rank 1 has seed 1"),
    "uneven shares": (UNEVEN, "SS602", LOOP, "after batch 31 rank 0 leaves"),
    "a batch per epoch": (FIRST_AGAIN, "SS711", "next(iter", "rank 0 read, 3 differ"),
    "one batch for ever": (ONE_BATCH, "SS711", "batch = next", "forward passes"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_with_the_data_is_found_at_its_line(tmp_path, name):
    found = found_in(tmp_path, *PLANTED[name])
    if name == "ranks with one seed":  # the generator that was seen
        assert "`np.random.seed(seed + rank)`" in found.remedy
        assert "torch" not in found.remedy


RIGHT_HERE = "model(inputs).argmax(1) == labels"


@pytest.mark.parametrize(("right", "reduced", "expected"), [
    ("accelerator.gather(RIGHT)", "counts", {"SS107"}),
    ("accelerator.gather_for_metrics(RIGHT)", "counts", set()),
    ("RIGHT", "accelerator.reduce(counts.long())", set()),
])  # fmt: skip
def test_samples_that_accelerate_repeats_count_unless_its_metrics_leave_them_out(
    right, reduced, expected, tmp_path
):
    pytest.importorskip("accelerate")
    text = planted(
        ("import gc\n", "import gc\nfrom accelerate import Accelerator\n"),
        ('dist.init_process_group("gloo")', "accelerator = Accelerator(cpu=True)"),
        (f"{VALID})", "accelerator.prepare(DataLoader(val_set, batch_size=8))"),
        (RIGHT_HERE, right.replace("RIGHT", RIGHT_HERE)),
        ("len(labels)])", "len(right)])"),
        ("        dist.all_reduce(counts)\n", f"        counts = {reduced}\n"),
        base=PADDED,
    )
    report = check(tmp_path, text)
    assert codes(report) == expected
    assert any("33 samples" in said for said in report.not_seen) == (right == "RIGHT")


JOIN = """\
        own = torch.cat(rights).float()
        dist.all_gather(parts := [own.clone(), own.clone()], own)
        accuracy = torch.stack(parts, 1).flatten()[:ALL].mean().item()
"""


def test_padding_that_a_script_leaves_out_by_hand_does_not_count(tmp_path):
    own = planted(
        (RIGHT_HERE, f"({RIGHT_HERE})[: len(labels) - (rank and len(labels) == 1)]"),
        ("len(labels)])", "len(right)])"),
        base=PADDED,
    )
    gathered = planted(
        ("manual_seed(1)", "manual_seed(7)"),  # 13 of 34 are right: no share of one rank's 17
        ("        counts = torch.zeros(2)\n", "        rights = []\n"),
        ("counts += torch.tensor([float(right.sum()), len(labels)])", "rights.append(right)"),
        (
            "        dist.all_reduce(counts)\n        accuracy = float(counts[0] / counts[1])\n",
            JOIN,
        ),
        base=PADDED,
    )
    assert check(tmp_path, own).findings == []
    of_rank = (".float()\n        dist", ".float(); own.mean().item()\n        dist")
    numpy = ("ALL].mean().item()", "ALL].numpy().mean()"), ("accuracy:.3f", "accuracy:.2f")
    for text in (gathered, planted(of_rank, *numpy, base=gathered)):
        assert codes(check(tmp_path, text.replace("ALL", "33"))) == set()
    found_in(tmp_path, gathered.replace("ALL", ""), "SS107", "val_sampler = ", "of 34")


def test_the_remedy_names_the_loader_that_the_loop_wraps(tmp_path):
    loop = "for _, (inputs, labels) in enumerate(iter(train_loader)):"
    text = planted((SET_EPOCH, ""), (LOOP + ":", loop))
    found = found_in(tmp_path, text, "SS103", loop, "epoch was 0 and 0")
    assert found.remedy.splitlines() == ["+ train_loader.sampler.set_epoch(epoch)", f"  {loop}"]


EPOCHS = """\
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        while True:
            yield from range(100)
class Count(torch.utils.data.IterableDataset):
    def __iter__(self): yield from range(100)
data = torch.arange(100.0)
batches = BatchSampler(SequentialSampler(data), 5, drop_last=False)
loaders = {
    "plain": DataLoader(data, batch_size=2),
    "workers": DataLoader(data, batch_size=2, num_workers=2),
    "persistent": DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True),
    "batches": DataLoader(data, batch_sampler=batches),
    "unbatched": DataLoader(data, batch_size=None),
    "short": DataLoader(data, batch_size=25),
    "stream": DataLoader(Count(), batch_size=2),
    "two streams": DataLoader(Count(), batch_size=2, num_workers=2, persistent_workers=True),
}
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for name, loader in loaders.items():
    for epoch in range(3):
        firsts = []
        for batch in loader:
            firsts.append(int(batch.flatten()[0]))
            optimizer.zero_grad()
            model(batch.float().reshape(-1, 1)).mean().backward()
            optimizer.step()
        print(name, epoch, *firsts)
counted = iter(loaders["plain"])
for epoch in range(4):
    iterator = iter(loaders["plain"])
    print("counted", epoch, *(int(next(iterator)[0]) for _ in range(len(loaders["plain"]))))
endless = iter(DataLoader(data, batch_size=2, sampler=Endless()))
print("endless", 0, *(int(next(endless)[0]) for _ in range(60)))
"""


def test_an_epoch_is_its_first_batches_and_its_last_and_later_ones_are_one_batch(tmp_path):
    report = check(tmp_path, EPOCHS, nproc=1)
    read: dict[str, list[list[int]]] = {}
    for line in report.output[0].splitlines():
        name, numbers = re.fullmatch(r"(\D+) \d ([\d ]+)", line).groups()
        read.setdefault(name, []).append([int(number) for number in numbers.split()])
    plain = [*range(0, 20, 2), 98]
    for name in ("plain", "workers", "persistent"):
        assert read[name] == [plain, plain, [0]]
    assert read["batches"] == [[*range(0, 50, 5), 95]] * 2 + [[0]]
    assert read["unbatched"] == [[*range(10), 99]] * 2 + [[0]]
    assert read["short"] == [[0, 25, 50, 75]] * 2 + [[0]]
    assert read["stream"] == [plain[:-1]] * 2 + [[0]]
    assert [len(epoch) for epoch in read["two streams"]] == [10, 10, 1]
    assert read["counted"] == [plain] * 4  # who counts batches asks for no more than there are
    assert read["endless"] == [[*range(0, 100, 2), *range(0, 20, 2)]]


RIGHT = '''\
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler
from torch.utils.data import DistributedSampler, RandomSampler
class KeyedBySample(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        np.random.seed(index)
        return torch.from_numpy(np.random.randn(8).astype("float32"))
class Masked(KeyedBySample):
    def __getitem__(self, index):
        return super().__getitem__(index) * (torch.rand(8) > 0.1)
class OwnPart(torch.utils.data.Dataset):
    """Its part is chosen as it is read."""
    def __init__(self, x):
        self.x = x
        self.others = torch.tensor(1.0), torch.eye(2).to_sparse(), x.to("meta"), x.T.bool()
    def __len__(self):
        return len(self.x) // dist.get_world_size()
    def __getitem__(self, index):
        return self.x[index * dist.get_world_size() + dist.get_rank()]
def cycle(loader):
    while True:
        yield from loader
def seeded(worker):
    np.random.seed(0)
def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = TensorDataset(x)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)  # as the remedy says
    def step(rows):
        optimizer.zero_grad()
        model(rows).pow(2).mean().backward()
        optimizer.step()
    def shared(dataset, **more):
        return DataLoader(dataset, 4, sampler=DistributedSampler(dataset), **more)
    loaders = [
        DataLoader(TensorDataset(x[rank::size]), 4, shuffle=True),
        DataLoader(TensorDataset(x[rank::size]), 32, shuffle=True),  # one batch is all there is
        DataLoader(Subset(data, range(rank, 64, size)), 4, shuffle=True),
        DataLoader(OwnPart(x), 4, shuffle=True, generator=torch.Generator()),
        DataLoader(data, 4, sampler=WeightedRandomSampler(torch.ones(64), 32)),
        DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=32)),
        DataLoader(range(32), 4, shuffle=True, generator=torch.Generator(),
                   collate_fn=lambda numbers: (x[rank::size][torch.tensor(numbers)],)),
        shared(KeyedBySample()),
        shared(KeyedBySample(), num_workers=2, worker_init_fn=seeded),
        shared(Masked(), num_workers=2),
        DataLoader(TensorDataset(x[rank::size]), 4, sampler=DistributedSampler(range(32), 1, 0)),
        shared(TensorDataset(torch.randn(64, 8))),
    ]
    for loader in loaders:
        for batch in loader:
            rows = batch if isinstance(batch, torch.Tensor) else batch[0]
            step(rows)
    uneven = DataLoader(Subset(data, range(20) if rank else range(20, 64)), 1, shuffle=True)
    with Join([model]):
        for (rows,) in uneven:
            step(rows)
    endless = cycle(loaders[0])
    for _ in range(30):
        (rows,) = next(endless)
        step(rows)
    model.eval()
    padded = Subset(data, range(33))
    with torch.no_grad():
        right = []
        for (rows,) in DataLoader(padded, 4, sampler=DistributedSampler(padded, shuffle=False)):
            right.append((model(rows)[:, 0] > 0).float())
        gathered = [torch.zeros(17) for _ in range(size)]
        dist.all_gather(gathered, torch.cat(right))
        print(torch.stack(gathered, 1).flatten()[:33].mean().item())
    del model  # its reducer would hold the group
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
'''


def test_nothing_is_found_in_what_looks_like_a_mistake_with_the_data_and_is_right(tmp_path):
    report = check(tmp_path, RIGHT)
    assert [f for f in report.findings if f.severity != "advice"] == []
    assert {said[:5] for said in report.not_seen} >= {"SS107", "SS114"}


HALF = "torch.randperm(64, generator=torch.Generator().manual_seed(1))"


@pytest.mark.parametrize("rows", [
    "self.x[torch.randint(16, (64,), generator=torch.Generator().manual_seed(first))]",
    "self.x[::2][first::step]",
    f"map(self.x.__getitem__, {HALF}[:48][first::step].tolist())",
], ids=["with replacement", "one of two", "a shuffled half"])  # fmt: skip
def test_streams_that_are_shared_out_once_or_drawn_are_right(rows, tmp_path):
    text = planted(("in self.x[first::step]:", f"in {rows}:"), base=STREAMED)
    assert check(tmp_path, text).findings == []


def test_rows_that_a_batch_lacks_are_counted_where_that_is_sure():
    x, lengths = torch.randn(4, 3), (3, 6, 4)
    assert lost_rows([*x, None], x[1:]) == 1
    assert lost_rows(list(x), x[:3] + 1) == 0, "they may be mixed or augmented"
    assert lost_rows(list(x), [x[:1], x[1:]]) == 0
    words = list(torch.randperm(sum(lengths)).split(lengths))
    assert lost_rows(words, pad_sequence(words[1:], batch_first=True)[:, :-1]) == 1
    assert lost_rows(words, pad_sequence(words[1:])) == 0, "time comes first"
    assert lost_rows(words, torch.cat(words)[None]) == 0, "packed into one row"
