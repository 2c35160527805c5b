"""What is said of runs side by side, on runs whose every number is known."""

import re
from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.base.run.code_copy import copy_code, find_code
from samestep.show.reporting import curves
from samestep.show.reporting.charts import phases_chart
from samestep.show.reporting.collect import collect
from samestep.show.reporting.comparison import (
    CodeChange,
    code_changes,
    compare_losses,
    compare_runs,
)
from samestep.show.reporting.comparison_text import as_table, lines
from samestep.show.reporting.page import render
from samestep.show.reporting.run_data import read_run
from samestep.show.reporting.run_sections import rank_by_rank
from tests.reporting.made_runs import change, change_start, write_run


def test_differences_are_named_as_far_as_known_and_marked_if_they_decide(tmp_path):
    settings = {"num_workers": 4, "hidden": [8, 16], "scale": 0.12345681}  # to the last digit
    one = write_run(tmp_path / "one", seed=1, num_workers=0, hidden=[8, 8], scale=0.12345678)
    other = write_run(tmp_path / "other", seed=2, clip_norm=1.0, **settings)
    found = {d.name: (d.values, d.decides) for d in compare_runs([one, other]).differences}
    assert found == {
        "seed": (("1", "2"), True),
        "num_workers": (("0", "4"), False),
        "hidden": (("8 8", "8 16"), True),
        "scale": (("0.12345678", "0.12345681"), True),
        "clip_norm": (("–", "1"), True),
    }
    one, other = write_run(tmp_path / "known", seed=1), write_run(tmp_path / "without", ranks=2)
    (other / "settings.toml").unlink()
    found = {d.name: d.values for d in compare_runs([one, other]).differences}
    assert found == {"world_size": ("1", "2"), "micro_batch_size": ("10", "5")}
    one = write_run(tmp_path / "fact", num_samples=10_000)  # an option; 60 are trained
    other = write_run(tmp_path / "setting", num_samples=10_000)
    (other / "settings.toml").unlink()
    assert compare_runs([one, other]).differences == []
    recipe = write_run(tmp_path / "recipe", seed=1)
    loop = write_run(tmp_path / "loop", seed=2, noise=3)
    file = loop / "settings.toml"
    file.write_text(re.sub("^(recipe|lr) .*$", "", file.read_text(), flags=re.MULTILINE))
    found = {d.name: d.decides for d in compare_runs([recipe, loop]).differences}
    assert found == {"lr": False, "seed": True, "noise": False}


def changed(step_from, by):
    return lambda step: 1 / step + (by if step >= step_from else 0)


@pytest.mark.parametrize(
    ("loss", "verdict", "largest", "first"),
    [
        (changed(1, 0.0), "equal", 0.0, None),
        (changed(4, 1e-7), "rounding", 1e-7, None),
        (changed(7, 0.01), "apart", 0.01, 7),
        (changed(1, 0.2), "apart", 0.2, 1),
        # Where the loss has fallen to nothing, rounding has not: its sums are as large as before.
        (lambda step: 1 / step if step < 9 else 1e-7, "apart", 1 / 9 - 1e-7, 9),
    ],
)
def test_the_same_training_is_told_from_another(tmp_path, loss, verdict, largest, first):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", ranks=2, loss=loss)
    found = compare_losses(read_run(one), read_run(other))
    assert found.verdict == verdict
    assert found.largest == pytest.approx(largest, abs=1e-12)
    assert found.first_apart == first
    assert found.steps == 18


def test_what_is_large_beside_a_small_loss_is_no_rounding(tmp_path):
    one = write_run(tmp_path / "one", loss=lambda _: 1e-6)
    other = write_run(tmp_path / "other", loss=lambda _: 9e-6)
    assert compare_losses(read_run(one), read_run(other)).verdict == "apart"


def test_runs_that_cannot_be_compared_are_not_and_no_reason_is_made_up(tmp_path):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", epochs=0)
    text = " ".join("\n".join(lines(compare_runs([one, other]))).split())
    assert "--log-every" in text
    assert "samestep verify" not in text
    one, other = write_run(tmp_path / "small"), write_run(tmp_path / "large", global_batch=20)
    found = compare_runs([one, other])
    assert found.same_training[0].verdict == "unknown"
    assert found.same_training[0].why.startswith("20 samples per step against 10,")
    assert "(10, 20 samples)" in found.notes[0]


