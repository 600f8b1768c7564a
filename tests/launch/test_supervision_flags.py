"""Options of supervision: the config that each one sets, and the values that are rejected."""

from __future__ import annotations

import signal

import pytest

from elasticlib import AgentOptions
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.command_line import build_parser

TERM, INT, HUP, QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


def parse_agent(line: str, script: str) -> AgentOptions:
    return parse_options([*line.split(), script])[0].agent


def test_default_supervision_is_the_same_on_the_command_line_and_in_python(script: str) -> None:
    assert parse_agent("", script) == AgentOptions()
    assert (AgentOptions().stop_signals, AgentOptions().drain_signals) == (
        (TERM, INT, HUP, QUIT),
        (USR2,),
    )


@pytest.mark.parametrize(
    ("line", "stop", "drain", "notice"),
    [
        ("--signals-to-handle SIGTERM,SIGUSR1", (TERM, USR1), (USR2,), (TERM,)),
        # An explicit option takes precedence over the default drain signal.
        ("--signals-to-handle SIGTERM,SIGUSR1,SIGUSR2", (TERM, USR1, USR2), (), (TERM,)),
        ("--drain-signals SIGUSR1", (TERM, INT, HUP, QUIT), (USR1,), ()),
        ("--drain-signals SIGUSR1,SIGTERM", (INT, HUP, QUIT), (USR1, TERM), ()),
        ("--drain-signals none", (TERM, INT, HUP, QUIT), (), ()),
        ("--signals_to_handle none --drain_signals SIGINT", (), (INT,), ()),
    ],
)
def test_signal_options_select_stop_drain_and_notice_signals(
    line: str, stop: tuple[int, ...], drain: tuple[int, ...], notice: tuple[int, ...], script: str
) -> None:
    agent = parse_agent(line, script)
    assert (agent.stop_signals, agent.drain_signals, agent.notice_signals) == (stop, drain, notice)


def test_workers_ignore_drain_signals_except_sigterm() -> None:
    options = AgentOptions(drain_signals=(USR1, TERM))
    assert options.agent_only_signals == (USR1,)


def test_timeouts_set_the_options_of_the_agent_and_of_the_rendezvous(script: str) -> None:
    options, _ = parse_options(["--checkpoint-grace=60", "--restart-window=3600", script])
    assert options.agent.checkpoint_grace == 60.0
    assert options.job.restart_window == 3600


def test_help_lists_the_exit_codes_and_the_defaults() -> None:
    text = " ".join(build_parser().format_help().split())
    assert "75 drained (see --drain-exit-code), 76 stopped by elasticlib stop, 128 + N" in text
    assert "(default: 75)" in text
    assert f"the job changes its size (default: {AgentOptions().checkpoint_grace:g})" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--signals-to-handle TERM", "signal names with commas between.*got 'TERM'"),
        ("--signals-to-handle SIGTERM,", "got 'SIGTERM,'"),
        ("--drain-signals 12", "got '12'"),
        ("--drain-signals SIGKILL", "--drain-signals cannot contain SIGKILL"),
        ("--signals-to-handle SIGCHLD", "cannot contain SIGCHLD"),
        (
            "--signals-to-handle SIGUSR1 --drain-signals SIGUSR1",
            "--drain-signals must not have a signal of --signals-to-handle.*got 'SIGUSR1'",
        ),
        ("--drain-exit-code 256", "--drain-exit-code must be from 0 to 255, got 256"),
        ("--checkpoint-grace=-1", "--checkpoint-grace must be seconds from 0 to 1e\\+06, got -1.0"),
        ("--checkpoint-grace nan", "--checkpoint-grace must be seconds"),
        ("--restart-window=-1", "--restart-window must be seconds"),
    ],
)
def test_invalid_supervision_option_is_rejected_with_a_message(
    line: str, message: str, script: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options([*line.split(), script])


@pytest.mark.parametrize(
    ("line", "is_detected", "seconds"),
    [("", False, None), ("--hang-timeout auto", True, None), ("--hang_timeout 2.5", True, 2.5)],
)
def test_hang_timeout_sets_the_limits_of_the_hang_detector(
    line: str, is_detected: bool, seconds: float | None, script: str
) -> None:
    agent = parse_agent(line, script)
    assert (agent.hang is not None) == is_detected
    assert getattr(agent.hang, "timeout", None) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e9"])
def test_invalid_hang_timeout_is_rejected(text: str, script: str) -> None:
    with pytest.raises(ConfigError, match="--hang-timeout must be auto"):
        parse_agent(f"--hang-timeout={text}", script)


def test_snapshot_replicas_are_limited_by_the_number_of_other_nodes(script: str) -> None:
    job_flags = "--nnodes 1:3 --rdzv-endpoint h:1"
    assert parse_agent(f"{job_flags} --snapshot-replicas 2", script).snapshot_replicas == 2
    assert AgentOptions().snapshot_replicas == 0
    with pytest.raises(ConfigError, match="from 0 to 2 in a job of up to 3 nodes, got 3"):
        parse_agent(f"{job_flags} --snapshot-replicas 3", script)
    with pytest.raises(ConfigError, match="from 0 to 0 in a job of 1 nodes, got 1"):
        parse_agent("--standalone --snapshot-replicas 1", script)
    with pytest.raises(
        ConfigError, match="--snapshot-replicas must be an integer of at least 0, got -1"
    ):
        parse_agent(f"{job_flags} --snapshot-replicas -1", script)
    with pytest.raises(
        ConfigError, match=r"^snapshot_replicas must be an integer of at least 0, got -1"
    ):
        AgentOptions(snapshot_replicas=-1)
