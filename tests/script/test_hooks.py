"""What the hooks make of a script's calls into PyTorch: phases, steps, epochs, profilers."""

import io
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from samestep import UserError
from samestep.base.phases import Phases
from samestep.launch.ranks.launch import Launch
from samestep.scripts.hooks import Hooks
from samestep.scripts.measuring.trace_digest import COLLATE
from samestep.scripts.running import RankZeroEnded, ScriptRanks
from tests.processes import TIMEOUT_S, free_port

DATA = TensorDataset(torch.zeros(12, 4), torch.zeros(12, 1))
STEP = ["data", "forward", "backward", "optimizer"]


class Laps(list):  # a lap timer that keeps only the names of the phases, in order
    def lap(self, phase):
        self.append(phase)

    def seen(self):
        """Return the names in turn, without `other` and repetitions, and forget them."""
        names = [name for name, _ in groupby(name for name in self if name != "other")]
        self.clear()
        return names


class Script:  # a training loop as a user would write it, watched by hooks
    def __init__(self, phases=None, *, several=False):
        self.hooks = Hooks(Laps() if phases is None else phases, several=several)
        self.epochs, self.steps, self.profilers = [], [], []
        self.hooks.on_epoch = self.epochs.append
        self.hooks.on_step = self.steps.append
        self.hooks.on_profiler = lambda: self.profilers.append(len(self.steps))
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x=DATA.tensors[0], y=DATA.tensors[1]):
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def evaluate(self, loader):
        self.model.eval()
        with torch.no_grad():
            for x, _ in loader:
                self.model(x)
        self.model.train()


@pytest.fixture
def script():
    one = Script()
    with one.hooks.installed():
        yield one


@pytest.fixture
def laps(script):
    return script.hooks.phases


def test_a_step_is_data_forward_backward_optimizer_apart_from_the_start_of_workers(script, laps):
    for x, y in DataLoader(DATA, batch_size=6):
        script.step(x, y)
    assert laps.seen() == [*STEP, *STEP, "data"]  # at last the end of its iterator
    assert script.steps == [1, 2]
    for x, y in DataLoader(DATA, batch_size=6, num_workers=1):
        script.step(x, y)
    assert laps.seen() == ["workers", *STEP[1:], *STEP, "data"]


def test_a_part_that_is_computed_again_is_backward_and_saving_is_the_checkpoint(script, laps):
    x = torch.zeros(12, 4, requires_grad=True)
    checkpoint(script.model, x, use_reentrant=True).sum().backward()
    assert laps.seen() == ["forward", "backward"]
    torch.save({}, io.BytesIO())
    assert laps == ["other", "checkpoint"]


def test_from_eval_to_train_all_is_evaluation_with_the_data_that_it_reads(script, laps):
    script.step()
    laps.clear()
    script.evaluate(DataLoader(DATA, batch_size=12))
    assert set(laps.seen()) == {"evaluation"}
    script.step()
    assert laps.seen() == ["optimizer", "forward", "backward", "optimizer"]


def test_a_model_that_trains_with_a_frozen_part_in_eval_mode_is_not_evaluated(script, laps):
    script.model.eval()
    script.step()
    laps.clear()
    for x, y in DataLoader(DATA, batch_size=12):
        script.step(x, y)
    assert laps.seen() == [*STEP, "data"]


def closure_of(script, optimizer, sleep_s=0.0):
    def closure():
        time.sleep(sleep_s)
        optimizer.zero_grad()
        loss = (script.model(DATA.tensors[0] + 1) - 2).square().mean()
        loss.backward()
        return loss

    return closure


def lbfgs(script, max_iter=2):
    return torch.optim.LBFGS(script.model.parameters(), max_iter=max_iter)