@pytest.mark.parametrize(
    ("more", "decides"),
    [
        ({"schedule": "constant"}, {"epochs": False, "cache": True}),
        ({"schedule": "cosine"}, {"epochs": True, "cache": True}),
        ({"own_schedule": True, "free_options": ["cache"]}, {"epochs": True, "cache": False}),
    ],
)
def test_the_length_decides_where_the_schedule_follows_it(tmp_path, more, decides):
    said = {name: value for name, value in more.items() if name != "schedule"}
    runs = []
    for epochs in (3, 12):
        table = {"epochs": epochs, "cache": str(epochs), "schedule": more.get("schedule", "")}
        runs.append(write_run(tmp_path / str(epochs), **table))
        change_start(runs[-1], **said)
    found = {one.name: one.decides for one in compare_runs(runs).differences}
    assert found == decides


def test_long_values_are_cut_and_runs_that_do_not_fit_come_below(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    paths = [f"/a/very/long/way/to/the/data/of/the/group/{end}" for end in ("first", "second")]
    runs = [write_run(tmp_path / path[-5:], data_dir=path) for path in paths]
    shown = [line for line in lines(compare_runs(runs)) if not line.startswith(("A  ", "B  "))]
    assert max(map(len, shown)) <= 80
    (row,) = [line for line in shown if "data_dir" in line]
    assert "group/first" in row
    assert "group/second" in row
    runs = [write_run(tmp_path / f"r{n}", step_s=1e-6 * 9**n, lr=0.1 + n) for n in range(9)]
    shown = [line for line in lines(compare_runs(runs)) if str(tmp_path) not in line]
    assert max(map(len, shown)) <= 80
    heads = [line for line in shown if line.startswith("Throughput")]
    assert len(heads) > 1
    assert "".join("".join(head.split()[1:]) for head in heads) == "ABCDEFGHI"


def test_throughput_leaves_the_first_epoch_out_unless_there_is_no_other(tmp_path):
    run = read_run(write_run(tmp_path / "run", step_s=0.5))
    speed = curves.throughput(run)
    assert speed.basis == "epochs 2–3"
    assert (speed.samples_per_s, speed.steps_per_s) == (20, 2)
    assert (speed.ms_per_step, speed.us_per_sample) == (500, 50_000)
    spent = curves.phases(run)
    assert spent["forward"] == pytest.approx(150)
    assert sum(spent.values()) == pytest.approx(speed.ms_per_step)
    run = write_run(tmp_path / "short", epochs=1, phases=None)
    change(run, lambda records: [r for r in records if r["event"] == "step"][:4])
    speed = curves.throughput(read_run(run))
    assert speed.basis == "steps 1–4"
    assert speed.samples_per_s == pytest.approx(10 / 1.5)
    assert curves.phases(read_run(run)) is None


def test_an_epoch_that_a_run_stopped_within_counts_once_and_ranks_from_the_resume_on(tmp_path):
    def stopped(records):
        """Stop after step 9, half of the second epoch, by --max-steps; then resume."""
        for record in (r for r in records if r["event"] == "epoch"):
            record["ranks"] = {"compute": [0.9 if record["epoch"] == 2 else 1.8] * 2}
        part = next(n for n, r in enumerate(records) if r.get("step") == 9) + 1
        half = {"step": 9, "samples": 30, "train_seconds": 1.5, "phases": {"forward": 0.45}}
        before = records[part + 3] | half, {"event": "resume", "step": 9, "checkpoint": "x.pt"}
        return [*records[:part], *before, *records[part:]]

    run, whole = (read_run(write_run(tmp_path / name, ranks=2)) for name in ("run", "whole"))
    run = read_run(change(run.path, stopped))
    assert curves.throughput(run) == curves.throughput(whole)
    assert curves.phases(run) == curves.phases(whole)
    assert phases_chart(run, 0) == phases_chart(whole, 0)
    assert "300 ms" in rank_by_rank(run).verdict


def test_flops_and_mfu_are_means_over_the_seconds_and_memory_is_the_most(tmp_path):
    def told(records):
        epochs = {1: (9e12, 0.9, 5), 2: (2e12, 0.2, 7 << 30), 3: (4e12, 0.4, 6)}
        names = ("flops_per_s", "mfu", "peak_memory_bytes")
        for r in (r for r in records if r["event"] == "epoch"):
            r |= dict(zip(names, epochs[r["epoch"]], strict=True))
        return records

    known, other = change(write_run(tmp_path / "known"), told), write_run(tmp_path / "other")
    rows = [line.split() for line in lines(compare_runs([known, other]))]
    assert ["model", "FLOP/s", "3T", "–"] in rows
    assert ["MFU", "30.0%", "–"] in rows
    assert ["peak", "memory", "7.52", "GB", "–"] in rows


def test_the_time_to_a_metric_is_that_of_the_record_that_first_shows_it(tmp_path):
    slow, fast = write_run(tmp_path / "slow"), write_run(tmp_path / "fast", step_s=0.25)
    never = write_run(tmp_path / "never", accuracy=lambda _: 0.1)
    found = compare_runs([slow, fast, never], "accuracy", 0.6)
    one, other, none = found.reached
    assert (one.step, one.samples, one.seconds) == (12, 120, 12.0)
    assert one.with_pauses == pytest.approx(12 + 2 * 0.25 + 0.125)  # the checkpoint came after
    assert (other.samples, other.seconds) == (120, 6.0)
    assert none is None
    for metric in ("loss", "train_loss"):  # a loss has to fall to its target
        assert compare_runs([slow, fast], metric, 0.09).reached[0].step == 12


def test_curves_are_shown_as_recorded_or_else_by_lines_between_records(tmp_path):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "b", global_batch=20, epochs=2)
    curve = compare_runs([one, other]).by_samples
    assert curve.as_recorded
    assert curve.places == (60, 120)
    assert curve.values == ((0.5, 0.5), (pytest.approx(2 / 3), pytest.approx(2 / 3)))
    one = [curves.Point(0, 10, 1.0, 1.0), curves.Point(0, 30, 3.0, 0.0)]
    other = [curves.Point(0, 20, 10.0, 5.0), curves.Point(0, 40, 40.0, 5.0)]
    curve = curves.by_samples([one, other])
    assert not curve.as_recorded
    assert (curve.places[0], curve.places[-1]) == (20, 30)
    assert curve.values[0] == (0.5, 5.0)
    times = curves.by_seconds([one, other])
    assert (times.places[0], times.places[-1]) == (1.0, 40.0)
    assert times.values[0] == (1.0, None)
    assert times.values[-1] == (None, 5.0)
    later = [curves.Point(0, samples, 1.0, 1.0) for samples in (31, 35)]
    assert curves.by_samples([one, later]) is None


