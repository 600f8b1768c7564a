"""The check of a node that `--node-check builtin` runs, in a process of its own.

`python -m elasticlib.launch.builtin_check` prints one line per check, and exits with 1 if one has
failed. It checks a matrix product and memory on the CPU and on each accelerator, shared memory,
disk space, a loopback connection, and a connection to the store. A healthy node needs a few
seconds, most of them to import torch and to initialize the accelerators.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..clock import monotonic
from ..endpoint import STORE_PORT, split_endpoint
from ..errors import format_error
from ..observe.formatting import format_bytes
from ..sanitize import escape_to_one_line
from .checks import (
    CheckResult,
    CheckStatus,
    check_directory,
    check_shared_memory,
    error_result,
    ok_result,
)

CONNECT_TIMEOUT_S = 2.0  # for one address of the store
MIN_FREE_DISK_BYTES = 100 * 1000 * 1000  # logs and events must fit; checkpoints need more
MATRIX_SIZE = 1024
MEMORY_BLOCK_BYTES = 64 * 1024 * 1024  # workers that wait for a restart may use the rest
# The matrices repeat with this period, so that few entries determine the whole product.
PERIOD = 7

Check = Callable[[], CheckResult]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, and return the exit code: 0 if all have passed, else 1."""
    parser = argparse.ArgumentParser("elasticlib.launch.builtin_check", description=__doc__)
    parser.add_argument("--endpoint", action="append", default=[], help="of a store, HOST[:PORT]")
    parser.add_argument("--directory", action="append", default=[], help="that must be writable")
    args = parser.parse_args(argv)
    failed = []
    for name, check in checks_of_node(args.endpoint, args.directory):
        result = run_check(name, check)
        print(_line(result), flush=True)
        if result.status is CheckStatus.ERROR:
            failed.append(result)
    if failed:
        # The agent shows the last line as the reason.
        problems = "; ".join(f"{result.check}: {result.message}" for result in failed)
        print(escape_to_one_line(problems))
    return int(bool(failed))


def _line(result: CheckResult) -> str:
    return escape_to_one_line(f"{result.status.value:7}  {result.check:13}  {result.message}")


def run_check(name: str, check: Check) -> CheckResult:
    """Return the result of a check with its duration. An exception is a failure."""
    started_at = monotonic()
    try:
        result = check()
    except Exception as error:
        return error_result(name, format_error(error))
    message = f"{result.message} ({monotonic() - started_at:.2f} s)"
    return CheckResult(name, result.status, message)


def checks_of_node(
    endpoints: Sequence[str], directories: Sequence[str]
) -> Iterator[tuple[str, Check]]:
    """Yield the name of each check with its function, the quick ones first.

    Args:
        endpoints: the endpoints of the store, of which one must answer.
        directories: directories in which files must be writable.
    """
    yield "shared memory", check_shared_memory
    for path in dict.fromkeys((tempfile.gettempdir(), *directories)):
        yield "directory", functools.partial(check_directory, "directory", path)
        yield "disk space", functools.partial(check_disk_space, path)
    yield "loopback", check_loopback
    if endpoints:
        yield "store", functools.partial(check_store_connection, endpoints)
    try:
        devices = find_devices()
    except Exception as error:  # a broken installation or driver may raise anything
        yield "torch", functools.partial(error_result, "torch", f"no device: {format_error(error)}")
        return
    for device in devices:
        yield f"{device} product", functools.partial(check_product, device)
        yield f"{device} memory", functools.partial(check_memory, device)


# -- this machine ----------------------------------------------------------------------------------


def check_disk_space(path: str, min_free_bytes: int = MIN_FREE_DISK_BYTES) -> CheckResult:
    """Check that the file system of a directory has space for logs and events."""
    existing = os.path.abspath(path)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    free = shutil.disk_usage(existing).free
    status = CheckStatus.OK if free >= min_free_bytes else CheckStatus.ERROR
    needed = "" if status is CheckStatus.OK else f", and {format_bytes(min_free_bytes)} are needed"
    return CheckResult("disk space", status, f"{format_bytes(free)} are free in {path}{needed}")


