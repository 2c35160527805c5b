"""The trackers' own clients: what they wrote offline at two ranks, and what is not usual."""

import importlib.util
import json
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from samestep.show.tracking import TrackedRecord, TrackedResult, TrackedRun
from tests import tiny
from tests.command_line import read_json
from tests.processes import free_port, run_ranks
from tests.tracking import readers
from tests.tracking.test_following import samestep

PACKAGES = ("comet_ml", "mlflow", "tensorboard", "wandb")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.xdist_group("trackers"),
    pytest.mark.filterwarnings("ignore"),  # the clients' own, in a process that makes them errors
]

PLANTED = "hunter2" * 6
OWN_PICTURE = """
def weights(model, data):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(3, 2))
    figure.subplots().hist(model[0].weight.flatten().tolist())
    return figure
recipe = Recipe("""
CHANGES = {
    '    "checkpoint_every_steps": 4,\n': "",
    '"epochs": 6': '"epochs": 2',
    "y[n + 37:]))": 'y[n + 37:]), classes=("no", "<b>$yes"))',
    "\nrecipe = Recipe(": f"{OWN_PICTURE}pictures={{'weights': weights}}, ",
}
RECIPE = tiny.RECIPE
for _before, _after in CHANGES.items():
    assert _before in RECIPE
    RECIPE = RECIPE.replace(_before, _after)
PICTURES = {"confusion", "weights"}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    recipe = tiny.write_recipe(folder, RECIPE)
    nowhere = f"127.0.0.1:{free_port()}"
    environment = {"HOME": str(folder), "WANDB_API_KEY": PLANTED, "COMET_API_KEY": PLANTED}
    environment |= {"WANDB_BASE_URL": f"http://{nowhere}"}
    environment |= {"COMET_URL_OVERRIDE": f"http://{nowhere}/clientlib/"}
    environment |= {"MLFLOW_TRACKING_URI": f"http://somebody:{PLANTED}@{nowhere}"}
    run = folder / "run"
    flags = "--log-every 2 --track-checkpoints --track-timeout 600"
    names = ("--track-project", "odd ones", "--track-name", "the first", "--track-tags", "a, b")
    track = ("--track", "wandb,comet,tensorboard,mlflow", *names, *flags.split(), "--epochs", "1")
    begin = ("train", recipe, "--run-dir", run, *track)
    printed = []
    (folder / "outputs").mkdir()
    for arguments in (begin, ("train", run, "--resume", "--epochs", "2")):
        ranks = samestep(*arguments, world_size=2, folder=folder / "outputs", **environment)
        assert ranks.wait() == [0, 0], ranks.output()
        printed.append(ranks.printed(0))
    return SimpleNamespace(path=run, printed=printed, folder=folder)


def metrics_of(run, series):
    """Return (name, step, epoch, value) of what a series must show, in order."""
    return [
        (name, step, epoch, value)
        for step, epoch, values in readers.expected(run)[series]
        for name, value in values.items()
    ]


SERIES = ("train", "epoch", "validation")


def curves(run):
    """Yield name → [(step, or epoch of an epoch's, value)], as two of the trackers draw them."""
    for series in SERIES:
        metrics = metrics_of(run, series)
        for name in {metric[0] for metric in metrics}:
            own = [metric for metric in metrics if metric[0] == name]
            yield name, [(e if series == "epoch" else step, value) for _, step, e, value in own]


def names_of(artifacts):
    return {Path(one.path).name for one in artifacts}


def last_test(run):
    """Return name → value of the last test; the first execution's is at the tracker too."""
    ((step, _, values),) = readers.expected(run)["test"]
    return step, values