def test_what_is_not_recorded_is_told_and_the_rest_compared(tmp_path):
    whole, cut = write_run(tmp_path / "whole"), write_run(tmp_path / "cut", finished=False)
    for name in ("settings.toml", "environment.json"):
        (cut / name).unlink()
    text = (cut / "events.jsonl").read_text()
    (cut / "events.jsonl").write_text(text[: int(len(text) * 0.6)])
    found = compare_runs([whole, cut])
    assert found.same_training[0].verdict == "equal"
    assert 0 < found.same_training[0].steps < 18
    shown = "\n".join(lines(found))
    files = [problem.split()[0] for problem in found.runs[1].problems]
    assert files[1:] == ["settings.toml", "environment.json"]
    for problem in found.runs[1].problems:
        assert f"! {problem.split(':')[0]}" in shown
    assert found.runs[1].status.startswith("no end recorded")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.toml").write_text(f'recipe = "toy"\nlr = {len(name)}.0\n')
    shown = "\n".join(lines(compare_runs([tmp_path / "one", tmp_path / "other"])))
    assert shown.count("! events.jsonl") == 2
    assert "lr " in shown
    assert "\nthroughput: " in shown


MISTAKES = {
    "no run": ([], {}, "samestep compare runs/ID runs/ID"),
    "one run": (["one"], {}, "samestep compare runs/ID runs/ID"),
    "twice": (["one", "../runs/one"], {}, "runs/one "),
    "nothing in common": (["one", "alien"], {}, "alien is of recipe martian.*--any-recipe"),
    "no such metric": (["one", "two"], {"metric": "bleu"}, "'bleu'.*accuracy, train_loss"),
    "not there": (["one", "gone"], {}, "gone"),
    "too many": ([str(n) for n in range(27)], {}, "27 .* 26"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_what_to_do(tmp_path, name, monkeypatch):
    names, more, words = MISTAKES[name]
    runs = tmp_path / "runs"
    for run in ("one", "two"):
        write_run(runs / run)
    write_run(runs / "alien", recipe="martian")
    monkeypatch.chdir(runs)
    with pytest.raises(UserError, match=words):
        compare_runs([runs / name for name in names], **more)


@pytest.mark.parametrize(("pace", "tables"), [(1.0, 2), (100.0, 1)])
def test_runs_that_share_no_time_have_no_table_by_time(tmp_path, pace, tables):
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "other", step_s=0.5 * pace)]
    headings = [line for line in lines(compare_runs(runs)) if line.startswith("validation")]
    assert len(headings) == tables


