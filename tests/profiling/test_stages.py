"""The stages of a profile on a clock that a test sets: what is measured, what traced, when it ends.

Each fake training takes steps of known length; a step that is traced takes ten times as long.
"""

import re
import tomllib
from dataclasses import fields
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import UserError
from samestep.base.settings import Settings
from samestep.prove.profiling.recipe_profile import _steps_between
from samestep.prove.profiling.tried_values import apply_settings
from samestep.scripts.measuring.measured import Extent
from samestep.scripts.measuring.stages import Stages, TimeAccount
from tests import tiny
from tests.command_line import read_json, start

STEP_S, SLOW_DOWN = 0.125, 10
EXTENT = {field.name for field in fields(Extent)}


class Clock:  # time that passes when it is told to, all of it in the phase `forward`
    def __init__(self):
        self.seconds = 0.0

    def lap(self, phase):
        pass

    def running(self):
        return {"forward": self.seconds}


class FakeTracer:  # a profiler that takes a second to start and two to stop
    def __init__(self, clock, **_):
        self.clock, self.steps, self.runs = clock, 0, False

    def start(self):
        self.runs = True
        self.clock.seconds += 1

    def step(self, taken=1):
        self.steps += taken * self.runs

    def stop(self):
        if self.runs:
            self.clock.seconds += 2
        self.runs = False