def test_wandb_has_one_run_of_all_records_with_settings_machine_and_result(tracked):
    runs = readers.wandb_records(tracked.path, "run")
    ids = {run.run_id for run in runs}
    assert ids == {read_json(tracked.path / "tracking" / "wandb.json")["id"]}
    rows = readers.wandb_rows(tracked.path)
    for series in SERIES:
        found = [
            (name, row["step"], row["epoch"], row[name])
            for row in rows
            for name in row
            if name.startswith(f"{series}/")
        ]
        assert sorted(found) == sorted(metrics_of(tracked.path, series))
    step, values = last_test(tracked.path)
    assert [row["step"] for row in rows if "test/loss" in row] == [11, step]
    assert values.items() <= next(row for row in reversed(rows) if "test/loss" in row).items()
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps)), "W&B's own count only goes up, over both executions"
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    axes = readers.wandb_axes(tracked.path)
    assert axes["epoch/*"] == "epoch"
    assert {axes[f"{series}/*"] for series in ("train", "validation", "test")} == {"step"}
    config, summary = (readers.wandb_updates(tracked.path, of) for of in ("config", "summary"))
    assert config["lr"] == 0.01
    assert config["options.hidden"] == 16
    assert config["facts.world_size"] == 2
    result = read_json(tracked.path / "result.json")
    assert summary["result.test.accuracy"] == result["test"]["accuracy"]
    run = runs[0]
    assert (run.project, run.display_name, list(run.tags)) == ("odd ones", "the first", ["a", "b"])
    assert any(readers.wandb_records(tracked.path, kind) for kind in ("request", "artifact"))


def is_png(content):
    return content.startswith(b"\x89PNG")


def test_wandb_and_comet_have_the_pictures(tracked):
    rows = readers.wandb_rows(tracked.path)
    for name in PICTURES:
        key = f"pictures/{name}.path"
        files = [Path(row[key]).name for row in rows if key in row]
        assert len(files) == 2, "one for each end of the run"
        for wanted in files:
            (file,) = (tracked.path / "tracking" / "wandb").rglob(wanted)
            assert is_png(file.read_bytes())
    found = {}
    for path in (tracked.path / "tracking" / "comet").glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            for line in archive.read("messages.json").decode().splitlines():
                payload = json.loads(line)["payload"]
                if payload.get("upload_type") == "visualization":
                    name = payload["additional_params"]["figName"]
                    found[name] = archive.read(Path(payload["file_path"]).name)
    assert found.keys() == {f"{name}.png" for name in PICTURES}
    assert all(map(is_png, found.values()))


def test_comet_has_one_experiment_with_every_value_by_step_and_epoch(tracked):
    archives = readers.comet_messages(tracked.path)
    assert len(archives) == 2, "one for each execution"
    assert {about["offline_id"] for about, _ in archives} == {
        read_json(tracked.path / "tracking" / "comet.json")["id"]
    }
    # `get` alone would find nothing where the first archive was lost with a killed process.
    assert {about["resume_strategy"] for about, _ in archives} == {"get_or_create"}
    found = readers.comet_metrics(tracked.path)
    for series in SERIES:
        own = [metric for metric in found if metric[0].startswith(f"{series}/")]
        assert sorted(own) == sorted(metrics_of(tracked.path, series))
    step, values = last_test(tracked.path)
    assert ("test/loss", step, 2, values["test/loss"]) in found
    steps = [step for name, step, _, _ in found if name == "train/loss"]
    assert steps == sorted(steps)
    about = archives[0][0]
    assert (about["project_name"], sorted(about["tags"])) == ("odd ones", ["a", "b"])
    parameters = {
        m["payload"]["param"]["paramName"]: m["payload"]["param"]["paramValue"]
        for m in archives[0][1]
        if m["type"] == "parameter_msg"
    }
    assert parameters["lr"] == 0.01
    others = {
        m["payload"]["key"]: m["payload"]["value"]
        for m in archives[1][1]
        if m["type"] == "log_other"
    }
    assert others["result.status"] == "completed"


