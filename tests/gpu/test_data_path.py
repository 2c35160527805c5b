"""Batches on a GPU: bit for bit those of the CPU, copied ahead without anybody waiting."""

import pytest
import torch
from torch.utils.data import Dataset

from samestep.core.data import memory_source
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.prefetch import send
from samestep.core.data.recipe_data import open_source
from samestep.core.recipes import cifar10
from samestep.launch.ranks.world import World
from tests.gpu.trainings import no_synchronisation
from tests.processes import run_ranks

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
NUM_SAMPLES, BATCH = 203, 16


def samples():
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (NUM_SAMPLES, 3, 32, 32), generator=generator)
    return images.to(torch.uint8), torch.randint(0, 10, (NUM_SAMPLES,), generator=generator)


class Listed(Dataset):  # the same, one at a time; it counts what was read
    def __init__(self):
        self.images, self.labels = samples()
        self.read = 0

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        self.read += 1
        return self.images[index], self.labels[index]


class Trees(Listed):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        size = torch.tensor(index, dtype=torch.float64)
        return {"image": image, "more": [size]}, (label, size)


def opened(kind, device, **how):
    data = {"loader": Listed, "trees": Trees}.get(kind, samples)()
    whole = {} if kind == "trees" else {"augment": cifar10.augment, "transform": cifar10.normalise}
    parts = {"num_workers": 0} | whole | how
    return open_source(data, World(device=device), seed=5, dtype=torch.float32, **parts)


def leaves(tree):
    return [leaf.cpu() for leaf in torch.utils._pytree.tree_leaves(tree)]


def read(source, first_step=0):
    """Return all tensors of two epochs and of an evaluation, step by step."""
    found = []
    for epoch in (0, 1):
        blocks = source.blocks(epoch, first_step, global_batch=BATCH, drop_last=False)
        steps = (step for block in blocks for step in block.singles())
        found += [(epoch, step.first_step, leaves((step.inputs, step.targets))) for step in steps]
    found += [(-1, k, leaves(pair[:2])) for k, pair in enumerate(source.evaluation(BATCH))]
    return found


def assert_same(one, other):
    assert [entry[:2] for entry in one] == [entry[:2] for entry in other]
    for (*place, found), (*_, expected) in zip(one, other, strict=True):
        assert all(map(torch.equal, found, expected)), place


KINDS = ["on the device", "on the host", "loader", "trees"]


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    if request.param == "on the host":
        monkeypatch.setattr(memory_source, "_fits_on", lambda _stored, world: world.device == CPU)
        monkeypatch.setattr(memory_source, "_BYTES_PER_GATHER_ON_CUDA", 1 << 20)
    return request.param


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("first_step", [0, 5])
def test_batches_are_those_of_the_cpu_to_the_last_bit(cuda, kind, first_step):
    assert_same(read(opened(kind, cuda), first_step), read(opened(kind, CPU), first_step))


def _with_workers(device):
    source = opened("loader", torch.device(device), num_workers=2)
    found = read(source)
    source.close()
    return found


@pytest.mark.gpu(dry=True)
def test_worker_processes_read_the_same(cuda, tmp_path):
    (found,) = run_ranks(_with_workers, 1, tmp_path, str(cuda))
    assert_same(found, read(opened("loader", CPU)))


def test_data_that_fits_is_on_the_device(cuda):
    source = opened("on the device", cuda)
    assert isinstance(source, MemorySource)
    assert source.is_resident
    assert source.targets.device == cuda
    assert 0 < memory_source._room(World(device=cuda)) <= torch.cuda.mem_get_info(cuda)[1] / 4


def test_the_host_never_waits_for_the_device_in_a_pass(cuda, kind):
    source = opened(kind, cuda)
    read(source)  # what is made once is made here
    with no_synchronisation():
        for block in source.blocks(2, 0, global_batch=BATCH, drop_last=False):
            for step in block.singles():
                assert step.rows
        for _ in source.evaluation(BATCH):
            pass


def test_what_waits_would_be_noticed(cuda):
    with no_synchronisation(), pytest.raises(RuntimeError):
        torch.arange(3, device=cuda).cpu()


def test_a_batch_is_whole_when_a_slow_device_computes_with_it(cuda, kind):
    """The host is ahead: a copy that came late, or memory reused too early, would show here."""
    expected = [sum(t.double().sum() for t in tensors) for _, _, tensors in read(opened(kind, CPU))]
    sums = []

    def use(inputs, targets):
        torch.cuda._sleep(2_000_000)
        tensors = torch.utils._pytree.tree_leaves((inputs, targets))
        sums.append(sum(tensor.double().sum() for tensor in tensors))

    source = opened(kind, cuda)
    for epoch in (0, 1):
        for block in source.blocks(epoch, 0, global_batch=BATCH, drop_last=False):
            for step in block.singles():
                use(step.inputs, step.targets)
    for inputs, targets, *_ in source.evaluation(BATCH):
        use(inputs, targets)
    assert torch.allclose(torch.stack(sums).cpu(), torch.stack(expected), rtol=1e-12)


@pytest.mark.gpu(dry=True)
def test_the_host_has_read_one_batch_more_than_it_has_handed_out(cuda):
    source = opened("loader", cuda)
    data = source._loader.dataset._dataset
    ahead = 1 if cuda.type == "cuda" else 0
    blocks = source.blocks(0, 0, global_batch=BATCH, drop_last=False)
    for number, _block in enumerate(blocks, start=1):
        twice_more = 2  # the first sample, to find out whether the data set draws
        assert data.read == min((number + ahead) * BATCH, NUM_SAMPLES) + twice_more


def test_a_host_that_is_far_ahead_of_the_device_fills_no_memory(cuda, monkeypatch):
    monkeypatch.setattr(memory_source, "_fits_on", lambda _stored, _world: False)
    data = torch.zeros(64, 1 << 20, dtype=torch.uint8), torch.arange(64)  # a MiB each
    world = World(device=cuda)
    source = open_source(data, world, seed=1, dtype=torch.float32, num_workers=0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    for epoch in range(8):
        for block in source.blocks(epoch, 0, global_batch=16, drop_last=False):
            assert block.num_steps == 1
            torch.cuda._sleep(20_000_000)
            block.inputs.amax()  # a sum would hold a copy of 8 bytes for each of 1
    batch = 16 << 20
    assert torch.cuda.max_memory_allocated(cuda) - before <= 5 * batch


@pytest.mark.gpu(dry=True)
def test_what_is_sent_arrives_though_the_host_drops_it_at_once(cuda):
    sent = []
    for number in range(50):
        if cuda.type == "cuda":
            torch.cuda._sleep(200_000)
        sent.append(send(torch.full((1000,), number), cuda))
    assert [int(tensor.sum()) for tensor in sent] == [1000 * number for number in range(50)]
