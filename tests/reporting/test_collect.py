"""What a page shows of a run, from its records alone."""

import json
from pathlib import Path

import pytest

from samestep.base.run.records import SYSTEM
from samestep.show.reporting import facts, page, run_data
from samestep.show.reporting.collect import collect
from tests.reporting.made_runs import change, lines_of, write_run


def chart(report, ident):
    return next(chart for chart in report.charts if chart.id == ident)


def test_every_value_has_a_chart_with_its_curves_and_gaps_are_counted(tmp_path):
    report = collect([write_run(tmp_path / "one")])
    assert [c.id for c in report.charts] == [
        *("loss", "accuracy", "lr", "grad_norm", "samples_per_s", "phases")
    ]
    roles = [(curve.role, len(curve.x)) for curve in chart(report, "loss").curves]
    assert roles == [("steps", 18), ("mean", 3), ("validation", 3)]
    assert chart(report, "accuracy").curves[0].y == (0.5, 0.666667, 0.75)

    def lost(records):
        for r in records:
            if r.get("step") in (3, 4) and r["event"] == "step":
                r |= {"loss": None, "grad_norm": None}
        return records

    report = collect([change(write_run(tmp_path / "gaps"), lost)])
    assert (chart(report, "loss").gaps, chart(report, "grad_norm").gaps) == (2, 2)
    assert chart(report, "loss").curves[0].y[2:4] == (None, None)
    assert report.runs[0].problems == ()


def test_phases_are_stacked_and_the_verdict_names_the_bound_and_a_straggler(tmp_path):
    run = collect([write_run(tmp_path / "one")]).runs[0]
    assert run.phases.kind == "stack"
    assert [curve.label for curve in run.phases.curves] == [
        *("data", "forward", "backward", "optimizer", "other")
    ]
    assert run.phases.curves[0].x == (0, 6, 12, 18)
    assert run.step_time.bound == "compute"
    waiting = {"data": 0.8, "forward": 0.1, "backward": 0.1}
    slow = collect([write_run(tmp_path / "slow", phases=waiting)]).runs[0]
    assert slow.step_time.bound == "waits"

    def with_ranks(compute):
        def edit(records):
            for r in records:
                if r["event"] == "epoch":
                    waits = [max(compute) - c for c in compute]
                    r["ranks"] = {"data": [0.0] * 3, "compute": compute, "all_reduce": waits}
            return records

        return edit

    even = change(write_run(tmp_path / "even", ranks=3), with_ranks([3.0, 3.1, 3.0]))
    late = change(write_run(tmp_path / "late", ranks=3), with_ranks([3.0, 3.0, 6.0]))
    assert collect([even]).runs[0].ranks.verdict.startswith("No rank")
    found = collect([late]).runs[0].ranks
    assert found.verdict.startswith("Rank 2")
    # Milliseconds of a step: 12 s in the 12 steps of the epochs but the first.
    assert found.table.rows[2] == ("rank 2", "0", "1,000", "0")


def test_the_time_line_has_every_attempt_and_counts_restarts(tmp_path):
    def resumed(records):
        start = {**records[0], "resumed": True, "world_size": 4}
        name = "checkpoint_epoch_2.pt"
        at = next(i for i, r in enumerate(records) if r.get("path", "").endswith(name))
        resume = {"event": "resume", "step": 12, "checkpoint": name, "changes": ["lr"]}
        return [*records[: at + 1], start, resume, *records[at + 1 :]]

    line = collect([change(write_run(tmp_path / "run"), resumed)]).runs[0].time_line
    assert [(bar.label, bar.begin, bar.length) for bar in line.bars] == [
        ("1 rank", 0.0, pytest.approx(66.7, abs=0.1)),
        ("4 ranks", pytest.approx(66.7, abs=0.1), pytest.approx(33.3, abs=0.1)),
    ]
    assert [row[6] for row in line.attempts.rows] == ["0–12", "12–18"]
    assert line.attempts.rows[1][7] == "finished; changed: lr"
    assert sorted(mark.kind for mark in line.marks) == ["checkpoint"] * 3 + ["resume"]

    def repeated(records):
        return [*records, *2 * [{**records[0], "resumed": True}, records[-1]]]

    line = collect([change(write_run(tmp_path / "repeated"), repeated)]).runs[0].time_line
    assert line.summary.endswith("2 restarts, all on 1 rank.")
    assert [row[5:7] for row in line.attempts.rows[1:]] == 2 * [("the end", "none")]


