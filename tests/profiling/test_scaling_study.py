"""What is measured: sizes that keep a rank's batch or the global one, in rounds that take turns."""

import re
from pathlib import Path

import msgspec
import pytest

from samestep.commands.scale import parse_ranks
from samestep.errors import UserError
from samestep.profiling.scaling_study import FILE, Segment, plan_study, run_study
from samestep.settings import Settings
from tests.profiling.made_studies import measurement


def sizes(study):
    return [(s.mode, s.ranks, s.global_batch_size, s.micro_batch_size) for s in study.setups]


def test_weak_scaling_keeps_the_batch_of_a_rank_and_strong_the_global_batch():
    study = plan_study(Settings(batch_size=32), [1, 2, 4], ["weak", "strong"])
    assert sizes(study) == [
        ("weak", 1, 32, 32),
        *(("weak", 2, 64, 32), ("strong", 2, 32, 16)),
        *(("weak", 4, 128, 32), ("strong", 4, 32, 8)),
    ]
    assert [s.ranks for s in study.of("strong")] == [1, 2, 4]
    # The settings mean the smallest number of ranks,
    study = plan_study(Settings(batch_size=64), [2, 4], ["strong", "weak"])
    assert sizes(study) == [("strong", 2, 64, 32), ("strong", 4, 64, 16), ("weak", 4, 128, 32)]
    # and micro-steps stay when scaling weakly, and become fewer when strongly: here from four.
    settings = Settings(batch_size=64, micro_batch_size=16)
    study = plan_study(settings, [1, 2], ["weak", "strong"])
    assert sizes(study)[1:] == [("weak", 2, 128, 16), ("strong", 2, 64, 16)]


def test_a_batch_that_ranks_do_not_divide_is_measured_and_one_without_samples_for_all_left_out():
    study = plan_study(Settings(batch_size=4), [1, 3, 5], ["weak", "strong"])
    assert sizes(study) == [
        ("weak", 1, 4, 4),
        *(("weak", 3, 12, 4), ("strong", 3, 4, 2)),
        ("weak", 5, 20, 4),
    ]
    (note,) = study.left_out
    assert note.startswith("strong scaling at 5 ranks")
    with pytest.raises(UserError, match="--batch-size 4"):
        plan_study(Settings(batch_size=4), [1, 5], ["strong"])


def test_sizes_are_put_in_order_and_what_is_no_list_of_several_is_refused():
    assert parse_ranks("4,1,2,2") == (1, 2, 4)
    for text in ("", "a", "1,b", "0,1", "-1,2", "1", "4", "2,2", "1,65", "1.5,2"):
        with pytest.raises(UserError, match="--nproc"):
            parse_ranks(text)


class Launch:
    """Ranks that measure nothing: each setup leaves made-up segments of ten steps."""

    def __init__(self):
        self.started, self.folders = [], set()

    def __call__(self, ranks, task):
        self.started.append((ranks, [size for size, *_ in task.setups]))
        for number, (size, _, run) in enumerate(task.setups):
            Path(run).mkdir(parents=True)  # there is none yet
            self.folders.add(Path(run).parent)
            one = Segment(steps=10, samples=10 * size, phases={"forward": 1.0 + number})
            (Path(run) / FILE).write_bytes(msgspec.json.encode(measurement([one, one])))


def test_rounds_take_turns_and_one_start_of_ranks_serves_both_modes(tmp_path):
    study = plan_study(Settings(batch_size=8), [1, 2], ["weak", "strong"])
    launch, told = Launch(), []
    left, found = run_study(study, tmp_path, rounds=2, seconds=1.0, launch=launch, tell=told.append)
    assert left == study
    assert launch.folders == {tmp_path}
    assert launch.started == [(1, [8]), (2, [16, 8])] * 2
    assert [(one.setup, len(one.rounds)) for one in found] == [(s, 2) for s in study.setups]
    assert found[2].rounds[0].segments[0].seconds == 2.0
    assert told[1] == "round 1 of 2, 2 ranks: weak 160, strong 40 samples/s"


def test_steps_that_the_training_set_does_not_fill_are_left_out_and_said(tmp_path):
    """1,000 samples: two ranks of 400 have them, four would train 1,600 in name only."""
    study, launch = plan_study(Settings(batch_size=400), [1, 2, 4], ["weak"]), Launch()
    left, found = run_study(study, tmp_path, rounds=2, seconds=1.0, launch=launch, tell=len)
    assert launch.started == [(1, [400]), (2, [800])] * 2
    assert [one.setup.ranks for one in found] == [1, 2]
    (said,) = left.left_out
    assert re.match(r"weak scaling at 4 ranks .* 1,600 .* 1,000 ", said)
    too_large = plan_study(Settings(batch_size=1002), [1, 2], ["strong"])
    with pytest.raises(UserError, match=r"1,002 .* 1,000 .*--batch-size"):
        run_study(too_large, tmp_path / "other", rounds=1, seconds=1.0, launch=launch, tell=len)
