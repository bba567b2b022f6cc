from __future__ import annotations

import sys

import pytest

from moelab.doctor import network
from moelab.doctor.check import MISSING, OK, WARN

SETTINGS = (
    "NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_LIBFABRIC_PROVIDER",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host(tmp_path):
    """host(cards={"mlx5_0": "mlx5_core"}, ...) makes the /dev, /proc and /sys of a host."""

    def make(cards=(), state="4: ACTIVE", gdrdrv=False, peermem=False, params=None):
        def write(path, text):
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

        for number, (name, driver) in enumerate(dict(cards).items()):
            write(f"dev/infiniband/uverbs{number}", "")
            port = f"sys/class/infiniband/{name}/ports/1"
            write(f"{port}/link_layer", "InfiniBand\n")
            write(f"{port}/state", state + "\n")
            write(f"{port}/rate", "400 Gb/sec (4X NDR)\n")
            drivers = tmp_path / "sys/bus/pci/drivers" / driver
            drivers.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"sys/class/infiniband/{name}/device").mkdir()
            (tmp_path / f"sys/class/infiniband/{name}/device/driver").symlink_to(drivers)
        if gdrdrv:
            write("dev/gdrdrv", "")
        if peermem:
            write("sys/module/nvidia_peermem/version", "580.159\n")
        if params is not None:
            write("proc/driver/nvidia/params", params)
        return {c.name: c for c in network.checks(tmp_path)}

    return make


def test_without_a_network_card_nothing_is_a_warning(host):
    found = host()
    assert found["network cards"].status == MISSING and "one node only" in found["network cards"].detail
    assert not [c for c in found.values() if c.status == WARN]
    assert {c.section for c in found.values()} == {"Multi-node only"}


def test_cards_are_shown_with_driver_link_and_state(host):
    found = host({"mlx5_0": "mlx5_core", "mlx5_1": "mlx5_core"}, gdrdrv=True, peermem=True)
    card = found["network cards"]
    assert card.status == OK
    assert card.detail == ("mlx5_0 (mlx5: InfiniBand active 400 Gb/sec), mlx5_1 (mlx5: InfiniBand active 400 Gb/sec)")
    assert found["GDRCopy"].status == found["GPU memory for NICs"].status == OK
    assert found["GPU memory for NICs"].detail == "/sys/module/nvidia_peermem/version"


def test_ports_that_are_down_are_a_warning(host):
    assert host({"mlx5_0": "mlx5_core"}, state="1: DOWN")["network cards"].status == WARN


def test_what_is_missing_beside_a_card_gets_a_fix(host):
    found = host({"mlx5_0": "mlx5_core"}, params='EnableStreamMemOPs: 0\nRegistryDwords: ""\n')
    assert found["GDRCopy"].status == MISSING and "gdrdrv" in found["GDRCopy"].fix
    assert "modprobe nvidia_peermem" in found["GPU memory for NICs"].fix
    assert "NVreg_EnableStreamMemOPs=1" in found["driver options"].fix


def test_efa_without_gdrcopy_is_a_warning(host):
    assert host({"rdmap0s6": "efa"})["GDRCopy"].status == WARN


@pytest.mark.parametrize(
    ("params", "status", "shown"),
    [
        ('EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n', OK, "on, PeerMappingOverride on"),
        ('EnableStreamMemOPs: 1\nRegistryDwords: ""\n', MISSING, "on, PeerMappingOverride off"),
        ('EnableStreamMemOPs: 0\nRegistryDwords: "PeerMappingOverride=1;"\n', MISSING, "off, PeerMappingOverride on"),
    ],
)
def test_driver_options_are_read(host, params, status, shown):
    check = host(params=params)["driver options"]
    assert check.status == status and shown in check.detail


@pytest.mark.parametrize(
    ("card", "settings", "status", "shown"),
    [
        ("mlx5_core", {}, OK, "set to ibrc"),
        ("efa", {}, WARN, "set to ibrc, but no card is mlx5"),
        ("mlx5_core", {"NVSHMEM_IB_ENABLE_IBGDA": "1"}, OK, "IBGDA, started by the GPU, with ibrc for the host"),
        ("mlx5_core", {"NVSHMEM_REMOTE_TRANSPORT": "libfabric"}, WARN, "libfabric (cxi), but no card is cxi"),
        ("efa", {"NVSHMEM_REMOTE_TRANSPORT": "libfabric", "NVSHMEM_LIBFABRIC_PROVIDER": "efa"}, OK, "libfabric (efa)"),
        ("mlx5_core", {"NVSHMEM_REMOTE_TRANSPORT": "none"}, OK, "right on one node"),
        ("efa", {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_IB_ENABLE_IBGDA": "1"}, WARN, "no card is mlx5"),
    ],
)
def test_the_transport_is_held_against_the_cards(host, monkeypatch, card, settings, status, shown):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    check = host({"nic0": card})["transport"]
    assert check.status == status and shown in check.detail, check


def test_the_interface_is_the_one_that_nvshmem_takes():
    names = ["lo", "docker0", "eth0", "eth1", "ibp3s0"]
    assert network.chosen_interfaces(names) == ["ibp3s0"]
    assert network.chosen_interfaces(names[:-1]) == ["eth0", "eth1"]
    assert network.chosen_interfaces(["lo", "docker0"]) == ["docker0"]
    assert network.chosen_interfaces(["lo"]) == ["lo"]
    assert network.chosen_interfaces([]) == []
    assert network.chosen_interfaces(names, "eth") == ["eth0", "eth1"]
    assert network.chosen_interfaces(names, "=eth1") == ["eth1"]
    assert network.chosen_interfaces(names, "^ib,lo,docker") == ["eth0", "eth1"]
    assert network.chosen_interfaces(names, "bond") == []


def test_the_meeting_point_and_what_is_wrong_with_it(monkeypatch):
    monkeypatch.setattr(network, "_addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.2", "eth1": "10.1.0.2"})
    check = network._meeting_point()
    assert (check.status, check.detail) == (OK, "eth0 (10.0.0.2); also eth1")
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "eth1")
    assert network._meeting_point().detail == "eth1 (10.1.0.2) by NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert network._meeting_point().status == WARN and "NCCL_SOCKET_IFNAME=eth0" in network._meeting_point().detail
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "ib0")
    check = network._meeting_point()
    assert check.status == WARN and "ib0 fits none of lo, eth0, eth1" in check.detail and check.fix
    monkeypatch.delenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
    monkeypatch.setattr(network, "_addresses", lambda: {"lo": "127.0.0.1"})
    check = network._meeting_point()
    assert check.status == MISSING and check.detail == "lo (127.0.0.1): this host only"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for addresses")
def test_addresses_are_those_of_this_host():
    assert network._addresses().get("lo") == "127.0.0.1"


@pytest.mark.skipif(sys.platform != "linux", reason="library names of Linux")
def test_libraries_are_opened_and_the_loaders_reason_is_shown(monkeypatch):
    monkeypatch.setattr(network, "LIBRARIES", {"libc.so.6": "all", "libnone.so.9": "nobody"})
    there, gone = network._libraries(has_card=True)
    assert (there.name, there.status, there.detail) == ("libc", OK, "opens; for all")
    assert (gone.name, gone.status) == ("libnone", MISSING)
    assert "libnone.so.9: cannot open" in gone.detail and "RUNBOOK" in gone.fix
