"""The options of elasticrun compared with the parser of the installed torchrun."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch.distributed.run as torchrun

from elasticlib import LaunchOptions
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import Launch, parse_launch
from elasticlib.launch.command_line import EXTENSION_MARK, build_parser
from elasticlib.launch.flags import FLAGS, PREFIX, UNSUPPORTED
from elasticlib.launch.option_text import row_text

ACTIONS = {
    action.dest: action
    for action in torchrun.get_args_parser()._actions
    if action.option_strings and action.dest not in ("help", "print_completion")
}
PARSER = build_parser()
NEWER = {"log_line_prefix_template"}
"""Options that only newer versions of torchrun have."""
OTHER_DEFAULTS = {
    "rdzv_backend",  # tcp, where torchrun has static
    "rdzv_id",  # generated
    "start_method",  # torch's default imports torch at each start of a worker
}


def is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


@pytest.mark.parametrize("dest", sorted(ACTIONS.keys() - UNSUPPORTED.keys()))
def test_each_option_of_torchrun_is_accepted_in_all_spellings(dest: str) -> None:
    torchs = ACTIONS[dest]
    for spelling in torchs.option_strings:
        action = PARSER._option_string_actions[spelling]
        assert (action.dest, is_switch(action)) == (dest, is_switch(torchs))
        assert {*(torchs.choices or ())} <= {*(action.choices or torchs.choices or ())}
    assert not torchs.required
    if dest not in OTHER_DEFAULTS and torchs.default and not is_switch(torchs):
        text = row_text(FLAGS[dest], LaunchOptions()) or FLAGS[dest].default_text
        assert (
            text.partition(":")[0] in str(torchs.default).partition(":")[0] or dest == "node_rank"
        )


def test_help_lists_each_option_once_and_marks_those_that_torchrun_lacks() -> None:
    text = PARSER.format_help()
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


CONTEXT = {"nnodes": "1:3", "rdzv_endpoint": "h:1", "nproc_per_node": "2", "tee": "3"}
"""Options of a job in which any further option is valid, except for those in OTHER_CONTEXTS."""
# These options contradict --rdzv-endpoint.
OTHER_CONTEXTS = {"standalone": {}, "master_addr": {"nnodes": "2"}, "master_port": {"nnodes": "2"}}


@pytest.mark.parametrize("dest", sorted(UNSUPPORTED))
def test_unsupported_option_of_torchrun_is_rejected_with_its_replacement(
    dest: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dest not in FLAGS
    replacement = UNSUPPORTED[dest]
    error = f": elasticlib does not implement this flag of torchrun; {replacement}"
    for spelling in ACTIONS[dest].option_strings:
        for words in ([spelling, "null", script], [f"{spelling}=null", script], [spelling, "null"]):
            with pytest.raises(SystemExit) as exit_info:
                parse_launch(words, {})
            assert exit_info.value.code == 2
            assert f"error: {spelling}{error}\n" in capsys.readouterr().err
        assert spelling not in PARSER.format_help()
    variable = PREFIX + dest.upper()
    with pytest.raises(ConfigError, match=re.escape(variable + error)):
        parse_launch([script], {variable: "null"})
    assert parse_launch([script], {variable: ""}).options


@pytest.mark.parametrize("dest", sorted(ACTIONS.keys() - UNSUPPORTED.keys()))
def test_option_and_its_variable_set_the_same_value(dest: str, script: str) -> None:
    flag, variable = ACTIONS[dest].option_strings[-1], PREFIX + dest.upper()
    context = OTHER_CONTEXTS.get(dest, {**CONTEXT, dest: ""})
    line = [f"--{name}={value}" for name, value in context.items() if value]
    program = "json" if dest == "module" else script
    value = "" if is_switch(ACTIONS[dest]) else VALUES.get(dest, "value")
    from_flag = parse_launch([*line, flag, *filter(None, [value]), program], {})
    from_variable = parse_launch([*line, program], {variable: value})
    assert without_id(from_variable) == without_id(from_flag)
    assert (from_variable.settings[dest].origin, from_variable.warnings) == (variable, ())


def without_id(launch: Launch) -> tuple[object, object]:
    """Return the options and the program without the id, which may be generated."""
    rendezvous = attrs.evolve(launch.options.rendezvous, run_id="job")
    return attrs.evolve(launch.options, rendezvous=rendezvous), launch.entrypoint


def test_abbreviated_option_is_rejected(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_launch(["--stand", script], {})
    assert "--stand" in capsys.readouterr().err


PRINT_COMPLETION = (
    "import sys; {setup}from elasticlib.launch.elasticrun import main; main(sys.argv[1:])"
)


def print_completion(shell: str, setup: str = "") -> subprocess.CompletedProcess[str]:
    command = (
        sys.executable,
        "-c",
        PRINT_COMPLETION.format(setup=setup),
        "--print-completion",
        shell,
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_bash_completes_options(tmp_path: Path) -> None:
    printed = print_completion("bash")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "completion").write_text(printed.stdout)
    script_text = (
        f"source {tmp_path}/completion; COMP_WORDS=(elasticrun --nproc-per-n); COMP_CWORD=1; "
        "$(complete -p elasticrun | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); echo ${COMPREPLY[@]}"
    )
    completed = subprocess.run(
        ["bash", "-c", script_text], capture_output=True, text=True, timeout=60
    )
    assert completed.stdout == "--nproc-per-node\n", completed.stderr


@pytest.mark.parametrize(
    ("shell", "setup", "code", "message"),
    [
        ("dosh", "", 2, "--print-completion must be one of bash, zsh, tcsh"),
        ("zsh", "sys.modules['shtab'] = None; ", 1, "pip install shtab"),
    ],
)
def test_completion_that_is_not_available_is_an_error(
    shell: str, setup: str, code: int, message: str
) -> None:
    printed = print_completion(shell, setup)
    assert (printed.returncode, printed.stdout) == (code, "")
    assert message in printed.stderr
