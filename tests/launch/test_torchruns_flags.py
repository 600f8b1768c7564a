"""The installed torchrun's own parser, flag by flag, beside ours."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as torchrun

from elasticlib.defaults import UNSUPPORTED_TORCHRUN_OPTIONS
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_launch
from elasticlib.launch.command_line import EXTENSION_MARK, build_parser
from elasticlib.launch.flags import FLAGS
from elasticlib.launch.settings import PREFIX

ACTIONS = {
    action.dest: action
    for action in torchrun.get_args_parser()._actions
    if action.option_strings and action.dest not in ("help", "print_completion")
}
OURS = build_parser()
NEWER = {"log_line_prefix_template"}
"""Flags of a newer torchrun than the oldest that is installed."""
OTHER_DEFAULTS = {
    # Not given is told from given, so that what contradicts another is seen.
    "rdzv_backend": (None, "static"),
    "node_rank": (None, 0),
    "master_addr": (None, "127.0.0.1"),
    "start_method": (None, "spawn"),
    # Read into the same values later.
    "rdzv_conf": ([], ""),
    "duplicate_stdout_filters": ("", []),
    "duplicate_stderr_filters": ("", []),
    "signals_to_handle": (None, "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    # torch's default is in its LaunchConfig.
    "shutdown_timeout": (30.0, None),
}


def is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


@pytest.mark.parametrize("dest", sorted(ACTIONS.keys() - UNSUPPORTED_TORCHRUN_OPTIONS.keys()))
def test_each_flag_of_torchrun_is_here_in_all_its_spellings(dest: str) -> None:
    theirs, parser = ACTIONS[dest], OURS
    for spelling in theirs.option_strings:
        ours = parser._option_string_actions[spelling]
        assert (ours.dest, is_switch(ours)) == (dest, is_switch(theirs))
        assert {*(theirs.choices or ())} <= {*(ours.choices or theirs.choices or ())}
    assert not theirs.required
    told = (FLAGS[dest].default, theirs.default)
    assert told[0] == told[1] or told == OTHER_DEFAULTS[dest]


def test_help_shows_each_flag_once_and_marks_those_that_torchrun_has_not() -> None:
    text = OURS.format_help()
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert {*(flag.name for flag in FLAGS.values()), "--help", "--version"} <= {*shown}
    assert not any("_" in name for name in shown)
    for dest, flag in FLAGS.items():
        assert flag.is_extension is (dest not in ACTIONS and dest not in NEWER), dest
    assert text.count(EXTENSION_MARK) == 1 + sum(flag.is_extension for flag in FLAGS.values())


VALUES = {
    "nnodes": "1:3",
    "nproc_per_node": "2",
    "rdzv_backend": "c10d",
    "rdzv_conf": "join_timeout=9,read_timeout=7",
    "max_restarts": "2",
    "monitor_interval": "0.5",
    "start_method": "forkserver",
    "redirects": "0:1",
    "tee": "3",
    "local_ranks_filter": "0",
    "duplicate_stdout_filters": "a,,b,c",
    "duplicate_stderr_filters": "a",
    "node_rank": "0",
    "master_port": "1",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "4",
}


BESIDE = {"nnodes": "1:3", "rdzv_endpoint": "h:1", "nproc_per_node": "2", "tee": "3"}
"""With these each flag has a meaning, but for those that are another answer to where nodes meet."""
ELSEWHERE = {"standalone": {}, "master_addr": {"nnodes": "2"}, "master_port": {"nnodes": "2"}}


@pytest.mark.parametrize("dest", sorted(UNSUPPORTED_TORCHRUN_OPTIONS))
def test_a_flag_of_torchrun_that_is_not_implemented_is_refused_with_what_to_use(
    dest: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dest not in FLAGS
    instead = UNSUPPORTED_TORCHRUN_OPTIONS[dest]
    refusal = f": elasticlib does not implement this flag of torchrun; {instead}"
    for spelling in ACTIONS[dest].option_strings:
        for words in ([spelling, "null", script], [f"{spelling}=null", script], [spelling, "null"]):
            with pytest.raises(SystemExit) as ended:
                parse_launch(words, {})
            assert ended.value.code == 2
            assert f"error: {spelling}{refusal}\n" in capsys.readouterr().err
        assert spelling not in OURS.format_help()
    variable = PREFIX + dest.upper()
    with pytest.raises(ConfigError, match=re.escape(variable + refusal)):
        parse_launch([script], {variable: "null"})
    assert parse_launch([script], {variable: ""}).config


@pytest.mark.parametrize("dest", sorted(ACTIONS.keys() - UNSUPPORTED_TORCHRUN_OPTIONS.keys()))
def test_a_flag_says_what_its_variable_says(dest: str, script: str) -> None:
    flag, variable = ACTIONS[dest].option_strings[-1], PREFIX + dest.upper()
    beside = ELSEWHERE.get(dest, {**BESIDE, dest: ""})
    line = [f"--{name}={value}" for name, value in beside.items() if value]
    program = "json" if dest == "module" else script
    value = "" if is_switch(ACTIONS[dest]) else VALUES.get(dest, "word")
    told = parse_launch([*line, flag, *filter(None, [value]), program], {}).settings
    theirs = parse_launch([*line, program], {variable: value}).settings
    assert theirs[dest] == told[dest] != FLAGS[dest].default or dest == "role"
    assert theirs.settings[dest].origin == variable


def test_no_flag_is_known_by_its_first_letters(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_launch(["--stand", script], {})
    assert "--stand" in capsys.readouterr().err


ASK = "import sys; {before}from elasticlib.launch.elasticrun import main; main(sys.argv[1:])"


def completion(shell: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-c", ASK.format(before=before), "--print-completion", shell)
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_shell_completes_our_flags_as_it_does_torchruns(tmp_path: Path) -> None:
    printed = completion("bash")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "completion").write_text(printed.stdout)
    ask = (
        f"source {tmp_path}/completion; COMP_WORDS=(elasticrun --nproc-per-n); COMP_CWORD=1; "
        "$(complete -p elasticrun | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); echo ${COMPREPLY[@]}"
    )
    typed = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60)
    assert typed.stdout == "--nproc-per-node\n", typed.stderr


@pytest.mark.parametrize(
    ("shell", "before", "code", "said"),
    [
        ("dosh", "", 2, "--print-completion must be one of bash, zsh, tcsh"),
        ("zsh", "sys.modules['shtab'] = None; ", 1, "pip install shtab"),
    ],
)
def test_what_cannot_be_completed_is_said(shell: str, before: str, code: int, said: str) -> None:
    printed = completion(shell, before)
    assert (printed.returncode, printed.stdout) == (code, "")
    assert said in printed.stderr