def test_two_recipes_or_one_run_alone_are_shown_when_insisted_on(tmp_path):
    one = write_run(tmp_path / "one", lr=0.1)
    other = write_run(tmp_path / "other", recipe="martian", noise=0.2)
    found = compare_runs([one, other], target=0.6, any_recipe=True)
    assert "recipe martian" in found.notes[0]
    shown = "\n".join(lines(found))
    assert "noise" in shown, "all settings"
    assert "≥ 0.6" in shown
    run = write_run(tmp_path / "alone")
    with pytest.raises(UserError, match="--plot"):
        compare_runs([run])
    found = compare_runs([run], alone=True)
    assert "same training" not in "\n".join(lines(found))
    assert found.curves[0]


def with_evaluations(**fields):
    return lambda records: [r | fields if r["event"] == "evaluation" else r for r in records]


def test_without_steps_epochs_and_evaluations_tell_but_no_test_does(tmp_path):
    unstepped = lambda records: [r for r in records if r["event"] != "step"]  # noqa: E731
    one, other = (change(write_run(tmp_path / name), unstepped) for name in ("one", "other"))
    found = compare_losses(read_run(one), read_run(other))
    assert (found.verdict, found.steps, found.epochs, found.evaluations) == ("equal", 0, 3, 3)
    shown = " ".join("\n".join(lines(compare_runs([one, other]))).split())
    assert "3 epochs and 3 evaluations" in shown
    tested = with_evaluations(split="test")
    one, other = (change(write_run(tmp_path / name), tested) for name in ("a", "b"))
    assert compare_losses(read_run(one), read_run(other)).evaluations == 0


def test_a_loss_of_an_epoch_tells_another_training_and_of_an_evaluation_another_measure(tmp_path):
    def worse(event):
        return lambda records: [r | {"loss": 0.9} if r["event"] == event else r for r in records]

    one, other, measured = (write_run(tmp_path / name) for name in ("one", "other", "measured"))
    found = compare_losses(read_run(one), read_run(change(other, worse("epoch"))))
    assert (found.verdict, found.first_apart, found.last_alike) == ("apart", 6, 5)
    found = compare_losses(read_run(one), read_run(change(measured, worse("evaluation"))))
    assert (found.verdict, found.evaluated_otherwise, found.evaluations) == ("equal", 6, 0)
    assert found.evaluations_apart == pytest.approx(0.9 - 1 / 18)


def test_what_differs_with_the_ranks_is_told_only_of_a_model_that_has_it(tmp_path):
    runs = [write_run(tmp_path / str(n), ranks=n, loss=changed(7, n)) for n in (1, 2)]
    for run in runs:
        change_start(run, by_ranks=["BatchNorm"])
    shown = "\n".join(lines(compare_runs(runs)))
    assert "BatchNorm" in shown
    assert "dropout" not in shown


