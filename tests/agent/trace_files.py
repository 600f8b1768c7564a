"""Traces: a text of events, with the effects that the agent's machine answers.

A line that is not indented is an event or a setting; the lines below it are the effects, and the
phase if it has changed. `docs` of a trace are its first lines, which begin with "#". Events:

    options workers=2 grace=30 check           settings of the machine
    ready [peers] [unfit=TEXT]                 the node is prepared, or unfit
    joined [slots=2] [nodes=2] [rank=0]        a generation has formed
    over KIND                                  a change of the membership
    see 0,1 notices regroup left call=3 ...    what workers show from now on
    exit 0 CODE [MESSAGE] [asked]              a worker has exited, asked by its agent or by itself
    signal NAME                                a signal
    ask drain|stop|restart [in=SECONDS]        a request, with a deadline
    fail TEXT                                  a part of the agent has failed
    peers stop 1:5 2:none | peers over 1       what other nodes have published
    stacks | finished [TEXT]                   answers of the ports
    wait SECONDS                               time passes
"""

from __future__ import annotations

import shlex
import signal
from typing import Any

import attrs

from elasticlib.agent.machine import Limits, MachineState, begin, due_at, handle
from elasticlib.agent.machine_check import check
from elasticlib.agent.messages import (
    Action,
    ComponentFailed,
    Effect,
    Event,
    Finish,
    Finished,
    Join,
    Meaning,
    NodeReady,
    Notify,
    Prepare,
    Requested,
    SignalReceived,
    StacksCollected,
    StartWorkers,
    StopWorkers,
    Tick,
    WorkerExited,
    WorkersSeen,
)
from elasticlib.agent.stop_agreement import StopProposal, decode_proposal, encode_proposal
from elasticlib.errors import RendezvousTimeoutError
from elasticlib.rendezvous.interface import (
    Joined,
    MembershipChanged,
    PeerMessages,
    Publish,
    RankAssignment,
    RendezvousInfo,
    RendezvousStoreInfo,
    Report,
    ReportKind,
    Topic,
)
from elasticlib.rendezvous.membership import Change, ChangeKind
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import Heartbeat, WorkerView

MEANINGS = {
    "SIGTERM": Meaning.DRAIN_IF_NOTICED,
    "SIGUSR2": Meaning.DRAIN,
    "SIGINT": Meaning.INTERRUPT,
}
FLAGS = {
    "notices": {"takes_notices": True, "has_called_should_stop": True},
    "regroup": {"can_regroup": True},
    "left": {"has_left": True},
    "ready": {"is_ready": True},
    "broken": {"group_failed": True},
    "failed": {"has_failed": True},
}


def run(text: str) -> str:
    """Return the trace with the effects that the machine answers."""
    player, lines = _Player(), []
    for line in text.splitlines():
        if line.startswith(("#", "  ")) or not line.strip():
            if not line.startswith("  "):
                lines.append(line)
            continue
        lines.append(line)
        lines += ["  " + found for found in player.play(line)]
    return "\n".join(lines) + "\n"


