"""What a job may ask for: every form that sbatch takes, and a message for every other."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.base.errors import UserError
from samestep.cluster.slurm import options as job_options
from samestep.cluster.slurm import sandbox_cluster as cluster
from samestep.cluster.slurm.options import JobOptions, apply_flags, read_defaults, read_time
from samestep.cluster.slurm.sandbox_cluster import check_folder, default_folder, down_line, nodes_of
from samestep.shell.cli import main


@given(st.integers(0, 20), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_every_form_of_a_time_limit_is_read_in_seconds(days, hours, minutes, rest):
    assert read_time(f"{days}-{hours:02}:{minutes:02}:{rest:02}") == (
        ((days * 24 + hours) * 60 + minutes) * 60 + rest
    )
    assert (
        read_time(f"{days}-{hours}:{minutes + 1}") == ((days * 24 + hours) * 60 + minutes + 1) * 60
    )
    assert read_time(f"{days + 1}-{hours}") == ((days + 1) * 24 + hours) * 3600
    assert read_time(f"{hours}:{minutes}:{rest}") == (hours * 60 + minutes) * 60 + rest
    assert read_time(f"{minutes}:{rest}") == minutes * 60 + rest
    assert read_time(str(rest)) == rest * 60


def test_no_limit_is_none_and_lists_of_all_files_add_up(tmp_path):
    for text in ("UNLIMITED", "infinite", "INVALID", "Partition_Limit", ""):
        assert read_time(text) is None
    assert read_time("00:00:00") == 0
    options = layers(tmp_path, 'module = ["a"]\nenv = ["A=1"]\nnodes = 2', 'module = ["b"]')
    assert (options.module, options.env, options.nodes) == (("a", "b"), ("A=1",), "2")
    assert layers(tmp_path / "quoted", 'nodes = "1-4"').nodes == "1-4"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"time": "2h"}, "--time 2h"),
        ({"time": "0"}, "--time 0"),
        ({"time": "2", "signal_s": 120}, "--signal-s 120"),
        *(({"nodes": n}, rf"--nodes {n} .*\(4\).*\(1-4\)") for n in ("0", "0-2", "4-1", "x", "1-")),
        *(({"nodes": n}, f"--nodes {n} ") for n in ("", "-1", "1 - 4", "1,3", "1-4-5", "٤", "4 ")),
        ({"ntasks_per_node": 0}, "--ntasks-per-node is 0"),
        ({"signal_s": 1}, "--signal-s is 1"),
        ({"mem": "64 GB"}, "--mem 64 GB"),
        ({"venv": "a", "conda": "b"}, "--venv, --conda, --container and --container-image"),
        ({"after": ("x",)}, "--after x"),
        ({"env": ("A",)}, "--env 'A'"),
        ({"sbatch": ("exclusive",)}, "--sbatch 'exclusive'"),
        ({"sbatch": ("-a 0-3",)}, "--sbatch=-a "),
        ({"sbatch": ("--exclusive --arr 1",)}, "--sbatch=--arr "),
        ({"sbatch": ("hetjob",)}, "--sbatch=hetjob "),
        ({"partition": "a\n#SBATCH --wrap=x"}, "--partition "),
        ({"sbatch": ("--exclusive --com mine",)}, "--sbatch=--comment"),
        ({"interface": "eth0; rm"}, "--interface 'eth0; rm'"),
        ({"container": "a", "container_image": "b"}, "--container and --container-image"),
        ({"elastic": "2:4", "container": "a"}, "--elastic .* container"),
        ({"elastic": "auto", "launcher": "torchrun"}, "--elastic needs --launcher srun"),
    ],
)
def test_what_cannot_be_is_refused_with_the_name_of_its_flag(options, says):
    with pytest.raises(UserError, match=says):
        JobOptions(**options)


@pytest.mark.parametrize(("nodes", "fewest", "most"), [("1", 1, 1), ("1-4", 1, 4), ("3-3", 3, 3)])
def test_nodes_are_a_number_or_the_fewest_and_the_most(nodes, fewest, most):
    options = JobOptions(nodes=nodes, gpus_per_node=8)
    assert options.node_range == (fewest, most)
    assert (options.has_range, options.most_ranks) == (fewest < most, 8 * most)
    assert options.size == f"{nodes} node{'s' * (nodes != '1')} × 8 ranks"


@pytest.mark.parametrize(
    "options",
    [
        {"env": ("WANDB_API_KEY=hunter2",)},
        {"env": ("MY_PASSWORDS=hunter2",)},
        {"sbatch": ("--export=ALL,A=1,WANDB_API_KEY=hunter2",)},
        {"sbatch": ("export=WANDB_API_KEY=hunter2",)},
    ],
)
def test_a_secret_is_refused_and_not_repeated_and_what_only_sounds_like_one_taken(options):
    with pytest.raises(UserError) as error:
        JobOptions(**options)
    assert "hunter2" not in str(error.value)
    for name in ("TOKENIZERS_PARALLELISM", "KEYBOARD", "AUTHOR", "COMPASS"):
        JobOptions(env=(f"{name}=1",), sbatch=(f"--export=ALL,{name}=1", "--account=a", "-A a"))


def layers(folder: Path, *texts: str, **flags) -> JobOptions:
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / str(number) / "samestep.toml")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text(f"[slurm]\n{text}\n")
    defaults = read_defaults(paths)
    return apply_flags(defaults, job_options.UncheckedOptions(**(vars(defaults) | flags)), paths)


@pytest.mark.parametrize(
    ("texts", "flags", "expected"),
    [
        (('conda = "c"', 'venv = "/v"'), {}, ("/v", None, None)),
        (('venv = "/v"', 'container = "/i.sif"'), {}, (None, None, "/i.sif")),
        (('venv = "/v"',), {"conda": "c"}, (None, "c", None)),
    ],
)
def test_an_environment_takes_the_place_of_the_layers_below(tmp_path, texts, flags, expected):
    options = layers(tmp_path, *texts, **flags)
    assert (options.venv, options.conda, options.container) == expected


def test_only_what_all_layers_come_to_is_checked_and_paths_are_relative_to_their_file(tmp_path):
    # Two minutes are too few with the default warning, and are not what is asked for.
    assert layers(tmp_path, 'time = "2"', "signal_s = 30", time="1").signal_s == 30
    with pytest.raises(UserError, match=r"--time 2 .*samestep\.toml"):
        layers(tmp_path / "alone", 'time = "2"')
    with pytest.raises(UserError, match="--venv, --conda, --container and --container-image"):
        layers(tmp_path / "two", 'venv = "/v"\nconda = "c"')
    assert layers(tmp_path, 'venv = ".venv"').venv == str(tmp_path / "0" / ".venv")
    for index, image in enumerate(("~/i.sif", "docker://a/b", "/i.sif")):
        assert layers(tmp_path / f"at-{index}", f'container = "{image}"').container == image


@pytest.mark.parametrize(
    "text",
    [
        'env = "WANDB_API_KEY=hunter2"',
        '[slurm.env]\nWANDB_API_KEY = "hunter2"',
        'env = [{ WANDB_API_KEY = "hunter2" }]',
        'WANDB_API_KEY = "hunter2"',
    ],
)
def test_a_value_of_a_file_of_defaults_is_never_shown(tmp_path, text):
    with pytest.raises(UserError) as error:
        layers(tmp_path, text)
    assert "samestep.toml" in str(error.value)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[slurm]\npartitoin = "a"', "'partition'.*account, after"),
        (
            '[slurm]\ngpus_per_node = "two"',
            r"samestep\.toml: \[slurm\] gpus_per_node: .*whole number",
        ),
        ("[slurm]\nnodes = 1.5", r"samestep\.toml: \[slurm\] nodes: .*text in quotes"),
        ('[slurm]\nnodes = "two"', r"--nodes two .*samestep\.toml"),
        ("[slurm", r"samestep\.toml .*TOML"),
        ("[slrum]\nnodes = 1", "'slrum'"),
        ("slurm = 1", r"samestep\.toml: slurm"),
    ],
)
def test_a_file_of_defaults_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, text, says):
    path = tmp_path / "samestep.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        apply_flags(defaults := read_defaults([path]), defaults, [path])


def test_the_configuration_is_the_golden_one_and_no_path_too_long():
    folder, ports = Path("/home/ada/sandbox"), (20_001, 20_002, 20_003)
    names = {"user": "ada", "host": "laptop"}
    text = cluster.slurm_conf(folder, **names, controller_port=20_000, node_ports=ports, cpus=4)
    golden = Path(__file__).parent / "scripts" / "slurm.conf"
    if os.environ.get("SAMESTEP_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert nodes_of(text) == ["node1", "node2", "node3"]
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
