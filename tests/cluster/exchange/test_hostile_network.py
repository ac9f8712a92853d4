"""Processes without the secret at the ports of the collective exchange change nothing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch

from ngsgd.cluster.exchange import collective, process_group, rendezvous
from ngsgd.cluster.exchange.authentication import Channel, RefusedError, accepted, new_secret, opened
from ngsgd.cluster.exchange.collective import GroupFailure, Step, StepRequest
from ngsgd.cluster.exchange.process_group import Bytes, Group, prove_members
from ngsgd.cluster.exchange.rendezvous import MemberStore, Rendezvous
from ngsgd.optim.outer import Average, OuterInfo
from tests.cluster.exchange.test_collective import PLAIN, Swarm
from tests.tiers import HANGS_S

# as an outsider would: lists all keys, then writes an address of zeros under every name that a
# generation may use
_STRANGER = """
import sys
from datetime import timedelta
import torch.distributed as dist
try:
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=1))
    for generation in range(200):
        for rank in range(3):
            store.set(f"g{generation}/0/{rank}", bytes(8))
    print("entered", store.num_keys())
except Exception as error:
    print("refused")
"""


class Attacked(Swarm):
    """A group during whose every reduction somebody else is at work on its port."""

    def __init__(self, num_workers: int, attack: Callable[[int], None] = lambda port: None) -> None:
        super().__init__(PLAIN, num_workers)
        self.attack = attack

    def ask(self, orders: Mapping[int, StepRequest], timeout_s: float, when_lost: Callable[[], None]) -> dict[int, object]:
        self.orders.append(orders)
        self.attack(orders[0].port)

        def answer(worker: int) -> object:
            # the first member looks for the others' addresses before they are there
            time.sleep(0.2 * (worker > 0))
            return self.members[worker].step(orders[worker])
        with ThreadPoolExecutor(len(orders)) as threads:
            return dict(zip(orders, threads.map(answer, orders), strict=True))


@pytest.mark.faults
def test_a_process_without_the_secret_neither_enters_nor_changes_the_mean() -> None:
    answers: list[str] = []

    def attack(port: int) -> None:
        done = subprocess.run([sys.executable, "-c", _STRANGER, str(port)], capture_output=True, text=True, check=False)
        answers.append(done.stdout.strip())
    swarm = Attacked(2, attack)
    assert swarm.round((0, 1))
    assert answers == ["refused"]


@pytest.mark.faults
def test_a_flood_of_connections_delays_the_group_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # long enough for an honest member on a busy machine
    monkeypatch.setattr(rendezvous, "_PROOF_S", 1.5)
    with contextlib.ExitStack() as stack:
        def attack(port: int) -> None:
            for number in range(300):
                connection = socket.create_connection(("127.0.0.1", port))
                stack.enter_context(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(bytes(1 + number % 40))
        swarm = Attacked(3, attack)
        assert swarm.round((0, 1, 2))


def test_the_port_is_closed_after_the_group_has_formed() -> None:
    swarm = Attacked(2)
    assert swarm.round((0, 1))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", swarm.orders[0][0].port), timeout=5)
    assert swarm.round((0, 1), 1)
    assert swarm.orders[0][0].generation == swarm.orders[1][0].generation


def test_every_generation_has_another_secret_which_no_log_shows() -> None:
    swarm = Attacked(2)
    for outer_iter in range(2):
        swarm.exchange.close()
        assert swarm.round((0, 1), outer_iter)
    first, second = (orders[0].secret for orders in swarm.orders)
    assert first != second
    assert len(first) >= 16
    assert repr(first) not in repr(swarm.orders) and first.hex() not in repr(swarm.orders)


class Altered:
    """A group whose data are changed in transfer after the first two messages."""

    def __init__(self, group: Any, alter: Callable[[Bytes], Bytes]) -> None:
        self.group, self.alter, self.num_messages = group, alter, 0

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        self.num_messages += 1
        found: Bytes = self.group.all_to_all(outgoing, out_sizes, in_sizes, deadline)
        return self.alter(found) if self.num_messages > 2 else found

    def close(self) -> None:
        self.group.close()


def swapped(content: Bytes) -> Bytes:
    """Two words of each member's part exchanged: every sum over the words stays as it was."""
    changed = content.copy()
    for first in (0, len(content) // 2):
        changed[first:first + 8], changed[first + 8:first + 16] = content[first + 8:first + 16], content[first:first + 8]
    return changed


def test_an_altered_result_is_rejected_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = process_group.Group
    swarm = Attacked(2)
    results = swarm.results((0, 1))
    monkeypatch.setattr(process_group, "Group", lambda *given, **named: Altered(whole(*given, **named), swapped))
    assert not swarm.step(results)
    assert all(np.array_equal(result.sent.read(), vector)
               for result, vector in zip(results, swarm.vectors((0, 1)), strict=True))
    (message,) = swarm.exchange.news()
    assert "forged" in message and "version" not in message
    monkeypatch.setattr(process_group, "Group", whole)
    assert swarm.round((0, 1), 1)
    assert swarm.exchange.news() == []


def test_a_peer_that_cannot_prove_the_secret_gets_no_parameters() -> None:
    class Impostor:
        """Return the received data unchanged, like an attacker who has only the nonces."""

        def __init__(self) -> None:
            self.sent: list[int] = []

        def all_to_all(self, outgoing: Bytes, *_: Any) -> Bytes:
            self.sent.append(len(outgoing))
            return outgoing

        def all_reduce(self, tensor: Any, deadline: float) -> None:
            raise AssertionError

        def close(self) -> None:
            pass
    group = Impostor()
    with pytest.raises(RefusedError):
        prove_members(cast(Group, group), new_secret(), 1, 0, 2, time.monotonic() + HANGS_S)
    assert max(group.sent) < 100


def test_whatever_a_forged_message_raises_breaks_the_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch turned a forged address into ValueError: vector::_M_default_append."""
    def join(*_: Any, **__: Any) -> Any:
        raise ValueError("vector::_M_default_append")
    monkeypatch.setattr(collective, "join", join)
    swarm = Swarm(PLAIN, 1)
    swarm.results((0,))
    order = StepRequest("127.0.0.1", 1, 1, 0, 1, "gloo", 0.5, 1,
                        Step(((0, (0, 0, 1)),), Average(), OuterInfo(0, 1, 1, 0.1), {}, (1.0,)), {}, None, new_secret())
    assert isinstance(swarm.members[0].step(order), GroupFailure)


def test_a_group_that_fails_again_and_again_is_tried_less_often_with_one_incident(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*_: Any, **__: Any) -> Any:
        raise RuntimeError("disturbed")
    monkeypatch.setattr(collective, "join", join)
    swarm = Attacked(2)
    tried = []
    for outer_iter in range(40):
        is_open, num_orders = swarm.exchange.is_open(outer_iter), len(swarm.orders)
        assert not swarm.step(swarm.results((0, 1), outer_iter))
        assert (len(swarm.orders) > num_orders) == is_open
        tried += [outer_iter] * is_open
    assert tried == [0, 1, 3, 7, 15, 31]
    # a worker joined, and the cause is gone
    swarm.exchange.next_try = 0
    (message,) = swarm.exchange.news()
    assert "disturbed" in message
    monkeypatch.setattr(collective, "join", process_group.join)
    assert swarm.round((0, 1), 40) and swarm.round((0, 1), 41)
    assert not swarm.exchange.news()
    # the next failure is another one
    monkeypatch.setattr(collective, "join", join)
    assert not swarm.round((0, ), 42)
    assert len(swarm.exchange.news()) == 1 and swarm.exchange.is_open(43)


def test_an_address_on_which_the_coordinator_cannot_listen_makes_it_average() -> None:
    swarm = Swarm(PLAIN, 2)
    swarm.exchange.host = "192.0.2.1"  # of documentation: no machine has it
    results = swarm.results((0, 1))
    assert not swarm.step(results) and swarm.orders == []
    (message,) = swarm.exchange.news()
    assert "192.0.2.1" in message
    swarm.exchange.host = "127.0.0.1"
    assert swarm.round((0, 1), 1)


# ------------------------------------------------------------------------------ rendezvous, channel
def test_the_rendezvous_serves_only_members() -> None:
    secret = new_secret()
    server = Rendezvous("127.0.0.1", secret)
    try:
        with pytest.raises(RuntimeError):
            MemberStore("127.0.0.1", server.port, new_secret(), 0.3, 2)
        assert server.num_refused > 0
        first, second = (MemberStore("127.0.0.1", server.port, secret, 60.0, 2) for _ in range(2))
        threading.Timer(0.1, first.set, ("0/0", b"address")).start()
        second.wait(["0/0"])
        assert second.get("0/0") == b"address"
        assert second.check(["0/0"]) and not second.check(["0/0", "0/1"])
        assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    finally:
        server.close()
    with pytest.raises(RuntimeError, match="closed"):
        first.get("0/1")


@pytest.mark.parametrize("size", [2, 64, pytest.param(1000, marks=pytest.mark.slow)])
def test_addresses_of_all_members_take_two_requests_of_each(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[bytes] = []
    answer = Rendezvous._answer

    def counted(self: Rendezvous, request: bytes) -> bytes:
        requests.append(request[:1])
        return answer(self, request)
    monkeypatch.setattr(Rendezvous, "_answer", counted)
    # members that prove the secret at once are more than strangers are allowed to be
    monkeypatch.setattr(rendezvous, "_PROOF_S", HANGS_S)
    secret = new_secret()
    server = Rendezvous("127.0.0.1", secret)

    def joined(rank: int) -> bool:
        """As gloo does; each address is another for each member."""
        store = MemberStore("127.0.0.1", server.port, secret, HANGS_S, size)
        store.set(f"0/{rank}", f"address {rank}".encode())
        found = []
        for other in range(size):
            store.wait([f"0/{other}"], timedelta(seconds=HANGS_S))
            found.append(store.get(f"0/{other}"))
        store.close()
        return found == [f"address {other}".encode() for other in range(size)]
    with ThreadPoolExecutor(size) as threads:
        assert all(threads.map(joined, range(size)))
    assert sorted(requests) == [b"l"] * size + [b"s"] * size
    server.close()


def test_a_member_that_publishes_nothing_is_missed_by_all() -> None:
    secret = new_secret()
    server = Rendezvous("127.0.0.1", secret)
    store = MemberStore("127.0.0.1", server.port, secret, 0.2, 2)
    store.set("0/0", b"address")
    with pytest.raises(RuntimeError):
        store.get("0/1")
    # a value that only one member publishes, as NCCL does
    store.set("id", b"unique")
    assert store.get("id") == b"unique"
    server.close()


def test_members_that_wait_fail_at_once_when_the_rendezvous_closes() -> None:
    secret = new_secret()
    server = Rendezvous("127.0.0.1", secret)
    # a store that waited for its own timeout would outlast the timeout of the test
    store = MemberStore("127.0.0.1", server.port, secret, 10_000.0, 2)
    threading.Timer(0.1, server.close).start()
    with pytest.raises(RuntimeError):
        store.wait(["never"])


def channels(secret: bytes) -> tuple[Channel, Channel, socket.socket]:
    """(client's end, server's end, the server's bare socket)."""
    ends: list[Channel] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: ends.append(opened("127.0.0.1", port, secret, time.monotonic() + HANGS_S)))
        thread.start()
        connection, _ = listener.accept()
        server = accepted(connection, secret, time.monotonic() + HANGS_S)
        thread.join()
    return ends[0], server, connection


def test_messages_that_are_altered_or_repeated_are_refused() -> None:
    client, server, bare = channels(new_secret())
    client.send(b"an address")
    assert server.receive() == b"an address"
    server.send(b"yes")
    recorded = client.connection.recv(1000, socket.MSG_PEEK)
    assert client.receive() == b"yes"
    bare.sendall(recorded)   # once more
    with pytest.raises(RefusedError):
        client.receive()
    client.close()
    server.close()


def test_a_server_without_the_secret_is_refused_by_its_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(16))
                connection.recv(64)
                connection.sendall(bytes(16))
        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(RefusedError):
            opened("127.0.0.1", listener.getsockname()[1], new_secret(), time.monotonic() + HANGS_S)


def test_a_group_of_threads_proves_its_members() -> None:
    """Each end of a real group, and one of them with another secret."""
    secrets, answers = [new_secret(), new_secret()], {}
    server = Rendezvous("127.0.0.1", secrets[0])

    def join(rank: int, secret: bytes) -> None:
        try:
            store = MemberStore("127.0.0.1", server.port, secrets[0], 60.0, 2)
            group = process_group.Group("gloo", store, rank, 2, timeout_s=60.0, address="127.0.0.1", device=torch.device("cpu"))
            prove_members(group, secret, 1, rank, 2, time.monotonic() + HANGS_S)
            answers[rank] = "joined"
        except RefusedError:
            answers[rank] = "refused"
    for given, wanted in ((secrets[0], "joined"), (secrets[1], "refused")):
        answers.clear()
        server.close()
        server = Rendezvous("127.0.0.1", secrets[0])
        threads = [threading.Thread(target=join, args=(rank, secret)) for rank, secret in ((0, secrets[0]), (1, given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {0: wanted, 1: wanted}
    server.close()