def test_tensorboard_has_every_value_at_its_step_or_epoch(tracked):
    reader = readers.tensorboard(tracked.path)
    for name, must in curves(tracked.path):
        drawn = [(e.step, np.float32(e.value)) for e in reader.Scalars(name)]
        assert drawn == [(at, np.float32(value)) for at, value in must], name
    step, values = last_test(tracked.path)
    last = reader.Scalars("test/accuracy")[-1]
    assert (last.step, np.float32(last.value)) == (step, np.float32(values["test/accuracy"]))
    texts = {
        tag: reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in reader.Tags()["tensors"]
    }
    assert "| lr | 0.01 |" in texts["settings"]
    assert "| status | completed |" in texts["result"]
    assert set(reader.Tags()["images"]) == {f"pictures/{name}" for name in PICTURES}
    for name in PICTURES:
        last = reader.Images(f"pictures/{name}")[-1]
        assert (last.step, is_png(last.encoded_image_string)) == (step, True)
        assert min(last.width, last.height) > 100


def test_mlflow_has_one_run_with_every_value_at_its_step_or_epoch(tracked):
    store = readers.mlflow_store(tracked.path)
    (run,) = store.search_runs([store.get_experiment_by_name("odd ones").experiment_id])
    assert (run.info.run_name, run.info.status) == ("the first", "FINISHED")
    assert run.data.params["lr"] == "0.01"
    assert run.data.tags["tags"] == "a, b"
    assert run.data.tags["facts.world_size"] == "2"
    for name, must in curves(tracked.path):
        history = store.get_metric_history(run.info.run_id, name)
        assert [(m.step, m.value) for m in history] == must, name
    _, values = last_test(tracked.path)
    assert run.data.metrics["test/loss"] == values["test/loss"]
    kept = {path.name for path in (tracked.path / "checkpoints").glob("*.pt")}
    assert names_of(store.list_artifacts(run.info.run_id, "checkpoints")) == kept
    pictures = store.list_artifacts(run.info.run_id, "pictures")
    assert names_of(pictures) == {f"{name}.png" for name in PICTURES}


def test_the_screen_says_where_each_tracker_is_no_key_is_told_and_nothing_left_elsewhere(tracked):
    for text in tracked.printed:
        for name in ("wandb", "comet"):
            assert text.count(f"{name:<7} offline: {tracked.path}/tracking/{name}") == 1, text
            assert "(127.0.0.1 " in text
        assert f"sqlite:///{tracked.path}/tracking/mlflow/mlflow.db" in text
        assert f"samestep track {tracked.path} --to wandb,comet" in text
    assert PLANTED not in "".join(tracked.printed)
    assert not readers.files_with(PLANTED, tracked.folder)
    left = {path.name for path in tracked.folder.iterdir()}
    made = {"tiny.py", "tiny.pace", "run", "outputs", "__pycache__"}
    assert left <= made | {".config", ".cache", ".local"}
    assert "system/cpu_percent" in {name for name, *_ in readers.comet_metrics(tracked.path)}
    assert "system/memory_percent" in readers.tensorboard(tracked.path).Tags()["scalars"]


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


def _ask_mlflow(folder: Path) -> dict[str, tuple]:
    """Ask MLflow in one process, which takes seconds to import it; return its answers."""
    asked = {"two": _two_projects, "elsewhere": _known_elsewhere, "killed": _killed_and_again}
    return {name: ask(folder / name) for name, ask in asked.items()}


def test_mlflow_takes_any_name_and_has_each_value_once_whatever_happened(tmp_path):
    (answers,) = run_ranks(_ask_mlflow, 1, tmp_path / "rank", tmp_path)
    first, again = answers["two"]
    assert first[1] == 0, "this store has nothing of it yet"
    assert again == (first[0], None)
    store = readers.mlflow_store(tmp_path / "two")
    found = store.get_run(first[0])
    assert found.data.params == {"lr_0_": "1"}
    assert found.data.tags["resumed.lr_0_"] == "2"
    assert found.data.metrics == {"a_b_": 0.5}
    assert store.get_experiment_by_name("two") is None
    runs, history = answers["killed"]
    assert len(runs) == 1
    assert history == [(1, 0.5), (2, 0.25), (3, 0.125)]
    run, lines = answers["elsewhere"]
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
