"""What the trackers' real clients make of settings, projects and machines that are not usual."""

import os
from pathlib import Path

import pytest

from samestep.show.tracking import TrackedRecord, TrackedResult, TrackedRun
from tests.processes import run_ranks
from tests.tracking import readers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("trackers"),
    pytest.mark.filterwarnings("ignore"),  # the clients' own, in a process that makes them errors
]


def tracked_run(path: Path, tracker: str, **more) -> TrackedRun:
    folder = path / "tracking" / tracker
    folder.mkdir(parents=True, exist_ok=True)
    usual = {"path": path, "folder": folder, "id": "a" * 32, "project": "one", "name": "run"}
    usual |= {"offline": True, "tags": (), "settings": {}, "facts": {}}
    usual |= {"started_at": 1.0, "timeout_s": 60.0}
    usual |= dict.fromkeys(("known", "workspace", "pid"))
    return TrackedRun(**{**usual, **more})


def entry(event, line, **values) -> TrackedRecord:
    return TrackedRecord(
        event=event, axis="step", step=line, epoch=None, time=1.0 + line, values=values, line=line
    )


DONE = TrackedResult(status="completed", values={"test.accuracy [%]": 0.5})


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    """Ask MLflow in one process, which takes seconds to import it; return folder and answers."""
    folder = tmp_path_factory.mktemp("mlflow")
    return folder, run_ranks(_ask_mlflow, 1, folder / "rank", folder)[0]


def _ask_mlflow(folder: Path) -> dict[str, tuple]:
    asked = {"two": _two_projects, "elsewhere": _known_elsewhere, "killed": _killed_and_again}
    return {name: ask(folder / name) for name, ask in asked.items()}


def test_mlflow_takes_any_name_and_has_each_value_once_whatever_happened(mlflow):
    folder, answers = mlflow
    first, again = answers["two"]
    assert first[1] == 0, "this store has nothing of it yet"
    assert again == (first[0], None)
    store = readers.mlflow_store(folder / "two")
    found = store.get_run(first[0])
    assert found.data.params == {"lr_0_": "1"}
    assert found.data.tags["resumed.lr_0_"] == "2"
    assert found.data.metrics == {"a_b_": 0.5}
    assert store.get_experiment_by_name("two") is None
    runs, history = mlflow[1]["killed"]
    assert len(runs) == 1
    assert history == [(1, 0.5), (2, 0.25), (3, 0.125)]
    run, lines = mlflow[1]["elsewhere"]
    assert run != "0" * 32
    assert lines == 0


def _two_projects(path: Path) -> tuple[tuple[str, int | None], ...]:
    from samestep.show.tracking import mlflow

    first = mlflow.start(tracked_run(path, "mlflow", settings={"lr[0]": 1}))
    mlflow.record(first.client, [entry("metrics", 1, **{"a:b*": 0.5})])
    mlflow.finish(first.client, DONE)
    again = mlflow.start(
        tracked_run(path, "mlflow", settings={"lr[0]": 2}, project="two", known=first.run)
    )
    mlflow.finish(again.client, DONE)
    return (first.run, first.lines), (again.run, again.lines)


def _killed_and_again(path: Path) -> tuple[set[str | None], list[tuple[int, float]]]:
    from samestep.show.tracking import mlflow

    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{path}/mlflow.db"
    run = tracked_run(path, "mlflow", offline=False, tags=("a tag",))
    store = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    usual, mlflow.RunTag = mlflow.RunTag, None  # as if it ended once it had made the run
    with pytest.raises(TypeError):
        mlflow.start(run)
    mlflow.RunTag = usual
    values = [entry("step", n + 1, loss=2.0 ** -(n + 1)) for n in range(3)]
    for upto in (2, 3):
        started = mlflow.start(run)
        mlflow.record(started.client, values[:upto])
    mlflow.finish(started.client, DONE)
    found = store.search_runs([store.get_experiment_by_name("one").experiment_id])
    history = store.get_metric_history(started.run, "loss")
    return {one.info.run_id for one in found}, sorted((m.step, m.value) for m in history)


def _known_elsewhere(path: Path) -> tuple[str, int | None]:
    from samestep.show.tracking import mlflow

    started = mlflow.start(tracked_run(path, "mlflow", known="0" * 32))
    return started.run, started.lines


def test_wandb_has_the_machine_in_its_summary_and_an_axis_for_any_metric(tmp_path):
    run_ranks(_one_step_and_the_machine, 1, tmp_path / "rank", tmp_path)
    summary = readers.wandb_updates(tmp_path, "summary")
    assert summary["system/cpu_percent.mean"] == 30.0
    assert summary["system/cpu_percent.max"] == 40.0
    step, metrics = readers.wandb_rows(tmp_path)
    assert (step["_step"], metrics["_step"]) == (1, 2)
    assert (metrics["step"], metrics["lr/now"], metrics["a:b*"]) == (2, 0.5, 1.0)
    axes = readers.wandb_axes(tmp_path)
    assert axes["lr/now"] == "step"
    assert "a:b*" not in axes, "to W&B it would be a pattern"


def _one_step_and_the_machine(path: Path) -> None:
    from samestep.show.tracking import wandb

    client = wandb.start(tracked_run(path, "wandb")).client
    wandb.record(client, [entry("step", 1, **{"train/loss": 1.0})])
    wandb.record(client, [entry("metrics", 2, **{"lr/now": 0.5, "a:b*": 1.0})])
    for busy in (20.0, 40.0):
        wandb.record(client, [entry("system", -1, **{"system/cpu_percent": busy})])
    wandb.finish(client, DONE)