class Training:
    """Steps in epochs, told to stages after each; `profiles` are steps with an own profiler on."""

    def __init__(
        self, *, per_epoch=None, profiles=(), agree=lambda answer: answer(), at_once=1, **wishes
    ):
        self.clock = Clock()
        self.per_epoch, self.profiles, self.at_once = per_epoch, profiles, at_once
        self.profiler_is_on = False
        extent = Extent(**{name: wishes.pop(name) for name in EXTENT & wishes.keys()})
        account = TimeAccount(lambda: self.clock, now=lambda: self.clock.seconds, cores=dict)
        wishes |= {"new_tracer": FakeTracer, "own_profiler_runs": lambda: self.profiler_is_on}
        self.stages = Stages(account, agree, extent, **wishes)
        self.taken = 0
        self.traced = []

    def run(self, steps=10_000):
        """Train until the stages are done, or so many steps; return whether they are done."""
        for step in range(steps):
            if self.per_epoch and step % self.per_epoch == 0:
                if step:
                    self.clock.seconds += 0.5  # what lies between two epochs
                if self.stages.epoch_begins(step // self.per_epoch + 1):
                    return True
            if step in self.profiles and not self.profiler_is_on:
                self.profiler_is_on = True
                self.stages.script_profiles()
            elif step not in self.profiles:
                self.profiler_is_on = False
            is_traced = self.stages.tracer is not None and self.stages.tracer.runs
            self.traced += [step] * is_traced
            slow = is_traced or self.profiler_is_on
            self.clock.seconds += STEP_S * (SLOW_DOWN if slow else 1)
            self.taken += self.at_once
            if self.stages.at(self.taken):
                return True
        return False

    @property
    def seconds_per_step(self):
        return self.stages.span.seconds / self.stages.span.steps


def profiled(**wishes):
    training = Training(**wishes)
    assert training.run()
    return training


def test_steps_are_measured_after_the_warm_up_and_then_traced():
    training = profiled(seconds=3.0)
    span, tracer = training.stages.span, training.stages.tracer
    assert span.seconds >= 3.0
    assert span.steps == pytest.approx(span.seconds / STEP_S)
    assert span.rank.phases == {"forward": pytest.approx(span.seconds / span.steps)}
    assert training.traced[0] >= 0.5 / STEP_S + span.steps
    assert len(training.traced) == tracer.steps == 5  # half a second of them are fewer
    assert not tracer.runs
    assert training.stages.done
    training = Training()
    training.clock.seconds = 0.4  # most of the warm-up was the start of the program
    assert training.run()
    assert training.seconds_per_step == pytest.approx(STEP_S)
    assert training.stages.span.steps == training.traced[0] - 4  # 4 is the first decision
    training = profiled(at_once=8)
    assert training.stages.tracer.steps == 8 * len(training.traced)
    training = Training(seconds=0.5)
    training.run(steps=4)
    for step in count(5):
        training.clock.seconds += 0.001
        if training.stages.at(step):
            break
    assert training.stages.tracer.steps == 20


@pytest.mark.parametrize("profiles", [(), (12, 13)], ids=["all", "but for one profiled itself"])
def test_whole_epochs_are_measured_with_what_lies_between_them_and_the_next(profiles):
    training = profiled(per_epoch=10, wants_epochs=lambda: True, profiles=profiles, seconds=4.0)
    assert training.stages.span.steps % 10 == 0
    assert training.seconds_per_step == pytest.approx(STEP_S + 0.05)
    assert training.stages.tracer.steps == 5


@given(per_epoch=st.integers(1, 30), seconds=st.floats(0.1, 4.0))
def test_enough_steps_are_measured_however_much_of_an_epoch_is_traced(per_epoch, seconds):
    training = profiled(per_epoch=per_epoch, wants_epochs=lambda: True, seconds=seconds)
    assert training.stages.span.steps >= 8


def test_one_epoch_is_traced_whole_or_given_up_after_20_seconds():
    training = profiled(per_epoch=100, wants_epochs=lambda: True, seconds=3.0)
    span = training.stages.span
    assert 0.2 < training.traced[0] / 100 < 0.4, "long before the first epoch's end"
    assert training.stages.tracer.steps == 5
    assert span.seconds == pytest.approx(STEP_S * span.steps, rel=0.03)
    training = profiled(per_epoch=10**6, wants_epochs=lambda: True, seconds=1.0)
    assert 20 < training.clock.seconds < 50
    assert training.seconds_per_step == pytest.approx(STEP_S)
    training = profiled(per_epoch=11, epoch=2)
    assert training.traced == list(range(11, 22))
    assert training.stages.span.steps == 7  # of the epoch before, since the first decision
    assert training.seconds_per_step == pytest.approx(STEP_S + 0.5 / 7)
    training = profiled(per_epoch=11, epoch=1)
    assert training.traced == list(range(11))
    assert training.stages.span.steps == 11
    # Neither the second in which the profiler starts nor the two in which it stops.
    assert training.stages.span.seconds == pytest.approx(11 * STEP_S * SLOW_DOWN + 0.5)


@pytest.mark.parametrize("wished", [2, 37, 500])
def test_so_many_steps_are_measured_as_are_wished_for_whatever_the_epochs(wished):
    training = profiled(steps=wished, per_epoch=100, wants_epochs=lambda: True, seconds=1.0)
    assert training.stages.span.steps == wished
    assert training.stages.tracer.steps == 5


@pytest.mark.parametrize("taken", [10, 30])
def test_a_stop_signal_ends_it_with_what_was_measured_until_then(taken):
    training = Training(seconds=3.0, stop=lambda: training.taken >= taken)
    assert training.run()
    assert training.stages.stopped
    assert taken <= training.taken <= 1.25 * taken
    assert training.seconds_per_step == pytest.approx(STEP_S)


def test_a_profiler_of_the_scripts_own_ends_a_trace_early_and_is_in_no_number():
    training = Training(seconds=1.0)
    while training.stages.stage != "trace":
        assert not training.stages.at(training.taken)
        training.clock.seconds += STEP_S
        training.taken += 1
    training.stages.at(training.taken)
    assert training.stages.tracer.steps == 1
    training.stages.script_profiles()
    assert not training.stages.tracer.runs
    for step in range(training.taken + 1, training.taken + 5):
        done = training.stages.at(step)
    assert done
    assert training.stages.tracer.steps == 1
    training = profiled(profiles=range(10, 20), seconds=3.0)
    assert training.stages.profiled_itself
    assert training.seconds_per_step == pytest.approx(STEP_S)
    assert training.stages.tracer.steps == 5


def test_an_epoch_that_never_begins_leaves_no_trace_and_one_that_ends_early_what_there_was():
    training = Training(per_epoch=11, epoch=9)
    assert not training.run(steps=33)
    training.stages.end()
    assert training.stages.tracer is None
    training = profiled(per_epoch=10, epoch=2, profiles=range(8, 30))
    assert training.stages.tracer is None
    assert training.taken == 10
    training = Training(seconds=1.0)
    while not training.traced:
        training.run(steps=1)
    training.stages.end()
    assert training.stages.done
    assert not training.stages.tracer.runs
    assert training.seconds_per_step == pytest.approx(STEP_S)


@pytest.mark.parametrize(("steps", "measured"), [(1, None), (2, None), (3, 2), (20, 16)])
def test_a_training_that_ends_early_is_measured_as_far_as_it_came(steps, measured):
    training = Training(seconds=60.0)
    assert not training.run(steps=steps)
    training.stages.end()
    assert training.stages.done
    assert training.stages.tracer is None
    span = training.stages.span
    assert (span and span.steps) == measured


def test_rank_0s_answers_move_every_rank_alike():
    first = Training(seconds=2.0)
    answers = []
    first.stages._agree = lambda answer: answers.append(answer()) or answers[-1]
    assert first.run()
    replies = iter(answers)
    other = Training(seconds=2.0, agree=lambda _answer: next(replies))
    other.clock.seconds = 100.0
    assert other.run()
    assert (other.taken, other.traced) == (first.taken, first.traced)


def swept(folder, recipe, sizes, code=0):
    words = ("profile", str(tiny.write_recipe(folder, recipe)), "--batch-sizes", sizes)
    flags = ("--seconds", "0.2", "--run-dir", str(folder / "out"))
    ranks = start(*words, *flags, folder=folder / "o")
    assert ranks.wait() == [code], ranks.output()
    return read_json(folder / "out" / "profile.json")


def test_an_epochs_small_last_batch_counts_as_such_and_how_long_to_train_need_not_be_said(tmp_path):
    """A step of 100 samples is followed by one of 31: together they are 131, not 200."""
    recipe = tiny.RECIPE.replace('"epochs": 6', '"lr": 0.1')
    ((row,),) = (sweep["rows"] for sweep in swept(tmp_path, recipe, "100")["sweeps"])
    assert 31 <= row["samples_per_s"] * row["seconds"] <= 80
    plan = SimpleNamespace(steps_per_epoch=1000, total_steps=10)
    assert {*_steps_between(SimpleNamespace(settings=Settings(), plan=plan)).values()} == {10}


def test_batches_that_the_training_set_does_not_fill_are_refused_before_measuring(here, refused):
    path, out = str(tiny.write_recipe(here)), here / "out"
    said = refused("profile", path, "--batch-sizes", "2,132", "--run-dir", str(out))
    assert re.search(r"--batch-sizes: .*131 .*132", said)
    assert not out.exists()


STOPS_AT_4 = """
import os
import signal
from dataclasses import replace
without, sent = recipe.loss, []
def loss(outputs, targets):
    if len(outputs) == 4 and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
    return without(outputs, targets)
recipe = replace(recipe, loss=loss)
"""


@pytest.mark.slow
def test_after_a_stop_signal_no_further_value_is_tried_and_what_there_is_is_shown(tmp_path):
    found = swept(tmp_path, tiny.RECIPE + STOPS_AT_4, "2,4,8", code=143)
    (sweep,) = found["sweeps"]
    assert [row["value"] for row in sweep["rows"]] == [2, 4]
    assert sweep["skipped"] == [8]
    assert found["measured"]["stopped"]


FILE = """\
# my settings
recipe = "mnist"
num_workers = 0   # none so far
batch-size = 32
[options]
num_workers = "an option may be called the same"
"""


def test_only_the_value_changes_and_what_is_not_there_is_added_above_the_tables(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(FILE)
    apply_settings(path, {"num_workers": 4, "batch_size": 64}, "mnist")
    changed = FILE.replace("num_workers = 0 ", "num_workers = 4 ").replace("32", "64")
    assert path.read_text() == changed
    path.write_text("lr = 0.1\n\n[options]\nhidden = 3\n")
    apply_settings(path, {"num_workers": 2}, "mnist")
    assert path.read_text() == "lr = 0.1\nnum_workers = 2\n\n[options]\nhidden = 3\n"
    path = tmp_path / "new.toml"
    apply_settings(path, {"num_workers": 2}, "/a/my recipe.py")
    assert tomllib.loads(path.read_text()) == {"recipe": "/a/my recipe.py", "num_workers": 2}


@pytest.mark.parametrize("text", ["this is = not = toml\n", '"num_workers" = 1\n'])
def test_a_file_in_another_form_is_left_alone(text, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.toml"):
        apply_settings(path, {"num_workers": 2}, "mnist")
    assert path.read_text() == text