@attrs.define
class _Player:
    limits: Limits = attrs.field(factory=lambda: Limits(2))
    state: MachineState = attrs.field(factory=MachineState)
    now: float = 0.0
    generation: int = 0
    interrupts: int = 0
    has_begun: bool = False
    found: list[str] = attrs.field(factory=list)

    def play(self, line: str) -> list[str]:
        self.found = []
        name, *words = shlex.split(line)
        if name == "options":
            self.set_options(words)
            return []
        if not self.has_begun:
            self.has_begun = True
            self.state, effects = begin(self.limits)
            self.note(effects)
        getattr(self, name)(words)
        return self.found

    def set_options(self, words: list[str]) -> None:
        values = dict(word.partition("=")[::2] for word in words)
        self.limits = Limits(
            int(values.get("workers", 2)),
            checkpoint_grace=float(values.get("grace", 30)),
            checks_node="check" in values,
        )

    def post(self, event: Event) -> None:
        before = self.state
        self.state, effects = handle(self.state, event, self.now, self.limits)
        check(self.state)
        self.note(effects)
        stage = self.state.stop.stage.name if self.state.stop else ""
        old = before.stop.stage.name if before.stop else ""
        if (self.state.phase, stage) != (before.phase, old):
            outcome = ""
            if self.state.outcome != before.outcome and self.state.outcome is not None:
                outcome = f": {self.state.outcome.state.value}, {self.state.outcome.reason}"
            self.found.append(f"[{self.state.phase.value}{' ' * bool(stage)}{stage}{outcome}]")

    def note(self, effects: tuple[Effect, ...]) -> None:
        self.found += [describe_effect(effect) for effect in effects]

    # -- events --------------------------------------------------------------------------------

    def ready(self, words: list[str]) -> None:
        unfit = next((w.partition("=")[2] for w in words if w.startswith("unfit=")), "")
        self.post(NodeReady(unfit, peers_train="peers" in words))

    def joined(self, words: list[str]) -> None:
        values = {key: int(value) for key, _, value in (word.partition("=") for word in words)}
        slots, nodes = values.get("slots", self.limits.local_world_size), values.get("nodes", 1)
        rank, others = values.get("rank", 0), nodes - 1
        self.generation += 1
        place = RankAssignment(rank, nodes, slots, rank, slots + others, rank, slots + others)
        store = RendezvousStoreInfo("localhost", 1)
        info = RendezvousInfo("job", self.generation, place, store)
        self.post(Joined(self.state.attempt, info))

    def over(self, words: list[str]) -> None:
        error = RendezvousTimeoutError() if words[0] == "not_joined" else None
        kind = ChangeKind.FAILED if error else ChangeKind(words[0])
        reason = " ".join(words[1:]) or kind.value
        self.post(MembershipChanged(self.state.attempt, Change(kind, reason), error))

    def see(self, words: list[str]) -> None:
        view = dict(self.state.view)
        for local in map(int, words[0].split(",")):
            one = view.get(local, WorkerView(f"pid {local}", heartbeat=Heartbeat()))
            for word in words[1:]:
                key, _, value = word.partition("=")
                changes: dict[str, Any] = FLAGS.get(word, {})
                if key == "call":
                    changes = {"stop_call": int(value)}
                elif word == "stepped":
                    changes = {"heartbeat": Heartbeat(num_steps=1)}
                one = attrs.evolve(one, **changes)
            view[local] = one
        self.post(WorkersSeen(view))

    def exit(self, words: list[str]) -> None:
        local, code = int(words[0]), int(words[1])
        is_asked = "asked" in words
        message = " ".join(word for word in words[2:] if word != "asked")
        exit_ = WorkerExit(
            local,
            local,
            10 + local,
            code,
            message=message,
            stop_was_requested=is_asked,
            failed_before_stop=not is_asked,
            signal_sent_by_agent=is_asked and code < 0,
        )
        worker = self.state.alive[local]
        self.post(WorkerExited(worker.start, exit_))

    def signal(self, words: list[str]) -> None:
        number = signal.Signals[words[0]].value
        self.interrupts += words[0] == "SIGINT"
        meaning = MEANINGS.get(words[0], Meaning.END)
        self.post(SignalReceived(number, words[0], meaning, self.interrupts))

    def ask(self, words: list[str]) -> None:
        limit = next((float(w.partition("=")[2]) for w in words if w.startswith("in=")), None)
        deadline = None if limit is None else self.now + limit
        action = Action(words[0])
        reason = "preempted" if limit is not None else "drain"
        self.post(Requested(action, "somebody", reason, deadline, self.generation))

    def fail(self, words: list[str]) -> None:
        self.post(ComponentFailed(" ".join(words)))

    def peers(self, words: list[str]) -> None:
        topic = Topic(words[0])
        if words[1] == "unreachable":
            return self.post(PeerMessages(self.state.attempt, topic, None))
        values: dict[int, bytes] = {}
        for word in words[1:]:
            rank, _, call = word.partition(":")
            proposal = StopProposal(None if call == "none" else int(call or 1), "resize", 20.0)
            values[int(rank)] = encode_proposal(proposal) if topic is Topic.STOP else b""
        return self.post(PeerMessages(self.state.attempt, topic, values))

    def stacks(self, _words: list[str]) -> None:
        self.post(StacksCollected(self.state.attempt, {}))

    def finished(self, words: list[str]) -> None:
        self.post(Finished(" ".join(words)))

    def wait(self, words: list[str]) -> None:
        end = self.now + float(words[0])
        while (due := due_at(self.state)) <= end:
            self.now = max(self.now, due)
            self.found.append(f"after {self.now:g} s:")
            self.post(Tick())
        self.now = end


def describe_effect(effect: Effect) -> str:
    """Return an effect in one line."""
    match effect:
        case Prepare(check=is_checked):
            return "Prepare, and check" if is_checked else "Prepare"
        case Join(attempt=attempt):
            return f"Join {attempt}"
        case Report(kind=ReportKind.SLOTS):
            return f"Report {effect.slots} slots{', retained' * effect.is_retained}"
        case Report(kind=ReportKind.FAILURE):
            kind = "" if effect.evidence is None else f" ({effect.evidence.kind.value})"
            return f"Report failure{kind}: {effect.reason}"
        case Report():
            reason = f": {effect.reason}" if effect.reason else ""
            return f"Report {effect.kind.value}{reason}"
        case Publish(topic=Topic.STOP, value=value):
            call = decode_proposal(value).call
            return f"Publish stop at {'no call' if call is None else f'call {call}'}"
        case Publish(topic=topic):
            return f"Publish {topic.value}"
        case StartWorkers(members=group, standby=standby):
            names = ", ".join(map(str, group)) or "none"
            return f"StartWorkers {names}" + (f", standby {_list(standby)}" if standby else "")
        case Notify(notice=notice, call=call):
            at = "" if call is None else f", at call {call}"
            return f"Notify {notice.reason}, {notice.grace_s:g} s{at}"
        case StopWorkers(local_ranks=ranks, how=how, why=why):
            return f"{how.name} {_list(ranks)}{f' ({why})' if why else ''}"
        case Finish(save=save):
            return "Finish, and save" if save else "Finish without a save"
    return type(effect).__name__


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
