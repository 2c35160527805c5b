"""Before anything is started: which trackers there are, whether they can go online, and why not."""

import base64
import json
from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.settings import Settings
from samestep.tracking import choice
from samestep.tracking.access import find_access, secrets_of, why_unreachable
from samestep.tracking.choice import check_choice, check_installed, chosen, default_project
from tests.processes import free_port
from tests.tracking.servers import Errors

KEY = "0123456789abcdef" * 3


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home directory, and a current one, without any configuration."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("tracker", "environment", "why"),
    [
        ("wandb", {}, "WANDB_API_KEY is not set"),
        ("wandb", {"WANDB_API_KEY": "short"}, "WANDB_API_KEY is malformed"),
        ("wandb", {"WANDB_API_KEY": f"{KEY[:30]} {KEY[:20]}"}, "WANDB_API_KEY is malformed"),
        ("wandb", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "WANDB_MODE is offline"),
        ("comet", {}, "COMET_API_KEY is not set"),
        ("comet", {"COMET_API_KEY": "<your key>"}, "COMET_API_KEY is malformed"),
        ("comet", {"COMET_API_KEY": KEY, "COMET_START_ONLINE": "0"}, "COMET_START_ONLINE is off"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "mlruns"}, "MLFLOW_TRACKING_URI names a folder"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "file:///mlruns"}, "sqlite:///FILE"),
        (
            "mlflow",
            {"MLFLOW_TRACKING_URI": "http://a", "MLFLOW_TRACKING_USERNAME": "me"},
            "MLFLOW_TRACKING_USERNAME is set without MLFLOW_TRACKING_PASSWORD",
        ),
    ],
)
def test_what_keeps_a_tracker_offline_is_said_without_the_key(home, tracker, environment, why):
    access = find_access(tracker, environment, home)
    assert access.offline
    assert why in access.why
    assert not any(value in access.why for value in environment.values() if "KEY" in value)
    assert KEY not in repr(access)


@pytest.mark.parametrize(
    ("tracker", "environment", "address"),
    [
        ("wandb", {"WANDB_API_KEY": KEY}, "https://api.wandb.ai"),
        ("wandb", {"WANDB_API_KEY": f"local-{KEY}", "WANDB_BASE_URL": "http://w"}, "http://w"),
        ("wandb", {"WANDB_IDENTITY_TOKEN_FILE": "token"}, "https://api.wandb.ai"),
        ("comet", {"COMET_API_KEY": KEY[:25]}, "https://www.comet.com/clientlib/"),
        ("comet", {"COMET_API_KEY": KEY[:25], "COMET_URL_OVERRIDE": "http://c/"}, "http://c/"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://m:5000"}, "http://m:5000"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "sqlite:////srv/mlflow.db"}, None),
        ("own.module", {}, None),
    ],
)
def test_with_a_key_a_tracker_goes_online_to_its_own_address(home, tracker, environment, address):
    access = find_access(tracker, environment, home)
    assert not access.offline
    assert access.address == address


def test_trackers_whose_files_are_all_there_is_are_local_without_a_word(home):
    for tracker in ("tensorboard", "mlflow"):
        access = find_access(tracker, {}, home)
        assert (access.offline, access.why) == (True, None)


def test_a_key_is_found_where_the_tracker_itself_keeps_it(home):
    (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    (home / ".netrc").chmod(0o600)
    (home / ".comet.config").write_text(f"[comet]\napi_key={KEY[:25]}\nurl_override=http://c/\n")
    assert not find_access("wandb", {}, home).offline
    assert find_access("wandb", {"WANDB_BASE_URL": "http://other"}, home).offline
    assert find_access("comet", {}, home).address == "http://c/"
    Path(".env").write_text("COMET_URL_OVERRIDE='http://d/'\n")
    assert find_access("comet", {}, home).address == "http://d/"
    folder = home / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nmode = offline\n")
    assert find_access("wandb", {"WANDB_API_KEY": KEY}, home).why == "WANDB_MODE is offline"


def test_damaged_configuration_of_a_tracker_is_its_own_matter(home):
    (home / ".netrc").write_text("machine without end \x00")
    (home / ".comet.config").write_text("no section\n= nothing")
    assert find_access("wandb", {}, home).offline
    assert find_access("comet", {}, home).offline


def test_the_address_in_a_comet_key_is_taken(home):
    part = base64.b64encode(json.dumps({"baseUrl": "https://comet.here"}).encode()).decode()
    access = find_access("comet", {"COMET_API_KEY": f"{KEY[:25]}*{part}"}, home)
    assert access.address == "https://comet.here/clientlib/"


def test_secrets_are_known_by_the_names_of_variables_and_in_addresses():
    environment = {
        "WANDB_API_KEY": KEY,
        "HOME": "/home/me",
        "X_TOKEN": "tokens",
        "MY_KEY": "a",
        "MLFLOW_TRACKING_URI": "http://me:password@host",
    }
    assert set(secrets_of(environment)) == {KEY, "tokens", "password"}


def test_a_server_is_reachable_if_it_answers_whatever_it_says():
    with Errors() as server:
        assert why_unreachable(server.url) is None
    nobody = f"http://127.0.0.1:{free_port()}"
    assert why_unreachable(nobody) == "127.0.0.1 cannot be reached: no connection"
    assert "cannot be reached" in why_unreachable("nonsense")


# --- names


def test_trackers_are_named_with_commas_and_none_is_none():
    assert chosen(None) == chosen("none") == []
    assert chosen("comet, wandb,") == ["comet", "wandb"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"track": "tensorbord"}, "Did you mean 'tensorboard'?"),
        ({"track": "none,wandb"}, "no tracker 'none'"),
        ({"track": "a b.c"}, "no tracker 'a b.c'"),
        ({"track": "x/wandb.py"}, "the name wandb is taken"),
        ({"track": "my.py,other/my.py"}, "names my twice"),
        ({"track_project": ""}, "--track-project '' has 0 characters"),
        ({"track_project": "a%b"}, "holds '%'"),
        ({"track_name": "a\nb"}, r"holds '\n'"),
        ({"track_workspace": "a/b"}, "--track-workspace 'a/b' holds '/'"),
    ],
)
def test_a_choice_that_no_service_would_take_is_refused(settings, says):
    with pytest.raises(UserError) as refused:
        check_choice(Settings(**settings))
    assert says in str(refused.value)


