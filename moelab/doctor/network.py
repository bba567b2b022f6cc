"""What ranks on several nodes need: a network card and its libraries, memory that it may reach, and a socket to meet
at. Nothing here matters on one node, so nothing that is missing is a warning until a network card is there.

What is looked for is what NVSHMEM's transports open (its sources, v3.4.5: src/modules/transport, bootstrap/uid); the
page kernels/RUNBOOK.md says what to do with it.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from moelab.doctor.check import MISSING, OK, WARN, Check, ChildFailed, ask

SECTION = "Multi-node only"
PAGE = "kernels/RUNBOOK.md"
# By the names that NVSHMEM opens, and which transport wants them.
LIBRARIES = {
    "libibverbs.so.1": "IBRC, IBGDA",
    "libmlx5.so.1": "IBRC, IBGDA",
    "libfabric.so.1": "EFA",
    "libgdrapi.so.2": "EFA, and all of IBRC's atomics",
}
# NVSHMEM asks for these files; the kernel's dmabuf, which it tries first, makes the module unnecessary.
PEER_MEMORY = (
    "sys/module/nvidia_peermem/version",
    "sys/kernel/mm/memory_peers/nvidia-peermem/version",
    "sys/kernel/mm/memory_peers/nv_mem/version",
)
_OPEN = """
import ctypes, json
found = {}
for name in %r:
    try:
        ctypes.CDLL(name)
        found[name] = ""
    except OSError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def checks(root: Path = Path("/")) -> Iterator[Check]:
    """`root`: where /dev, /proc and /sys are looked for."""
    cards = network_cards(root)
    yield _cards(root, cards)
    yield _transport(cards)
    yield from _libraries(bool(cards))
    gdr = (root / "dev/gdrdrv").exists()
    yield Check(
        SECTION,
        "GDRCopy",
        OK if gdr else WARN if "efa" in cards.values() else MISSING,
        "/dev/gdrdrv" if gdr else "no /dev/gdrdrv: EFA needs it, and IBRC for all atomics but set and add",
        "" if gdr or not cards else "install gdrcopy and load its module: modprobe gdrdrv",
    )
    peer = next((file for file in PEER_MEMORY if (root / file).exists()), None)
    yield Check(
        SECTION,
        "GPU memory for NICs",
        OK if peer else MISSING,
        f"/{peer}" if peer else "no nvidia_peermem: needs dmabuf then (open GPU driver, rdma-core 44, Linux 6.1)",
        "" if peer or not cards else "modprobe nvidia_peermem",
    )
    yield _driver_options(root, bool(cards))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    endless = limit == resource.RLIM_INFINITY
    yield Check(
        SECTION,
        "ulimit -l",
        WARN if cards and not endless else OK,
        "unlimited" if endless else f"{limit / 1024:.0f} KiB",
        "RDMA registers memory: ulimit -l unlimited" if cards and not endless else "",
    )
    yield _meeting_point()


def network_cards(root: Path) -> dict[str, str]:
    """{device: mlx5 | efa | its driver} of those that a process can open; NVSHMEM's IB transports serve mlx5."""
    if not any((root / "dev/infiniband").glob("uverbs*")):
        return {}
    found = {}
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        driver = device / "device" / "driver"
        name = os.path.basename(os.path.realpath(driver)) if driver.exists() else "unknown driver"
        found[device.name] = {"mlx5_core": "mlx5"}.get(name, name)
    return found


def _cards(root: Path, cards: dict[str, str]) -> Check:
    if not cards:
        return Check(SECTION, "network cards", MISSING, "no /dev/infiniband/uverbs*: one node only")
    shown, active = [], 0
    for name, driver in cards.items():
        ports = []
        for port in sorted((root / "sys/class/infiniband" / name / "ports").glob("*")):
            link, state, rate = (_first_line(port / file) for file in ("link_layer", "state", "rate"))
            active += "ACTIVE" in state
            ports.append(f"{link} {state.split(': ')[-1].lower()} {rate.split(' (')[0]}".strip())
        shown.append(f"{name} ({driver}{': ' + ', '.join(ports) if ports else ''})")
    return Check(
        SECTION,
        "network cards",
        OK if active else WARN,
        ", ".join(shown),
        "" if active else "no port is active: cable, switch or subnet manager",
    )


