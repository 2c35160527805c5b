"""What a checkpoint holds is copied to the host; here the CPU stands in for a GPU."""

from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

from samestep.run import host_copy
from samestep.run.host_copy import HostCopies, on_host


@pytest.fixture
def copied(monkeypatch):
    """Let the CPU pass for a GPU: every tensor is copied, and its device waited for."""
    waited = []

    class Stream:
        def synchronize(self):
            waited.append("waited")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    monkeypatch.setattr(host_copy, "_DEVICE", "cpu")
    monkeypatch.setattr(host_copy, "_new_like", lambda tensor, **_: torch.empty_like(tensor))
    return waited


def test_without_cuda_a_state_is_left_as_it_is():
    state = {"model": nn.Linear(2, 2).state_dict()}
    assert on_host(state) is state


def test_all_tensors_are_copied_and_waited_for_once(copied):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    found = on_host(state)
    assert copied == ["waited"]
    assert found["step"] == 3
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for name, tensor in state["model"].items():
        assert found["model"][name].data_ptr() != tensor.data_ptr()
        assert torch.equal(found["model"][name], tensor)
    mine, its = found["optimizer"]["state"][0], state["optimizer"]["state"][0]
    assert all(torch.equal(mine[key], its[key]) for key in its)


def test_a_state_dict_stays_one_with_the_versions_of_its_modules(copied):
    before = nn.BatchNorm1d(2).state_dict()
    after = on_host(before)
    assert type(after) is OrderedDict
    assert after._metadata == before._metadata
    assert list(after) == list(before)


def test_layouts_and_weights_that_are_shared_stay_so(copied):
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    counts = Counter({3: 1})  # as MultiStepLR's milestones
    found = on_host({"a": last, "same": last.detach(), "part": last[:1], "list": [last, counts]})
    assert found["a"].is_contiguous(memory_format=torch.channels_last)
    assert found["same"].data_ptr() == found["a"].data_ptr() == found["list"][0].data_ptr()
    assert found["part"].data_ptr() != found["a"].data_ptr()
    assert torch.equal(found["part"], last[:1])
    assert found["list"][1:] == [counts]


def test_what_changes_after_a_copy_does_not_reach_it_and_the_next_copy_reuses_its_memory():
    state = {"a": torch.ones(3, 4), "b": [torch.ones(3, 4), torch.ones(2)], "steps": [1, 2]}
    copies = HostCopies()
    first = copies.take(state)
    held = {first["a"].data_ptr(), *(t.data_ptr() for t in first["b"])}
    state["a"].add_(1)
    state["steps"].append(3)
    assert torch.equal(first["a"], torch.ones(3, 4))
    assert first["steps"] == [1, 2]
    second = copies.take({**state, "c": torch.zeros(5)})
    assert {second["a"].data_ptr(), *(t.data_ptr() for t in second["b"])} == held
    assert torch.equal(second["a"], state["a"])
    assert torch.equal(second["c"], torch.zeros(5))


def test_a_parameter_comes_back_as_a_parameter_and_keeps_whether_it_is_trained():
    state = {"a": nn.Parameter(torch.ones(2)), "b": torch.ones(2, requires_grad=True)}
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    copied = HostCopies().take({**state, "frozen": frozen})
    assert type(copied["a"]) is type(copied["frozen"]) is nn.Parameter
    assert [copied[name].requires_grad for name in ("a", "b", "frozen")] == [True, True, False]
    assert copied["b"].is_leaf