def test_of_a_metric_that_falls_a_target_is_reached_from_above_unless_the_user_says_more(tmp_path):
    def named(records):
        for record in records:
            if record["event"] == "evaluation":
                record["mae"] = 1 - record.pop("accuracy")
        return records

    runs = [change(write_run(tmp_path / name), named) for name in ("one", "other")]
    errors = [change_start(run, lower_is_better=["loss", "mae"]) for run in runs]
    found = compare_runs(errors, "mae", 0.4)
    assert found.smaller
    assert [goal.step for goal in found.reached] == [12, 12]
    shown = "\n".join(lines(found))
    assert "mae ≤ 0.4" in shown
    (best,) = [line for line in shown.splitlines() if "best of the run" in line]
    assert best.split()[-1] == "0.2500"
    old = change(write_run(tmp_path / "old"), with_evaluations(mae=0.3))
    assert compare_runs([old, errors[0]], "mae", 0.4).smaller, "another run says it"
    settings = errors[0] / "settings.toml"
    settings.write_text(settings.read_text() + 'monitor = "mae"\nmode = "max"\n')
    assert not compare_runs(errors, "mae", 0.4).smaller


def with_code(run: Path, **files: bytes) -> Path:
    """Let a run have a copy of a folder with these files; train.py is the one that ran."""
    folder = run.with_name(f"{run.name}-code")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    copy_code(find_code(folder / "train.py"), write_run(run))
    return run


def summary(changes: list[CodeChange] | None) -> list[tuple[str, str, int, int]]:
    return [(one.file, one.change, one.added, one.removed) for one in changes or ()]


@pytest.fixture
def pair(tmp_path):
    same = {"same.py": b"x\n", "lib/same.py": b"y\n"}
    old = {"train.py": b"a\nb\nc\n", "gone.py": b"1\n", "w.bin": b"\0\1"}
    new = {"train.py": b"a\nB\nc\nd\n", "new.py": b"1\n2\n", "w.bin": b"\0\2"}
    return with_code(tmp_path / "A", **same, **old), with_code(tmp_path / "B", **same, **new)


def test_each_file_that_differs_is_told_also_where_a_run_keeps_one_alone(pair, tmp_path):
    found = code_changes(*pair)
    assert summary(found) == [
        ("gone.py", "gone", 0, 1),
        ("new.py", "new", 2, 0),
        ("train.py", "edited", 2, 1),
        ("w.bin", "edited", 0, 0),
    ]
    assert found[2].diff.splitlines()[:2] == ["--- a/train.py", "+++ b/train.py"]
    assert {"-b", "+B", "+d"} <= {*found[2].diff.splitlines()}
    assert found[3].diff == ""
    assert code_changes(pair[0], pair[0]) == []
    # Data that is only linked is no code.
    (pair[1] / "code" / "data").symlink_to(pair[0])
    (pair[1] / "code" / "__pycache__").mkdir()
    (pair[1] / "code" / "__pycache__" / "x.pyc").touch()
    assert summary(code_changes(*pair)) == summary(found)
    (tmp_path / "C").mkdir()
    assert code_changes(pair[0], tmp_path / "C") is None
    (tmp_path / "C" / "recipe.py").write_text("a\nb\n")
    assert summary(code_changes(pair[0], tmp_path / "C")) == [("train.py", "edited", 0, 1)]
    assert summary(code_changes(tmp_path / "C", pair[0])) == [("train.py", "edited", 1, 0)]
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "script.py").write_text("a\nb\n")
    assert code_changes(tmp_path / "C", tmp_path / "D") == []


def test_compare_and_the_report_show_the_difference(tmp_path, pair):
    runs = [*pair, write_run(tmp_path / "C")]
    found = compare_runs(runs)
    screen = [line.split() for line in lines(found)]
    assert ["train.py", "–", "+2", "-1", "?"] in screen
    assert ["+B"] in screen
    told = as_table(found)["code"]
    assert [one["run"] for one in told] == ["B", "C"]
    assert [one["file"] for one in told[0]["files"]] == ["gone.py", "new.py", "train.py", "w.bin"]
    assert told[1]["files"] is None
    page = render(collect(runs)).html
    assert "\n+B\n" in page
    assert "code-B" in page
    assert "code-C" not in page


def test_a_long_difference_is_left_out_of_the_screen_and_is_in_the_json(tmp_path):
    many = "".join(f"{n}\n" for n in range(99))
    runs = [with_code(tmp_path / "A", **{"train.py": b""})]
    runs += [with_code(tmp_path / "B", **{"train.py": many.encode()})]
    found = compare_runs(runs)
    assert "+77" not in [*lines(found)]
    assert "\n+77" in as_table(found)["code"][0]["files"][0]["diff"]
