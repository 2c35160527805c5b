"""Memory that is used up, and operations without a deterministic form, are told once, in words."""

import gc
import weakref

import pytest
import torch

from samestep.errors import UserError, blame, device_error
from tests.command_line import RECIPE
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
HUNGRY = RECIPE.replace(
    "recipe = Recipe(",
    """
class Hungry(nn.Linear):
    seen = 0
    def forward(self, x):
        self.seen += self.training
        if WHEN:
            raise ERROR  # hungry
        return super().forward(x)

recipe = Recipe(""",
)
HUNGRY = HUNGRY.replace("model=model", "model=lambda: Hungry(4, 2)")
LINE = next(n for n, line in enumerate(HUNGRY.splitlines(), 1) if "# hungry" in line)
NO_MEMORY = f"torch.OutOfMemoryError({TOLD!r})"
IN_TRAINING, IN_EVALUATION = "self.seen == 3", "not self.training and self.seen > 3"


@pytest.fixture
def told_of(refused, tmp_path):
    def told_of(verb, when, error):
        text = HUNGRY.replace("WHEN", when).replace("ERROR", error)
        path = write_recipe(tmp_path, text, "hungry.py")
        return refused(verb, str(path), "--run-dir", str(tmp_path / verb), "--log-every", "1")

    return told_of


@pytest.mark.parametrize(
    ("when", "where", "steps"), [(IN_TRAINING, "at step 3", 2), (IN_EVALUATION, "(10, 4)", 6)]
)
def test_memory_that_is_used_up_gets_one_message(told_of, tmp_path, when, where, steps):
    message = told_of("train", when, NO_MEMORY)
    remedies = ("--micro-batch-size", "--eval-batch-size")
    for part in (where, "139.80 GiB", f"hungry.py:{LINE}", *remedies):
        assert part in message
    assert message.count("expandable_segments") == 1
    records = all_records(tmp_path / "train")
    assert sum(r["event"] == "step" for r in records) == steps
    assert records[-1]["event"] == "stop"
    # What is trained before an evaluation fails is kept.
    assert any(r["event"] == "checkpoint" for r in records) == (when == IN_EVALUATION)


def test_a_profile_tells_it_and_an_operation_without_a_deterministic_form_too(told_of):
    assert "--micro-batch-size" in told_of("profile", IN_TRAINING, NO_MEMORY)
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

    found = []

    def forward():
        held = torch.nn.Identity()
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
