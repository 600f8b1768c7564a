"""What `elasticlib doctor` looks at on this machine: each look is a function that returns findings,
says what to do about what is not good, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .._version import versions
from ..agent.options import DRAIN_SIGNALS, SIGNALS
from ..held_folder import is_held
from ..workers.cpu import CGROUPS, MEMBERSHIP, groups
from ..workers.session import SHARED_MEMORY
from .checks import Finding, writable

LITTLE_SHARED = 64 * 1024 * 1024
FEW_FILES = 1024
FEW_PROCESSES = 1024
TORCH_SECONDS = 10.0
UNSYNCHRONISED = 5
"""What adjtimex returns of a clock that nothing keeps right."""
_TORCH = """
import json, torch, torch.distributed as d
there = d.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "gloo": there and d.is_gloo_available(),
    "nccl": there and d.is_nccl_available(),
    "cuda": torch.version.cuda or "",
    "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}))
"""


def look_at_versions() -> Iterator[Finding]:
    found = versions()
    yield Finding("versions", True, ", ".join(f"{name} {text}" for name, text in found.items()))
    # In a process of its own: an import can hang, crash, and change what comes after it.
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        sentence = f"torch is not imported within {TORCH_SECONDS:g} s: is its disk slow, or away?"
        yield Finding("torch", None, sentence)
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding("torch", False, f"torch cannot be imported: {last}")
        return
    said = json.loads(done.stdout.splitlines()[-1])
    gloo = "gloo is there" if said["gloo"] else "gloo is not there: CPU workers cannot meet"
    yield Finding("gloo", bool(said["gloo"]), gloo)
    if said["gpus"] and not said["nccl"]:
        yield Finding("GPUs", False, f"{said['gpus']} GPUs and no NCCL: install torch for CUDA")
    elif said["gpus"]:
        yield Finding("GPUs", True, f"{said['gpus']}, with CUDA {said['cuda']} and NCCL")
    else:
        yield Finding("GPUs", True, "none: workers train on the CPU, by gloo")


def look_at_shared_memory(place: str = SHARED_MEMORY) -> Iterator[Finding]:
    check = "shared memory"
    try:
        usage = shutil.disk_usage(place)
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                mapped[0] = 1
    except OSError as error:
        yield Finding(
            check,
            False,
            f"no file can be made and mapped in {place} ({error.strerror}): loaders with workers "
            "and NCCL need it; in Docker give --shm-size or --ipc=host, in Kubernetes mount an "
            "emptyDir of medium Memory there",
        )
        return
    sizes = f"{_size(usage.free)} of {_size(usage.total)} are free in {place}"
    if usage.total <= LITTLE_SHARED:
        hint = "that is Docker's default, and little for loaders with workers: give --shm-size"
        yield Finding(check, None, f"{sizes}; {hint}")
    elif usage.free < LITTLE_SHARED:
        yield Finding(check, False, f"{sizes}: see what lies there (ls -l {place}), and remove it")
    else:
        yield Finding(check, True, f"{sizes}, and a file in it can be mapped")


def look_at_locks(folder: str, check: str) -> Iterator[Finding]:
    """Whether files can be written and locked in a folder, as a file store there would need it."""
    found = writable(check, folder)
    if not found.good:
        yield found
        return
    nearest = os.path.abspath(folder)
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    kind = filesystem_of(nearest)
    remote = kind.startswith(("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs"))
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        yield Finding(
            check,
            False,
            f"{nearest} ({kind}) takes files and no locks ({error.strerror}): a store in it "
            "(--rdzv-backend file) cannot work; mount it with locks (NFS: without nolock), or meet "
            "over TCP",
        )
        return
    shared = "; it is shared, so locks hold across machines only as its server keeps them"
    yield Finding(
        check, True, f"{nearest} ({kind}) takes files and locks{shared if remote else ''}"
    )


def filesystem_of(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system at a path, as the kernel names it."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def look_at_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{_count(soft)} open files may be had, {_count(hard)} at most"
    few = hard != resource.RLIM_INFINITY and hard < FEW_FILES
    advice = "; that is too few for a store or many loaders: raise it (ulimit -Hn, LimitNOFILE=)"
    yield Finding("open files", not few, said + (advice if few else ""))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few = soft != resource.RLIM_INFINITY and soft < FEW_PROCESSES
    advice = ", and each thread is one: raise it (ulimit -u)" if few else ""
    pids = limit_of_group("pids", "pids.max")
    group = "" if pids is None else f", {pids} in this container"
    good = not few and (pids is None or pids >= FEW_PROCESSES // 4)
    advice = advice or ("; raise its limit of pids" if not good else "")
    yield Finding("processes", good, f"{_count(soft)} may run{group}{advice}")


def look_at_memory() -> Iterator[Finding]:
    limit = limit_of_group("memory", "memory.max", "memory.limit_in_bytes")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit is None or limit >= total:
        yield Finding("memory", True, f"{_size(total)}, and no limit of a container's")
    else:
        yield Finding(
            "memory",
            True,
            f"this container may use {_size(limit)} of the machine's {_size(total)}; what lies in "
            f"{SHARED_MEMORY} counts, and whoever needs more is killed (SIGKILL)",
        )


def look_at_clock() -> Iterator[Finding]:
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        yield Finding("clock", None, "this system does not say whether its clock is kept right")
    elif state == UNSYNCHRONISED:
        sentence = "nothing keeps the clock right: times in the logs of several machines may not "
        yield Finding("clock", None, sentence + "match (the training needs no clock); run NTP")
    else:
        yield Finding("clock", True, "it is kept right by NTP")


def look_at_signals() -> Iterator[Finding]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    told = (*SIGNALS, *DRAIN_SIGNALS, signal.SIGCHLD)
    # Workers are waited for, whether or not SIGCHLD is heard.
    masked = [number.name for number in told[:-1] if number in blocked]
    ignored = [number.name for number in told if signal.getsignal(number) is signal.SIG_IGN]
    if masked:
        sentence = f"{', '.join(masked)} blocked: whoever starts elasticrun is to unblock them"
        yield Finding("signals", False, sentence)
    elif ignored:
        # It must hear how its workers end; else what was ignored when it was started stays so.
        deaf = [name for name in ignored if name != "SIGCHLD"]
        sentence = f"{', '.join(ignored)} ignored by whoever started this (nohup, a shell's &)"
        then = f"will not hear {', '.join(deaf)}" if deaf else "sets that right"
        good = False if "SIGTERM" in deaf else None
        yield Finding("signals", good, f"{sentence}: elasticrun {then}")
    else:
        yield Finding("signals", True, "none that elasticrun heeds is ignored or blocked")


def look_at_leftovers(place: str = SHARED_MEMORY) -> Iterator[Finding]:
    """Folders of agents that are gone, as where agent and guardian were killed together."""
    folders = [path for path in Path(place).glob("elasticlib-*") if _is_mine(path)]
    if not folders:
        yield Finding("leftovers", True, f"nothing of elasticlib's lies in {place}")
        return
    used = _mentioned()
    held = {path: _is_held(path) for path in folders if str(path).encode() not in used}
    left = [path for path, lives in held.items() if lives is False]
    unknown = [path for path, lives in held.items() if lives is None]
    if left:
        sizes = f"{_sizes(left)} left by jobs that are gone"
        yield Finding("leftovers", False, f"{sizes}: rm -r {' '.join(map(str, left))}")
    if unknown:
        # Processes that use them may be in a PID namespace of their own, and not be seen here.
        sentence = f"{_sizes(unknown)} in {place}: of a job that is just starting or ending, of one"
        sentence += " in another container, or left by one of an older version"
        yield Finding("leftovers", None, f"{sentence}: {' '.join(map(str, unknown))}")
    if not left and not unknown:
        yield Finding("leftovers", True, f"the folders in {place} are of jobs that run")


def _is_held(folder: Path) -> bool | None:
    try:
        return is_held(folder)
    except OSError:
        return None


def _is_mine(path: Path) -> bool:
    try:
        return path.is_dir() and path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _sizes(folders: list[Path]) -> str:
    return _size(sum(_size_of(folder) for folder in folders))


def _size_of(folder: Path) -> int:
    found = 0
    # Unlike a glob, a walk does not mind what goes meanwhile.
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return found


def _mentioned() -> bytes:
    """What processes of this user have mapped, and were told in environments and commands."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        for name in ("maps", "environ", "cmdline"):
            try:
                found.append((process / name).read_bytes())
            except OSError:
                break  # it is another's, or gone
    return b"\n".join(found)


def limit_of_group(
    controller: str, *names: str, membership: Path = MEMBERSHIP, mount: Path = CGROUPS
) -> int | None:
    """The least of the limits of this process's cgroup and those above it; None without one."""
    try:
        folders = groups(membership.read_text(), controller, mount)
    except OSError:
        return None
    found = []
    for folder in folders:
        for name in names:
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                found.append(int(text))
    return min(found, default=None)


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
