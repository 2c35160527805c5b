"""A recipe over streams of an odd size, and what is needed to train it.

131 elements and a global batch of 12: the last global batch is incomplete. What an element draws
tells whether it is seeded by its place.
"""

from pathlib import Path

from tests import tiny

RECIPE = """
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import IterableDataset
from samestep import Recipe, Splits
@dataclass(frozen=True)
class Options:
    kind: str = "plain"
    elements: int = 131
    fail: int = -1
    tars: str = ""
def sample(place):
    x = torch.randn(8, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
    return x, (x[0] * x[1] > 0).long()
class Numbers(IterableDataset):
    def __init__(self, places, fail=-1): self.places, self.fail = places, fail
    def __iter__(self):
        for place in self.places:
            if place == self.fail: raise ValueError("a broken element")
            x, y = sample(place)
            yield x + 0.1 * torch.randn(8, dtype=torch.float64), y
class ByRank(Numbers):
    '''What divides itself by rank, or ends elsewhere on each.'''
    def __iter__(self):
        rank = torch.distributed.get_rank()
        if len(self.places) > 131:
            yield from map(sample, range(100 + rank))
        else:
            yield from map(sample, self.places[rank::2])
class Shards(Numbers):
    opened = Path(__file__).with_name("opened")
    def __init__(self, parts):
        super().__init__([place for part in parts for place in part])
        self.parts = parts
    @property
    def num_shards(self): return len(self.parts)
    def shard(self, num_shards, index): return Shards(self.parts[index::num_shards])
    def __iter__(self):
        if self.opened.exists():
            import os
            (self.opened / f"{os.environ.get('RANK', 0)}-{self.parts[0][0]}").touch()
        yield from super().__iter__()
class Counted(Numbers):
    '''It goes on from a state, and fails if it is read from the beginning again.'''
    at = 0
    def __iter__(self):
        for place in self.places[self.at:]:
            self.at += 1
            yield sample(place)
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
def from_list(places):
    for place in places: yield {"place": place}
def hugging_face(places):
    import datasets
    one = datasets.IterableDataset.from_generator(from_list, gen_kwargs={"places": places})
    return one.map(lambda row: {"noise": float(torch.randn(()))})
class Tars(IterableDataset):
    def __init__(self, files): self.files = files
    @property
    def num_shards(self): return len(self.files)
    def shard(self, num_shards, index): return Tars(self.files[index::num_shards])
    def __iter__(self):
        import webdataset
        rows = webdataset.WebDataset(
            self.files, shardshuffle=False, nodesplitter=None, workersplitter=None)
        yield from rows.decode().to_tuple("pth", "cls")
def collate(rows):
    if isinstance(rows[0], dict):
        rows = [(x + row["noise"], y) for row in rows for x, y in [sample(row["place"])]]
    return (torch.stack([torch.as_tensor(x) for x, _ in rows]),
            torch.stack([torch.as_tensor(y) for _, y in rows]))
def data(o):
    n = range(o.elements)
    uneven = [n[:3], n[3:50], n[50:60], n[60:61], n[61:]]
    train = {
        "plain": lambda: Numbers(n, o.fail),
        "by rank": lambda: ByRank(n),
        "shards": lambda: Shards([n[k::7] for k in range(7)]),
        "uneven": lambda: Shards(uneven),
        "counted": lambda: Counted(n),
        "hugging face": lambda: hugging_face(list(n)),
        "tar": lambda: Tars(sorted(map(str, Path(o.tars).glob("*.tar")))),
    }[o.kind]()
    return Splits(train=train, validation=Numbers(range(1000, 1037)))
def model(o): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
recipe = Recipe(model=model, data=data, collate=collate, options=Options, settings={
    "epochs": 2, "batch_size": 12, "lr": 0.01, "precision": "fp64", "log_every": 1})
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    return tiny.write_recipe(folder, text, "flow.py")


def write_tars(folder: Path, elements: int = 131, shards: int = 3) -> None:
    """Write the elements into small tar files, as WebDataset reads them."""
    import torch
    import webdataset

    folder.mkdir()
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as file:
            for place in range(elements)[shard::shards]:
                x = torch.randn(8, generator=torch.Generator().manual_seed(place)).double()
                label = int(x[0] * x[1] > 0)
                file.write({"__key__": f"{place:05d}", "pth": x, "cls": label})
