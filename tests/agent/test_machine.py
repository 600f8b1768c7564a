"""The agent's machine against random workers, nodes and signals: its invariants always hold."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from elasticlib.agent.machine import TABLE, EventKind, Limits, Phase, begin, due_at, handle
from elasticlib.agent.machine_check import check
from elasticlib.agent.messages import (
    Action,
    ComponentFailed,
    DumpStacks,
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
from elasticlib.agent.stop_agreement import StopProposal, encode_proposal
from elasticlib.rendezvous.interface import (
    Joined,
    MembershipChanged,
    PeerMessages,
    RankAssignment,
    RendezvousInfo,
    RendezvousStoreInfo,
    Topic,
)
from elasticlib.rendezvous.membership import Change, ChangeKind
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import Heartbeat, StopHow, WorkerView

NUM_WORKERS = 3
MAX_LUCK = 9
LUCK = st.integers(0, MAX_LUCK)  # What ends the run happens rarely, so that much happens before.
SIGNALS = {
    15: ("SIGTERM", Meaning.DRAIN_IF_NOTICED),
    2: ("SIGINT", Meaning.INTERRUPT),
    12: ("SIGUSR2", Meaning.DRAIN),
    1: ("SIGHUP", Meaning.END),
}


@attrs.define
class Process:
    """A worker as the world sees it."""

    start: int
    is_member: bool
    can_regroup: bool = False
    takes_notices: bool = False
    has_left: bool = False
    stop_call: int | None = None
    told: StopHow | None = None

    def view(self) -> WorkerView:
        is_out = self.has_left or not self.is_member
        return WorkerView(
            "a worker",
            is_ready=is_out and self.can_regroup,
            can_regroup=self.can_regroup,
            has_left=self.has_left and self.is_member,
            takes_notices=self.takes_notices,
            has_called_should_stop=self.takes_notices,
            stop_call=self.stop_call,
            heartbeat=Heartbeat(num_steps=1, is_attached=True),
        )


class World(RuleBasedStateMachine):
    """Workers, nodes and people round one machine. They do anything they can, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limits = Limits(NUM_WORKERS, checks_node=False)
        self.state, effects = begin(self.limits)
        self.processes: dict[int, Process] = {}
        self.is_preparing = self.is_joining = self.is_finishing = self.has_stacks_due = False
        self.generation, self.num_nodes = 0, 1
        self.num_interrupts = 0
        self.execute(effects)

    # -- the world executes what the machine wants ---------------------------------------------

    def post(self, event: Event) -> None:
        before = self.state
        self.state, effects = handle(self.state, event, self.now, self.limits)
        assert handle(before, event, self.now, self.limits) == (self.state, effects)
        self.execute(effects)

    def execute(self, effects: tuple[Effect, ...]) -> None:
        joins = [n for n, effect in enumerate(effects) if isinstance(effect, Join)]
        assert joins in ([], [len(effects) - 1]), effects
        for effect in effects:
            match effect:
                case Prepare():
                    self.is_preparing = True
                case Join():
                    assert not self.is_joining or self.state.phase is Phase.JOINING
                    self.is_joining = True
                case StartWorkers(start, members, standby):
                    self.start(start, members, standby)
                case Notify():
                    assert self.processes
                    for process in self.processes.values():
                        if process.is_member and not process.has_left:
                            process.told = StopHow.NOTICE
                case StopWorkers(ranks, how):
                    assert ranks
                    assert set(ranks) <= self.processes.keys()
                    for local in ranks:
                        before = self.processes[local].told
                        assert before is None or before <= how
                        self.processes[local].told = how
                case DumpStacks():
                    self.has_stacks_due = True
                case Finish():
                    self.is_finishing = True

    def start(self, start: int, members: tuple[int, ...], standby: tuple[int, ...]) -> None:
        assert self.processes.keys() <= {*members, *standby}
        for local in (*members, *standby):
            if local in self.processes:
                process = self.processes[local]
                assert process.is_member is False or process.has_left
                self.processes[local] = attrs.evolve(
                    process, is_member=local in members, has_left=False, told=None, stop_call=None
                )
            else:
                self.processes[local] = Process(start, local in members)

    # -- events --------------------------------------------------------------------------------

    @initialize(slots=st.integers(1, NUM_WORKERS), num_nodes=st.integers(1, 3))
    def begin(self, slots: int, num_nodes: int) -> None:
        self.node_is_ready(peers_train=False, unfit="")
        self.a_generation_forms(slots, num_nodes)

    @rule(peers_train=st.booleans(), unfit=st.sampled_from(["", "", "", "no GPU"]))
    @precondition(lambda self: self.is_preparing)
    def node_is_ready(self, peers_train: bool, unfit: str) -> None:
        self.is_preparing = False
        if self.state.phase in (Phase.JOINING, Phase.STOPPING, Phase.CLOSING, Phase.ENDED):
            self.post(NodeReady(unfit, peers_train=peers_train))

    @rule(slots=st.integers(1, NUM_WORKERS), num_nodes=st.integers(1, 3))
    @precondition(lambda self: self.is_joining)
    def a_generation_forms(self, slots: int, num_nodes: int) -> None:
        self.is_joining = False
        offered = self.state.reported
        slots = min(slots, offered[0] or 1) if offered else slots
        self.generation, self.num_nodes = self.generation + 1, num_nodes
        total = slots + num_nodes - 1
        assignment = RankAssignment(0, num_nodes, slots, 0, total, 0, total)
        store = RendezvousStoreInfo("localhost", 1)
        info = RendezvousInfo("job", self.generation, assignment, store)
        self.post(Joined(self.state.attempt, info))

    @rule(kind=st.sampled_from(ChangeKind), luck=LUCK)
    @precondition(lambda self: self.state.phase is not Phase.ENDED)
    def the_membership_changes(self, kind: ChangeKind, luck: int) -> None:
        if kind.is_final and luck < MAX_LUCK:
            kind = ChangeKind.GENERATION_ENDED
        if self.state.phase is Phase.JOINING and not kind.is_final:
            return
        self.post(MembershipChanged(self.state.attempt, Change(kind, kind.value)))

    @rule(
        data=st.data(), code=st.sampled_from([0, 0, 1, -9, -11]), message=st.sampled_from(["", "x"])
    )
    @precondition(lambda self: self.processes)
    def a_worker_exits(self, data: st.DataObject, code: int, message: str) -> None:
        local = data.draw(st.sampled_from(sorted(self.processes)))
        process = self.processes.pop(local)
        was_told = process.told is not None
        exit_ = WorkerExit(local, local, 1, code, message=message, stop_was_requested=was_told)
        self.post(WorkerExited(process.start, exit_))

    @rule(data=st.data())
    @precondition(lambda self: self.processes)
    def a_worker_changes(self, data: st.DataObject) -> None:
        local = data.draw(st.sampled_from(sorted(self.processes)))
        process = self.processes[local]
        change = data.draw(st.sampled_from(["notices", "regroup", "call", "left"]))
        is_told = process.told in (StopHow.NOTICE, StopHow.LEAVE)
        if change == "notices":
            process.takes_notices = True
        elif change == "regroup":
            process.can_regroup = True
        elif change == "call" and process.told is StopHow.NOTICE:
            process.stop_call = 3
        elif change == "left" and is_told and process.can_regroup and process.is_member:
            process.has_left = True
        self.post(WorkersSeen({n: one.view() for n, one in self.processes.items()}))

    @rule(number=st.sampled_from(sorted(SIGNALS)), luck=LUCK)
    def a_signal(self, number: int, luck: int) -> None:
        if luck < MAX_LUCK and self.state.outcome is None:
            return
        name, meaning = SIGNALS[number]
        self.num_interrupts += number == 2
        self.post(SignalReceived(number, name, meaning, self.num_interrupts))

    @rule(
        action=st.sampled_from(Action), seconds=st.sampled_from([None, 0.0, 8.0, 300.0]), luck=LUCK
    )
    def a_request(self, action: Action, seconds: float | None, luck: int) -> None:
        if luck < MAX_LUCK and action is not Action.RESTART:
            return
        deadline = None if seconds is None else self.now + seconds
        self.post(Requested(action, "somebody", "drain", deadline, self.generation))

    @rule(luck=LUCK)
    def a_part_fails(self, luck: int) -> None:
        if luck == MAX_LUCK:
            self.post(ComponentFailed("a thread failed"))

    @rule(
        topic=st.sampled_from(Topic),
        call=st.sampled_from([None, 2, 5]),
        is_reachable=st.booleans(),
    )
    def peers_publish(self, topic: Topic, call: int | None, is_reachable: bool) -> None:
        values = dict.fromkeys(range(1, self.num_nodes), b"")
        if topic is Topic.STOP:
            values = {n: encode_proposal(StopProposal(call, "resize", 5.0)) for n in values}
        found = values if is_reachable else None
        self.post(PeerMessages(self.state.attempt, topic, found))

    @rule()
    @precondition(lambda self: self.has_stacks_due)
    def stacks_arrive(self) -> None:
        self.has_stacks_due = False
        self.post(StacksCollected(self.state.attempt, {}))

    @rule()
    @precondition(lambda self: self.is_finishing)
    def the_last_save_is_done(self) -> None:
        self.is_finishing = False
        self.post(Finished())

    @rule(seconds=st.sampled_from([0.001, 1.0, 9.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def tick(self) -> None:
        for _ in range(10):
            if self.now < due_at(self.state):
                return
            self.post(Tick())
        raise AssertionError("the machine is due for ever")

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def the_state_is_possible(self) -> None:
        check(self.state)
        alive = {n: (one.start, one.is_member) for n, one in self.processes.items()}
        found = {n: (one.start, one.is_member) for n, one in self.state.alive.items()}
        survivors = self.state.outcome and "survived" in self.state.outcome.reason
        if not survivors and self.state.phase is not Phase.JOINING:
            assert found == alive

    @invariant()
    def a_node_that_joins_is_joining(self) -> None:
        if self.state.phase is Phase.JOINING:
            assert self.is_preparing or self.is_joining

    def teardown(self) -> None:
        """A run that has to end does so by itself, if the workers obey and the parts answer."""
        self.post(SignalReceived(1, "SIGHUP", Meaning.END))
        for _ in range(20):
            if self.state.phase is Phase.ENDED:
                break
            for local, process in [*self.processes.items()]:
                if process.told is not None:
                    del self.processes[local]
                    exit_ = WorkerExit(local, local, 1, -15, stop_was_requested=True)
                    self.post(WorkerExited(process.start, exit_))
            if self.is_finishing:
                self.the_last_save_is_done()
            self.now = max(self.now, min(due_at(self.state), self.now + 1e6))
            self.tick()
        assert self.state.phase is Phase.ENDED, self.state


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "examples",
    [
        100,
        pytest.param(1_000, marks=pytest.mark.long),
        pytest.param(12_000, marks=pytest.mark.release),
    ],
)
def test_the_machine_keeps_its_invariants_whatever_happens(examples: int) -> None:
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            # A new counterexample must not block unrelated changes.
            derandomize=examples < 12_000,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_each_kind_has_a_row_in_each_phase_or_cannot_happen_there() -> None:
    phases = [phase for phase in Phase if phase is not Phase.ENDED]
    missing = {(phase, kind) for phase in phases for kind in EventKind} - TABLE.keys()
    assert missing == {
        *((phase, EventKind.FINISHED) for phase in (Phase.JOINING, Phase.ACTIVE, Phase.STOPPING)),
        *(
            (phase, kind)
            for phase in (Phase.JOINING, Phase.ACTIVE)
            for kind in (EventKind.SIGNAL_AGAIN, EventKind.SIGNAL_INTERRUPT)
        ),
        *((Phase.ACTIVE, kind) for kind in (EventKind.READY, EventKind.UNFIT, EventKind.JOINED)),
        *(
            (Phase.JOINING, kind)
            for kind in (
                EventKind.OVER_PLANNED,
                EventKind.OVER_BROKEN,
                EventKind.EXIT_OK,
                EventKind.EXIT_FAILED,
                EventKind.EXIT_UNFIT,
            )
        ),
    }
