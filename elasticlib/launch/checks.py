"""The command `elasticlib doctor`: six checks for problems that prevent a job from running.

The checks cover the endpoint and name resolution, a round trip to the store with its secret, shared
memory, open files, torch with its devices, and writable directories. Each check is bounded in time,
removes what it creates, and suggests a remedy.
"""

from __future__ import annotations

import argparse
import enum
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
from collections.abc import Iterator, Sequence

import attrs

from .._version import versions
from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError, StoreError, StoreRejectedError
from ..observe.formatting import format_bytes
from ..sanitize import escape_to_one_line
from ..stores.tcp_client import TcpStore
from ..workers.run_dirs import SHARED_MEMORY
from .addresses import (
    addresses_of,
    ambiguous_host_error,
    bind_error,
    is_local_address,
    is_loopback,
    outward_address,
    resolve,
)
from .cli_output import argument_type, print_error
from .secret import read_secret

CONNECT_TIMEOUT_S = 3.0
IMPORT_TIMEOUT_S = 60.0  # importing torch takes seconds, and longer from a slow or busy disk
DOCKER_SHARED_MEMORY_BYTES = 64 * 1024 * 1024
MIN_OPEN_FILES = 1024
_PROBE_KEY = "elasticlib/doctor"
_TORCH_PROGRAM = """
import json, torch, torch.distributed as d
has_distributed = d.is_available()
print(json.dumps({
    "gloo": has_distributed and d.is_gloo_available(),
    "nccl": has_distributed and d.is_nccl_available(),
    "cuda": torch.version.cuda or "",
    "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}))
"""


