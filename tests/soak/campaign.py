"""Fault campaign: which faults a job meets at which of its training steps, drawn from a seed.

A campaign is a value and a file: a header line, and one line per fault in the order of their steps.
The number of nodes after each fault follows from the faults before it, so that every fault can be
injected. A campaign in which one cannot is rejected. This module reads no clock and starts no
process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import attrs

VERSION = 2
FORMAT = "elasticlib fault campaign"
MAX_NODES = 3
INITIAL_NODES = 2
# The job may train this number of steps past a fault that cannot be injected yet. Then it waits.
MAX_STEPS_AHEAD = 60
# The part of its step in which a worker causes a fault: before it computes, before gradients are
# summed, after the weights have changed, and after the snapshot.
STEP_PARTS = ("start", "gradients", "update", "snapshot")
EXIT_CODES = (1, 3, 7, 42, 113, 255)
EXCEPTION, EXIT, SEGFAULT, SLOW = range(1, 5)  # the faults that a worker causes on request
# The training of the job: samples of an epoch, global batch size and number of logical workers.
SAMPLES, BATCH, LOGICAL = 6400, 8, 8
# Steps between two checkpoints, and between two digests of the weights, and checkpoints to keep.
SAVE_EVERY, DIGEST_EVERY, KEEP_LAST = 20, 500, 3


@attrs.frozen
class FaultKind:
    """A kind of fault."""

    weight: float  # its share of all faults in percent
    description: str  # the noun phrase in the table of results
    extra_steps: int = 0  # added to the spacing, because the job may train during the fault
    min_nodes: int = 1  # the nodes that the job must have before the fault
    max_nodes: int = MAX_NODES
    node_change: int | None = 0  # None: all nodes are lost, and INITIAL_NODES replace them


FAULT_KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind(22, "SIGKILL of a worker"),
    "exception": FaultKind(14, "exception in a training step"),
    "exit": FaultKind(12, "`sys.exit(n)` in a training step"),
    "segfault": FaultKind(10, "segmentation fault of a worker"),
    "join": FaultKind(7.5, "join of a node", max_nodes=MAX_NODES - 1, node_change=1),
    "drain": FaultKind(7.5, "drain of a node (SIGUSR2)", min_nodes=2, node_change=-1),
    "agent": FaultKind(8, "SIGKILL of an agent, and join of a replacement", min_nodes=2),
    "slow": FaultKind(6, "training step that takes 1 s longer"),
    "store": FaultKind(4, "SIGKILL of the store, and restart without its data"),
    "hang": FaultKind(2, "SIGSTOP of a worker beyond the hang timeout"),
    "stopped": FaultKind(2, "SIGSTOP of an agent beyond its lease", extra_steps=60, min_nodes=2),
    "partition": FaultKind(
        2, "network partition of a node beyond its lease", extra_steps=60, min_nodes=2
    ),
    "full": FaultKind(1.5, "full disk for checkpoints", extra_steps=40),
    "corrupt": FaultKind(
        1.5, "corruption of the newest checkpoint, and loss of all nodes", node_change=None
    ),
}


@attrs.frozen
class Fault:
    """A fault of a campaign."""

    step: int  # the training step at which it is due
    kind: str
    victim: int = 0  # selects one of the ranks or nodes of the job, modulo their number
    parameters: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Campaign:
    """The faults of a soak. Seed, mix and spacing show how they were drawn."""

    seed: int
    mix: Mapping[str, float]  # the weight of each kind
    spacing: tuple[int, int]  # the minimum and maximum of steps between two faults
    faults: tuple[Fault, ...]

    @property
    def steps(self) -> int:
        """The number of training steps: up to the last fault, and for the recovery from it.

        While other nodes start, the remaining ones train.
        """
        last = self.faults[-1]
        kind = FAULT_KINDS[last.kind]
        is_quick = kind.min_nodes == 1 and kind.node_change == 0 and not kind.extra_steps
        return last.step + MAX_STEPS_AHEAD + (80 if is_quick else 400)


class CampaignError(ValueError):
    """A campaign that cannot be drawn or run, or a file that contains none."""


def default_mix(excluded: Sequence[str] = ()) -> dict[str, float]:
    """Return the weights of all kinds, except the excluded ones."""
    return {name: kind.weight for name, kind in FAULT_KINDS.items() if name not in excluded}


def draw(
    seed: int, count: int, mix: Mapping[str, float], spacing: tuple[int, int] = (15, 25)
) -> Campaign:
    """Draw a campaign.

    Args:
        seed: The same seed and arguments give the same campaign.
        count: The number of faults.
        mix: The weight of each kind.
        spacing: The minimum and maximum of steps between two faults.

    Raises:
        CampaignError: No campaign can be drawn from these arguments.
    """
    _check_arguments(count, mix, spacing)
    random = Random(seed)
    faults: list[Fault] = []
    nodes, step = INITIAL_NODES, 0
    for _ in range(count):
        step += random.randint(*spacing)
        possible = [name for name in mix if _is_possible(FAULT_KINDS[name], nodes)]
        if not possible:
            raise CampaignError(f"no kind of {', '.join(mix)} is possible with {nodes} nodes")
        (name,) = random.choices(possible, [mix[name] for name in possible])
        faults.append(Fault(step, name, random.randrange(1 << 16), _draw_parameters(name, random)))
        nodes = nodes_after(nodes, name)
        step += FAULT_KINDS[name].extra_steps
    return Campaign(seed, dict(mix), spacing, tuple(faults))


def _check_arguments(count: int, mix: Mapping[str, float], spacing: tuple[int, int]) -> None:
    if count < 1:
        raise CampaignError(f"a campaign must have at least one fault, got {count}")
    if not 1 <= spacing[0] <= spacing[1]:
        raise CampaignError(f"spacing must be MIN, MAX with 1 <= MIN <= MAX, got {spacing}")
    for name, weight in mix.items():
        if name not in FAULT_KINDS:
            raise CampaignError(f"unknown fault {name!r}; known are {', '.join(FAULT_KINDS)}")
        if not weight > 0:
            raise CampaignError(f"the weight of {name} must be above 0, got {weight}")


def _is_possible(kind: FaultKind, nodes: int) -> bool:
    return kind.min_nodes <= nodes <= kind.max_nodes


def nodes_after(nodes: int, kind: str) -> int:
    """Return the number of nodes after a fault of this kind."""
    change = FAULT_KINDS[kind].node_change
    return INITIAL_NODES if change is None else nodes + change


def _draw_parameters(kind: str, random: Random) -> dict[str, Any]:
    if kind in ("exception", "segfault"):
        return {"part": random.choice(STEP_PARTS)}
    if kind == "exit":
        return {"part": random.choice(STEP_PARTS), "code": random.choice(EXIT_CODES)}
    if kind == "kill":
        return {"delay_ms": random.randrange(30)}
    if kind == "slow":
        return {"seconds": 1.0}
    return {}


# -- the file -------------------------------------------------------------------------------------


def write(campaign: Campaign) -> str:
    """Return the campaign as text: one line of JSON for the header, and one for each fault."""
    header = {"format": FORMAT, "version": VERSION, "faults": len(campaign.faults)}
    header |= {"seed": campaign.seed, "mix": dict(campaign.mix), "spacing": campaign.spacing}
    lines = [header, *(_fault_to_json(fault) for fault in campaign.faults)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _fault_to_json(fault: Fault) -> dict[str, Any]:
    plain = {"step": fault.step, "kind": fault.kind, "victim": fault.victim}
    return plain | ({"parameters": dict(fault.parameters)} if fault.parameters else {})


def read(text: str) -> Campaign:
    """Return the campaign in a text that `write` or a person wrote.

    Raises:
        CampaignError: The text is not a campaign, or a fault is not possible. The message names the
            line.
    """
    header: dict[str, Any] = {}
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            plain = json.loads(line)
            if number == 1:
                header = dict(plain)
            else:
                faults.append(Fault(**plain))
        except (ValueError, TypeError) as error:
            raise CampaignError(f"line {number} is not part of a campaign: {error}") from error
    expected = {"format": FORMAT, "version": VERSION, "faults": len(faults)}
    if not faults or any(header.get(name) != value for name, value in expected.items()):
        raise CampaignError(f"line 1 must be the header {expected} of a campaign, got {header}")
    _check_faults(faults)
    low, high = header.get("spacing", (15, 25))
    return Campaign(header.get("seed", 0), header.get("mix", {}), (low, high), tuple(faults))


def _check_faults(faults: Sequence[Fault]) -> None:
    nodes, last = INITIAL_NODES, 0
    for number, fault in enumerate(faults, 2):
        kind = FAULT_KINDS.get(fault.kind)
        if kind is None or set(fault.parameters) != set(_draw_parameters(fault.kind, Random(0))):
            raise CampaignError(f"line {number}: unknown fault or parameters: {fault}")
        if fault.step <= last:
            raise CampaignError(
                f"line {number}: faults must be in the order of their steps, got {fault.step} "
                f"after {last}"
            )
        if not _is_possible(kind, nodes):
            raise CampaignError(
                f"line {number}: {fault.kind} needs {kind.min_nodes} to {kind.max_nodes} nodes, "
                f"but the job has {nodes} after the faults before it"
            )
        nodes, last = nodes_after(nodes, fault.kind), fault.step