def test_a_test_is_drawn_at_the_step_of_the_checkpoint_that_was_tested(tmp_path):
    def tested(records):
        test = {"event": "evaluation", "split": "test", "epoch": 3, "step": 18, "loss": 0.5}
        return [*records, {**test, "checkpoint": "checkpoint_epoch_2.pt", "seconds": 0.1}]

    report = collect([change(write_run(tmp_path / "run"), tested)])
    assert [c.x for c in chart(report, "loss").curves if c.role == "test"][-1][-1] == 12


@pytest.mark.parametrize("lines", [0, 1, 5])
def test_a_run_is_shown_as_far_as_its_records_go(tmp_path, lines):
    run = write_run(tmp_path / "run", finished=False)
    kept = lines_of(run)[:lines]
    (run / "events.jsonl").write_text("".join(kept) + '{"event": "st')
    (run / "environment.json").unlink()
    report = collect([run])
    # The torn line, the environment, and what lacks: a start record, or any record.
    assert len(report.runs[0].problems) == (2 if lines else 4)
    assert bool(report.charts) == (lines > 1)


def test_classes_come_from_the_test_with_the_worst_first(tmp_path):
    run = write_run(tmp_path / "run")
    test = {"per_class": {"cat": 0.9, "dog": 0.5, "fox": None}}
    test["confusion"] = [[9, 1, 0], [4, 5, 1], [0, 0, 0]]
    (run / "result.json").write_text(json.dumps({"status": "completed", "test": test}))
    found = collect([run]).runs[0].classes
    assert found.split == "test"
    assert [row[0] for row in found.table.rows] == ["dog", "cat", "fox"]
    assert found.table.rows[0][3] == "cat (4), fox (1)"
    assert found.heat.rows[0][0] == (9, 9)
    accuracies = {f"class {n}": n / 10_000 for n in range(10_000)}
    (run / "result.json").write_text(json.dumps({"test": {"per_class": accuracies}}))
    found = collect([run]).runs[0].classes
    assert [row[0] for row in found.table.rows] == [f"class {n}" for n in range(50)]
    assert "10,000" in found.table.note
    assert found.heat is None


def test_settings_of_the_command_line_come_first_and_it_can_be_repeated(tmp_path):
    run = write_run(tmp_path / "run", seed=42, width=8)
    command = ["/x/bin/samestep", "train", "toy", "--width", "8"]
    (run / "environment.json").write_text(json.dumps({"command": command}))
    part = collect([run]).runs[0]
    special, others = part.settings
    assert {row[0] for row in special.rows} == {"lr", "batch_size", "epochs", "width"}
    assert [row[0] for row in others.rows] == ["seed"]
    assert part.commands[0] == ("repeat it", "samestep train toy --width 8")
    run = write_run(tmp_path / "mine", lr=0.5)
    command = json.dumps({"command": ["loop.py", "--lr", "0.5"]})
    (run / "environment.json").write_text(command)
    (table, *_) = facts.settings_tables(run_data.read_run(run))
    assert next(row[2] for row in table.rows if row[0] == "lr") == "of the loop"
    run = Path("runs/mine")
    for words, pasted in (
        ("train s.py --run-dir runs/mine --lr 0.1 --resume", "train s.py --lr 0.1"),
        ("train runs/mine --resume --allow-change=lr --lr 1", "train runs/mine --lr 1"),
        ("train spiral --run_dir=runs/mine --epochs 2", "train spiral --epochs 2"),
        ("runs/mine --lr 0.1", "runs/mine-again --lr 0.1"),
        ("--out=runs/mine/ --lr 0.1", "--out=runs/mine-again --lr 0.1"),
    ):
        assert facts._anew(words.split(), run) == pasted.split()


