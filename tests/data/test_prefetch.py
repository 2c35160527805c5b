"""Batches on their way to a device: one ahead, in order, with a stand-in for what copies them."""

import contextlib
import itertools
import os
import signal
import types
from functools import partial

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from samestep import UserError, uniform
from samestep.data import memory_source, prefetch
from samestep.data.batches import open_source
from samestep.data.blocks import untimed
from samestep.data.memory_source import MemorySource
from samestep.data.prefetch import SideStream, on_device, send
from samestep.data.trees import map_leaves
from samestep.ranks.world import World
from samestep.run.records import PHASES
from samestep.training.phases import DevicePhases
from tests import tiny
from tests.command_line import read_json
from tests.data.test_batches import BOTH_KINDS, Listed, Noisy, same, samples, source, steps_of
from tests.processes import run_ranks

CPU = torch.device("cpu")


class Copier:
    """Copies at once, and takes down what it was asked for."""

    def __init__(self, log=None):
        self.log = [] if log is None else log
        self.started, self.waited, self.last = 0, 0, -1

    def start(self, pair):
        self.log.append(f"copy {self.started}")
        self.started += 1
        return self.started - 1, map_leaves(torch.clone, pair)

    def wait(self, started):
        number, pair = started
        assert number > self.last, "batches are waited for in their order"
        self.last = number
        self.log.append(f"wait {number}")
        self.waited += 1
        return pair


@pytest.fixture
def copier(monkeypatch):
    """Let batches be copied ahead on the CPU, and no data be where the model is."""
    one = Copier()
    use_instead(one, monkeypatch.setattr)
    return one


def use_instead(copier, setattr_=setattr):
    setattr_(prefetch, "_copier", lambda _device: copier)
    setattr_(memory_source, "_fits", lambda _stored, _world: False)


def pairs(count, log=None, fails_at=None):
    for number in range(count):
        if number == fails_at:
            raise ValueError(number)
        if log is not None:
            log.append(f"read {number}")
        yield torch.tensor([number]), torch.tensor([-number])


def test_a_batch_is_read_and_its_copy_begun_before_the_one_before_it_is_used(copier):
    log = copier.log
    for number, (inputs, targets) in enumerate(on_device(pairs(3, log), CPU, log.append)):
        assert (int(inputs), int(targets)) == (number, -number)
        log.append(f"use {number}")
    assert log == [
        *("read 0", "data", "copy 0"),
        *("read 1", "data", "copy 1", "wait 0", "to_device", "use 0"),
        *("read 2", "data", "copy 2", "wait 1", "to_device", "use 1"),
        *("data", "wait 2", "to_device", "use 2"),
    ]


