"""Import paths of Horovod that scripts use."""

from __future__ import annotations

import os

import pytest

import horovod
import horovod.runner
from horovod import errors
from horovod.common import exceptions, util
from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery


class Ops:
    Average, Sum = "average", "sum"


def test_names_are_the_same_objects() -> None:
    assert horovod.runner.run is horovod.run
    assert exceptions.HorovodInternalError is errors.HorovodInternalError
    assert "torch 1 here, but 2 there" in exceptions.get_version_mismatch_message("torch", "1", "2")


def test_fixed_hosts_are_the_latest_given_ones() -> None:
    given = {"a": 2}
    hosts = FixedHosts(given)
    given["b"] = 1
    assert hosts.find_available_hosts_and_slots() == {"a": 2}
    hosts.set({"c": 3})
    assert hosts.find_available_hosts_and_slots() == {"c": 3}
    with pytest.raises(TypeError, match="find_available_hosts_and_slots"):
        HostDiscovery()  # type: ignore[abstract]


def test_env_sets_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KH_A", "1")
    with util.env(KH_A="2", KH_B="3", KH_C=None):
        assert (os.environ["KH_A"], os.environ["KH_B"], "KH_C" in os.environ) == ("2", "3", False)
    assert (os.environ["KH_A"], "KH_B" in os.environ) == ("1", False)


@pytest.mark.parametrize(
    ("items", "n", "parts"),
    [
        ([1, 2, 3, 4, 5], 2, [[1, 2, 3], [4, 5]]),
        ([1, 2, 3, 4], 4, [[1], [2], [3], [4]]),
        ([1], 3, [[1], [], []]),
        ([], 1, [[]]),
    ],
)
def test_split_list(items: list[int], n: int, parts: list[list[int]]) -> None:
    assert util.split_list(items, n) == parts


@pytest.mark.parametrize(("n", "yes"), [(0, False), (1, True), (2, True), (3, False), (64, True), (-4, False)])
def test_power_of_two(n: int, yes: bool) -> None:
    assert util.num_rank_is_power_2(n) is yes


@pytest.mark.parametrize(("x", "yes"), [([], True), ("a", True), (3, False), (iter(()), True), (None, False)])
def test_is_iterable(x: object, yes: bool) -> None:
    assert util.is_iterable(x) is yes


@pytest.mark.parametrize(
    ("version", "target", "yes"),
    [
        ("2.13.0+cpu", "2.1.0", True),
        ("2.1.0", "2.1.0", True),
        ("2.0.9", "2.1.0", False),
        ("2.1.0rc1", "2.1.0", True),
        ("3", "2.9.9", True),
    ],
)
def test_versions_compare_as_numbers(version: str, target: str, yes: bool) -> None:
    assert util.is_version_greater_equal_than(version, target) is yes


@pytest.mark.parametrize(("version", "target"), [(2, "2.0.0"), ("2.0.0", "2.0"), ("2.0.0", None), ("1.0", "a.b.c")])
def test_wrong_versions_are_errors(version: object, target: object) -> None:
    with pytest.raises(ValueError, match="version"):
        util.is_version_greater_equal_than(version, target)  # type: ignore[arg-type]


def test_old_average_argument() -> None:
    choose = util.get_average_backwards_compatibility_fun(Ops)
    assert choose(None, None) == "average"
    assert choose("min", None) == "min"
    with pytest.warns(DeprecationWarning, match="op") as caught:
        assert choose(None, False) == "sum"
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="supersedes"):
        choose("min", True)


def test_extensions() -> None:
    assert util.extension_available("numpy")
    assert not util.extension_available("mxnet")


def test_what_is_built_in() -> None:
    assert not util.mpi_built(verbose=True)
    assert not util.ddl_built()
    assert not util.ccl_built()
    assert util.nccl_built() == 0
