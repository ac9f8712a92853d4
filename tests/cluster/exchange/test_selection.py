"""Which way results take to the average, for pretended devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngsgd.cluster.exchange.selection import WorkerDevice, choose_way
from ngsgd.errors import ClusterError

# host, on the coordinator's machine, UUID, PCI bus (None: a torch that does not show it), name
Properties = tuple[str, bool, str, int | None, str]


def pretended(monkeypatch: pytest.MonkeyPatch, found: Properties) -> WorkerDevice:
    """The device of a worker for whom torch reports these properties."""
    host, is_near, uuid, bus, name = found
    properties: dict[str, Any] = {"name": name, "uuid": uuid}
    if bus is not None:
        properties |= {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(nodename=host))
    return WorkerDevice.of(torch.device("cuda", 0), is_near=is_near)


OWN = [("n0", True, "a", 0x3b, "H100"), ("n0", True, "b", 0x5e, "H100")]
FAR_OWN = [*OWN, ("n1", False, "c", 0x3b, "H100")]
SHARED = [("n1", False, "a", 0x3b, "H100"), ("n1", False, "a", 0x3b, "H100")]
SHARED_BY_UUID = [("n1", False, "a", None, "H100"), ("n1", False, "a", None, "H100")]
OWN_BY_UUID = [("n1", False, "a", None, "H100"), ("n1", False, "b", None, "H100")]
SLICES = [("n1", False, f"MIG-{one}", 0x3b, "H100 MIG 1g.10gb") for one in "ab"]
SLICE_EACH = [(f"n{one}", False, f"MIG-{one}", 0x3b, "H100 MIG 1g.10gb") for one in range(2)]


@pytest.mark.parametrize(("devices", "is_nccl_possible"), [
    (OWN, True), (FAR_OWN, True), (OWN_BY_UUID, True), (SHARED, False), (SHARED_BY_UUID, False),
    (SLICES, False), (SLICE_EACH, False)],
    ids=["own, one machine", "own, two machines", "own by UUID", "one GPU", "one GPU by UUID",
         "slices of one GPU", "slices of two GPUs"])
def test_the_way_follows_from_the_gpus(monkeypatch: pytest.MonkeyPatch, devices: list[Properties],
                                       is_nccl_possible: bool) -> None:
    found = [pretended(monkeypatch, properties) for properties in devices]
    # NCCL has not run between GPUs, so that only its name chooses it
    is_far = any(not properties[1] for properties in devices)
    assert choose_way("auto", found, jobs_keep_state=False)[0] == ("collective" if is_far else "shared_memory")
    if is_nccl_possible:
        assert choose_way("nccl", found, jobs_keep_state=False)[0] == "nccl"
    else:
        with pytest.raises(ClusterError):
            choose_way("nccl", found, jobs_keep_state=False)


@pytest.mark.parametrize("is_near", [True, False])
def test_workers_on_cpus_never_use_nccl(is_near: bool) -> None:
    devices = [WorkerDevice.of(torch.device("cpu"), is_near=is_near)] * 2
    assert choose_way("auto", devices, jobs_keep_state=False)[0] == ("shared_memory" if is_near else "collective")
    # these have no group to average in
    alone = "shared_memory" if is_near else "object_store"
    assert choose_way("auto", devices[:1], jobs_keep_state=False)[0] == alone
    assert choose_way("auto", devices, jobs_keep_state=True)[0] == alone
    with pytest.raises(ClusterError):
        choose_way("nccl", devices, jobs_keep_state=False)


def test_a_named_way_is_taken_where_it_is_possible() -> None:
    far = [WorkerDevice("n0", True), WorkerDevice("n1", False)]
    for way in ("collective", "object_store"):
        assert choose_way(way, far, jobs_keep_state=False)[0] == way
    assert choose_way("shared_memory", far[:1], jobs_keep_state=False)[0] == "shared_memory"
    with pytest.raises(ClusterError):
        choose_way("shared_memory", far, jobs_keep_state=False)
