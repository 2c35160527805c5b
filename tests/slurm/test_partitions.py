"""What no partition can give is refused; what any of them might give is not."""

import pytest

from samestep.errors import UserError
from samestep.slurm.checks import check_partitions, parse_partitions
from samestep.slurm.options import JobOptions
from tests.slurm.fake_slurm import install

# A default of two small nodes; a larger one, of two kinds of nodes; one that is hidden.
PARTITIONS = (
    "debug|2|4|1:00:00|(null)\n"
    "gpu|8|32|2-00:00:00|gpu:a100:4(S:0-1)\n"
    "gpu|1|64|2-00:00:00|gpu:h100:8,gpu:a100:1\n"
    "hidden|1|128|infinite|(null)\n"
)


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch):
    fake = install(tmp_path / "bin", PARTITIONS)
    monkeypatch.setenv("PATH", str(fake.folder))
    return fake


@pytest.mark.parametrize(
    ("partition", "options"),
    [
        ("debug,gpu", {"nodes": "9"}),
        ("debug", {"nodes": "2-9"}),
        ("debug,gpu", {"gpus_per_node": 9, "ntasks_per_node": 1}),
        ("hidden", {"ntasks_per_node": 128, "time": "100-00:00:00"}),
        # A site may route jobs by their size: the default partition does not decide.
        (None, {"nodes": "9"}),
        (None, {"ntasks_per_node": 128}),
        (None, {"time": "1-00:00:00"}),
    ],
)
def test_a_job_that_one_of_its_partitions_may_run_is_let_through(partition, options):
    check_partitions(JobOptions(**options), partition)


@pytest.mark.parametrize(
    ("partition", "options", "says"),
    [
        ("debug", {"nodes": "3"}, "--nodes 3: partition debug has 2"),
        ("debug", {"nodes": "3-9"}, "--nodes 3-9: partition debug has 2"),
        ("debug,gpu", {"nodes": "10"}, "--nodes 10: partition gpu has 9"),
        (None, {"nodes": "10"}, "--nodes 10: partition gpu has 9"),
        (None, {"gpus_per_node": 10}, "--gpus-per-node 10.* gpu .* 9 GPUs"),
        ("debug", {"gpus_per_node": 1}, "--gpus-per-node 1:.* debug "),
        (None, {"ntasks_per_node": 129}, "129 cores.* 64"),
        ("debug,gpu", {"time": "3-00:00:00"}, "--time 3-00:00:00: .* gpu .* 2-00:00:00"),
        ("debug,gup", {}, "'gup'.*'gpu'"),
    ],
)
def test_a_job_that_none_can_run_is_refused_with_what_the_largest_has(partition, options, says):
    with pytest.raises(UserError, match=says):
        check_partitions(JobOptions(**options), partition)


def test_hidden_partitions_are_asked_for_and_unlike_nodes_are_told_apart(slurm):
    check_partitions(JobOptions(), None)
    assert "--all --exact" in slurm.calls[0]


def test_lines_that_name_a_cluster_are_no_partitions():
    assert list(parse_partitions("CLUSTER: north\n" + PARTITIONS)) == ["debug", "gpu", "hidden"]
