"""What `elasticlib doctor` and `elasticrun --dry-run` look at, one function each.

A look returns findings, says what to do about what is not good, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

import attrs

from .._version import versions
from ..agent.options import DRAIN_SIGNALS, SIGNALS
from ..compat import TIMER_FILE
from ..endpoint import join_endpoint
from ..errors import ConfigError, ElasticError, StoreError, StoreRefused
from ..held_folder import is_held
from ..observe.wording import size
from ..stores.secret import VARIABLE as SECRET
from ..stores.tcp_client import TcpStore
from ..stores.tcp_protocol import NOT_OURS
from ..workers.cpu import CGROUPS, MEMBERSHIP, bindings, count_cores, groups
from ..workers.session import SHARED_MEMORY
from ..workers.spec import Command, Entrypoint, Module, check_preload, own_device
from .addresses import (
    addresses_of,
    dial,
    is_loopback,
    is_ours,
    of_several_machines,
    outward_address,
    resolve,
    source_address,
    why_not_served,
)
from .config import (
    HEALTH_VARIABLE,
    OBSERVE_FLAG,
    TCP_BACKENDS,
    LaunchConfig,
    health_port,
)
from .console import log_level
from .endpoints import read_secret
from .store_host import must_host

CONNECT_SECONDS = 3.0
TORCH_SECONDS = 10.0
LITTLE_SHARED = 64 * 1024 * 1024
FEW_FILES = 1024
FEW_PROCESSES = 1024
GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
_ANOTHERS = "or is it the place of another --rdzv-backend?"
_WAYS_IN = {
    "secret": f" (doctor is given it in {SECRET} or by --secret-file)",
    "protocol": ": install the same version of elasticlib on all nodes",
}
"""What to do, by a word of what the store says."""
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


@attrs.frozen
class Finding:
    """What one look found. good: whether a job can work so; None where it is for its user to
    say."""

    check: str
    good: bool | None
    sentence: str

    @property
    def row(self) -> tuple[str, str, str]:
        return ({True: "ok", False: "BAD", None: "note"}[self.good], self.check, self.sentence)


# -- a launch --------------------------------------------------------------------------------------


def look_at_program(config: LaunchConfig, entrypoint: Entrypoint) -> Iterator[Finding]:
    if isinstance(entrypoint, Command):
        path = shutil.which(entrypoint.program)
        where = f"is {path}" if path else "is not on the PATH, or not to be executed"
        yield Finding("program", path is not None, f"{entrypoint.program} {where}")
    elif isinstance(entrypoint, Module):
        yield _importable("module", entrypoint.name)
    else:
        yield Finding("script", True, f"{getattr(entrypoint, 'path', entrypoint)} is there")
    cores, workers = count_cores(), config.nproc_per_node
    few = True if workers <= cores else None
    yield Finding("processors", few, f"{workers} workers, {cores} processors")
    refused = list(_tried("--preload", lambda: check_preload(config.preload, entrypoint), ""))
    yield from refused
    for name in () if refused else config.preload:
        yield _importable("--preload", name)


def _importable(check: str, name: str) -> Finding:
    """By its outermost package: looking further would import it."""
    outermost, dot, _ = name.partition(".")
    if PathFinder.find_spec(outermost, [os.getcwd(), *sys.path]) is None:
        return Finding(check, False, f"{outermost} is not found from here or on Python's path")
    rest = f"; whether it has {name} is not looked at, as that would import it" if dot else ""
    return Finding(check, True, f"{outermost} is found{rest}")


def look_at_flags(config: LaunchConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What a launch would be refused for, and where it would write."""
    if config.log_dir is not None:
        yield writable("--log-dir", config.log_dir)
    path = config.torchrun.timer_file
    folder = os.path.dirname(os.path.abspath(path)) if path else ""
    if path and not os.path.isdir(folder):
        yield Finding(TIMER_FILE, False, f"no pipe can be made at {path}: there is no {folder}")
    elif path:
        yield writable(TIMER_FILE, folder)
    if config.virtual_local_rank:
        yield from _tried(
            "--virtual-local-rank",
            lambda: own_device(config.nproc_per_node - 1, environment),
            "the last worker's GPU is {}",
        )
    workers, visible = config.nproc_per_node, environment.get("CUDA_VISIBLE_DEVICES")
    if config.numa_binding is not None:
        name = config.numa_binding
        yield from _tried(
            "--numa-binding",
            lambda: bindings(name, workers, visible),
            "workers are bound to processors near their GPUs",
        )
    level = environment.get("LOGLEVEL", "INFO")
    yield from _tried("LOGLEVEL", lambda: log_level(level), f"{level}, for the agent's own lines")
    backend, file = config.rdzv_backend, config.options.secret_file
    asked = backend in TCP_BACKENDS
    known = "nodes must prove to know it" if asked else "the secret is not used: it is not "
    yield from _tried(
        "secret",
        lambda: read_secret(environment, file, "--rdzv-conf secret_file"),
        known if asked else f"{known}for {backend}",
        good=True if asked else None,
    )


