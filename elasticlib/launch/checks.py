"""The command `elasticlib doctor`: six checks of what keeps jobs from running on a machine.

The checks are the endpoint with the names of machines, the store with its secret, shared memory,
open files, torch with its devices, and folders that are written to. Each check has a time limit
where it needs one, removes what it has made, and says what to do about what it finds.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import attrs

from .._version import versions
from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError, StoreError, StoreRejectedError
from ..observe.wording import size
from ..stores.tcp_client import TcpStore
from ..visible import visible_line
from ..workers.run_dirs import SHARED_MEMORY
from .addresses import (
    addresses_of,
    is_loopback,
    is_ours,
    of_several_machines,
    outward_address,
    resolve,
    why_not_served,
)
from .cli_output import argument_type, print_error
from .endpoints import read_secret

CONNECT_TIMEOUT_S = 3.0
IMPORT_TIMEOUT_S = 60.0  # importing torch takes seconds, and more from a slow or busy disk
DOCKER_SHARED_MEMORY_BYTES = 64 * 1024 * 1024
FEW_FILES = 1024
_PROBE_KEY = "elasticlib/doctor"
_TORCH = """
import json, torch, torch.distributed as d
there = d.is_available()
print(json.dumps({
    "gloo": there and d.is_gloo_available(),
    "nccl": there and d.is_nccl_available(),
    "cuda": torch.version.cuda or "",
    "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}))
"""


@attrs.frozen
class Finding:
    """What a check found. good: whether a job can run so; None if the user has to judge."""

    check: str
    good: bool | None
    sentence: str


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check this machine, and an endpoint, for what keeps a job from running, and say what to "
        "do about it. Exit status: 0 if nothing is bad, 1 if something is, 2 for a wrong command "
        "line or secret."
    )
    parser.add_argument(
        "--rdzv-endpoint",
        type=argument_type(lambda text: split_endpoint(text, STORE_PORT)),
        metavar="HOST[:PORT]",
        help=f"where the nodes of the job meet, if in a tcp store (port {STORE_PORT} by default)",
    )
    parser.add_argument("--secret-file", metavar="PATH", help="holds the job's secret, if any")
    parser.add_argument("--log-dir", metavar="DIR", help="where logs, or a file store, would go")
    parser.set_defaults(run=_diagnose)


def _diagnose(chosen: argparse.Namespace) -> int:
    try:
        secret = read_secret(os.environ, chosen.secret_file, "--secret-file")
    except ConfigError as error:
        return print_error("doctor: error", error, 2)
    has_failed = False
    # Each finding is printed at once, so that the output shows where a check hangs.
    for found in run_checks(chosen.rdzv_endpoint, secret, chosen.log_dir):
        word = {True: "ok", False: "BAD", None: "note"}[found.good]
        print(visible_line(f"{word:4}  {found.check:13}  {found.sentence}"), flush=True)
        has_failed = has_failed or found.good is False
    return int(has_failed)


def run_checks(
    endpoint: tuple[str, int] | None, secret: bytes | None, log_dir: str | None
) -> Iterator[Finding]:
    """Run all checks in order. The endpoint is the host and the port of a TCP store."""
    yield check_own_name(endpoint)
    if endpoint is not None:
        resolved = check_endpoint(*endpoint)
        yield resolved
        if resolved.good:
            yield check_store(*endpoint, secret)
    yield check_shared_memory()
    yield check_open_files()
    yield check_torch()
    yield check_folder("temporary", tempfile.gettempdir())
    if log_dir is not None:
        yield check_folder("--log-dir", log_dir)


# -- names and the store ---------------------------------------------------------------------------


def check_own_name(endpoint: tuple[str, int] | None) -> Finding:
    """Check what this machine's name means here, because gloo's workers listen at that address."""
    name, outward = socket.gethostname(), outward_address()
    found = addresses_of(name)
    # A job on one machine, or with a named interface, does not use the name.
    alone = endpoint is None or all(map(is_loopback, resolve(*endpoint)))
    bad = None if alone or os.environ.get("GLOO_SOCKET_IFNAME") else False
    ways = f"map it to {outward} in /etc/hosts, or set GLOO_SOCKET_IFNAME for the workers"
    if is_loopback(outward):
        ways = "other machines need an address of this one to reach it"
    shown = ", ".join(found)
    if not found:
        return Finding("own name", bad, f"{name} cannot be resolved here: {ways}")
    if all(map(is_loopback, found)):
        sentence = f"{name} means {shown} here, which no other machine can reach: workers of "
        return Finding("own name", bad, f"{sentence}several machines wait for each other; {ways}")
    if not any(map(is_ours, found)):
        return Finding("own name", bad, f"{name} means {shown}, no address of this machine: {ways}")
    return Finding("own name", True, f"{name} is {shown}; traffic leaves from {outward}")


def check_endpoint(host: str, port: int) -> Finding:
    """Check which machine the endpoint means."""
    addresses = resolve(host, port)
    if not addresses:
        ways = "check the name, /etc/hosts and the resolver"
        return Finding("endpoint", False, f"{host} cannot be resolved here: {ways}")
    several = of_several_machines(join_endpoint(host, port), addresses)
    whose = "this machine" if any(map(is_ours, addresses)) else "another machine"
    found = f"{host} is {', '.join(addresses)}: {whose}"
    return Finding("endpoint", not several, several or found)


def check_store(host: str, port: int, secret: bytes | None) -> Finding:
    """Check that a store at the endpoint lets this node in, by a round trip that changes nothing.

    If nothing serves there and the address is of this machine, check that a node can serve there.
    """
    endpoint, addresses = join_endpoint(host, port), resolve(host, port)
    error: StoreError | None = None
    for address in addresses:
        store = TcpStore(address, port, timeout=CONNECT_TIMEOUT_S, secret=secret)
        try:
            store.get(_PROBE_KEY)
        except StoreError as failed:
            error = failed
        else:
            return Finding("store", True, f"an elasticlib store answers at {endpoint}")
        finally:
            store.close()
    if isinstance(error, StoreRejectedError):
        ways = "give the secret in ELASTICLIB_SECRET or by --secret-file"
        if "secret" not in str(error):
            ways = "is it the place of another version, or of another --rdzv-backend?"
        return Finding("store", False, f"{endpoint} rejects this node: {error}; {ways}")
    if isinstance(getattr(error, "__cause__", None), ConnectionRefusedError):
        ours = [address for address in addresses if is_ours(address)]
        why = why_not_served(ours, port) if ours else None
        if why is not None:
            return Finding("store", False, f"{endpoint} cannot be served: {why}")
        if ours:
            return Finding("store", True, f"{endpoint} is free: this node can serve the store")
        sentence = f"{endpoint} refuses connections: no store is served there yet"
        return Finding("store", None, f"{sentence}; start the node that hosts it")
    ways = "is the machine on, does a firewall drop packets, or does another program serve there?"
    return Finding("store", False, f"{error}: {ways}")


# -- this machine ----------------------------------------------------------------------------------


def check_shared_memory(place: str = SHARED_MEMORY) -> Finding:
    """Check that files in shared memory can be made and mapped, and how much room there is."""
    check = "shared memory"
    try:
        usage = shutil.disk_usage(place)
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                mapped[0] = 1
    except OSError as error:
        sentence = f"no file can be made and mapped in {place} ({error.strerror}): loaders with "
        sentence += "workers, snapshots and NCCL need it; in Docker give --shm-size or --ipc=host, "
        return Finding(check, False, f"{sentence}in Kubernetes mount an emptyDir of medium Memory")
    sizes = f"{size(usage.free)} of {size(usage.total)} are free in {place}"
    if usage.total <= DOCKER_SHARED_MEMORY_BYTES:
        hint = "that is Docker's default, and little for loaders with workers: give --shm-size"
        return Finding(check, None, f"{sizes}; {hint}")
    if usage.free < DOCKER_SHARED_MEMORY_BYTES:
        return Finding(check, False, f"{sizes}: remove files there (ls -l {place})")
    return Finding(check, True, sizes)


def check_open_files() -> Finding:
    """Check how many files a process may open; elasticrun raises its own limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= FEW_FILES:
        most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
        return Finding("open files", True, f"{most} are allowed")
    ways = "raise the limit (ulimit -Hn, LimitNOFILE=)"
    return Finding("open files", False, f"{hard} are too few for a store or many loaders: {ways}")


def check_torch() -> Finding:
    """Import torch in a process of its own, because an import can hang or crash."""
    command = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        sentence = f"torch is not imported within {IMPORT_TIMEOUT_S:g} s: is its disk slow?"
        return Finding("torch", False, sentence)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("torch", False, f"torch cannot be imported: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    known = ", ".join(f"{name} {text}" for name, text in versions().items())
    if not found["gloo"]:
        return Finding(
            "torch", False, f"{known}: this torch has no gloo, so CPU workers cannot meet"
        )
    if not found["gpus"]:
        return Finding("torch", True, f"{known}, no GPU: workers train on the CPU, with gloo")
    if not found["nccl"]:
        return Finding(
            "torch", False, f"{known}, {found['gpus']} GPUs and no NCCL: install torch for CUDA"
        )
    return Finding(
        "torch", True, f"{known}, {found['gpus']} GPUs with CUDA {found['cuda']} and NCCL"
    )


def check_folder(check: str, folder: str) -> Finding:
    """Check that files can be written and locked in a folder, or where it would be made."""
    nearest = os.path.abspath(folder)
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    made = "" if nearest == os.path.abspath(folder) else f", as it would be made in {nearest}"
    try:
        # Permissions alone do not tell: the file system can be full or mounted without locks.
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"elasticlib")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        sentence = f"no file can be written and locked in {folder}{made}: {error.strerror}"
        return Finding(check, False, sentence)
    return Finding(check, True, f"files can be written and locked in {folder}{made}")
