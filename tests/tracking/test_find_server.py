"""What the clients themselves say of keys and servers, asked in a process of their own."""

import base64
import importlib
import importlib.util
import json
import os

import pytest

from samestep.show.tracking import Server
from tests.processes import run_ranks

MISSING = [p for p in ("comet_ml", "mlflow", "wandb") if importlib.util.find_spec(p) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.xdist_group("trackers"),
    pytest.mark.slow,  # it imports each client, seconds at a time
    pytest.mark.filterwarnings("ignore"),
]
KEY = "0123456789abcdef" * 3
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


def assert_refused(answer, *names):
    """Check that a refusal names what to look at, and no key."""
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
