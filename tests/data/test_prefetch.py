"""Batches on their way to a device: one ahead, in order, with a stand-in for what copies them."""

import contextlib
import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from samestep import UserError, uniform
from samestep.base.trees import map_leaves
from samestep.core.data import memory_source, prefetch
from samestep.core.data.order import untimed
from samestep.core.data.prefetch import SideStream, on_device
from samestep.core.data.recipe_data import open_source
from samestep.launch.ranks.world import World
from tests import tiny
from tests.command_line import read_json
from tests.data.test_batches import BOTH_KINDS, Listed, Noisy, same, samples, source, steps_of
from tests.processes import run_ranks
from tests.session.test_training_run import FLAGS, session

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Copier:  # copies at once, and takes down what it was asked for
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
    setattr_(memory_source, "_fits_on", lambda _stored, _world: False)


def pairs(count, log=None, fails_at=None):
    for number in range(count):
        if number == fails_at:
            raise ValueError(number)
        if log is not None:
            log.append(f"read {number}")
        yield torch.tensor([number]), torch.tensor([-number])


def test_a_batch_is_copied_ahead_and_an_interrupt_not_put_off(copier):
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

    def interrupted():
        yield from pairs(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(on_device(interrupted(), CPU, untimed))


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


class Leaf:  # a stand-in for a tensor that says what is done to it, and in which stream
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


class Cuda:  # a stand-in for `torch.cuda`: streams and events that say what is asked of them
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

        stream = SimpleNamespace(name=name, record_event=record_event, wait_event=wait_event)
        return stream

    def Event(self, **_how):  # noqa: N802
        def record(stream):
            copied = [entry[1] for entry in self.log if entry[0] == "copy"]
            event.of, event.after = stream.name, max(copied, default=None)
            self.log.append(("marks", stream.name))

        event = SimpleNamespace(of=None, after=None, record=record)
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
    stream = SideStream(GPU)
    zero = stream.start(({"a": [Leaf(cuda, 0)]}, (Leaf(cuda, 1),)))
    assert [entry for entry in cuda.log if entry[0] in ("pin", "copy")] == [
        *(("pin", 0), ("copy", 0, "side"), ("pin", 1), ("copy", 1, "side"))
    ]
    assert ("host waits", None) in cuda.log, "nothing has begun yet: it returns at once"
    stream.start((Leaf(cuda, 2), Leaf(cuda, 3, "cuda:0")))
    pinned = [entry[1] for entry in cuda.log if entry[0] == "pin"]
    assert pinned == [0, 1, 2], "what is on the device stays there"
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


def opened(data, rank=0, world_size=1, **how):
    shifted = lambda inputs, keys: inputs.float() + uniform(keys, 2)  # noqa: E731
    doubled = lambda inputs: inputs.mul_(2)  # noqa: E731 - in place: the data must not change
    return source(data, rank, world_size, **{"transform": doubled, "augment": shifted} | how)


@BOTH_KINDS
@pytest.mark.parametrize(("rank", "first_step"), [(0, 3), (2, 0)])
def test_what_is_copied_ahead_is_what_is_read_in_place(monkeypatch, kind, rank, first_step):
    monkeypatch.setattr(memory_source, "_STEPS_PER_GATHER", 2)
    plain = opened(kind(samples(31)), rank, 3)
    its, evaluated = steps_of(plain, 2, first_step), dict(enumerate(plain.evaluation(4)))
    num_blocks = len(list(plain.blocks(2, first_step, global_batch=4, drop_last=False)))
    copier, data = Copier(), samples(31)
    use_instead(copier, monkeypatch.setattr)
    ahead = opened(kind(data), rank, 3)
    assert same(steps_of(ahead, 2, first_step), its)
    assert copier.waited == num_blocks
    assert same(dict(enumerate(ahead.evaluation(4))), evaluated)
    assert torch.equal(data[0], samples(31)[0])
    for batch in plain.evaluation(4):
        batch.targets.add_(1)  # as a loss may do
    assert same(dict(enumerate(plain.evaluation(4))), dict(enumerate(ahead.evaluation(4))))


class Broken(Listed):
    def __getitem__(self, index):
        if index == 17:
            raise OSError(5, "lost")
        return super().__getitem__(index)


def first_steps(one):
    for block in one.blocks(0, 0, global_batch=4, drop_last=False):
        yield block.first_step


def _with_workers():  # read ahead with two workers; return what was read, and whether they are gone
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


class Dies(Listed):  # its ninth sample ends the process that reads it
    def __init__(self, *data, end):
        super().__init__(*data)
        self._end = end

    def __getitem__(self, index):
        if index == 9:
            self._end()
        return super().__getitem__(index)


def _killed(by=signal.SIGKILL):
    os.kill(os.getpid(), by)


def _read_by_dying_workers():
    looks = _MultiProcessingDataLoaderIter._try_get_data
    looks.__defaults__ = (0.1,)  # PyTorch looks every 5 s whether its workers live
    said, child_handler = [], signal.getsignal(signal.SIGCHLD)
    printed = os.open(".", os.O_TMPFILE | os.O_RDWR)
    os.dup2(printed, 2)
    for end in (partial(os._exit, 3), _killed, partial(_killed, signal.SIGSEGV)):
        try:
            list(first_steps(opened(Dies(*samples(31), end=end), num_workers=1)))
        except (UserError, RuntimeError) as error:
            said.append((type(error), str(error)))
    as_before = signal.getsignal(signal.SIGCHLD) == child_handler
    return said, as_before, os.pread(printed, 9999, 0)


def test_a_worker_that_ends_is_told_with_its_end_the_data_set_and_the_samples(tmp_path):
    ((said, as_before, errors),) = run_ranks(_read_by_dying_workers, 1, tmp_path)
    left, killed, crashed = said
    assert (left[0], killed[0]) == (UserError, RuntimeError)
    assert all("Dies" in said and "samples " in said for _kind, said in (left, killed))
    assert "exit code 3" in left[1]
    assert "SIGKILL" in killed[1]
    assert "memory" in killed[1]
    assert "SIGSEGV" in crashed[1]
    assert b"\0" not in errors
    assert as_before, "PyTorch would raise in whatever line the rank is at"


def test_a_training_that_copies_ahead_is_the_same_also_stopped_and_resumed(tmp_path, monkeypatch):
    recipe, whole, ahead = tiny.write_recipe(tmp_path), tmp_path / "whole", tmp_path / "ahead"
    tiny.trained(recipe, whole, *FLAGS)
    copier = Copier()
    use_instead(copier, monkeypatch.setattr)
    monkeypatch.setattr(memory_source, "_STEPS_PER_GATHER", 2)
    assert session(recipe, *FLAGS, "--run-dir", str(ahead), stop_at=7)["outcome"].signum
    tiny.resumed(ahead)
    assert copier.waited > 11
    tiny.assert_same_training(ahead, whole, tolerance=0)
    assert read_json(ahead / "result.json")["status"] == "completed"
    records = tiny.all_records(ahead)
    for record in (r for r in records if r["event"] == "epoch"):
        total = sum(record["phases"].values())
        seconds = record["train_seconds"]
        assert seconds / 2 < total <= seconds + 1e-3  # between phases a busy machine may wait
    for start in (r for r in records if r["event"] == "start"):
        assert any("CPU memory" in note for note in start["notes"]), "it could be on the device"


GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch):  # GPUs of 80 GiB; what the memory of each holds is counted
    held = SimpleNamespace(count=1, others=0, allocated=0, cached=0)

    def free():
        return 80 * GIB - held.others - held.allocated - held.cached

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _d: (free(), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _d: held.allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _d: held.allocated + held.cached)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: held.count)
    return held