@pytest.mark.parametrize("by_name", [False, True])
def test_what_an_optimizer_does_around_its_closure_is_its_own(script, laps, by_name):
    optimizer = lbfgs(script, max_iter=1)
    closure = closure_of(script, optimizer)
    for _ in DataLoader(DATA, batch_size=12):
        laps.clear()
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert laps[0] == "other", "Python around the step is not the optimizer's"
        assert laps.seen() == ["optimizer", "forward", "backward", "optimizer"]


def step_of(script, optimizer, sleep_s=0.0):
    return lambda: optimizer.step(closure_of(script, optimizer, sleep_s))


def of_a_function(script, optimizer):
    """A model that is no module, as in `x @ w`."""
    weight = script.model.weight

    def step():
        optimizer.zero_grad()
        (DATA.tensors[0] @ weight.T).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("make", "other_s"),
    [
        (lambda script: script.step, 0.06),
        (lambda script: step_of(script, script.optimizer), 0.06),
        (lambda script: step_of(script, lbfgs(script)), 0.06),
        (lambda script: of_a_function(script, script.optimizer), 0.06),
        (lambda script: step_of(script, script.optimizer, sleep_s=0.02), 0.14),
    ],
    ids=["a plain step", "a closure", "LBFGS", "a model that is a function", "data of a closure"],
)
def test_python_between_the_steps_of_a_loop_without_a_loader_is_other(make, other_s):
    script = Script(Phases())
    step = make(script)
    with script.hooks.installed():
        for _ in range(3):
            step()
            time.sleep(0.02)  # planted: the script's own Python
        step()
    assert script.hooks.phases.running()["other"] >= other_s


def test_a_compiled_graph_holds_nothing_of_what_is_noted(script, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    script.step()
    script.hooks.phases.clear()
    script.model(DATA.tensors[0])
    script.optimizer.zero_grad()
    assert script.hooks.phases == []


LOADER = DataLoader(DATA, batch_size=4)


class Lengthless(TensorDataset):
    def __len__(self):
        raise NotImplementedError


UNKNOWN = Lengthless(*DATA.tensors)
BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LOADER,
        lambda: DataLoader(DATA, batch_size=4),
        lambda: DataLoader(TensorDataset(*DATA.tensors), batch_size=4),
        lambda: DataLoader(UNKNOWN, batch_sampler=BATCHES),
    ],
    ids=["the same loader", "a new one", "a new one of new data", "one of unknown length"],
)
def test_an_epoch_begins_when_the_training_begins_to_read(script, make):
    for _ in range(3):
        for x, y in make():
            script.step(x, y)
        script.evaluate(DataLoader(DATA, batch_size=4))
    assert script.epochs == [1, 2, 3]
    assert (len(script.steps), script.hooks.batches) == (9, 9)


def test_an_evaluation_on_the_training_data_and_steps_without_a_loader_begin_no_epoch(script):
    for _ in range(2):
        for x, y in DataLoader(DATA, batch_size=4):
            script.step(x, y)
        with torch.no_grad():
            for x, _ in DataLoader(DATA, batch_size=4):
                script.model(x)
    assert script.epochs == [1, 2]
    alone = Script()
    with alone.hooks.installed():
        alone.step()
        alone.step()
    assert (alone.steps, alone.epochs, alone.hooks.loader) == ([1, 2], [], None)


def test_the_steps_of_a_second_training_count_and_those_of_a_second_optimizer_do_not(script):
    first, critic = script.optimizer, torch.optim.SGD(script.model.parameters(), lr=0.1)
    script.step()
    for _ in range(2):
        for _ in range(5):
            critic.step()
        script.step()
    assert script.steps == [1, 2, 3]
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
    for _ in range(9):
        script.step()
    assert script.steps == [1, 2, 3, 4, 5], "from the eighth in a row on"
    del first, script.optimizer
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
    script.step()
    assert script.steps[-1] == 6, "at once, where the first is gone"


def test_a_profiler_of_the_scripts_own_is_told_of_and_shows_collating(script):
    script.step()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profiler:
        list(DataLoader(DATA, batch_size=4))
        script.step()
    assert {*script.profilers} == {1}
    assert [event.name for event in profiler.events()].count(COLLATE) == 3


