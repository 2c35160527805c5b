"""Memory that is used up, and operations without a deterministic form, are told once, in words."""

import gc
import weakref

import pytest
import torch

from samestep.errors import UserError, blame, device_error
from tests.tiny import all_records, write_recipe

# What torch 2.11 says on a GPU, shortened.
TOLD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 3.25 MiB is free. Of the allocated memory 138.00 GiB is allocated by PyTorch, and 0.50 "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
BACKWARD = (
    "scatter_cuda does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this"
)
RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits

class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 2), 0

    def forward(self, x):
        self.seen += self.training
        if {when}:
            raise {error}
        return self.linear(x)

def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:40], y[:40]), validation=(x[40:52], y[40:52]), test=(x[52:], y[52:]))

recipe = Recipe(model=Hungry, data=data, settings=dict(epochs=2, batch_size=8, log_every=1))
"""
NO_MEMORY = f"torch.OutOfMemoryError({TOLD!r})"
IN_TRAINING, IN_EVALUATION = "self.seen == 3", "not self.training and self.seen > 3"


@pytest.fixture
def told_of(refused, tmp_path):
    def told_of(verb, when, error):
        path = write_recipe(tmp_path, RECIPE.format(when=when, error=error), "hungry.py")
        return refused(verb, str(path), "--run-dir", str(tmp_path / "run"))

    return told_of


@pytest.mark.parametrize(
    ("when", "where", "steps"), [(IN_TRAINING, "at step 3", 2), (IN_EVALUATION, "(8, 4)", 5)]
)
def test_memory_that_is_used_up_gets_one_message_with_what_to_do(
    told_of, tmp_path, when, where, steps
):
    message = told_of("train", when, NO_MEMORY)
    for part in (where, "139.80 GiB", "hungry.py:14", "--micro-batch-size", "--eval-batch-size"):
        assert part in message
    assert message.count("expandable_segments") == 1
    records = all_records(tmp_path / "run")
    assert sum(r["event"] == "step" for r in records) == steps
    assert records[-1]["event"] == "stop"
    # What is trained before an evaluation fails is kept.
    assert any(r["event"] == "checkpoint" for r in records) == (when == IN_EVALUATION)


def test_a_profile_tells_it_too(told_of):
    assert "--micro-batch-size" in told_of("profile", IN_TRAINING, NO_MEMORY)


def test_an_operation_without_a_deterministic_form_is_told_with_the_setting(told_of):
    message = told_of("train", IN_TRAINING, f"RuntimeError({BACKWARD!r})")
    assert "--deterministic: " in message
    assert "scatter_cuda" in message
    assert "use_deterministic_algorithms" not in message


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ],
)
def test_memory_ends_in_several_words(text):
    told = device_error(RuntimeError(text))
    assert isinstance(told, UserError)
    assert text.splitlines()[0] in str(told)
    assert "asynchronously" not in str(told)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory")])
def test_other_errors_are_not_taken_for_it(error):
    assert device_error(error) is None


def test_what_a_failed_forward_held_is_freed():
    """A checkpoint may be written after a failed evaluation, and needs memory too."""

    class Held:
        pass

    found = []

    def forward():
        held = Held()
        found.append(weakref.ref(held))
        raise torch.OutOfMemoryError(TOLD)

    def evaluate():
        try:
            forward()
        except RuntimeError as error:
            blame("The model failed", error)

    with pytest.raises(UserError) as raised:
        evaluate()
    gc.collect()
    assert raised.value is not None
    assert found[0]() is None