def on_gpu(ranks=1, backend="none"):
    return World(world_size=ranks, local_world_size=ranks, device=GPU, backend=backend)


def test_data_takes_a_quarter_of_a_gpu_and_what_does_not_fit_is_left_to_the_cpu(gpus):
    assert memory_source._room(on_gpu()) == 20 * GIB
    gpus.allocated = 15 * GIB  # the training set
    assert memory_source._room(on_gpu()) == 5 * GIB
    gpus.allocated, gpus.cached = 18 * GIB, 30 * GIB  # and what PyTorch keeps for itself
    assert memory_source._room(on_gpu()) == 2 * GIB
    gpus.allocated = gpus.cached = 0
    world = on_gpu()
    stored = [SimpleNamespace(nbytes=8 * GIB, device=CPU) for _ in range(2)]
    assert memory_source._fits_on(stored, world)
    gpus.allocated = 5 * GIB
    assert not memory_source._fits_on(stored, world)
    for tensor in stored:
        tensor.device = world.device
    assert memory_source._fits_on(stored, world)


@pytest.mark.parametrize(
    ("ranks", "backend", "count", "sharing"),
    [(3, "gloo", 2, 2), (8, "nccl", 8, 1), (8, "nccl", 1, 1)],
)
def test_ranks_that_share_a_gpu_share_the_quarter(gpus, ranks, backend, count, sharing):
    gpus.count = count
    assert memory_source._room(on_gpu(ranks, backend)) == 20 * GIB / sharing
    gpus.others = 10 * GIB  # another of these ranks was faster
    assert memory_source._room(on_gpu(ranks, backend)) < 20 * GIB / sharing


@pytest.mark.parametrize(("ranks", "on_cuda"), [(1, 8), (8, 64)])
def test_a_block_for_a_gpu_holds_more_steps(copier, ranks, on_cuda):
    images = torch.zeros((4, 3, 32, 32), dtype=torch.uint8), torch.arange(4)
    for device, expected in ((CPU, 1), (GPU, on_cuda)):
        world = World(world_size=ranks, device=device)
        one = open_source(images, world, seed=1, dtype=torch.float32, num_workers=0)
        assert one.steps_per_block(512) == expected