def check_loopback() -> CheckResult:
    """Check that a TCP connection over 127.0.0.1 can be opened, and carries data unchanged."""
    sent = os.urandom(1024)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(CONNECT_TIMEOUT_S)
        address = server.getsockname()
        with socket.create_connection(address, CONNECT_TIMEOUT_S) as client:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(sent)
                received = b""
                while len(received) < len(sent) and (data := client.recv(len(sent))):
                    received += data
    if received != sent:
        return error_result("loopback", "data that was sent to 127.0.0.1 arrived changed")
    return ok_result("loopback", "a connection to 127.0.0.1 carries data")


def check_store_connection(endpoints: Sequence[str]) -> CheckResult:
    """Check that the host of one of these endpoints answers.

    A store that is not served yet is no fault of this node: a refused connection is an answer, and
    a name that cannot be resolved yet is only a warning.
    """
    problems, has_unknown_name = [], False
    for endpoint in endpoints:
        try:
            answer = _connect(*split_endpoint(endpoint, STORE_PORT))
        except socket.gaierror as error:
            has_unknown_name = True
            problems.append(f"{endpoint} cannot be resolved ({error.strerror})")
        except OSError as error:
            problems.append(f"{endpoint} does not answer ({error.strerror or error})")
        else:
            return ok_result("store", f"{endpoint} {answer}")
    status = CheckStatus.WARNING if has_unknown_name else CheckStatus.ERROR
    return CheckResult("store", status, ", ".join(problems))


def _connect(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
            return "accepts a connection"
    except ConnectionRefusedError:
        return "answers, and serves no store yet"


# -- devices ---------------------------------------------------------------------------------------


def find_devices() -> list[str]:
    """Return the names of the CPU and of all accelerators that torch finds."""
    import torch

    current = torch.accelerator.current_accelerator()
    if current is not None and torch.accelerator.is_available():
        kind, count = current.type, torch.accelerator.device_count()
    else:
        kind, count = "cuda", torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"{kind}:{index}" for index in range(count))]


def check_product(device: str, size: int = MATRIX_SIZE) -> CheckResult:
    """Compute a matrix product on a device, and compare it with one that Python computes.

    The entries are small integers, so that the product is exact in 32-bit and in TF32 arithmetic.
    """
    import torch

    rows = torch.arange(size).unsqueeze(1)
    columns = torch.arange(size).unsqueeze(0)
    left = ((3 * rows + 5 * columns) % PERIOD).float().to(device)
    right = ((2 * rows + 4 * columns + 1) % PERIOD).float().to(device)
    product = (left @ right).cpu()
    expected = torch.tensor(expected_entries(size), dtype=torch.float32)
    expected = expected[rows % PERIOD, columns % PERIOD]
    num_wrong = int((product != expected).sum())
    if num_wrong:
        wrong = f"{num_wrong} of {size * size} entries of a matrix product are wrong"
        return error_result(f"{device} product", wrong)
    return ok_result(f"{device} product", f"a product of {size} x {size} matrices is correct")


def expected_entries(size: int) -> list[list[int]]:
    """Return the entries of the product of `check_product` in its first `PERIOD` rows and columns.

    All other entries repeat them.
    """
    return [
        [
            sum(((3 * i + 5 * j) % PERIOD) * ((2 * j + 4 * k + 1) % PERIOD) for j in range(size))
            for k in range(PERIOD)
        ]
        for i in range(PERIOD)
    ]


def check_memory(device: str, num_bytes: int = MEMORY_BLOCK_BYTES) -> CheckResult:
    """Check that a block of memory can be allocated on a device, and keeps what is written."""
    import torch

    pattern = torch.arange(num_bytes // 4, dtype=torch.int32, device=device)
    block = pattern ^ 0x55555555
    num_wrong = int(((block ^ 0x55555555) != pattern).sum())
    if num_wrong:
        return error_result(
            f"{device} memory", f"{num_wrong} of {num_bytes // 4} words were changed"
        )
    free = _free_bytes(torch, device)
    details = "" if free is None else f", {format_bytes(free)} are free"
    message = f"{format_bytes(num_bytes)} can be written and read{details}"
    return ok_result(f"{device} memory", message)


def _free_bytes(torch: Any, device: str) -> int | None:
    """Return the free memory of a CUDA device, or None for other devices."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else None


if __name__ == "__main__":
    sys.exit(main())