def _transport(cards: dict[str, str]) -> Check:
    """What NVSHMEM is told to use, and whether a card for it is there."""
    asked = os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "ibrc").lower()
    ibgda = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "0").lower() in ("1", "y", "yes", "true", "on")
    provider = os.environ.get("NVSHMEM_LIBFABRIC_PROVIDER", "cxi").lower()
    needs = {"ibrc": "mlx5", "ibdevx": "mlx5", "libfabric": provider}.get(asked)
    shown = f"{asked} ({provider})" if asked == "libfabric" else asked
    if ibgda:
        shown, needs = f"IBGDA, started by the GPU, with {shown} for the host", needs or "mlx5"
    if asked == "none" and not ibgda:
        shown = "none (NVSHMEM_REMOTE_TRANSPORT): right on one node"
    if not cards or needs is None or needs in cards.values():
        return Check(SECTION, "transport", OK if cards else MISSING, f"set to {shown}")
    fix = f"{PAGE} has the settings for each"
    return Check(SECTION, "transport", WARN, f"set to {shown}, but no card is {needs}", fix)


def _libraries(has_card: bool) -> Iterator[Check]:
    try:
        found = ask(_OPEN % list(LIBRARIES), timeout_s=30)
    except ChildFailed as failure:
        yield Check(SECTION, "libraries", WARN, f"opening {', '.join(LIBRARIES)}: {failure}")
        return
    for name, reason in found.items():
        detail = f"opens; for {LIBRARIES[name]}" if not reason else f"{reason} ({LIBRARIES[name]})"
        fix = f"{PAGE} names the packages" if reason and has_card else ""
        yield Check(SECTION, name.split(".so")[0], MISSING if reason else OK, detail, fix)


def _driver_options(root: Path, has_card: bool) -> Check:
    """With both, the GPU rings the network card itself (IBGDA)."""
    try:
        text = (root / "proc/driver/nvidia/params").read_text()
    except OSError:
        return Check(SECTION, "driver options", MISSING, "no /proc/driver/nvidia/params: no NVIDIA driver here")
    stream = re.search(r"^EnableStreamMemOPs:\s*1\s*$", text, re.MULTILINE)
    override = re.search(r"PeerMappingOverride\s*=\s*1", text)
    detail = f"EnableStreamMemOPs {'on' if stream else 'off'}, PeerMappingOverride {'on' if override else 'off'}"
    if stream and override:
        return Check(SECTION, "driver options", OK, detail)
    fix = (
        'for IBGDA: options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;" in '
        "/etc/modprobe.d/nvidia.conf, and reboot; or NVSHMEM_IBGDA_NIC_HANDLER=cpu"
    )
    return Check(SECTION, "driver options", MISSING, f"{detail} (matters for IBGDA only)", fix if has_card else "")


def _meeting_point() -> Check:
    """Where rank 0 listens for the others; chosen as NVSHMEM does."""
    name, named = "bootstrap interface", os.environ.get("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "")
    addresses = _addresses()
    found = chosen_interfaces(list(addresses), named)
    fix = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=<one that all nodes reach>"
    if not found:
        said = f"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME={named} fits none of" if len(named) > 1 else "none has an address:"
        have = ", ".join(addresses) or ", ".join(name for _, name in socket.if_nameindex()) or "none"
        return Check(SECTION, name, WARN if len(named) > 1 else MISSING, f"{said} {have}", fix)
    detail = f"{found[0]} ({addresses[found[0]]})" + (f"; also {', '.join(found[1:])}" if found[1:] else "")
    detail += " by NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" if len(named) > 1 else ""
    theirs = os.environ.get("NCCL_SOCKET_IFNAME")
    if theirs and theirs != named:
        return Check(SECTION, name, WARN, f"{detail}, but NCCL_SOCKET_IFNAME={theirs}", fix)
    only_local = found[0] == "lo" or found[0].startswith("docker")
    return Check(SECTION, name, MISSING if only_local else OK, detail + (": this host only" if only_local else ""))


def chosen_interfaces(names: list[str], named: str = "") -> list[str]:
    """Of the interfaces with an address, those that NVSHMEM's bootstrap takes, in its order: by the setting (prefixes;
    ^ excludes, = wants the whole name), else ib*, else all but docker and lo, else those."""

    def matching(setting: str) -> list[str]:
        excluded, exact = setting.startswith("^"), setting.lstrip("^").startswith("=")
        wanted = [part.split(":")[0] for part in setting.lstrip("^=").split(",") if part]
        fits = [n for n in names if any(n == part if exact else n.startswith(part) for part in wanted)]
        return [n for n in names if n not in fits] if excluded else fits

    if len(named) > 1:
        return matching(named)
    return next((found for setting in ("ib", "^docker,lo", "docker", "lo") if (found := matching(setting))), [])


def _addresses() -> dict[str, str]:
    """{interface: IPv4 address}; empty where the system is not Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:  # SIOCGIFADDR
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _first_line(file: Path) -> str:
    try:
        return file.read_text().strip().splitlines()[0]
    except (OSError, IndexError):
        return ""