@pytest.mark.parametrize("of_the_copy", [False, True])
@pytest.mark.parametrize("fails_at", [0, 1, 2, 4])
def test_an_error_comes_in_place_of_its_own_batch(copier, monkeypatch, fails_at, of_the_copy):
    def start(pair, start=copier.start):
        if int(pair[0]) == fails_at:
            raise ValueError(fails_at)
        return start(pair)

    if of_the_copy:
        monkeypatch.setattr(copier, "start", start)
    batches = on_device(pairs(4, fails_at=None if of_the_copy else fails_at), CPU, untimed)
    for number in range(fails_at):
        assert int(next(batches)[0]) == number
    if fails_at < 4:
        with pytest.raises(ValueError, match=str(fails_at)):
            next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_an_interrupt_is_not_put_off(copier):
    def interrupted():
        yield from pairs(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(on_device(interrupted(), CPU, untimed))


def test_who_stops_early_ends_the_reader(copier):
    ended = []

    def read():
        try:
            yield from pairs(9)
        finally:
            ended.append(True)

    batches = on_device(read(), CPU, untimed)
    next(batches)
    batches.close()
    del batches
    assert (ended, copier.started) == ([True], 2)


def test_on_the_cpu_batches_pass_as_they_are():
    given = [((torch.ones(2), {"a": [torch.zeros(3)]}), torch.ones(1)) for _ in range(3)]
    log = []
    for (inputs, targets), pair in zip(on_device(given, CPU, log.append), given, strict=True):
        assert inputs[0] is pair[0][0]
        assert inputs[1]["a"][0] is pair[0][1]["a"][0]
        assert targets is pair[1]
    assert log == ["data", "to_device"] * 3


class Leaf:
    """A stand-in for a tensor that says what is done to it, and in which stream."""

    def __init__(self, cuda, number, device="cpu"):
        self.cuda, self.number, self.device = cuda, number, torch.device(device)

    def pin_memory(self):
        assert self.device.type == "cpu"
        self.cuda.log.append(("pin", self.number))
        return self

    def to(self, device, *, non_blocking):
        assert non_blocking
        self.cuda.log.append(("copy", self.number, self.cuda.current.name))
        return Leaf(self.cuda, self.number, device)

    def record_stream(self, stream):
        self.cuda.log.append(("belongs", self.number, stream.name))


class Cuda:
    """A stand-in for `torch.cuda`: streams and events that say what is asked of them."""

    def __init__(self):
        self.log = []
        self.compute, self.side = self._stream("compute"), self._stream("side")
        self.current = self.compute

    def _stream(self, name):
        def record_event():
            event = self.Event()
            event.record(stream)
            return event

        def wait_event(event):
            self.log.append((name, "waits for", event.of, event.after))

        stream = types.SimpleNamespace(name=name, record_event=record_event, wait_event=wait_event)
        return stream

    def Event(self, **_how):  # noqa: N802
        def record(stream):
            copied = [entry[1] for entry in self.log if entry[0] == "copy"]
            event.of, event.after = stream.name, max(copied, default=None)
            self.log.append(("marks", stream.name))

        event = types.SimpleNamespace(of=None, after=None, record=record)
        event.synchronize = lambda: self.log.append(("host waits", event.of))
        return event

    def Stream(self, _device):  # noqa: N802
        return self.side

    def current_stream(self, _device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_copies_run_on_a_stream_of_their_own_from_pinned_memory(cuda):
    """The computation waits for the copy, and keeps its memory; the host waits a batch later."""
    stream = SideStream(torch.device("cuda", 0))
    zero = stream.start(({"a": [Leaf(cuda, 0)]}, (Leaf(cuda, 1),)))
    assert [entry for entry in cuda.log if entry[0] in ("pin", "copy")] == [
        *(("pin", 0), ("copy", 0, "side"), ("pin", 1), ("copy", 1, "side"))
    ]
    assert ("host waits", None) in cuda.log, "nothing has begun yet: it returns at once"
    cuda.log.append(("pin", "the next"))
    stream.start((Leaf(cuda, 2), Leaf(cuda, 3)))
    cuda.log.clear()
    inputs, (target,) = stream.wait(zero)
    assert inputs["a"][0].device.type == target.device.type == "cuda"
    assert cuda.log == [
        ("compute", "waits for", "side", 1),
        ("belongs", 0, "compute"),
        ("belongs", 1, "compute"),
        ("marks", "compute"),
    ]
    cuda.log.clear()
    stream.start((Leaf(cuda, 4), Leaf(cuda, 5)))
    assert cuda.log[0] == ("host waits", "compute")
    assert cuda.current is cuda.compute


def test_what_is_sent_to_a_gpu_is_pinned_first_and_what_is_there_stays():
    cuda = Cuda()
    gpu = torch.device("cuda", 0)
    assert send(Leaf(cuda, 7), gpu).device == gpu
    assert send(Leaf(cuda, 8, "cuda:0"), gpu).device == gpu
    assert [entry for entry in cuda.log if entry[0] == "pin"] == [("pin", 7)]
    rows = torch.arange(3)
    assert send(rows, CPU) is rows


def test_phases_by_events_add_up_and_waiting_for_the_copy_is_to_device(monkeypatch):
    """The reader takes 5, the rest of a copy 3 and a step 11, by the clock of the device."""
    now = [0]

    class Event:
        def record(self):
            self.at = now[0]

        def query(self):
            return True

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return float(later.at - self.at)

    class Slow(Copier):
        def wait(self, started):
            now[0] += 3
            return super().wait(started)

    def read():
        for pair in pairs(4):
            now[0] += 5
            yield pair

    monkeypatch.setattr(prefetch, "_copier", lambda _device: Slow())
    phases = DevicePhases(Event)
    phases.begin()
    for _ in on_device(read(), CPU, phases.lap):
        now[0] += 11
        phases.lap("forward")
    seconds = phases.total()
    assert tuple(seconds) == PHASES
    assert {p: round(s * 1000) for p, s in seconds.items() if s} == {
        "data": 20,
        "to_device": 12,
        "forward": 44,
    }
    assert now[0] == 76


def shifted(inputs, keys):
    return inputs.float() + uniform(keys, 2)


def doubled(inputs):
    return inputs.mul_(2)  # in place: the data must not change


def opened(data, rank=0, world_size=1, **how):
    return source(data, rank, world_size, **{"transform": doubled, "augment": shifted} | how)


@BOTH_KINDS
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("first_step", [0, 3, 7])
def test_what_is_copied_ahead_is_what_is_read_in_place(monkeypatch, kind, world_size, first_step):
    """Bit for bit, from any step on; the reader of data in memory gathers several steps."""
    monkeypatch.setattr(memory_source, "_STEPS_PER_GATHER", 2)
    for rank in range(world_size):
        plain = opened(kind(samples(31)), rank, world_size)
        its, evaluated = steps_of(plain, 2, first_step), plain.evaluation(4)
        num_blocks = len(list(plain.blocks(2, first_step, global_batch=4, drop_last=False)))
        with monkeypatch.context() as patch:
            copier = Copier()
            use_instead(copier, patch.setattr)
            data = samples(31)
            ahead = opened(kind(data), rank, world_size)
            assert same(steps_of(ahead, 2, first_step), its)
            assert copier.waited == num_blocks
            again = dict(enumerate(ahead.evaluation(4)))
            assert torch.equal(data[0], samples(31)[0])
        assert same(again, dict(enumerate(evaluated)))


class Counted(Listed):
    read = 0

    def __getitem__(self, index):
        self.read += 1
        return super().__getitem__(index)


def test_the_host_is_one_batch_ahead_and_no_more(copier):
    data = Counted(*samples(31))
    blocks = opened(data).blocks(0, 0, global_batch=4, drop_last=False)
    for number, block in enumerate(blocks, start=1):
        assert block.first_step == number - 1
        assert data.read == min(4 * (number + 1), 31)


@BOTH_KINDS
def test_a_batch_that_was_read_ahead_and_not_used_is_read_again(copier, monkeypatch, kind):
    monkeypatch.setattr(memory_source, "_STEPS_PER_GATHER", 1)
    one = opened(kind(samples(31)))
    whole = steps_of(one, 1)
    blocks = one.blocks(1, 0, global_batch=4, drop_last=False)
    taken = {b.first_step: (b.inputs, b.targets) for b in itertools.islice(blocks, 3)}
    blocks.close()
    evaluated = sum(len(y) for _, y, *_ in one.evaluation(4))
    assert evaluated == 31, "an evaluation in between reads its own"
    assert same(whole, taken | steps_of(one, 1, 3))


class Broken(Listed):
    def __getitem__(self, index):
        if index == 17:
            raise OSError(5, "lost")
        return super().__getitem__(index)


def first_steps(one):
    for block in one.blocks(0, 0, global_batch=4, drop_last=False):
        yield block.first_step


def test_a_sample_that_cannot_be_read_fails_at_its_own_step(copier):
    one, whole = opened(Broken(*samples(31))), steps_of(opened(Listed(*samples(31))))
    at = next(step for step, rows in whole.items() if 17 in rows[1])
    taken = []
    with pytest.raises(UserError, match="17 of 31"):
        taken.extend(first_steps(one))
    assert at > 0
    assert taken == list(range(at))


def _with_workers():
    """Read ahead with two workers; return what was read, and whether they are gone."""
    use_instead(Copier())
    one = opened(Listed(*samples(31)), num_workers=2)
    blocks = one.blocks(0, 0, global_batch=4, drop_last=False)
    next(blocks)
    blocks.close()
    read = steps_of(one)
    noisy = steps_of(opened(Noisy(), num_workers=2, transform=None, augment=None))
    broken, taken, message = opened(Broken(*samples(31)), num_workers=2), [], ""
    try:
        taken.extend(first_steps(broken))
    except UserError as error:
        message = str(error)
    workers = one._loader._iterator._workers
    one.close()
    gone = not any(worker.is_alive() for worker in workers)
    return read, noisy, taken, message, gone, broken._loader._iterator is None


def test_workers_read_the_same_ahead_and_end_with_the_source(tmp_path):
    ((read, noisy, taken, message, *gone),) = run_ranks(_with_workers, 1, tmp_path)
    assert same(read, steps_of(opened(Listed(*samples(31)))))
    assert same(noisy, steps_of(opened(Noisy(), transform=None, augment=None)))
    at = next(step for step, rows in read.items() if 17 in rows[1])
    assert taken == list(range(at))
    assert "17 of 31" in message
    assert gone == [True, True]


class Dies(Listed):
    """Its ninth sample ends the process that reads it."""

    def __init__(self, *data, end):
        super().__init__(*data)
        self._end = end

    def __getitem__(self, index):
        if index == 9:
            self._end()
        return super().__getitem__(index)


def _killed():
    os.kill(os.getpid(), signal.SIGKILL)


def _read_by_dying_workers():
    looks = _MultiProcessingDataLoaderIter._try_get_data
    looks.__defaults__ = (0.1,)  # PyTorch looks every 5 s whether its workers live
    said, child_handler = [], signal.getsignal(signal.SIGCHLD)
    for end in (partial(os._exit, 3), _killed):
        try:
            list(first_steps(opened(Dies(*samples(31), end=end), num_workers=1)))
        except (UserError, RuntimeError) as error:
            said.append((type(error), str(error)))
    return said, signal.getsignal(signal.SIGCHLD) == child_handler


def test_a_worker_that_ends_is_told_with_its_end_the_data_set_and_the_samples(tmp_path):
    (((left, killed), as_before),) = run_ranks(_read_by_dying_workers, 1, tmp_path)
    assert (left[0], killed[0]) == (UserError, RuntimeError)
    assert all("Dies" in said and "samples " in said for _kind, said in (left, killed))
    assert "exit code 3" in left[1]
    assert "SIGKILL" in killed[1]
    assert "memory" in killed[1]
    assert as_before, "PyTorch would raise in whatever line the rank is at"


LISTED = """
class Listed(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]

"""
LOADED = tiny.RECIPE.replace("def data(", LISTED + "def data(").replace(
    "train=(x[:n], y[:n])", "train=Listed(x[:n], y[:n])"
)


def _train(recipe, folder):
    """Train whole; then copy ahead, stop within an epoch, and go on."""
    from tests.session.test_training_run import execute

    flags = ("--epochs", "2", "--threads", "1")
    execute(recipe, (*flags, "--run-dir", f"{folder}/whole"))
    copier = Copier()
    use_instead(copier)
    memory_source._STEPS_PER_GATHER = 2
    stopped = execute(recipe, (*flags, "--run-dir", f"{folder}/ahead"), 7)
    execute(f"{folder}/ahead", ("--resume",))
    return stopped["outcome"].signum, copier.waited


@pytest.mark.parametrize("text", [tiny.RECIPE, LOADED], ids=["memory", "loader"])
def test_a_training_that_copies_ahead_is_the_same_also_stopped_and_resumed(tmp_path, text):
    recipe = tiny.write_recipe(tmp_path, text)
    ((signum, copied),) = run_ranks(_train, 1, tmp_path / "output", str(recipe), str(tmp_path))
    assert signum
    assert copied > 11
    ahead = tmp_path / "ahead"
    tiny.assert_same_training(ahead, tmp_path / "whole", tolerance=0)
    assert read_json(ahead / "result.json")["status"] == "completed"
    records = tiny.all_records(ahead)
    for record in (r for r in records if r["event"] == "epoch"):
        total = sum(record["phases"].values())
        assert total == pytest.approx(record["train_seconds"], rel=0.02, abs=1e-3)
    starts = [r for r in records if r["event"] == "start"]
    told = [any("CPU memory" in note for note in start["notes"]) for start in starts]
    assert told == [text is tiny.RECIPE] * 2, "data that could have been on the device is named"


GIB = 1 << 30


class Gpu:
    """A GPU of 80 GiB whose memory is counted."""

    def __init__(self, monkeypatch, count=1):
        self.others, self.allocated, self.cached = 0, 0, 0
        self.free = lambda: 80 * GIB - self.others - self.allocated - self.cached
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _d: (self.free(), 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _d: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _d: self.allocated + self.cached)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def on_gpu(local_ranks=1, backend="none", local_rank=0):
    return World(
        rank=local_rank,
        world_size=local_ranks,
        local_rank=local_rank,
        local_world_size=local_ranks,
        device=torch.device("cuda", 0),
        backend=backend,
    )


@pytest.mark.parametrize(
    ("memory", "room"),
    [
        ({}, 20),
        ({"allocated": 15}, 5),  # the training set
        ({"allocated": 18, "cached": 30}, 2),  # and what PyTorch keeps for itself
        ({"others": 60}, 5),  # another program's
    ],
)
def test_data_takes_a_quarter_of_a_gpu_all_splits_together(monkeypatch, memory, room):
    gpu = Gpu(monkeypatch)
    for name, gib in memory.items():
        setattr(gpu, name, gib * GIB)
    assert memory_source._room(on_gpu()) == room * GIB


@pytest.mark.parametrize(
    ("local_ranks", "backend", "gpus", "sharing"),
    [(2, "gloo", 1, 2), (3, "gloo", 2, 2), (4, "gloo", 2, 2), (8, "nccl", 8, 1), (8, "nccl", 1, 1)],
)
def test_ranks_that_share_a_gpu_share_the_quarter(monkeypatch, local_ranks, backend, gpus, sharing):
    """Under mpirun each rank may see its own GPU alone: NCCL tells that it is not shared."""
    gpu = Gpu(monkeypatch, gpus)
    world = on_gpu(local_ranks, backend)
    assert memory_source._room(world) == 20 * GIB / sharing
    gpu.others = 10 * GIB  # another of these ranks was faster
    assert memory_source._room(world) < 20 * GIB / sharing


def test_what_does_not_fit_is_left_to_the_cpu_and_what_a_recipe_put_there_stays(monkeypatch):
    gpu, world = Gpu(monkeypatch), on_gpu()
    stored = tuple(Leaf(Cuda(), 0) for _ in range(2))
    for leaf in stored:
        leaf.nbytes = 8 * GIB
    assert memory_source._fits(stored, world)
    gpu.allocated = 5 * GIB
    assert not memory_source._fits(stored, world)
    for leaf in stored:
        leaf.device = world.device
    assert memory_source._fits(stored, world)


@pytest.mark.parametrize(
    ("rows", "batch", "ranks", "on_cpu", "on_cuda"),
    [((3, 32, 32), 512, 1, 1, 8), ((3, 32, 32), 512, 8, 1, 64), ((2,), 32, 1, 64, 64)],
    ids=["cifar", "cifar on 8 ranks", "spiral"],
)
def test_a_block_for_a_gpu_holds_more_steps(monkeypatch, rows, batch, ranks, on_cpu, on_cuda):
    monkeypatch.setattr(memory_source, "_fits", lambda _stored, _world: False)
    data = torch.zeros((4, *rows), dtype=torch.uint8), torch.arange(4)
    for device, expected in ((CPU, on_cpu), (torch.device("cuda", 0), on_cuda)):
        world = World(rank=0, world_size=ranks, device=device)
        one = open_source(data, world, seed=1, dtype=torch.float32, num_workers=0)
        assert isinstance(one, MemorySource)
        assert one.steps_per_block(batch) == expected