class CheckStatus(enum.Enum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"  # a job may run; the user has to judge
    ERROR = "error"  # a job cannot run


@attrs.frozen
class CheckResult:
    """The result of a check, with a remedy if it found a problem."""

    check: str
    status: CheckStatus
    message: str


def ok_result(check: str, message: str) -> CheckResult:
    return CheckResult(check, CheckStatus.OK, message)


def warning_result(check: str, message: str) -> CheckResult:
    return CheckResult(check, CheckStatus.WARNING, message)


def error_result(check: str, message: str) -> CheckResult:
    return CheckResult(check, CheckStatus.ERROR, message)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib doctor`."""
    parser.description = (
        "Check this machine, and optionally a rendezvous endpoint, for problems that would prevent "
        "a job from running, and suggest fixes. Exit status: 0 no errors, 1 at least one error, 2 "
        "invalid command line or secret."
    )
    parser.add_argument(
        "--rdzv-endpoint",
        type=argument_type(lambda text: split_endpoint(text, STORE_PORT)),
        metavar="HOST[:PORT]",
        help=f"rendezvous endpoint of a job that uses a tcp store (default port: {STORE_PORT})",
    )
    parser.add_argument("--secret-file", metavar="PATH", help="file with the secret of the job")
    parser.add_argument(
        "--log-dir", metavar="DIR", help="directory of the logs, or of a file store"
    )
    parser.set_defaults(run=_diagnose)


def _diagnose(args: argparse.Namespace) -> int:
    try:
        secret = read_secret(os.environ, args.secret_file, "--secret-file")
    except ConfigError as error:
        return print_error("doctor: error", error, 2)
    has_error = False
    # Each result is printed at once, so that the output shows where a check hangs.
    for result in run_checks(args.rdzv_endpoint, secret, args.log_dir):
        line = f"{result.status.value:7}  {result.check:13}  {result.message}"
        print(escape_to_one_line(line), flush=True)
        has_error = has_error or result.status is CheckStatus.ERROR
    return int(has_error)


def run_checks(
    endpoint: tuple[str, int] | None, secret: bytes | None, log_dir: str | None
) -> Iterator[CheckResult]:
    """Run all checks in order.

    Args:
        endpoint: host and port of a TCP store, or None to skip the checks of the store.
        secret: the secret of the store.
        log_dir: a directory to check, or None.
    """
    yield check_hostname(endpoint)
    if endpoint is not None:
        resolution = check_endpoint_resolution(*endpoint)
        yield resolution
        if resolution.status is CheckStatus.OK:
            yield check_store(*endpoint, secret)
    yield check_shared_memory()
    yield check_open_files()
    yield check_torch()
    yield check_directory("temporary", tempfile.gettempdir())
    if log_dir is not None:
        yield check_directory("--log-dir", log_dir)


# -- names and the store ---------------------------------------------------------------------------


def check_hostname(endpoint: tuple[str, int] | None) -> CheckResult:
    """Check the address of this machine's hostname, on which the gloo backend listens."""
    name, outward = socket.gethostname(), outward_address()
    addresses = addresses_of(name)
    # A single-node job, or one with a named interface, does not use the hostname.
    is_single_node = endpoint is None or all(map(is_loopback, resolve(*endpoint)))
    is_unused = is_single_node or bool(os.environ.get("GLOO_SOCKET_IFNAME"))
    problem = warning_result if is_unused else error_result
    remedy = f"map it to {outward} in /etc/hosts, or set GLOO_SOCKET_IFNAME for the workers"
    if is_loopback(outward):
        remedy = "give this machine an address that other machines can reach"
    shown = ", ".join(addresses)
    if not addresses:
        return problem("hostname", f"hostname {name} cannot be resolved: {remedy}")
    if all(map(is_loopback, addresses)):
        return problem(
            "hostname",
            f"hostname {name} resolves to the loopback address {shown}, so workers on other "
            f"machines cannot connect: {remedy}",
        )
    if not any(map(is_local_address, addresses)):
        return problem(
            "hostname",
            f"hostname {name} resolves to {shown}, which is no address of this machine: {remedy}",
        )
    return ok_result("hostname", f"{name} resolves to {shown}; default source address {outward}")


def check_endpoint_resolution(host: str, port: int) -> CheckResult:
    """Check that the host resolves to a single machine, without connecting to it."""
    addresses = resolve(host, port)
    if not addresses:
        remedy = "check the name, /etc/hosts and the resolver"
        return error_result("endpoint", f"{host} cannot be resolved: {remedy}")
    error = ambiguous_host_error(join_endpoint(host, port), addresses)
    if error:
        return error_result("endpoint", error)
    machine = "this machine" if any(map(is_local_address, addresses)) else "another machine"
    return ok_result("endpoint", f"{host} resolves to {', '.join(addresses)}: {machine}")


def check_store(host: str, port: int, secret: bytes | None) -> CheckResult:
    """Check that the store accepts this node, by reading a key.

    If no store is served and the address belongs to this machine, check that it can be bound.
    """
    endpoint, addresses = join_endpoint(host, port), resolve(host, port)
    error: StoreError | None = None
    for address in addresses:
        store = TcpStore(address, port, timeout=CONNECT_TIMEOUT_S, secret=secret)
        try:
            store.get(_PROBE_KEY)
        except StoreError as failure:
            error = failure
        else:
            return ok_result("store", f"an elasticlib store responds at {endpoint}")
        finally:
            store.close()
    if isinstance(error, StoreRejectedError):
        remedy = "give the secret in ELASTICLIB_SECRET or with --secret-file"
        if "secret" not in str(error):
            remedy = "another version of elasticlib or another --rdzv-backend may serve there"
        return error_result("store", f"{endpoint} rejects this node: {error}; {remedy}")
    if isinstance(getattr(error, "__cause__", None), ConnectionRefusedError):
        return _check_free_endpoint(endpoint, addresses, port)
    remedy = "check that the machine is up, the firewall, and that no other program serves there"
    return error_result("store", f"{error}: {remedy}")


def _check_free_endpoint(endpoint: str, addresses: Sequence[str], port: int) -> CheckResult:
    local = [address for address in addresses if is_local_address(address)]
    if not local:
        return warning_result(
            "store",
            f"{endpoint}: connection refused: no process listens on this port yet; start the node "
            "that hosts the store, or check its firewall",
        )
    reason = bind_error(local, port)
    if reason is not None:
        return error_result("store", f"{endpoint} cannot be served: {reason}")
    return ok_result("store", f"{endpoint} is free: this node can serve the store")


# -- this machine ----------------------------------------------------------------------------------


def check_shared_memory(path: str = SHARED_MEMORY) -> CheckResult:
    """Check that files in shared memory can be created and mapped, and how much space is free."""
    check = "shared memory"
    try:
        usage = shutil.disk_usage(path)
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                mapped[0] = 1
    except OSError as error:
        return error_result(
            check,
            f"no file can be created and mapped in {path} ({error.strerror}), but data loaders "
            "with workers, snapshots and NCCL need it: in Docker use --shm-size or --ipc=host, in "
            "Kubernetes mount an emptyDir of medium Memory",
        )
    sizes = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free in {path}"
    if usage.total <= DOCKER_SHARED_MEMORY_BYTES:
        hint = "that is Docker's default, too little for data loaders with workers: use --shm-size"
        return warning_result(check, f"{sizes}; {hint}")
    if usage.free < DOCKER_SHARED_MEMORY_BYTES:
        return error_result(check, f"{sizes}: remove files there (ls -l {path})")
    return ok_result(check, sizes)


def check_open_files() -> CheckResult:
    """Check the hard limit of open files, to which elasticrun raises its own limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES:
        limit = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return ok_result("open files", f"hard limit: {limit}")
    remedy = "raise it (ulimit -Hn, LimitNOFILE=)"
    return error_result(
        "open files",
        f"a hard limit of {hard} is too low for a store or many data loaders: {remedy}",
    )


def check_torch() -> CheckResult:
    """Import torch in a process of its own, because an import can hang or crash."""
    command = [sys.executable, "-c", _TORCH_PROGRAM]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return error_result(
            "torch",
            f"importing torch took more than {IMPORT_TIMEOUT_S:g} s: check the file system on "
            "which torch is installed",
        )
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        return error_result("torch", f"torch cannot be imported: {lines[-1]}")
    found = json.loads(process.stdout.splitlines()[-1])
    installed = ", ".join(f"{name} {text}" for name, text in versions().items())
    if not found["gloo"]:
        return error_result("torch", f"{installed}: this torch lacks gloo, which CPU workers need")
    if not found["gpus"]:
        return ok_result("torch", f"{installed}, no GPU: workers train on the CPU with gloo")
    gpus = f"{installed}, {found['gpus']} GPUs"
    if not found["nccl"]:
        return error_result("torch", f"{gpus}, but no NCCL: install torch for CUDA")
    return ok_result("torch", f"{gpus} with CUDA {found['cuda']} and NCCL")


def check_directory(check: str, path: str) -> CheckResult:
    """Check that files can be written and locked in a directory, or where it would be created."""
    path = os.path.abspath(os.path.expanduser(path))
    existing = path
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    suffix = ""
    if existing != path:
        suffix = f" (checked in {existing}, where it would be created)"
    try:
        # Permissions are not sufficient: the file system can be full, or have no locks.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"elasticlib")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error_result(
            check, f"no file can be written and locked in {path}{suffix}: {error.strerror}"
        )
    return ok_result(check, f"files can be written and locked in {path}{suffix}")
