"""Before anything is started: which trackers there are, whether they can go online, and why not."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from samestep.base import tracker_choice as choice
from samestep.base.errors import UserError
from samestep.base.settings import Settings
from samestep.base.tracker_choice import check_choice, check_installed, chosen, find_access
from samestep.show.tracking.follower import why_offline
from tests.processes import free_port
from tests.tracking.servers import Errors

KEY = "0123456789abcdef" * 3


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home directory, and a current one, without any configuration."""
    for name in os.environ:
        if name.startswith(("WANDB_", "COMET_", "MLFLOW_", "NETRC")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    ("tracker", "environment", "named"),
    [
        ("wandb", {}, ("WANDB_API_KEY", "`wandb login`")),
        ("wandb", {"NETRC": "~nosuchuser/.netrc"}, ("WANDB_API_KEY",)),
        ("comet", {}, ("COMET_API_KEY", "`comet login`")),
        ("comet", {"COMET_CONFIG": "~nosuchuser/c"}, ("COMET_API_KEY",)),
        ("mlflow", {"MLFLOW_TRACKING_URI": "mlruns"}, ("MLFLOW_TRACKING_URI", "sqlite:///FILE")),
        ("mlflow", {"MLFLOW_TRACKING_URI": "file:///mlruns"}, ("MLFLOW_TRACKING_URI",)),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://[bad"}, ("MLFLOW_TRACKING_URI",)),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://me:pa55word@[bad"}, ("MLFLOW_TRACKING_URI",)),
        (
            "mlflow",
            {"MLFLOW_TRACKING_URI": "http://a", "MLFLOW_TRACKING_USERNAME": "somebody"},
            ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
        ),
    ],
)
def test_what_keeps_a_tracker_offline_is_named(home, monkeypatch, tracker, environment, named):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    access = find_access(tracker)
    assert access.offline
    assert all(name in access.why for name in named)
    assert "somebody" not in access.why
    assert "pa55word" not in access.why


@pytest.mark.parametrize(
    ("tracker", "environment", "has_server"),
    [
        ("wandb", {"WANDB_API_KEY": "a key"}, True),
        ("wandb", {"WANDB_IDENTITY_TOKEN_FILE": "token"}, True),
        ("comet", {"COMET_API_KEY": "a key"}, True),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://m:5000"}, True),
        ("mlflow", {"MLFLOW_TRACKING_URI": "sqlite:////srv/mlflow.db"}, False),
        ("own.module", {}, True),
    ],
)
def test_with_a_key_a_tracker_may_go_online(home, monkeypatch, tracker, environment, has_server):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    access = find_access(tracker)
    assert (access.offline, access.has_server) == (False, has_server)


def test_only_a_key_lets_a_tracker_go_online_and_its_project_is_checked(home, monkeypatch):
    for tracker in ("tensorboard", "mlflow"):
        access = find_access(tracker)
        assert (access.offline, access.why, access.has_server) == (True, None, False)
    (home / ".netrc").write_bytes(b"machine github.com login me password \xff" + KEY.encode())
    Path(".env").write_text("LOG_LEVEL=debug\n")
    assert find_access("wandb").offline
    assert find_access("comet").offline
    assert chosen(None) == chosen("none") == []
    assert chosen("comet, wandb,") == ["comet", "wandb"]
    names = {"track_project": "Äpfel & Birnen (2)", "track_name": "a/b: c"}
    check_choice(Settings(track="comet,wandb,mlflow,tensorboard,my.py,our.module", **names))
    assert choice.default_project("my:recipe#2") == "my-recipe-2"
    monkeypatch.setenv("WANDB_PROJECT", "bad/name")
    with pytest.raises(UserError, match="WANDB_PROJECT 'bad/name'"):
        check_choice(Settings(track="wandb"))
    check_choice(Settings(track="wandb", track_project="good"))
    check_choice(Settings(track="tensorboard"))