def test_several_runs_share_axes_and_two_recipes_do_not(tmp_path):
    runs = [write_run(tmp_path / name, lr2=value) for name, value in (("a", 1), ("b", 2))]
    report = collect(runs, target=0.6)
    assert {curve.label[0] for curve in chart(report, "loss").curves} == {"A", "B"}
    assert chart(report, "loss").x == "samples trained"
    assert chart(report, "loss").curves[0].x[:7] == (10, 20, 30, 40, 50, 60, 70)
    assert report.beside.settings.rows == (("lr2", "1", "2"),)
    reached = report.beside.tables[-1]
    assert reached.rows[0] == ("step", "12", "12")
    runs = [write_run(tmp_path / name, recipe=name) for name in ("spiral", "prices")]
    report = collect(runs)
    assert [group.title for group in report.groups] == ["spiral", "prices"]
    idents = [chart.id for chart in report.charts]
    assert len(idents) == len(set(idents))
    assert len(report.beside.verdicts) == 1


def test_memory_is_drawn_where_a_tracker_took_samples_of_it(tmp_path):
    run = write_run(tmp_path / "run")
    sample = {"event": "system", "time": 1.0, "step": 3, "process_memory_gib": 1.5}
    (run / SYSTEM).parent.mkdir()
    (run / SYSTEM).write_text(json.dumps(sample) + "\n")
    report = collect([run])
    assert chart(report, "memory").curves[0].y == (1.5,)
    assert "1.5 GiB" in report.runs[0].memory


@pytest.mark.parametrize(
    ("event", "field"),
    [
        *(("start", "notes"), ("start", "time"), ("evaluation", "problems"), ("epoch", "ranks")),
        *(("evaluation", "per_class"), ("evaluation", "confusion"), ("metrics", "step")),
        *(("metrics", "values"), ("step", "lr"), ("epoch", "metrics")),
    ],
)
def test_a_field_that_is_not_what_a_run_writes_ends_no_report(tmp_path, event, field):
    run = write_run(tmp_path / "run", epochs=1)
    for odd in (None, "x", -1, [1, "a"], {"a": "b"}, {"a": [None]}, 10**30):
        more = {"event": "metrics", "step": 3, "values": {"z": 1.0}}

        def edit(records, odd=odd, more=more):
            records = [r for r in records if r["event"] != "metrics"]
            return [r | {field: odd} if r["event"] == event else r for r in (*records, more)]

        change(run, edit)
        page.render(collect([run]))


def test_the_header_has_the_best_the_time_left_and_the_duration(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run", accuracy=None)
    best = {"metric": "loss", "mode": "min", "value": None, "epoch": 0}
    told = {"status": "completed", "reason": "finished", "best": best, "training_seconds": 0.42}
    (path / "result.json").write_text(json.dumps(told))
    facts = dict(collect([path]).runs[0].facts)
    assert "best" not in facts
    assert facts["duration"].startswith("0.42 s")
    going = (tmp_path / "goes on").__eq__
    monkeypatch.setattr("samestep.base.run.directory.is_written", going)
    path = write_run(tmp_path / "goes on", epochs=4, finished=False)
    (path / "run.lock").write_text("")
    facts = dict(collect([change(path, lambda records: records[:20])]).runs[0].facts)
    assert facts["left"].startswith("0:10 ")  # 11 steps of 11/12 s, as the last 12
    assert facts["best"].startswith("accuracy 0.6667")
    best = chart(collect([path]), "accuracy").curves[-1]
    assert (best.label, best.role, best.x, best.y) == ("best, epoch 2", "best", (12,), (0.666667,))
    saved = collect([path]).runs[0].time_line.checkpoints
    assert [row[0].partition(", ")[2] for row in saved.rows] == ["", "best"]
    assert "left" not in dict(collect([write_run(tmp_path / "ended")]).runs[0].facts)
