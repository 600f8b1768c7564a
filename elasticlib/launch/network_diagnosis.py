"""What `elasticlib doctor` looks at between machines: names, addresses, interfaces, endpoint."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping

from ..endpoint import join_endpoint
from ..errors import StoreError, StoreRefused
from ..stores.secret import VARIABLE
from ..stores.tcp_client import TcpStore
from ..stores.tcp_protocol import NOT_OURS
from .checks import Finding, dial, why_not_served
from .store_host import is_ours, of_several_machines, outward_address, resolve

CONNECT_SECONDS = 3.0
GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
ANOTHERS = "or is it the place of another --rdzv-backend?"
WAYS_IN = {
    "secret": f" (doctor is given it in {VARIABLE} or by --secret-file)",
    "protocol": ": install the same version of elasticlib on all nodes",
}
"""What to do, by a word of what the store says."""


def look_at_own_name(
    environment: Mapping[str, str], target: tuple[str, int] | None
) -> Iterator[Finding]:
    """What this machine's name means here, which is where gloo's workers listen."""
    name = socket.gethostname()
    found = _addresses(name)
    check, outward = "own name", outward_address()
    # Without another machine, or with an interface that is named, nobody goes by this name.
    alone = target is None or all(map(_is_loopback, resolve(*target)))
    bad = None if alone or environment.get("GLOO_SOCKET_IFNAME") else False
    ways = f"have /etc/hosts say {outward}, or set GLOO_SOCKET_IFNAME for the workers"
    if outward == "127.0.0.1":
        ways = "other machines need an address of this one to reach it"
    if not found:
        yield Finding(check, bad, f"{name} resolves to nothing here: {ways}")
    elif all(_is_loopback(address) for address in found):
        shown = ", ".join(found)
        sentence = f"{name} means {shown} here, which no other machine can reach: workers of "
        yield Finding(check, bad, f"{sentence}several machines would wait for each other; {ways}")
    elif not any(is_ours(address) for address in found):
        shown = ", ".join(found)
        yield Finding(check, bad, f"{name} means {shown}, which this machine has not: {ways}")
    else:
        yield Finding(check, True, f"{name} is {', '.join(found)}")


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
    towards = _towards(*target) if target else None
    if towards is not None and towards != outward:
        yield Finding(
            "interface",
            None,
            f"the way to the endpoint begins at {towards}, and the default one at {outward}: if "
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


def look_at_endpoint(host: str, port: int, secret: bytes | None) -> Iterator[Finding]:
    """Whom an endpoint means, and who answers there."""
    endpoint = join_endpoint(host, port)
    addresses = resolve(host, port)
    if not addresses:
        sentence = f"{host} resolves to nothing here: check the name, /etc/hosts and the resolver"
        yield Finding("resolve", False, sentence)
        return
    ours = [address for address in addresses if is_ours(address)]
    several = of_several_machines(endpoint, addresses)
    if several:
        yield Finding("resolve", False, several)
    else:
        whose = "this machine" if ours else "another machine"
        yield Finding("resolve", True, f"{host} is {', '.join(addresses)}: {whose}")
    yield _reached(endpoint, addresses, port, secret)


def _reached(endpoint: str, addresses: list[str], port: int, secret: bytes | None) -> Finding:
    """Who answers where a launch would look for the store, which is not always what a name means
    to others."""
    try:
        address = dial(addresses, port, CONNECT_SECONDS)
    except ConnectionRefusedError:
        ours = [address for address in addresses if is_ours(address)]
        if ours:
            why = why_not_served(ours, port)
            if why is None:
                return Finding(
                    "reach", True, f"{endpoint} is free: this node would serve the store"
                )
            return Finding("reach", False, f"{endpoint} cannot be served: {why}")
        sentence = f"{endpoint} refuses: the machine is there, and nobody serves at that port (yet)"
        return Finding("reach", None, f"{sentence}; start the node that hosts, or see its firewall")
    except TimeoutError:
        sentence = f"{endpoint} does not answer within {CONNECT_SECONDS:g} s: a firewall drops what"
        return Finding("reach", False, f"{sentence} is sent to it, or the machine is off")
    except OSError as error:
        return Finding("reach", False, f"{endpoint} cannot be reached: {error.strerror or error}")
    return _asked(endpoint, address, port, secret)


def _asked(endpoint: str, address: str, port: int, secret: bytes | None) -> Finding:
    """Whether it is a store of ours that lets this node in; no key of it is read."""
    store = TcpStore(address, port, timeout=CONNECT_SECONDS, secret=secret)
    try:
        store.connect()
    except StoreRefused as error:
        if NOT_OURS in str(error):
            ways = "give another port, or stop what serves there"
            return Finding("reach", False, f"{error}: {ways}; {ANOTHERS}")
        # Not for another job: none is named here.
        hint = next((way for word, way in WAYS_IN.items() if word in str(error)), "")
        sentence = f"the elasticlib store at {endpoint} does not let this node in: {error}"
        return Finding("reach", False, f"{sentence}{hint}")
    except (StoreError, OSError) as error:
        sentence = f"{endpoint} takes connections, and does not speak as an elasticlib store"
        return Finding("reach", False, f"{sentence} ({error}): give another port; {ANOTHERS}")
    finally:
        store.close()
    return Finding("reach", True, f"an elasticlib store answers at {endpoint}")


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _towards(host: str, port: int) -> str | None:
    """The address of this machine from which the endpoint would be reached; nothing is sent."""
    for address in resolve(host, port):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, port or 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
