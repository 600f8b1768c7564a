"""Run of a campaign: inject each fault when it is due, wait for the recovery, measure its cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from elasticlib.observe.event import Event

from .campaign import INITIAL_NODES, Campaign, Fault
from .faults import Effect, NoEffectError, inject
from .phases import Recovery, measure_recovery
from .shared_page import JobView
from .soak_job import SoakJob, now
from .training_history import Generation

MAX_ATTEMPTS = 3  # to inject one fault
# Nodes are started in advance for the next faults of the campaign.
MAX_PREPARED_NODES, LOOKAHEAD_FAULTS = 3, 15
# The nodes that a fault of this kind admits. They must wait at their gates by then.
ADMITTED_NODES = {"join": 1, "agent": 1, "corrupt": 2}
FINISH_TIMEOUT_S = 600.0


@attrs.frozen
class FaultResult:
    """A fault that was injected, and what it cost."""

    number: int  # in the campaign, from 1
    kind: str
    step: int  # the current step when it was injected
    late: int  # the number of steps since it was due
    world: int  # the number of ranks before it
    generation: int  # the generation before it
    description: str  # what showed its effect; empty if it had none
    discarded: Mapping[int, int]  # discarded steps by the generation that discarded them
    ineffective_attempts: tuple[str, ...]  # what was seen instead of the effect
    recovery: Recovery | None


@attrs.define
class CampaignResult:
    """The results of a campaign."""

    faults: list[FaultResult] = attrs.field(factory=list)
    violations: list[str] = attrs.field(factory=list)
    restarts: int = 0  # the restarts that were counted against --max-restarts
    _counted: int = 0  # the count of the current job

    def count_restarts(self, events: Sequence[Event]) -> None:
        """Add the restarts of these events. A job that lost all of its nodes counts from 0."""
        for event in events:
            if event.kind == "generation.started":
                self.restarts += max(0, event.data["restarts"] - self._counted)
                self._counted = event.data["restarts"]


def run_campaign(
    job: SoakJob, campaign: Campaign, log: Callable[[str], None], file: Path
) -> CampaignResult:
    """Inject all faults, and wait for the end of the job.

    Args:
        job: A job without nodes.
        campaign: The faults.
        log: Receives a line for each fault.
        file: The file to which a line of JSON is appended for each fault.

    Raises:
        AssertionError: The job makes no progress, or has failed.
    """
    result = CampaignResult()
    job.nodes.prepare(INITIAL_NODES)
    for _ in range(INITIAL_NODES):
        job.nodes.admit()
    job.wait_for_world()
    with file.open("a") as lines:
        for number, fault in enumerate(campaign.faults, 1):
            job.nodes.prepare(_num_nodes_to_prepare(campaign.faults[number - 1 :]))
            fault_result = _run_fault(job, number, fault, result)
            result.faults.append(fault_result)
            lines.write(json.dumps(attrs.asdict(fault_result)) + "\n")
            lines.flush()
            log(_format_result(fault_result))
    log(f"all faults were injected by step {job.current_step()} of {job.steps}")
    _finish(job)
    return result


def _num_nodes_to_prepare(faults: Sequence[Fault]) -> int:
    """Return how many nodes the next faults admit."""
    admitted = sum(ADMITTED_NODES.get(fault.kind, 0) for fault in faults[:LOOKAHEAD_FAULTS])
    return min(MAX_PREPARED_NODES, admitted)


def _run_fault(job: SoakJob, number: int, fault: Fault, result: CampaignResult) -> FaultResult:
    attempts: list[str] = []
    num_nodes = ADMITTED_NODES.get(fault.kind, 0)
    while True:
        job.nodes.prepare(num_nodes)
        view = job.wait_until_due(fault.step, num_nodes)
        job.read_events()
        job.events.clear()
        committed = job.newest_committed_step()
        try:
            effect = inject(job, fault, view)
        except NoEffectError as error:
            attempts.append(str(error))
            if len(attempts) == MAX_ATTEMPTS:
                result.violations.append(f"fault {number} ({fault.kind}) had no effect: {attempts}")
                return FaultResult(
                    number, fault.kind, view.step, 0, len(view.ranks), view.generation, "", {},
                    tuple(attempts), None,
                )  # fmt: skip
            continue
        before = (view, committed, effect)
        return _await_recovery(job, number, fault, before, tuple(attempts), result=result)


def _await_recovery(
    job: SoakJob,
    number: int,
    fault: Fault,
    before: tuple[JobView, int, Effect],
    attempts: tuple[str, ...],
    *,
    result: CampaignResult,
) -> FaultResult:
    """Wait until all nodes have done the step that the fault prevented; measure the cost."""
    view, committed, effect = before
    job.wait_for_world(view.generation if effect.restarts else 0)
    generation = job.read_generations(view.generation)[0]
    last, last_done_at = _last_done(generation)
    fault_at = effect.at or last_done_at
    step = last + 1 if effect.restarts else effect.step or _step_at(generation, fault_at)
    after = job.wait_for_world(0, step)
    generations = job.read_generations(view.generation)
    job.read_events()
    recovery = measure_recovery(fault_at, step, job.events, generations)
    result.violations += _lost_checkpoints(number, generations[1:], committed, effect.damaged_step)
    result.count_restarts(job.events)
    discarded = job.add_to_history(after.generation)
    world, late = len(view.ranks), view.step - fault.step
    return FaultResult(
        number, fault.kind, step, late, world, view.generation, effect.description, discarded,
        attempts, recovery,
    )  # fmt: skip


def _last_done(generation: Generation) -> tuple[int, float]:
    """Return the last finished step of a generation and its time.

    If the generation finished no step, return the step before its first one, and the current time.
    """
    done = {number: step.done_at for number, step in generation.steps.items() if step.done_at}
    if done:
        return max(done), done[max(done)]
    return min(generation.steps, default=1) - 1, now()


def _step_at(generation: Generation, at: float) -> int:
    """Return the last step that was started by this time."""
    started = [number for number, step in generation.steps.items() if step.started_at <= at]
    return max(started, default=min(generation.steps, default=1))


def _lost_checkpoints(
    number: int, later: list[Generation], committed: int, damaged: int
) -> Iterator[str]:
    """Yield each restore that is older than the newest checkpoint before the fault."""
    for generation in later:
        for line in generation.restores:
            if line["resumed"] < committed and not damaged:
                yield (
                    f"fault {number}: generation {generation.number} resumed from step "
                    f"{line['resumed']}, although step {committed} was on the disk"
                )


def _format_result(result: FaultResult) -> str:
    cost = "" if result.recovery is None else f"{result.recovery.total:.2f} s"
    num_attempts = len(result.ineffective_attempts) + 1
    attempts = f", {num_attempts} attempts" if num_attempts > 1 else ""
    return (
        f"{result.number:5} step {result.step:6} world {result.world} {result.kind:9} {cost:>7}"
        f"  {result.description[:100]}{attempts}"
    )


def _finish(job: SoakJob) -> None:
    """Discard the waiting nodes, and wait until the others have trained all steps."""
    job.page.set_step_limit(job.steps)
    for node in job.nodes.waiting:
        job.nodes.discard(node)
    job.nodes.waiting.clear()
    job.wait_until(
        "the job to finish",
        lambda: all(node.process.poll() == 0 for node in job.nodes.present),
        FINISH_TIMEOUT_S,
    )
    job.add_to_history(1 << 40)
