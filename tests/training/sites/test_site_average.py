"""Averages over sites: equal to float64, nothing lost or counted twice, whatever fails."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

pytest.importorskip("obstore")

from ngsgd.config import OuterConfig
from ngsgd.errors import ConfigError, DataError, ObjectStorageError, RunInterrupted, RunLockedError
from ngsgd.training.sites.contribution import About, from_bytes, to_bytes
from ngsgd.training.sites.rounds import digest_of
from tests.reference.sites import Sites
from tests.training.sites.world import LAYOUT, Site, Vector, World, delta, of_two

# float32 vectors of order 1, some additions
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 5e-6}


class Killed(BaseException):
    """The death of a process at a write."""


def _read_from(world: World) -> Any:
    """Return the deltas of the last round as read; codes of rounded numbers may differ."""
    def of(name: str, move: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        number = max(site.average_.round for site in world.sites.values())
        content, _ = world.sites[name].link.get(f"rounds/{number:06d}/{name}.safetensors") or (b"", None)
        return from_bytes(content, LAYOUT)[0].astype(np.float64)
    return of


def _exactly(name: str, move: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return move


@pytest.mark.parametrize("compression", ["none", "int8", "sparse"])
def test_rounds_of_changing_sites_are_those_of_float64(compression: Any) -> None:
    world = World("a", "b", "c", compression=compression)
    reference = Sites(world.initial.astype(np.float64), {"a": 1, "b": 2, "c": 3})
    random, last = np.random.default_rng(1), ["a", "b", "c"]
    for number in range(12):
        for index, site in enumerate(world.sites.values()):
            move = delta(10 * number + index)
            site.train(move)
            reference.train(site.name, move.astype(np.float64))
        # those that were missing come first: a round waits only for the sites of the last one
        names = sorted(random.choice(["a", "b", "c"], random.integers(1, 4), replace=False), key=lambda name: (name in last, name))
        world.average(*names)
        last = names
        reference.round(names, _read_from(world))
        for name in names:
            np.testing.assert_allclose(world.sites[name].parameters, reference.parameters[name], **CLOSE)
    if compression == "none":
        assert all(np.array_equal(world.sites[names[0]].parameters, world.sites[name].parameters) for name in names)


@pytest.mark.parametrize("compression", ["none", "int8", "sparse"])
def test_no_delta_is_lost_or_counted_twice(compression: Any) -> None:
    """The mean of the parameters of all sites is the initial model and the mean of all deltas."""
    world = World("a", "b", compression=compression)
    total = world.initial.astype(np.float64)
    for number in range(10):
        for index, (site, share) in enumerate(zip(world.sites.values(), (1 / 3, 2 / 3), strict=True)):
            site.train(delta(2 * number + index))
            total += share * delta(2 * number + index)
        world.average("a", "b")
    a, b = (site.parameters.astype(np.float64) for site in world.sites.values())
    np.testing.assert_allclose(a / 3 + 2 * b / 3, total, **CLOSE)


@pytest.mark.parametrize("compression", ["none", "sparse"])
@pytest.mark.parametrize("outer", [OuterConfig("average"), OuterConfig("bmuf"), OuterConfig("diloco")])
def test_the_last_round_gives_all_sites_one_model(outer: OuterConfig, compression: Any) -> None:
    world = World("a", "b", period=2, num_outer_iters=5, compression=compression, outer=outer)
    for number in range(5):
        world.train(number)
        if world.sites["a"].average_.is_due(number):
            world.average("a", "b")
    assert [world.sites["a"].average_.is_due(number) for number in range(5)] == [False, True, False, True, True]
    assert np.array_equal(world.sites["a"].parameters, world.sites["b"].parameters)
    assert world.sites["a"].figures["round"] == 3


def test_a_site_that_was_cut_off_continues_and_is_averaged_again() -> None:
    world, a, b = of_two(wait_s=5.0)
    reference = Sites(world.initial.astype(np.float64), {"a": 1, "b": 2})

    def train(number: int) -> None:
        world.train(number)
        for index, name in enumerate(world.sites):
            reference.train(name, delta(2 * number + index).astype(np.float64))
    train(0)
    world.average("a", "b")
    reference.round(["a", "b"], _exactly)
    b.link.is_cut = True
    for number in (1, 2, 3):
        train(number)
        before = world.now_s
        a.average()
        b.average()
        reference.round(["a"], _exactly)
        # a waits once, in the round in which b is missing first
        assert (world.now_s - before > 5.0) == (number == 1)
    assert next(message for what, message in a.messages if what == "site_awaited").count(" b,") == 1
    assert a.events() == ["site_absent"] and set(b.events()) == {"site_alone"}
    b.link.is_cut = False
    train(4)
    world.average("b", "a")
    reference.round(["a", "b"], _exactly)
    assert a.events()[-1] == b.events()[-1] == "site_returned"
    assert b.figures["missed"] == 3 and a.figures["missed"] == 0
    for site in (a, b):
        np.testing.assert_allclose(site.parameters, reference.parameters[site.name], **CLOSE)
    assert np.array_equal(a.parameters, b.parameters)


@pytest.mark.parametrize("compression", ["none", "sparse"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("key", ["rounds/000002/a.safetensors", "rounds/000002/closed.json"])
def test_a_killed_site_repeats_its_round_with_the_same_result(key: str, when: str, compression: Any) -> None:
    """Also if the other site has closed the round meanwhile, or trains on."""
    def run(kill_at: str) -> World:
        world = World("a", "b", compression=compression)
        a = world.sites["a"]
        for number in range(4):
            saved = a.checkpoint()
            world.train(number)

            def at_write(at: str, written: str) -> None:
                if kill_at and (at, written) == (when, key):
                    raise Killed
            a.link.at_write = at_write
            try:
                world.average("b", "a")
            except Killed:
                a.link.at_write = lambda at, written: None
                saved = replace(saved, progress=replace(saved.progress, outer_iter=number - 1))
                a.begin(saved)
                a.train(delta(2 * number))
                a.average()
                if world.sites["b"].average_.round < a.average_.round:
                    world.sites["b"].average()
        return world
    whole, repeated = run(""), run(key)
    for name in ("a", "b"):
        assert np.array_equal(whole.sites[name].parameters, repeated.sites[name].parameters)


def test_a_late_site_computes_the_rounds_that_it_missed() -> None:
    world, a, b = of_two()
    for number in range(3):
        a.train(delta(number))
        a.average()
    b.train(delta(9))
    a.train(delta(3))
    world.average("b", "a")
    assert np.array_equal(a.parameters, b.parameters)
    assert b.figures["missed"] == 3 and b.figures["counted"] == 2


def test_a_new_run_takes_the_initial_parameters_of_the_first_site() -> None:
    world = World("a", "b")
    other = Site(world, "b", world.sites["b"].run)
    world.initial = world.initial + 1e-6
    other.begin()
    assert np.array_equal(other.parameters, world.sites["a"].parameters)


def with_header(site: str = "b", about: str = "", **arrays: Any) -> bytes:
    """A file of a site, with any arrays and any text about it."""
    about = about or json.dumps({"site": site, "run": "run", "round": 1, "outer_iter": 0})
    content: bytes = save({"values": np.zeros(LAYOUT.size, np.float32), **arrays}, {"about": about, "codec": ""})
    return content


def of_shape(*shape: int, kind: Any = np.float32) -> Any:
    return np.zeros(shape, kind)


SIZE = LAYOUT.size
BAD = {
    "no bytes": b"", "text": b"text", "NaN": with_header(values=np.full(SIZE, np.nan, np.float32)),
    "two dimensions": with_header(values=of_shape(SIZE // 5, 5)), "a row": with_header(values=of_shape(1, SIZE)),
    "a column": with_header(values=of_shape(SIZE, 1)), "too short": with_header(values=of_shape(SIZE - 1)),
    "empty": with_header(values=of_shape(0)), "a number": with_header(values=of_shape()),
    "float64": with_header(values=of_shape(SIZE, kind=np.float64)),
    "float16": with_header(values=of_shape(SIZE, kind=np.float16)), "integers": with_header(values=of_shape(SIZE, kind=np.int32)),
    "one more array": with_header(more=of_shape(3)), "infinite": with_header(values=np.full(SIZE, np.inf, np.float32)),
    "too large": with_header(values=np.full(SIZE, 3e38, np.float32)),
    "minus infinite": with_header(values=np.full(SIZE, -np.inf, np.float32)),
    "deep": with_header(about="[" * 100_000), "deep object": with_header(about='{"a":' * 100_000),
    "deep and closed": with_header(about="[" * 100_000 + "]" * 100_000), "a list": with_header(about="[]"),
    "a text": with_header(about='"x"'),
    "no JSON": with_header(about="{"), "not UTF-8": b"\x08" + bytes(7) + b'{"\xff": 1' + b"}",
    "long integer": with_header(about="9" * 10_000),
    "another site": with_header("a"), "no site": with_header(about="{}"),
    "one field more": with_header(about='{"site": "b", "run": "run", "round": 1, "outer_iter": 0, "more": 1}'),
    "a round of another type": with_header(about='{"site": "b", "run": "run", "round": true, "outer_iter": 0}'),
    "another round": with_header(about='{"site": "b", "run": "run", "round": 2, "outer_iter": 0}'),
    "other codes": save({"codes": of_shape(2, SIZE, kind=np.uint8), "peaks": of_shape(1), "statistics": of_shape(0)},
                        {"about": json.dumps({"site": "b", "run": "r", "round": 1, "outer_iter": 0}), "codec": "int8"}),
    "codec of another type": save({"values": of_shape(SIZE)}, {"about": "{}", "codec": "[]"})}


@pytest.mark.entry("At1", "average over sites, and one site writes a damaged delta: other shapes, types, names, numbers that are "
                   "not finite, deep JSON", "works",
                   "The delta is checked before the round is closed, and skipped with the incident `site_rejected`.")
@pytest.mark.parametrize("what", BAD)
def test_a_damaged_contribution_is_skipped_before_the_round_is_closed(what: str) -> None:
    world, a, b = of_two()
    b.link.create("rounds/000001/b.safetensors", BAD[what])
    a.train(delta(0))
    a.average()
    assert a.events() == ["site_rejected"] and a.figures["counted"] == 1
    np.testing.assert_allclose(a.parameters, world.initial + delta(0), **CLOSE)
    # the site itself continues, and is part of the next round
    b.train(delta(1))
    b.average()
    world.train(1)
    world.average("b", "a")
    assert b.figures["counted"] == 2 and np.array_equal(a.parameters, b.parameters)


@pytest.mark.entry("At1")
@pytest.mark.parametrize("site", ["b", "unknown"])
def test_a_round_that_is_closed_with_a_damaged_contribution_is_one_error(site: str) -> None:
    """As an earlier life of the site closed it."""
    world = World("a", "b")
    a, content = world.sites["a"], BAD["two dimensions"] if site == "b" else with_header("unknown")
    a.link.create(f"rounds/000001/{site}.safetensors", content)
    a.average_.rounds.close(1, {site: digest_of(content)}, {})
    before = a.average_.state_dict()["arrays"]["model"].copy()
    a.begin(a.checkpoint())
    a.train(delta(0))
    with pytest.raises(DataError, match=f"site {site} "):
        a.average()
    assert np.array_equal(a.average_.state_dict()["arrays"]["model"], before) and a.average_.round == 0


@pytest.mark.parametrize("key", ["rounds/000001/closed.json", "rounds/000001/b.safetensors"])
def test_damaged_objects_of_a_closed_round_are_rejected(key: str) -> None:
    _, a, b = of_two()
    b.train(delta(0))
    b.average()
    b.link.put(key, b"{}")
    a.train(delta(1))
    a.average()
    what, message = a.messages[-1]
    assert what == "site_alone" and "new exchange" in message


def test_sites_with_other_settings_and_second_runs_of_a_site_are_rejected() -> None:
    world = World("a", "b")
    other = world.site("b")
    with pytest.raises(ConfigError, match="run-b-1"):
        other.begin()
    world = World("a", "b")
    other = Site(world, "b", world.sites["b"].run)
    other.settings = replace(other.settings, seed=7)
    with pytest.raises(ConfigError, match="seed is 7"):
        other.begin()


def test_two_processes_of_one_site_are_noticed() -> None:
    world = World("a", "b")
    a = world.sites["a"]
    a.link.create("rounds/000001/a.safetensors",
                  to_bytes(np.zeros(LAYOUT.size, np.float32), About("a", "another", 1, 0), None, LAYOUT))
    a.train(delta(0))
    with pytest.raises(RunLockedError, match="another"):
        a.average()


def test_a_request_to_stop_ends_the_wait_and_the_round_can_be_repeated() -> None:
    _, a, b = of_two(wait_s=1e6)
    a.train(delta(0))
    saved = a.checkpoint()
    a.stop.is_requested = True
    with pytest.raises(RunInterrupted, match="outer iteration 1"):
        a.average()
    a.stop.is_requested = False
    b.train(delta(1))
    b.average()
    assert b.figures["counted"] == 2
    a.begin(saved)
    a.average()
    assert np.array_equal(a.parameters, b.parameters)


def test_the_others_do_not_wait_for_a_site_that_has_finished() -> None:
    world, _, b = of_two(num_outer_iters=2, wait_s=1e6)
    for number in range(2):
        world.train(number)
        world.average("a", "b")
    b.outer_iter = 0
    before = world.now_s
    b.average()
    assert b.figures["counted"] == 1 and world.now_s - before < 1.0


def test_the_last_round_waits_for_a_connection() -> None:
    world, a, b = of_two(num_outer_iters=1, wait_s=100.0)
    a.train(delta(0))
    b.train(delta(1))
    b.link.is_cut = True

    def repaired() -> None:
        b.link.is_cut = world.now_s < 60.0
        if not b.link.is_cut and "b" in b.average_.rounds.state(1, [])[0]:
            world.during_wait = lambda: None
            a.average()
    world.during_wait = repaired
    b.average()
    assert b.figures["counted"] == 2 and np.array_equal(a.parameters, b.parameters)
    assert not b.events()


def test_sizes_and_headers_are_checked() -> None:
    content = to_bytes(delta(0), About("a", "run", 1, 0), "sparse", LAYOUT)
    assert from_bytes(content, LAYOUT)[1] == About("a", "run", 1, 0)
    length = int.from_bytes(content[:8], "little")
    for old, new in ((b"sparse", b"sparze"), (b'"codec"', b'"cod3c"'), (b'\\"round\\": 1', b'\\"round\\": x')):
        with pytest.raises(ValueError, match="it"):
            from_bytes(content.replace(old, new), LAYOUT)
    with pytest.raises(ValueError, match="no contribution"):
        from_bytes(content[:-40], LAYOUT)
    assert json.loads(content[8:8 + length])["__metadata__"]["codec"] == "sparse"


def test_errors_of_a_new_run_end_it() -> None:
    world = World("a", "b")
    new = world.site("b")
    new.link.is_cut = True
    with pytest.raises(ObjectStorageError, match="unreachable"):
        new.begin()


def test_bytes_are_counted() -> None:
    world = World("a", "b", compression="sparse")
    a = world.sites["a"]
    for number in range(2):
        world.train(number)
        world.average("a", "b")
    # the first figures contain the initial parameters
    size: Vector = delta(0)
    # headers, a delta of 1/103 and statistics of layers; its own delta is not read again
    assert max(a.figures["sent_bytes"], a.figures["received_bytes"]) < size.nbytes / 4
