"""Places of instances: host ranges, division, the table; NUMA nodes, networks, and arguments of mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from poprun.bind import node_of, numa_nodes, parse_cpus
from poprun.flags import CommandLineError
from poprun.mpi_arguments import read_arguments
from poprun.networks import addresses_here, interfaces_of
from poprun.topology import divide, expand_hosts, instance_variables, table

EXPECTED = """\
 ===========================================
|              poprun topology              |
|===========================================|
| hosts     |           localhost           |
|-----------|-------------------------------|
| ILDs      |               0               |
|-----------|-------------------------------|
| instances |       0       |       1       |
|-----------|-------------------------------|
| replicas  | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
 -------------------------------------------"""


def test_the_table_is_popruns() -> None:
    assert table(divide(["localhost"], 8, 2, None)) == EXPECTED


@pytest.mark.parametrize(
    ("hosts", "replicas", "instances"),
    [(["a"], 1, 1), (["a-very-long-name.of.a.host", "b"], 2, 2), (["a"], 128, 4), (["a", "b", "c"], 12, 6)],
)
def test_every_line_of_the_table_is_equally_long_and_no_cell_is_cut(
    hosts: list[str], replicas: int, instances: int
) -> None:
    lines = table(divide(hosts, replicas, instances, None)).splitlines()
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert all(f" {host} " in lines[3] for host in hosts)
    assert f" {replicas - 1} " in lines[-2] and " poprun topology " in lines[1]


def test_instances_know_their_replicas() -> None:
    topology = divide(["a", "b"], 8, 4, None)
    offsets = [instance_variables(topology, i, 2)["POPDIST_REPLICA_INDEX_OFFSET"] for i in range(4)]
    local = [instance_variables(topology, i, 2)["POPDIST_LOCAL_INSTANCE_INDEX"] for i in range(4)]
    assert (offsets, local) == (["0", "2", "4", "6"], ["0", "1", "0", "1"])
    assert instance_variables(topology, 0, 2) == {
        "POPDIST_NUM_TOTAL_REPLICAS": "8",
        "POPDIST_NUM_IPUS_PER_REPLICA": "2",
        "POPDIST_NUM_LOCAL_REPLICAS": "2",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_REPLICA_INDEX_OFFSET": "0",
        "POPDIST_LOCAL_INSTANCE_INDEX": "0",
    }


def test_one_instance_on_each_host_is_the_default() -> None:
    assert divide(["a", "b"], 4, None, None).instances == 2
    assert divide(["a"], 4, None, None).instances == 1


@pytest.mark.parametrize(
    ("hosts", "replicas", "instances", "ilds", "message"),
    [
        (["a"], 8, 3, None, "--num-replicas=8 cannot be divided evenly among --num-instances=3; take 6 or 9 replicas"),
        (["a", "b"], 6, 3, None, "--num-instances=3 cannot be divided evenly among 2 hosts; take 2 or 4 instances"),
        (["a"], 8, 2, 3, "--num-replicas=8 cannot be divided evenly among --num-ilds=3"),
        (["a"], 1, 2, None, "take 2 replicas"),
    ],
)
def test_an_uneven_division_says_what_would_be_even(
    hosts: list[str], replicas: int, instances: int, ilds: int | None, message: str
) -> None:
    with pytest.raises(CommandLineError) as caught:
        divide(hosts, replicas, instances, ilds)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("host[0-2,4]", ["host0", "host1", "host2", "host4"]),
        ("n[08-11]-ib,login", ["n08-ib", "n09-ib", "n10-ib", "n11-ib", "login"]),
        ("user@a,10.0.0.1", ["user@a", "10.0.0.1"]),
    ],
)
def test_hosts_may_be_ranges(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a[", "a[]", "a[2-1]", "a[x]", "a[1-2", "a,a", "a[0-99999999]", "a[1-]b]"]
)
def test_garbage_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(CommandLineError, match=r"--host "):
        expand_hosts(text)


def test_of_the_arguments_of_mpirun_some_mean_something() -> None:
    text = "--tag-output --allow-run-as-root -x HOME -x A='b c' -x MISSING --mca btl_tcp_if_include 10.0.0.0/8"
    found = read_arguments(
        f"{text} --mca pml ob1 --bind-to none --output-filename out --timestamp-output", {"HOME": "/h"}
    )
    assert (found.environ, found.networks) == ({"HOME": "/h", "A": "b c"}, ["10.0.0.0/8"])
    assert (found.output_dir, found.timestamps) == ("out", True)
    assert found.ignored == ["-x MISSING (it is not set)", "--mca pml ob1", "--bind-to none"]
    for wrong in ("-x", "--mca a", "'"):
        with pytest.raises(CommandLineError, match="arguments for mpirun"):
            read_arguments(wrong, {})


def test_a_subnet_becomes_the_interfaces_that_lead_there() -> None:
    addresses = {"lo": "127.0.0.1", "eth0": "10.1.2.3", "ib0": "192.168.0.9"}
    assert interfaces_of(["10.0.0.0/8", "ib0", "192.168.0.0/24"], addresses) == ("eth0", "ib0")
    with pytest.raises(
        CommandLineError, match=r"no interface of this machine has an address in 172.16.0.0/12; there are lo"
    ):
        interfaces_of(["172.16.0.0/12"], addresses)
    assert addresses_here().get("lo", "127.0.0.1") == "127.0.0.1"


def test_instances_take_numa_nodes_in_turn(tmp_path: Path) -> None:
    for number, cpus in ((0, "0-1,4"), (1, "2-3"), (10, "8"), (2, "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus + "\n")
    nodes = numa_nodes(range(8), tmp_path)
    assert nodes == [{0, 1, 4}, {2, 3}]
    assert [node_of(i, nodes) for i in range(3)] == [{0, 1, 4}, {2, 3}, {0, 1, 4}]
    assert node_of(1, [{0, 1}]) == set() and parse_cpus("\n") == set()
