"""The trackers' real clients against servers that misbehave: one that never answers, one that
returns errors, one that dies within the run. The training is the same, and all is sent later, once.
"""

import importlib.util

import pytest

from tests import tiny
from tests.command_line import read_json
from tests.processes import TIMEOUT_S
from tests.tracking.readers import expected
from tests.tracking.servers import Errors, Silent, Wandb
from tests.tracking.test_following import samestep, train

MISSING = [p for p in ("comet_ml", "mlflow", "wandb") if importlib.util.find_spec(p) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.xdist_group("trackers"),
    pytest.mark.slow,  # what any tracker may do to a training is in test_following.py
]
SERIES = ("train", "epoch", "validation")
KEY = "0123456789" * 4


def at(url, folder):
    keys = {"WANDB_API_KEY": KEY, "COMET_API_KEY": KEY, "HOME": str(folder)}
    places = {"WANDB_BASE_URL": url, "COMET_URL_OVERRIDE": f"{url}/clientlib/"}
    return keys | places | {"MLFLOW_TRACKING_URI": url}


def test_a_server_that_never_answers_keeps_trackers_offline(tmp_path, uninterrupted):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    with Silent(is_there=False) as server:
        flags = ("--run-dir", run, "--track", "wandb,comet")
        ranks = train(recipe, *flags, folder=tmp_path, **at(server.url, tmp_path))
    tiny.assert_same_training(run, uninterrupted, 0)
    assert ranks.output().count("(127.0.0.1 ") == 2
    assert ranks.output().count("in 5 s)") == 2
    assert not server.asked or {method for method, _ in server.asked} == {"HEAD"}
    files = [run / "tracking" / f"{tracker}.json" for tracker in ("wandb", "comet")]
    offline, _ = found = [read_json(file)["offline"] for file in files]
    assert all(one["finished"] for one in found)
    with Wandb() as server:
        flags = ("--to", "wandb", "--tags", "a,b")
        sent = samestep("track", run, *flags, folder=tmp_path, **at(server.url, tmp_path))
        assert sent.wait() == [0], sent.output()
        assert history(server, run) == expected(run)
        ((name, state),) = server.runs.items()
        assert name == offline["run"], "the same name as in its files"
        assert state["tags"] == ["a", "b"]
        assert state["config"]["lr"]["value"] == 0.01


HANGS = "wandb,comet,mlflow"


@pytest.mark.parametrize(("kind", "trackers"), [("hangs", HANGS), ("errors", "wandb,comet")])
def test_a_server_that_hangs_or_fails_is_given_up(tmp_path, kind, trackers, uninterrupted):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    with Silent(is_there=True) if kind == "hangs" else Errors() as server:
        flags = ("--run-dir", run, "--track", trackers, "--track-timeout", "12")
        ranks = train(recipe, *flags, folder=tmp_path, **at(server.url, tmp_path))
    tiny.assert_same_training(run, uninterrupted, 0)
    for tracker in trackers.split(","):
        assert ranks.output().count(f"warning {tracker} failed: ") == 1, ranks.output()
        assert f"samestep track {run} --to {tracker}" in ranks.output()
    assert KEY not in ranks.output()


def history(server, run):
    found = {}
    for row in server.rows(read_json(run / "tracking" / "wandb.json")["id"]):
        values = {name: value for name, value in row.items() if "/" in name}
        series = next(iter(values)).split("/")[0]
        found.setdefault(series, []).append((row["step"], row["epoch"], values))
    return found


def test_wandb_has_a_run_once_whose_server_died_within_it(tmp_path, uninterrupted):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    with Wandb() as server:
        here = at(server.url, tmp_path)
        flags = ("--run-dir", run, "--track", "wandb", "--epochs", "1")
        train(recipe, *flags, folder=tmp_path, **here)
        assert history(server, run) == expected(run)
        ((name, state),) = server.runs.items()
        known = list(state["history"])
        server.dies_with_history = 403
        ranks = samestep("train", run, "--resume", "--epochs", "6", folder=tmp_path, **here)
        assert server.died.wait(TIMEOUT_S), ranks.output()
        tiny.until(lambda: [r["event"] for r in tiny.all_records(run)].count("stop") == 2)
        assert ranks.wait() == [0], ranks.output()
        tiny.assert_same_training(run, uninterrupted, 0)
        assert ranks.output().count("warning wandb failed: ") == 1
        assert state["history"] == known
        server.dead = server.dies_with_history = None
        again = samestep("track", run, "--to", "wandb", folder=tmp_path, **here)
        assert again.wait() == [0], again.output()
        assert list(server.runs) == [name]
        assert all(history(server, run)[series] == expected(run)[series] for series in SERIES)
        assert f"{server.url}/me/tiny/runs/{name}" in again.output()