@pytest.mark.parametrize(
    ("tracker", "file", "text"),
    [
        ("wandb", "home/.netrc", f"machine w.example\n  login user\n  password {KEY}\n"),
        ("wandb", "home/.config/wandb/settings", "[default]\nbase_url = http://w.example\n"),
        ("comet", "home/.comet.config", f"[comet]\napi_key={KEY}\n"),
        ("comet", ".comet.config", f"[comet]\napi_key={KEY}\n"),
        ("comet", ".env", f"COMET_API_KEY='{KEY}'\n"),
    ],
)
def test_a_key_is_looked_for_where_the_client_itself_keeps_it(home, tracker, file, text):
    assert find_access(tracker).offline
    path = home.parent / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert not find_access(tracker).offline


def test_what_a_client_refuses_keeps_it_offline_and_secrets_are_known_by_their_names():
    def refuse():
        raise ValueError("1 error\n  base_url: no address.")

    module, reports = SimpleNamespace(find_server=refuse), SimpleNamespace()
    order = SimpleNamespace(offline=False)
    assert why_offline(module, order, reports) == "1 error base_url: no address"
    assert why_offline(module, SimpleNamespace(offline=True), reports) is None
    environment = {"WANDB_API_KEY": KEY, "HOME": "/home/me", "X_TOKEN": "tokens", "MY_KEY": "a"}
    environment |= {"MLFLOW_TRACKING_URI": "http://me:password@host", "BROKEN_URI": "http://[::1"}
    assert set(choice.secrets_of(environment)) == {KEY, "tokens", "password"}
    with Errors() as server:
        assert choice.why_unreachable(server.url) is None
    assert choice.why_unreachable(f"http://me:key@127.0.0.1:{free_port()}").startswith("127.0.0.1 ")
    assert choice.why_unreachable("nonsense").startswith("nonsense ")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"track": "tensorbord"}, ("'tensorbord'", "'tensorboard'")),
        ({"track": "none,wandb"}, ("'none'",)),
        ({"track": "a b.c"}, ("'a b.c'",)),
        ({"track": "x/wandb.py"}, ("--track x/wandb.py", "name wandb")),
        ({"track": "my.py,other/my.py"}, ("--track", "my twice")),
        ({"track_project": ""}, ("--track-project ''", "0 characters")),
        ({"track_project": "a%b"}, ("--track-project", "'%'")),
        ({"track_name": "a\nb"}, ("--track-name", r"'\n'")),
        ({"track_workspace": "a/b"}, ("--track-workspace 'a/b'", "'/'")),
        ({"track_tags": "t" * 65}, ("--track-tags", "65")),
    ],
)
def test_a_choice_that_no_service_would_take_is_refused(settings, named):
    with pytest.raises(UserError) as refused:
        check_choice(Settings(**settings))
    assert all(part in str(refused.value) for part in named)


def test_a_missing_package_of_a_tracker_is_named_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(choice.PACKAGES, "wandb", "no_such_package")
    with pytest.raises(UserError, match=r"pip install 'samestep\[wandb\]'"):
        check_installed(["wandb"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="package nosuch"):
        check_installed(["nosuch.module"])
    (tmp_path / "nosuch").mkdir()
    (tmp_path / "nosuch" / "__init__.py").touch()
    check_installed(["nosuch.module"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"1 / 0\ndef start(run): ...\ndef record(client, entries): ...\n", r"finish\(\)"),
        (b"def start(:", "line 1"),
        (b"start = record = finish = '\xff'", "my.py"),
    ],
)
def test_a_file_that_is_no_tracker_is_refused_without_running_it(tmp_path, text, named):
    path = tmp_path / "my.py"
    path.write_bytes(text)
    with pytest.raises(UserError, match=named):
        check_installed([str(path)])
    from_elsewhere = "from other import begin as start, record\nfinish = print\n"
    for elsewhere in ("from other import *\n", from_elsewhere):
        path.write_text(elsewhere)
        check_installed([str(path)])
