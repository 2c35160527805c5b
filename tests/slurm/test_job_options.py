"""What a job may ask for: every form that sbatch takes, and a message for every other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UserError
from samestep.slurm.options import JobOptions, dependency, seconds
from samestep.slurm.profile import profile_files, read_profile


@given(st.integers(0, 20), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_every_form_of_a_time_limit_is_read_in_seconds(days, hours, minutes, rest):
    assert seconds(f"{days}-{hours:02}:{minutes:02}:{rest:02}") == (
        ((days * 24 + hours) * 60 + minutes) * 60 + rest
    )
    assert seconds(f"{days}-{hours}:{minutes + 1}") == ((days * 24 + hours) * 60 + minutes + 1) * 60
    assert seconds(f"{days + 1}-{hours}") == ((days + 1) * 24 + hours) * 3600
    assert seconds(f"{hours}:{minutes}:{rest}") == (hours * 60 + minutes) * 60 + rest
    assert seconds(f"{minutes}:{rest}") == minutes * 60 + rest
    assert seconds(str(rest)) == rest * 60


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"time": "2h"}, "--time 2h cannot be read"),
        ({"time": "0"}, "--time 0 cannot be read"),
        ({"time": "2", "signal_s": 120}, "no longer than --signal-s 120"),
        ({"nodes": 0}, "--nodes is 0; it must be 1 or more"),
        ({"ntasks_per_node": 0}, "--ntasks-per-node is 0"),
        ({"gpus_per_node": -1}, "--gpus-per-node is -1"),
        ({"signal_s": 1}, "--signal-s is 1; it must be 10 or more"),
        ({"mem": "64 GB"}, "--mem 64 GB should be"),
        ({"venv": "a", "conda": "b"}, "Give one of --venv, --conda and --container"),
        ({"after": ("x",)}, "--after x should be"),
        ({"env": ("A",)}, "should be NAME=VALUE"),
        ({"sbatch": ("exclusive",)}, "should be one option"),
        ({"partition": "a\n#SBATCH --wrap=x"}, "--partition must be one line"),
    ],
)
def test_what_cannot_be_is_refused_with_the_name_of_its_flag(options, says):
    with pytest.raises(UserError, match=says):
        JobOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"env": ("WANDB_API_KEY=hunter2",)},
        {"sbatch": ("--export=ALL,A=1,WANDB_API_KEY=hunter2",)},
    ],
)
def test_a_secret_is_refused_and_not_repeated(options):
    with pytest.raises(UserError) as error:
        JobOptions(**options)
    assert "WANDB_API_KEY" in str(error.value)
    assert "hunter2" not in str(error.value)


def test_dependencies_have_sbatchs_names():
    assert [dependency(d) for d in ("7", "7:ok", "8_2:notok", "9:any")] == [
        "afterok:7", "afterok:7", "afternotok:8_2", "afterany:9",
    ]  # fmt: skip


def test_a_projects_values_win_over_the_users(tmp_path):
    user, project = tmp_path / "config" / "samestep", tmp_path / "project"
    for folder in (user, project / "below"):
        folder.mkdir(parents=True)
    (user / "samestep.toml").write_text('[slurm]\npartition = "a"\naccount = "b"\n')
    (project / "samestep.toml").write_text('[slurm]\npartition = "c"\ngpus-per-node = 4\n')
    files = profile_files(project / "below", {"XDG_CONFIG_HOME": str(tmp_path / "config")})
    options = read_profile(files)
    assert (options.partition, options.account, options.gpus_per_node) == ("c", "b", 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[slurm]\npartitoin = "a"', "Did you mean 'partition'\\? The keys are: account, after"),
        ('[slurm]\nnodes = "two"', "nodes = 'two'"),
        ("[slurm", "no valid TOML"),
        ("[slrum]\nnodes = 1", "no use for 'slrum'"),
        ("slurm = 1", "slurm must be a table"),
        ("[slurm]\nnodes = 0", "--nodes is 0"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, text, says):
    path = tmp_path / "samestep.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_profile([path])
