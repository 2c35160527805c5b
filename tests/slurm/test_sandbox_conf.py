"""What a sandbox's slurm.conf says, as text; no Slurm is needed."""

import os
from pathlib import Path

import pytest

from samestep.cli import main
from samestep.errors import UserError
from samestep.slurm import sandbox_cluster as cluster
from samestep.slurm.sandbox_cluster import check_folder, default_folder, down_line, nodes_of


def test_the_configuration_is_the_golden_one():
    folder, ports = Path("/home/ada/sandbox"), (20_001, 20_002, 20_003)
    names = {"user": "ada", "host": "laptop"}
    text = cluster.slurm_conf(folder, **names, controller_port=20_000, node_ports=ports, cpus=4)
    golden = Path(__file__).parent / "scripts" / "slurm.conf"
    if os.environ.get("SAMESTEP_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert nodes_of(text) == ["node1", "node2", "node3"]


def test_a_path_too_long_for_a_socket_or_with_a_character_of_slurm_conf_is_refused():
    # /spool/node2/node2_9999999.4294967295 takes 37 of the 107 bytes
    check_folder(Path("/" + 69 * "x"), nodes=2)
    with pytest.raises(UserError, match=r"of 108 bytes, .* 107.*--dir /tmp/sandbox"):
        check_folder(Path("/" + 70 * "x"), nodes=2)
    with pytest.raises(UserError, match="of 109 bytes"):  # node10 is longer, twice
        check_folder(Path("/" + 69 * "x"), nodes=10)
    for strange in ' ,#%"':
        with pytest.raises(UserError, match=r"slurm\.conf") as caught:
            check_folder(Path(f"/home/ada{strange}b"), nodes=1)
        assert repr(strange) in str(caught.value)


def test_a_second_start_of_a_sandbox_says_how_that_one_is_taken_down(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert down_line(default_folder()) == "samestep slurm sandbox down"
    assert down_line(tmp_path / "a b") == f"samestep slurm sandbox down --dir '{tmp_path}/a b'"
    up = cluster.Status(folder=tmp_path, daemons={"x": 1}, nodes={"a": "idle"}, num_job_processes=0)
    monkeypatch.setattr(cluster, "status", lambda _folder: up)
    with pytest.raises(UserError, match=f"down --dir {tmp_path}`"):
        cluster._refuse_if_up(tmp_path)


@pytest.mark.parametrize("looks", [True, False])
def test_a_shell_that_looks_for_one_that_is_down_is_told(tmp_path, monkeypatch, capsys, looks):
    monkeypatch.setattr(cluster, "down", lambda _folder: True)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / ("slurm.conf" if looks else "other.conf")))
    assert main(["slurm", "sandbox", "down", "--dir", str(tmp_path)]) == 0
    assert ("unset SLURM_CONF" in capsys.readouterr().out) is looks
