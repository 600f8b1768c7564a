"""The flags of supervision: what each is read into, and what is refused."""

from __future__ import annotations

import signal

import pytest

from elasticlib import AgentOptions
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse
from elasticlib.launch.command_line import build_parser
from elasticlib.launch.launch_config import LaunchConfig, SupervisionOptions
from elasticlib.workers.interface import StopNotice

TERM, INT, HUP, QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


def read(line: str, script: str) -> SupervisionOptions:
    return parse([*line.split(), script])[0].supervision


def test_without_flags_a_launch_is_as_one_from_python(script: str) -> None:
    assert read("", script) == LaunchConfig().supervision
    assert (AgentOptions().stop_signals, AgentOptions().drain_signals) == (
        (TERM, INT, HUP, QUIT),
        (USR2,),
    )


@pytest.mark.parametrize(
    ("line", "ends", "drains", "saves"),
    [
        ("--signals-to-handle SIGTERM,SIGUSR1", (TERM, USR1), (USR2,), (TERM,)),
        # torchrun's own example for Slurm: what is said goes before what is assumed.
        ("--signals-to-handle SIGTERM,SIGUSR1,SIGUSR2", (TERM, USR1, USR2), (), (TERM,)),
        ("--drain-signals SIGUSR1", (TERM, INT, HUP, QUIT), (USR1,), ()),
        ("--drain-signals SIGUSR1,SIGTERM", (INT, HUP, QUIT), (USR1, TERM), ()),
        ("--drain-signals none", (TERM, INT, HUP, QUIT), (), ()),
        ("--signals_to_handle none --drain_signals SIGINT", (), (INT,), ()),
    ],
)
def test_signals_are_read(
    line: str, ends: tuple[int, ...], drains: tuple[int, ...], saves: tuple[int, ...], script: str
) -> None:
    agent = read(line, script).agent
    assert (agent.stop_signals, agent.drain_signals, agent.notice_signals) == (ends, drains, saves)


def test_workers_ignore_what_drains_but_never_what_stops_them() -> None:
    options = AgentOptions(drain_signals=(USR1, TERM))
    assert options.agent_only_signals == (USR1,)


def test_the_seconds_reach_the_agent_and_the_job(script: str) -> None:
    config, _ = parse(["--checkpoint-grace=60", "--restart-window=3600", script])
    assert config.supervision.agent.checkpoint_grace == 60.0
    assert config.rendezvous_settings.restart_window == 3600


def test_the_help_tells_the_exit_codes_and_the_true_defaults() -> None:
    text = " ".join(build_parser().format_help().split())
    assert "75 drained (see --drain-exit-code), 128 + N terminated by signal N" in text
    assert "(default: 75)" in text
    assert f"the job changes its size (default: {AgentOptions().checkpoint_grace:g})" in text


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--signals-to-handle TERM", "signal names with commas between.*got 'TERM'"),
        ("--signals-to-handle SIGTERM,", "got ''"),
        ("--drain-signals 12", "got '12'"),
        ("--drain-signals SIGKILL", "--drain-signals cannot contain SIGKILL"),
        ("--signals-to-handle SIGCHLD", "cannot contain SIGCHLD"),
        (
            "--signals-to-handle SIGUSR1 --drain-signals SIGUSR1",
            "SIGUSR1 is in both .* from one of them",
        ),
        ("--drain-exit-code 256", "--drain-exit-code must be from 0 to 255, got 256"),
        ("--checkpoint-grace=-1", "--checkpoint-grace must be seconds from 0 to 1e\\+06, got -1.0"),
        ("--checkpoint-grace nan", "--checkpoint-grace must be seconds"),
        ("--restart-window=-1", "--restart-window must be seconds"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(line: str, sentence: str, script: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse([*line.split(), script])


@pytest.mark.parametrize(
    ("line", "watched", "seconds"),
    [("", False, None), ("--hang-timeout auto", True, None), ("--hang_timeout 2.5", True, 2.5)],
)
def test_resizes_and_hangs_are_read(
    line: str, watched: bool, seconds: float | None, script: str
) -> None:
    agent = read(line, script).agent
    assert (agent.resize_mode, agent.hang_limits is not None) == ("at-step", watched)
    assert getattr(agent.hang_limits, "timeout", None) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e9"])
def test_a_silence_that_is_no_limit_is_refused(text: str, script: str) -> None:
    with pytest.raises(ConfigError, match="--hang-timeout must be auto or seconds"):
        read(f"--hang-timeout={text}", script)


def test_a_notice_of_a_resize_says_when_and_an_immediate_one_is_none() -> None:
    assert AgentOptions(resize_mode="immediate").make_notice("resize") is None
    assert AgentOptions(resize_mode="at-step").make_notice("resize") == StopNotice("resize", 30.0)
    assert AgentOptions(resize_mode="immediate").make_notice("drain") == StopNotice("drain", 30.0)
    with pytest.raises(ConfigError, match="resize_mode must be one of immediate, at-step, got"):
        AgentOptions(resize_mode="later")


def test_a_snapshot_has_replicas_on_as_many_nodes_as_there_may_be_others(script: str) -> None:
    meet = "--nnodes 1:3 --rdzv-endpoint h:1"
    assert read(f"{meet} --snapshot-replicas 2", script).agent.snapshot_replicas == 2
    assert AgentOptions().snapshot_replicas == 0
    with pytest.raises(ConfigError, match="from 0 to 2 in a job of up to 3 nodes, got 3"):
        read(f"{meet} --snapshot-replicas 3", script)
    with pytest.raises(ConfigError, match="from 0 to 0 in a job of up to 1 nodes, got 1"):
        read("--standalone --snapshot-replicas 1", script)
    with pytest.raises(ConfigError, match="--snapshot-replicas must be at least 0, got -1"):
        read(f"{meet} --snapshot-replicas -1", script)
    with pytest.raises(ConfigError, match="snapshot_replicas must be at least 0, got -1"):
        AgentOptions(snapshot_replicas=-1)