def _tried(
    check: str, do: Callable[[], object], sentence: str, good: bool | None = True
) -> Iterator[Finding]:
    """good: what it is if nothing is raised, and there is a result for the sentence."""
    try:
        result = do()
    except ConfigError as error:
        yield Finding(check, False, str(error))
    else:
        if result is not None:
            yield Finding(check, good, sentence.format(result))


def look_at_ports(config: LaunchConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Those at which it would be observed."""
    asked = {OBSERVE_FLAG: config.observed_at}
    try:
        asked[HEALTH_VARIABLE] = health_port(environment)
    except ConfigError as error:
        yield Finding(HEALTH_VARIABLE, False, str(error))
    for name, where in asked.items():
        if where is not None:
            why = why_not_served([where[0]], where[1])
            said = "can be served" if why is None else f"cannot be served: {why}"
            # The launch goes on without torch's, which several launches may share.
            bad = False if name == OBSERVE_FLAG else None
            good = True if why is None else bad
            yield Finding(name, good, f"{join_endpoint(*where)} {said}")


def look_at_place(config: LaunchConfig) -> Iterator[Finding]:
    """Where nodes meet, if that is no TCP store."""
    check = "meeting place"
    if config.alone:
        yield Finding(check, True, "this node is alone, with a store of its own")
    elif config.rdzv_backend == "file":
        yield from look_at_locks(config.rdzv_endpoint, check)
    elif (etcd := config.etcd) is not None:
        try:
            with contextlib.closing(etcd.open(CONNECT_SECONDS)) as store:
                store.get("elasticlib/dry-run")
        except ElasticError as error:
            yield Finding(check, False, f"etcd does not answer: {error}")
        else:
            yield Finding(check, True, f"etcd at {etcd.endpoints} answers")
    elif config.foreign:
        yield Finding(check, None, f"only {config.rdzv_backend} itself can try it")


# -- between machines ------------------------------------------------------------------------------


def look_at_own_name(
    environment: Mapping[str, str], target: tuple[str, int] | None
) -> Iterator[Finding]:
    """What this machine's name means here, which is where gloo's workers listen."""
    name = socket.gethostname()
    found = addresses_of(name)
    check, outward = "own name", outward_address()
    # Without another machine, or with an interface that is named, nobody goes by this name.
    alone = target is None or all(map(is_loopback, resolve(*target)))
    bad = None if alone or environment.get(GLOO) else False
    ways = f"map it to {outward} in /etc/hosts, or set GLOO_SOCKET_IFNAME for the workers"
    if outward == "127.0.0.1":
        ways = "other machines need an address of this one to reach it"
    shown = ", ".join(found)
    if not found:
        yield Finding(check, bad, f"{name} resolves to nothing here: {ways}")
    elif all(map(is_loopback, found)):
        sentence = f"{name} means {shown} here, which no other machine can reach: workers of "
        yield Finding(check, bad, f"{sentence}several machines would wait for each other; {ways}")
    elif not any(map(is_ours, found)):
        yield Finding(check, bad, f"{name} means {shown}, no address of this machine: {ways}")
    else:
        yield Finding(check, True, f"{name} is {shown}")


def look_at_interfaces(
    environment: Mapping[str, str], target: tuple[str, int] | None
) -> Iterator[Finding]:
    """Where the workers' traffic goes, as far as it can be told from outside."""
    names = [name for _, name in socket.if_nameindex()]
    said = False
    for variable in (GLOO, NCCL, TENSORPIPE):
        text = environment.get(variable, "")
        if not text:
            continue
        said = said or variable == GLOO
        why = _why_not_meant(variable, text, names)
        sentence = f"there is {why or 'such an interface'}"
        hint = f"; there are {', '.join(names)}" if why else ""
        yield Finding("interface", not why, f"{variable}={text}: {sentence}{hint}")
    outward = outward_address()
    towards = source_address(resolve(*target), target[1]) if target else None
    if towards is not None and towards != outward:
        yield Finding(
            "interface",
            None,
            f"packets to the endpoint leave from {towards}, all others from {outward}: if "
            "workers do not find each other, set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to "
            f"the interface of {towards}",
        )
    elif outward == "127.0.0.1" and towards is None:
        sentence = "there is no route but to this machine itself: jobs of one node work, and others"
        yield Finding("interface", None if target is None else False, f"{sentence} cannot")
    elif not said:
        here = towards or outward
        sentence = f"traffic leaves from {here}; gloo listens where this machine's name means, "
        yield Finding("interface", True, f"{sentence}NCCL chooses by itself (NCCL_DEBUG=INFO)")


def _why_not_meant(variable: str, text: str, names: list[str]) -> str:
    """What there is not, by the rules of who reads the variable; empty if there is."""
    if variable != NCCL:
        # torch wants each of gloo's names, and passes over a comma at the end.
        wanted = text.removesuffix(",").split(",") if variable == GLOO else [text]
        away = [repr(name) for name in wanted if name not in names]
        how = "names separated by commas" if variable == GLOO else "one name"
        return f"no interface {' or '.join(away)}, and it takes {how}, whole" if away else ""
    rest = text.removeprefix("^")
    wanted = [one.partition(":")[0] for one in rest.removeprefix("=").split(",") if one]
    if rest.startswith("="):
        matched = set(wanted) & set(names)
    else:
        matched = {name for name in names if name.startswith(tuple(wanted))}
    if text.startswith("^"):
        return "" if set(names) - matched else "no interface but what it excludes"
    return "" if matched else "no such interface"


def look_at_binding() -> Iterator[Finding]:
    address = outward_address()
    why = why_not_served([address], 0)
    sentence = f"a port at {address} can be served" if why is None else f"no port can be: {why}"
    yield Finding("bind", why is None, sentence)


def look_at_endpoint(
    host: str, port: int, secret: bytes | None, config: LaunchConfig | None = None
) -> Iterator[Finding]:
    """Whom an endpoint of a TCP store means, and who answers there. config: of a launch, which may
    say whether this node is to host, and may begin before the others do."""
    endpoint = join_endpoint(host, port)
    addresses = resolve(host, port)
    if not addresses:
        sentence = f"{host} resolves to nothing here: check the name, /etc/hosts and the resolver"
        yield Finding("resolve", False, sentence)
        return
    hosts = None if config is None else must_host(config)
    ours = [address for address in addresses if is_ours(address)]
    several = "" if hosts is not None else of_several_machines(endpoint, addresses)
    whose = "this machine" if ours else "another machine"
    found = f"{host} is {', '.join(addresses)}: {whose}"
    yield Finding("resolve", not several, several or found)
    if config is not None and hosts:
        anywhere = bool(config.options.is_host) and not ours
        yield _served(endpoint, ["::", "0.0.0.0"] if anywhere else addresses, port, anywhere)
        return
    try:
        address = dial(addresses, port, CONNECT_SECONDS)
    except OSError as error:
        may_host = ours if hosts is None else []
        missed = _unreached(endpoint, port, may_host, error)
        # The others of a launch may not have begun.
        yield missed if config is None or may_host else attrs.evolve(missed, good=None)
    else:
        yield _asked(endpoint, address, port, secret)


def _served(endpoint: str, addresses: list[str], port: int, anywhere: bool) -> Finding:
    """Whether a node can host the store, as it is to."""
    why = why_not_served(addresses, port)
    if why is not None:
        return Finding("reach", False, f"this node is to serve the store of {endpoint}: {why}")
    where = ", at all of its own addresses" if anywhere else ""
    return Finding("reach", True, f"{endpoint} is free: this node would serve the store{where}")


def _unreached(endpoint: str, port: int, ours: list[str], error: OSError) -> Finding:
    """Why no connection is taken where a launch would look for the store. ours: the addresses at
    which this node may host it."""
    if isinstance(error, ConnectionRefusedError) and ours:
        why = why_not_served(ours, port)
        if why is None:
            return Finding("reach", True, f"{endpoint} is free: this node would serve the store")
        return Finding("reach", False, f"{endpoint} cannot be served: {why}")
    if isinstance(error, ConnectionRefusedError):
        sentence = f"{endpoint} refuses: the machine is there, and nobody serves at that port (yet)"
        return Finding("reach", None, f"{sentence}; start the node that hosts, or see its firewall")
    if isinstance(error, TimeoutError):
        sentence = f"{endpoint} does not answer within {CONNECT_SECONDS:g} s: a firewall drops what"
        return Finding("reach", False, f"{sentence} is sent to it, or the machine is off")
    return Finding("reach", False, f"{endpoint} cannot be reached: {error.strerror or error}")


def _asked(endpoint: str, address: str, port: int, secret: bytes | None) -> Finding:
    """Whether it is a store of ours that lets this node in; no key of it is read."""
    store = TcpStore(address, port, timeout=CONNECT_SECONDS, secret=secret)
    try:
        store.connect()
    except StoreRefused as error:
        if NOT_OURS in str(error):
            ways = "give another port, or stop what serves there"
            return Finding("reach", False, f"{error}: {ways}; {_ANOTHERS}")
        # Not for another job: none is named here.
        hint = next((way for word, way in _WAYS_IN.items() if word in str(error)), "")
        sentence = f"the elasticlib store at {endpoint} does not let this node in: {error}"
        return Finding("reach", False, f"{sentence}{hint}")
    except (StoreError, OSError) as error:
        sentence = f"{endpoint} takes connections, and does not speak as an elasticlib store"
        return Finding("reach", False, f"{sentence} ({error}): give another port; {_ANOTHERS}")
    finally:
        store.close()
    return Finding("reach", True, f"an elasticlib store answers at {endpoint}")


# -- this machine ----------------------------------------------------------------------------------


def writable(check: str, path: str) -> Finding:
    """Whether a folder can be written to, or made."""
    nearest = _nearest(path)
    try:
        # Permissions alone do not tell: the file system may be full, or take no files at all.
        with tempfile.NamedTemporaryFile(dir=nearest) as file:
            file.write(b"elasticlib")
            file.flush()
        good = True
    except OSError:
        good = False
    made = "" if nearest == os.path.abspath(path) else f", as it would be made in {nearest}"
    return Finding(check, good, f"{path} can{'' if good else 'not'} be written to{made}")


def _nearest(path: str) -> str:
    """The folder that is there, in which the others would be made."""
    found = os.path.abspath(path)
    while not os.path.exists(found):
        found = os.path.dirname(found)
    return found


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
    sizes = f"{size(usage.free)} of {size(usage.total)} are free in {place}"
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
    nearest = _nearest(folder)
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
    said = f"{_count(soft)} are allowed, {_count(hard)} at most"
    few = hard != resource.RLIM_INFINITY and hard < FEW_FILES
    advice = "; too few for a store or many loaders: raise the limit (ulimit -Hn, LimitNOFILE=)"
    yield Finding("open files", not few, said + (advice if few else ""))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few = soft != resource.RLIM_INFINITY and soft < FEW_PROCESSES
    advice = ", and each thread counts as one: raise the limit (ulimit -u)" if few else ""
    pids = limit_of_group("pids", "pids.max")
    group = "" if pids is None else f", {pids} in this container"
    good = not few and (pids is None or pids >= FEW_PROCESSES // 4)
    advice = advice or ("; raise the container's limit of pids" if not good else "")
    yield Finding("processes", good, f"{_count(soft)} are allowed{group}{advice}")


def look_at_memory() -> Iterator[Finding]:
    limit = limit_of_group("memory", "memory.max", "memory.limit_in_bytes")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit is None or limit >= total:
        yield Finding("memory", True, f"{size(total)}, no container limit")
    else:
        yield Finding(
            "memory",
            True,
            f"this container may use {size(limit)} of the machine's {size(total)}; what lies in "
            f"{SHARED_MEMORY} counts, and a process that needs more is killed (SIGKILL)",
        )


def look_at_signals() -> Iterator[Finding]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    heeded = (*SIGNALS, *DRAIN_SIGNALS, signal.SIGCHLD)
    # Workers are waited for, whether or not SIGCHLD is heard.
    masked = [number.name for number in heeded[:-1] if number in blocked]
    ignored = [number.name for number in heeded if signal.getsignal(number) is signal.SIG_IGN]
    if masked:
        sentence = f"{', '.join(masked)} blocked: unblock them in what starts elasticrun"
        yield Finding("signals", False, sentence)
    elif ignored:
        # It must hear how its workers end; else what was ignored when it was started stays so.
        deaf = [name for name in ignored if name != "SIGCHLD"]
        sentence = f"{', '.join(ignored)} ignored by what started this command (nohup, a shell's &)"
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
        yield Finding("leftovers", None, f"{sizes}: rm -r {' '.join(map(str, left))}")
    if unknown:
        # Processes that use them may be in a PID namespace of their own, and not be seen here.
        sentence = f"{_sizes(unknown)} in {place}: of a job that is just starting or ending, of one"
        sentence += " in another container, or left by one of an older version"
        yield Finding("leftovers", None, f"{sentence}: {' '.join(map(str, unknown))}")
    if not left and not unknown:
        yield Finding("leftovers", True, f"the folders in {place} are of jobs that run")


def _is_held(folder: Path) -> bool | None:
    with contextlib.suppress(OSError):
        return is_held(folder)
    return None


def _is_mine(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_dir() and path.lstat().st_uid == os.geteuid()
    return False


def _sizes(paths: list[Path]) -> str:
    found = 0
    # Unlike a glob, a walk does not mind what goes meanwhile.
    for parent, folders, files in (step for path in paths for step in os.walk(path)):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return size(found)


def _mentioned() -> bytes:
    """What processes of this user have mapped, and what is in their environments and commands."""
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
    for path in (folder / name for folder in folders for name in names):
        with contextlib.suppress(OSError):
            text = path.read_text().strip()
            if text.isdigit():
                found.append(int(text))
    return min(found, default=None)


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)
