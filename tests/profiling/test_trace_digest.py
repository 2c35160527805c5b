"""What a trace says of its steps, on traces made by hand: of a CPU and of a GPU."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.scripts.measuring import trace_digest
from samestep.scripts.measuring.trace_digest import (
    COLLATE,
    digest,
    length,
    lengths_in,
    union,
    without,
)

STEP_US = 1000


def event(name, begin, duration, category="cpu_op", thread=1):
    one = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}
    return {**one, "pid": 1, "tid": thread}


def mark(phase, moment):
    return event(f"samestep::{phase}", moment, 0.1, "user_annotation")


def trace(inside, steps=5):
    """Steps of 1000 µs: data until 100, forward until 400, backward until 900, optimizer."""
    events = [mark("other", 0)]
    for step in range(steps):
        begin = step * STEP_US
        events.append(event(f"ProfilerStep#{step}", begin, STEP_US - 0.1, "user_annotation"))
        ends = {"data": 100, "forward": 400, "backward": 900, "optimizer": 1000}
        events += [mark(phase, begin + end) for phase, end in ends.items()]
        events += [{**one, "ts": one["ts"] + begin} for one in inside]
    return events


def test_phases_lie_between_marks_and_work_is_counted_once():
    found = digest(trace([event("aten::mm", 100, 90)]), 5)
    # 2 µs are taken for an operation that does nothing, and up to three of them are no work.
    assert found.matmul == pytest.approx(84 / 900, rel=0.01)
    assert found.launch == pytest.approx(816 / 900, rel=0.01)
    assert found.count == 1
    of_python = digest(trace([event("SlowBackward", 400, 500)]), 5)  # a node of autograd
    assert of_python.launch == pytest.approx(1.0)
    names, spans = ("data", "forward", "backward", "optimizer"), (0, 100, 400, 900, 1000)
    assert trace_digest.phases_of(trace([], steps=1)) == list(
        zip(names, pairwise(spans), strict=True)
    )
    assert digest([], 0).launch == 0
    nested = [
        event("aten::linear", 100, 800),
        event("aten::addmm", 200, 600),
        event("aten::add", 910, 80),
    ]
    found = digest(trace(nested), 5)
    assert found.matmul == pytest.approx((194 + 594) / 900, rel=0.01)
    assert found.memory == pytest.approx(74 / 900, rel=0.01)
    assert found.top_matmul[0] == ("addmm", pytest.approx(594 / 900, rel=0.01))
    assert found.top_memory == (("add", pytest.approx(74 / 900, rel=0.01)),)
    calm = trace([event("aten::mm", 100, 500), event("aten::add", 700, 100)])
    disturbed = [dict(one) for one in calm]
    next(one for one in disturbed if one["name"] == "aten::mm")["dur"] = 590
    assert digest(disturbed, 5).matmul == pytest.approx(digest(calm, 5).matmul, rel=0.01)


def test_a_loop_that_reads_numbers_is_told_from_indices_an_optimizer_and_overhead():
    norms = [event("aten::norm", start, 10) for start in range(400, 880, 40)]
    loop = [*norms, *(event("aten::_local_scalar_dense", e["ts"] + 20, 1) for e in norms)]
    found = digest(trace(loop), 5)
    assert found.syncs == 12
    assert found.sync == pytest.approx(440 / 900, rel=0.01)
    single = digest(trace([event("aten::_local_scalar_dense", 500, 1)]), 5)
    assert (single.syncs, single.sync) == (1, 0)
    reads = [event("aten::_local_scalar_dense", start, 1) for start in range(910, 990, 10)]
    ranges = [event("Optimizer.step#LBFGS.step", 400, 595, "user_annotation")]
    found = digest(trace([*ranges, *reads]), 5)
    assert (found.syncs, found.sync) == (0, 0)
    closures = [event("aten::_local_scalar_dense", start, 1) for start in range(410, 890, 10)]
    found = digest(trace([*ranges, *closures]), 5)
    assert found.syncs == 48
    assert found.sync > 0.5
    places = range(400, 880, 40)
    reads = [event("aten::_local_scalar_dense", start + 2, 1) for start in places]
    indexing = [event(trace_digest.INDEX, start, 5, "user_annotation") for start in places]
    found = digest(trace([*indexing, *reads]), 5)
    assert (found.syncs, found.sync) == (0, 0)
    assert digest(trace(reads), 5).syncs == 12
    assert digest(trace([event("aten::_local_scalar_dense", 50, 1)]), 5).syncs == 0, "of the data"


AT = "void at::native::"
LONG = "cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4"
NAMES = {
    "aten::addmm": "addmm",
    "ampere_sgemm_128x64_nn": "ampere_sgemm_128x64_nn",
    f"{AT}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, "
    "3ul> >(int)": "CUDAFunctor_add",
    f"{AT}elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_"
    "kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(int)>": "direct_copy_kernel_cuda",
    f"void cutlass::Kernel2<{LONG}>(Params)": "cutlass_80_tensorop_s1688gemm_128x64_16…",
    f"{AT}(anonymous namespace)::softmax_warp_forward<float, float, 7>()": "softmax_warp_forward",
    "<unknown>": "<unknown>",
}


def test_collating_is_a_share_of_the_wait_and_a_gpu_busy_in_any_kernel():
    calls = [event("aten::stack", 20, 60), event("aten::mm", 200, 50)]
    assert digest(trace(calls), 5).collate == pytest.approx(0.6)
    collates = event(COLLATE, 10, 80, "user_annotation")  # whatever that calls
    assert digest(trace([collates, *calls]), 5).collate == pytest.approx(0.8)
    assert {name: trace_digest.short_name(name) for name in NAMES} == NAMES
    copy = event("Memcpy HtoD (Pinned -> Device)", 750, 100, "gpu_memcpy", 9)
    step = [on_gpu(100, 500), on_gpu(400, 300, NCCL, 8), copy]
    assert digest(trace(step), 5).gpu_busy == pytest.approx(600e-6)
    assert digest(trace(step, steps=5), 40).gpu_busy == pytest.approx(75e-6)  # 8 steps a graph
    assert digest(trace([event("aten::mm", 100, 90)]), 5).gpu_busy is None

    def change(moment, size):
        return {"name": "[memory]", "ts": moment, "args": {"Bytes": size, "Device Type": 0}}

    rows = trace_digest.memory_timeline(
        [*trace([], steps=1), change(150, 1 << 20), change(500, 3 << 20), change(950, -(4 << 20))]
    )
    assert rows == [(0.15, "forward", 1.0), (0.5, "backward", 4.0), (0.95, "optimizer", 0.0)]
    assert trace_digest.peak_memory(rows) == (4.0, "backward")
    assert trace_digest.peak_memory([]) is None


KERNEL = "kernel"


def on_gpu(begin, duration, name="ampere_sgemm_128x64", stream=7):
    return event(name, begin, duration, KERNEL, stream)


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
DRY = [
    one
    for start in range(100, 1000, 100)
    for one in (on_gpu(start, 30), event("cudaStreamSynchronize", start + 10, 25, "cuda_runtime"))
]
# What a GPU does → the least and the most of a share.
ON_GPU = {
    "short calls of the host": (
        [on_gpu(100, 880), event("aten::mm", 100, 5)],
        {"matmul": (0.95, 1), "launch": (0, 0.05)},
    ),
    "waits for the host": (
        [on_gpu(start, 10, "elementwise_kernel") for start in range(100, 1000, 50)],
        {"launch": (0.7, 1), "memory": (0.15, 0.25)},
    ),
    "runs dry while the host waits for it": (DRY, {"sync": (0.6, 1), "launch": (0, 0.1)}),
    "waits for data": ([on_gpu(101, 898)], {"launch": (0, 0.01)}),
    "sends by NCCL": ([on_gpu(100, 500), on_gpu(600, 400, NCCL, 8)], {"matmul": (0.98, 1)}),
}


@pytest.mark.parametrize("case", ON_GPU)
def test_a_gpus_time_is_split_by_what_it_does_or_waits_for(case):
    step, shares = ON_GPU[case]
    found = digest(trace(step), 5)
    for name, (least, most) in shares.items():
        assert least <= getattr(found, name) <= most, (name, found)


TIMES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda t: (t[0], sum(t))))


def points(spans):
    return {moment for begin, end in spans for moment in range(int(begin), int(end))}


@given(TIMES, TIMES)
def test_intervals_are_sets_of_moments(one, other):
    first, second = union(one), union(other)
    assert points(first) == points(one)
    assert length(first) == len(points(one))
    assert points(trace_digest.common(first, second)) == points(one) & points(other)
    assert points(without(first, second)) == points(one) - points(other)
    assert points(without(union([(0, 60)]), first)) == set(range(60)) - points(one)
    shared = [len(points([window]) & points(other)) for window in first]
    assert lengths_in(first, second).tolist() == shared


@pytest.mark.timeout(60)
@pytest.mark.parametrize("of_each", [without, lengths_in])
def test_the_trace_of_a_whole_epoch_does_not_seem_to_hang(of_each):
    """A scan of all spans for every window would take minutes."""
    begins = np.arange(100_000.0)
    found = of_each(np.column_stack([begins, begins + 1]), np.column_stack([begins, begins + 0.5]))
    assert len(found) == 100_000


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=12))
def test_the_own_times_of_calls_within_each_other_are_the_time_that_they_cover(pairs):
    calls = [event("aten::a", begin, duration) for begin, duration in pairs]
    nested = sorted(calls, key=lambda e: (e["ts"], -e["dur"]))
    for number, call in enumerate(nested):  # cut to lie within the call around it
        for outer in nested[:number]:
            if outer["ts"] <= call["ts"] < outer["ts"] + outer["dur"]:
                call["dur"] = min(call["dur"], outer["ts"] + outer["dur"] - call["ts"])
    covered = length(union((e["ts"], e["ts"] + e["dur"]) for e in nested))
    assert sum(own for _, own in trace_digest.self_times(nested)) == pytest.approx(covered)