def test_of_several_ranks_the_wait_is_all_reduce_and_pytorch_is_as_before_at_the_end():
    places = [(DataLoader, "__iter__"), (torch.autograd, "backward"), (torch, "save")]
    places += [(nn.Module, "__call__"), (torch.optim.Optimizer, "zero_grad")]
    before = [getattr(place, name) for place, name in places]
    script = Script()
    with pytest.raises(KeyError), script.hooks.installed():
        raise KeyError
    assert [getattr(place, name) for place, name in places] == before
    script.step()
    assert script.steps == []
    script = Script(several=True)
    with script.hooks.installed():
        script.step()
    assert script.hooks.phases.seen() == ["forward", "backward", "all_reduce", "optimizer"]


def test_steps_of_a_script_are_its_changes_of_weights_or_its_optimizers_alone():
    script = Script()
    told = []
    script.hooks.on_own_updates = lambda: told.append(script.hooks.steps)
    with script.hooks.installed():
        for number in range(12):
            loss = nn.functional.mse_loss(script.model(DATA.tensors[0] + 1), DATA.tensors[1])
            loss.backward()
            if number % 2:  # two micro-steps for each update
                for weight in script.model.parameters():
                    weight.data.add_(weight.grad, alpha=-0.01)
                    weight.grad = None
    assert script.steps == [1, 2, 3], "of the updates before the last pass all after the second"
    assert told == [0]
    assert {id(w) for w in script.hooks.trained} == {id(w) for w in script.model.parameters()}
    script = Script()
    optimizer = lbfgs(script, max_iter=6)
    closure = closure_of(script, optimizer)
    with script.hooks.installed():
        for _ in range(4):
            closure()
        for _ in range(2):
            optimizer.step(closure)
            script.optimizer.step()  # of a second optimizer
    assert script.steps == [1, 2]


def rank(number, port, world_size=2, within_s=30.0):
    launch = Launch(rank=number, world_size=world_size, master_port=port)
    return ScriptRanks(launch, within_s)


def both(*functions, port=None):
    """Call a function for each rank, all at once; return what each returned."""
    port = port or free_port()
    with ThreadPoolExecutor(len(functions)) as pool:
        calls = [pool.submit(f, rank(number, port)) for number, f in enumerate(functions)]
        return [call.result(timeout=TIMEOUT_S) for call in calls]


def test_all_ranks_hear_what_rank_0_answers_and_a_single_one_answers_itself():
    def take_part(own):
        own.join()
        questions = iter(range(3))
        answers = [own.agree(lambda: next(questions) if own.rank == 0 else -1) for _ in range(3)]
        return answers, own.gather(f"found by {own.rank}")

    found = ["found by 0", "found by 1"]
    assert both(take_part, take_part) == [([0, 1, 2], found), ([0, 1, 2], [])]
    alone = rank(0, 0, world_size=1)
    alone.join()
    assert alone.agree(lambda: 5) == 5
    alone.end(1)
    assert alone.gather("mine") == ["mine"]


def test_a_rank_that_waits_for_rank_0_learns_at_once_after_how_many_steps_it_ended():
    def leave(own):
        own.join()
        own.agree(lambda: True)
        own.end(7)
        own.gather("")

    def stay(own):
        own.join()
        assert own.agree(lambda: False)
        began = time.monotonic()
        with pytest.raises(RankZeroEnded) as ended:
            own.agree(lambda: False)
        own.gather("")
        return ended.value.steps, time.monotonic() - began < 60

    assert both(leave, stay) == [None, (7, True)]


def test_a_script_can_listen_where_its_ranks_have_met():
    def meet(own):
        own.join()
        own.leave()

    port = free_port()
    both(meet, meet, port=port)
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_never_comes_is_named(number):
    port = free_port()
    with pytest.raises(UserError, match=f"rank {1 - number}"):
        rank(number, port, within_s=0.3).join()
