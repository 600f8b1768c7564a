"""A fault campaign: which faults a job meets, at which of its training steps; drawn from a seed.

It is a value and a file: a header, then a fault a line, in the order in which they strike. The
number of nodes that are there follows from the faults before, so that each of them can be played;
a campaign in which one cannot is refused. Nothing here reads a clock or touches a process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import attrs

VERSION = 1
FORMAT = "elasticlib fault campaign"
MOST_NODES = 3
FIRST_NODES = 2
AHEAD = 60
"""Steps by which the job may be past a fault that cannot strike yet; further it waits."""
WHERE = ("begin", "gradients", "update", "kept")
"""In which part of its step a worker meets a fault of its own making: before it computes, before
the gradients are summed, after the weights changed, after the snapshot."""
EXIT_CODES = (1, 3, 7, 42, 113, 255)
EXCEPTION, EXIT, SEGFAULT, SLOW = range(1, 5)
"""By which numbers a worker is asked for a fault."""
SAMPLES, BATCH, LOGICAL = 6400, 8, 8
SAVE_EVERY, DIGEST_EVERY, KEEP_LAST = 20, 500, 3
"""What the job trains on, and after how many steps it does what."""


@attrs.frozen
class Kind:
    """weight: of a hundred faults about so many. steps: that the job is given beside the spacing,
    as it may go on meanwhile. least, most: nodes that must be there before it strikes. change: of
    their number; None where all are lost and FIRST_NODES come."""

    weight: float
    what: str
    steps: int = 0
    least: int = 1
    most: int = MOST_NODES
    change: int | None = 0


KINDS: Mapping[str, Kind] = {
    "kill": Kind(22, "SIGKILL to a worker"),
    "exception": Kind(14, "an exception in a worker's step"),
    "exit": Kind(12, "sys.exit(n) in a worker's step"),
    "segfault": Kind(10, "a worker reads address 0"),
    "join": Kind(7.5, "a node joins", most=MOST_NODES - 1, change=1),
    "drain": Kind(7.5, "a node is told to leave (SIGUSR2)", least=2, change=-1),
    "agent": Kind(8, "SIGKILL to an agent; another node comes", least=2),
    "slow": Kind(6, "a worker takes a second over a step"),
    "store": Kind(4, "the store's process is killed, and starts again empty"),
    "hang": Kind(2, "SIGSTOP to a worker, for longer than the hang timeout"),
    "stopped": Kind(2, "SIGSTOP to an agent, past its lease", steps=60, least=2),
    "partition": Kind(2, "a node is cut off from the store, past its lease", steps=60, least=2),
    "full": Kind(1.5, "no room on the checkpoints' disk", steps=40),
    "corrupt": Kind(1.5, "the newest checkpoint is damaged, and all nodes are lost", change=None),
}


@attrs.frozen
class Fault:
    """at: the training step at which it is due. which: chooses the victim among those there."""

    at: int
    kind: str
    which: int = 0
    parameters: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Campaign:
    """seed, mix and spacing are what it was drawn from, to show to people."""

    seed: int
    mix: Mapping[str, float]
    spacing: tuple[int, int]
    faults: tuple[Fault, ...]

    @property
    def steps(self) -> int:
        """After which the job is over: the last fault, and time to recover from it, in which who
        is there trains on while others come."""
        last = self.faults[-1]
        kind = KINDS[last.kind]
        quick = kind.least == 1 and kind.change == 0 and not kind.steps
        return last.at + AHEAD + (80 if quick else 400)


class CampaignError(ValueError):
    """A campaign that cannot be played, or a file that holds none."""


def usual_mix(without: Sequence[str] = ()) -> dict[str, float]:
    """The weights of all kinds, but for those left out."""
    return {name: kind.weight for name, kind in KINDS.items() if name not in without}


def draw(
    seed: int, count: int, mix: Mapping[str, float], spacing: tuple[int, int] = (15, 25)
) -> Campaign:
    """So many faults of the kinds in the mix, by weight, with so many steps between two.

    Raises:
        CampaignError: it cannot be drawn.
    """
    _check_drawn_from(count, mix, spacing)
    random = Random(seed)
    faults: list[Fault] = []
    nodes, at = FIRST_NODES, 0
    for _ in range(count):
        at += random.randint(*spacing)
        fitting = [name for name in mix if _fits(KINDS[name], nodes)]
        if not fitting:
            raise CampaignError(f"no kind of {', '.join(mix)} can strike {nodes} nodes")
        (name,) = random.choices(fitting, [mix[name] for name in fitting])
        faults.append(Fault(at, name, random.randrange(1 << 16), _parameters(name, random)))
        nodes = after(nodes, name)
        at += KINDS[name].steps
    return Campaign(seed, dict(mix), spacing, tuple(faults))


def _check_drawn_from(count: int, mix: Mapping[str, float], spacing: tuple[int, int]) -> None:
    if count < 1:
        raise CampaignError(f"a campaign has at least one fault, got {count}")
    if not 1 <= spacing[0] <= spacing[1]:
        raise CampaignError(f"the spacing is MIN to MAX steps, 1 <= MIN <= MAX, got {spacing}")
    for name, weight in mix.items():
        if name not in KINDS:
            raise CampaignError(f"there is no fault {name!r}; there are {', '.join(KINDS)}")
        if not weight > 0:
            raise CampaignError(f"the weight of {name} is above 0, got {weight}")


def _fits(kind: Kind, nodes: int) -> bool:
    return kind.least <= nodes <= kind.most


def after(nodes: int, kind: str) -> int:
    """How many nodes there are after a fault of this kind."""
    change = KINDS[kind].change
    return FIRST_NODES if change is None else nodes + change


def _parameters(kind: str, random: Random) -> dict[str, Any]:
    if kind in ("exception", "segfault"):
        return {"where": random.choice(WHERE)}
    if kind == "exit":
        return {"where": random.choice(WHERE), "code": random.choice(EXIT_CODES)}
    if kind == "kill":
        return {"delay_ms": random.randrange(30)}
    if kind == "slow":
        return {"seconds": 1.0}
    return {}


# -- the file -------------------------------------------------------------------------------------


def write(campaign: Campaign) -> str:
    """The campaign as text, a line of JSON each for its header and its faults."""
    header = {"format": FORMAT, "version": VERSION, "faults": len(campaign.faults)}
    header |= {"seed": campaign.seed, "mix": dict(campaign.mix), "spacing": campaign.spacing}
    lines = [header, *(_line(fault) for fault in campaign.faults)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _line(fault: Fault) -> dict[str, Any]:
    line = {"at": fault.at, "kind": fault.kind, "which": fault.which}
    return line | ({"parameters": dict(fault.parameters)} if fault.parameters else {})


def read(text: str) -> Campaign:
    """What `write` wrote, or a person did.

    Raises:
        CampaignError: it is no campaign, or one that cannot be played; names the line.
    """
    header: dict[str, Any] = {}
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
            if number == 1:
                header = dict(found)
            else:
                faults.append(Fault(**found))
        except (ValueError, TypeError) as error:
            raise CampaignError(f"line {number} is no part of a campaign: {error}") from error
    wanted = {"format": FORMAT, "version": VERSION, "faults": len(faults)}
    if not faults or any(header.get(name) != value for name, value in wanted.items()):
        raise CampaignError(f"line 1 is no header of a campaign, as {wanted} is, got {header}")
    _check_order(faults)
    low, high = header.get("spacing", (15, 25))
    return Campaign(header.get("seed", 0), header.get("mix", {}), (low, high), tuple(faults))


def _check_order(faults: Sequence[Fault]) -> None:
    nodes, last = FIRST_NODES, 0
    for number, fault in enumerate(faults, 2):
        kind = KINDS.get(fault.kind)
        if kind is None or set(fault.parameters) != set(_parameters(fault.kind, Random(0))):
            raise CampaignError(f"line {number}: there is no such fault: {fault}")
        if fault.at <= last:
            raise CampaignError(
                f"line {number}: faults come in the order of their steps, got {fault.at} "
                f"after {last}"
            )
        if not _fits(kind, nodes):
            raise CampaignError(
                f"line {number}: {fault.kind} needs {kind.least} to {kind.most} nodes, and after "
                f"the faults before it there are {nodes}"
            )
        nodes, last = after(nodes, fault.kind), fault.at
