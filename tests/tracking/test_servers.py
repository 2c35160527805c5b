"""The trackers' real clients against servers that misbehave: one that never answers, one that
returns errors, one that dies within the run. The training is the same, and all is sent later, once.
What the clients themselves say of keys and servers, asked in a process of their own.
"""

import base64
import importlib
import importlib.util
import json
import os

import pytest

from samestep.show.tracking import Server
from tests import tiny
from tests.command_line import read_json
from tests.processes import TIMEOUT_S, run_ranks
from tests.tracking.readers import expected
from tests.tracking.servers import Errors, Silent, Wandb
from tests.tracking.test_following import samestep, train

MISSING = [p for p in ("comet_ml", "mlflow", "wandb") if importlib.util.find_spec(p) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.xdist_group("trackers"),
    pytest.mark.slow,  # what any tracker may do to a training is in test_following.py
    pytest.mark.filterwarnings("ignore"),  # the clients' own, as they are imported
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


COMET_KEY = KEY[:25]
COMET_SERVER = base64.b64encode(json.dumps({"baseUrl": "https://comet.here"}).encode()).decode()


def ask(tracker, folder, questions):
    """Return what a client answers to (files, environment): its server's address or its refusal."""
    (answers,) = run_ranks(_ask, 1, folder / "rank", tracker, folder, questions)
    return answers


def _ask(tracker, folder, questions):
    module = importlib.import_module(f"samestep.show.tracking.{tracker}")
    os.environ["WANDB_SILENT"] = "true"  # as a tracker's process has it
    forks = [_fork(module, folder / str(n), *question) for n, question in enumerate(questions)]
    answers = []
    for child, reading in forks:
        with os.fdopen(reading, "rb") as answer:
            answers.append(json.loads(answer.read()))
        os.waitpid(child, 0)
    return answers


def _fork(module, home, files, environment):
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    home.mkdir()
    os.chdir(home)
    for name, text in files.items():
        (home / name).write_text(text)
        (home / name).chmod(0o600)
    os.environ.update({"HOME": str(home)} | environment)
    try:
        server = module.find_server()
        assert isinstance(server, Server)
        answer = {"address": server.address, "secrets": server.secrets, "shown": repr(server)}
    except Exception as error:
        answer = {"refused": str(error)}
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


def assert_refused(answer, *names):  # check that a refusal names what to look at, and no key
    assert all(name in answer["refused"] for name in names), answer
    assert not [key for key in (KEY, COMET_KEY, "short-key", "<your key>") if key in str(answer)]


def assert_found(answer, address, key):
    assert (answer["address"], key in answer["secrets"]) == (address, True)
    assert key not in answer["shown"]


def test_wandb_says_itself_whether_it_has_a_key_and_for_which_server(tmp_path):
    server = {"WANDB_BASE_URL": "http://w.example"}
    netrc = f"machine w.example\n  login user\n  password {KEY}\n"
    cases = [
        ({".netrc": netrc.replace("w.example", "other.example")}, server),
        ({}, {"WANDB_API_KEY": "short-key"}),
        ({}, {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}),
        ({".netrc": netrc}, server),
    ]
    of_another, malformed, offline, found = ask("wandb", tmp_path, cases)
    assert_refused(of_another, "wandb login")
    assert_refused(malformed, "WANDB_API_KEY")
    assert_refused(offline, "WANDB_MODE")
    assert_found(found, "http://w.example", KEY)


def test_comet_says_itself_whether_it_has_a_key_and_for_which_server(tmp_path):
    kept = f"[comet]\napi_key={COMET_KEY}\nurl_override=http://kept.example/\n"
    cases = [
        ({}, {"COMET_API_KEY": "<your key>"}),
        ({}, {"COMET_API_KEY": COMET_KEY, "COMET_START_ONLINE": "0"}),
        ({}, {"COMET_API_KEY": COMET_KEY}),
        ({".comet.config": kept, ".env": "COMET_URL_OVERRIDE=http://dotenv.example/\n"}, {}),
        ({}, {"COMET_API_KEY": f"{COMET_KEY}*{COMET_SERVER}"}),
    ]
    malformed, offline, by_key, by_dotenv, in_key = ask("comet", tmp_path, cases)
    assert_refused(malformed, "COMET_API_KEY")
    assert_refused(offline, "COMET_START_ONLINE")
    assert_found(by_key, "https://www.comet.com/clientlib/", COMET_KEY)
    assert_found(by_dotenv, "http://dotenv.example/", COMET_KEY)
    assert_found(in_key, "https://comet.here/clientlib/", COMET_KEY)


def test_mlflow_has_a_server_where_its_variable_names_one(tmp_path):
    places = ("http://m:5000", "sqlite:////srv/mlflow.db")
    answers = ask("mlflow", tmp_path, [({}, {"MLFLOW_TRACKING_URI": uri}) for uri in places])
    assert [answer["address"] for answer in answers] == ["http://m:5000", None]
