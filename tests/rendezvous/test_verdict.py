"""Each rule of `blame`, and its invariants for random evidence."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.rendezvous.blame import (
    MAX_FOLLOWERS,
    MAX_TEXT_BYTES,
    MIN_TEXT_BYTES,
    Evidence,
    FailureKind,
    Verdict,
    blame,
)
from elasticlib.rendezvous.record_codec import encode

K = FailureKind


def of(host: str, kind: FailureKind, at: float = 0.0, rank: int = -1) -> Evidence:
    return Evidence(kind, f"{host}: {kind.value}", rank, at, node=f"{host}-1", host=host)


def judge(*evidence: Evidence) -> Verdict:
    """Return the verdict. Evidence of kind LOST is about lost nodes."""
    lost = [one for one in evidence if one.kind is K.LOST]
    verdict = blame([one for one in evidence if one.kind is not K.LOST], lost)
    assert verdict is not None
    return verdict


# Each case: the evidence, the node that is named, and the evidence that decides, by its index.
CASES = {
    "one own failure": ([of("a", K.RAISED)], "a", 0),
    "a failed collective": ([of("a", K.COLLECTIVE)], "", 0),
    "several failed collectives, the first": (
        [of("b", K.COLLECTIVE), of("a", K.COLLECTIVE)],
        "",
        0,
    ),
    "stopped workers": ([of("a", K.STOPPED), of("b", K.STOPPED)], "", 0),
    "an own failure after failed collectives": (
        [of("a", K.COLLECTIVE), of("b", K.COLLECTIVE), of("c", K.RAISED)],
        "c",
        2,
    ),
    "a death outweighs an exception of another host": (
        [of("a", K.RAISED, 1.0), of("b", K.KILLED, 99.0)],
        "b",
        1,
    ),
    "of deaths on two hosts, the one that was reported first": (
        [of("b", K.CRASHED, 9.0), of("a", K.KILLED, 1.0)],
        "b",
        0,
    ),
    "on one host, the exception may follow from the death": (
        [of("a", K.RAISED, 1.0), of("a", K.KILLED, 1.5)],
        "a",
        1,
    ),
    "on one host, an exception long before a death": (
        [of("a", K.RAISED, 1.0), of("a", K.KILLED, 9.0)],
        "a",
        0,
    ),
    "on one host, the earlier exception": (
        [of("a", K.RAISED, 2.0), of("a", K.RAISED, 1.0)],
        "a",
        1,
    ),
    "a lost node outweighs all": (
        [of("a", K.COLLECTIVE), of("b", K.KILLED), of("c", K.LOST)],
        "c",
        2,
    ),
    "a lost node that had reported its own failure": (
        [of("a", K.COLLECTIVE), of("b", K.KILLED), of("b", K.LOST)],
        "b",
        1,
    ),
    "a lost node that had reported a failed collective": (
        [of("a", K.RAISED), of("b", K.COLLECTIVE), of("b", K.LOST)],
        "b",
        2,
    ),
    "a rank that is elsewhere in a hang": (
        [of("a", K.COLLECTIVE), of("b", K.ELSEWHERE), of("c", K.COLLECTIVE)],
        "b",
        1,
    ),
    "two hosts that are elsewhere in a hang": (
        [of("a", K.COLLECTIVE), of("b", K.ELSEWHERE), of("c", K.ELSEWHERE)],
        "",
        1,
    ),
    "two ranks of one host that are elsewhere": (
        [of("a", K.COLLECTIVE), of("b", K.ELSEWHERE), of("b", K.ELSEWHERE)],
        "b",
        1,
    ),
    "an exception outweighs a hang that it caused": (
        [of("a", K.COLLECTIVE), of("b", K.RAISED), of("c", K.ELSEWHERE)],
        "b",
        1,
    ),
    "a worker that had exited before a collective failed": (
        [of("a", K.COLLECTIVE), of("b", K.LEFT), of("c", K.COLLECTIVE)],
        "b",
        1,
    ),
    "workers of two hosts that had exited": ([of("a", K.LEFT), of("b", K.LEFT)], "", 0),
}


@pytest.mark.parametrize(("evidence", "host", "index"), CASES.values(), ids=CASES)
def test_the_rules(evidence: list[Evidence], host: str, index: int) -> None:
    verdict = judge(*evidence)
    assert verdict.evidence is evidence[index]
    assert verdict.kind is evidence[index].kind
    assert (verdict.named_host, verdict.named_node) == ((host, f"{host}-1") if host else ("", ""))


def test_without_evidence_there_is_no_verdict() -> None:
    assert blame([]) is None


def test_the_ranks_that_failed_after_the_cause_are_listed() -> None:
    others = [of(f"h{n}", K.COLLECTIVE, rank=n) for n in range(100)]
    verdict = judge(*others, of("a", K.KILLED, rank=3), of("b", K.STOPPED, rank=200))
    assert verdict.followers == (0, 1, 2, *range(4, MAX_FOLLOWERS + 1))


hosts = st.sampled_from("abc")
all_evidence = st.lists(
    st.builds(
        of, hosts, st.sampled_from([kind for kind in K if kind is not K.LOST]), st.floats(0, 9)
    )
)
against_nobody = st.lists(st.builds(of, hosts, st.sampled_from([K.COLLECTIVE, K.STOPPED])))


@given(against_nobody)
def test_evidence_against_nobody_names_nobody(evidence: list[Evidence]) -> None:
    verdict = blame(evidence)
    assert verdict is None or (verdict.named_node, verdict.named_host) == ("", "")


@given(all_evidence, against_nobody, st.lists(hosts, unique=True))
def test_evidence_against_nobody_does_not_change_who_is_named(
    evidence: list[Evidence], more: list[Evidence], lost_hosts: list[str]
) -> None:
    lost = [of(host, K.LOST) for host in lost_hosts]
    before, after = blame(evidence, lost), blame([*more, *evidence, *more], lost)
    if before is not None and before.named_node:
        assert after is not None
        assert after.evidence == before.evidence
    elif after is not None:
        assert not after.named_node


@given(all_evidence, st.lists(hosts, unique=True))
def test_only_a_node_with_evidence_of_its_own_is_named(
    evidence: list[Evidence], lost_hosts: list[str]
) -> None:
    lost = [of(host, K.LOST) for host in lost_hosts]
    verdict = blame(evidence, lost)
    if verdict is None:
        assert not evidence
        assert not lost
        return
    assert verdict.evidence in (*evidence, *lost)
    if verdict.named_node:
        assert verdict.named_node == verdict.evidence.node
        assert verdict.kind.names_host


@given(all_evidence)
def test_the_evidence_of_one_node_can_be_combined_before_that_of_all(
    evidence: list[Evidence],
) -> None:
    # In the leader's listing, the evidence of a node is in one record.
    evidence = sorted(evidence, key=lambda one: one.host)
    combined = []
    for host in dict.fromkeys(one.host for one in evidence):
        of_host = blame([one for one in evidence if one.host == host])
        assert of_host is not None
        combined.append(of_host.evidence)
    before, after = blame(evidence), blame(combined)
    assert (before and before.named_node) == (after and after.named_node)


@given(st.text(max_size=3000), st.sampled_from(K), st.integers(1, 20_000))
def test_the_evidence_of_a_node_is_bounded(text: str, kind: FailureKind, num_nodes: int) -> None:
    full = Evidence(kind, text, 123, 1.5e9, 10**9)
    bounded = full.bounded(num_nodes)
    assert text.startswith(bounded.text)
    assert len(json.dumps(bounded.text)) <= MAX_TEXT_BYTES + 2
    assert len(encode(bounded)) <= 1024
    if not kind.names_host and num_nodes >= 10_000:
        assert len(json.dumps(bounded.text)) <= MIN_TEXT_BYTES + 2
    assert attrs.evolve(full, text=bounded.text) == bounded