def test_a_choice_that_services_take_is_taken():
    check_choice(
        Settings(
            track="comet,wandb,mlflow,tensorboard,my.py,our.module",
            track_project="Äpfel & Birnen (2)",
            track_name="a/b: c",
        )
    )
    assert default_project("my:recipe#2") == "my-recipe-2"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(choice.PACKAGES, "wandb", "no_such_package")
    with pytest.raises(UserError, match=r"pip install 'samestep\[wandb\]'"):
        check_installed(["wandb"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def start(run): ...\ndef record(client, entries): ...\n", "no function finish"),
        ("def start(:", "no Python"),
    ],
)
def test_a_file_that_is_no_tracker_is_refused_without_running_it(tmp_path, text, says):
    path = tmp_path / "my.py"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        check_installed([str(path)])


@pytest.mark.parametrize(
    "text", ["from other import *\n", "from other import begin as start, record\nfinish = print\n"]
)
def test_a_tracker_may_take_its_functions_from_elsewhere(tmp_path, text):
    path = tmp_path / "my.py"
    path.write_text(text)
    check_installed([str(path)])


@pytest.mark.parametrize(
    ("tracker", "environment"),
    [
        ("wandb", {"WANDB_API_KEY": "", "WANDB_BASE_URL": "http://[::1"}),
        ("wandb", {"NETRC": "~nosuchuser/.netrc"}),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://[bad"}),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://me:pa55word@[bad"}),
        ("comet", {"COMET_CONFIG": "~nosuchuser/c"}),
    ],
)
def test_what_cannot_be_read_at_all_is_a_reason_to_be_offline(home, tracker, environment):
    found = find_access(tracker, environment, home)
    assert found.offline
    assert f"what is set for {tracker} in the environment cannot be used" in found.why
    assert "pa55word" not in found.why


def test_a_netrc_that_is_no_text_is_a_reason_to_be_offline(home):
    (home / ".netrc").write_bytes(b"machine \xff")
    assert find_access("wandb", {}, home).offline


def test_an_address_that_is_none_does_not_keep_secrets_from_being_found():
    variables = {"BROKEN_URI": "http://[::1", "STORE_URI": "postgresql://me:pa55word@host/db"}
    assert secrets_of(variables) == ("pa55word",)


def test_a_project_that_the_service_would_refuse_is_refused_wherever_it_comes_from(monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "bad/name")
    with pytest.raises(UserError, match="WANDB_PROJECT 'bad/name' holds '/'"):
        check_choice(Settings(track="wandb"))
    check_choice(Settings(track="wandb", track_project="good"))
    check_choice(Settings(track="tensorboard"))


def test_a_module_whose_package_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no package nosuch here"):
        check_installed(["nosuch.module"])
    (tmp_path / "nosuch").mkdir()
    (tmp_path / "nosuch" / "__init__.py").touch()
    check_installed(["nosuch.module"])
