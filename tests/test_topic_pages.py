"""The pages about one topic (docs/installation.md and others) agree with the code.

Their command lines are parsed, their options exist, and their tables have the values of the code.
"""

from __future__ import annotations

import configparser
import importlib
import re
import shlex
from pathlib import Path

import attrs
import pytest
from pages import DOCS, read_page
from test_guide_pages import COMMANDS, FLAGS, parse_command_line

from elasticlib import (
    CheckpointManager,
)
from elasticlib.launch.flags import CONF, integer, number
from elasticlib.launch.flags import FLAGS as ROWS
from elasticlib.options import HangLimits, LaunchOptions, value_at

ROOT = DOCS.parent
PAGES = [
    *("comparison.md", "concepts.md", "gpu.md", "installation.md", "security.md", "timeouts.md"),
    "versioning.md",
]
COMMAND_LINES = [
    (page, line)
    for page in PAGES
    for language, code in read_page(page)[1]
    if language == "sh"
    for line in code.splitlines()
]
OTHER_OPTIONS = {"--shm-size", "--index-url", "--min-np", "--max-np"}  # of Docker, pip, Horovod


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def table_rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    text = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines, f"{page} has no table below {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES)
def test_command_line_of_page_is_valid(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del page
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    program, *arguments = shlex.split(line)
    if arguments == ["--version"]:
        arguments = ["--dry-run", "train.py"]
    arguments = ["1" if text == "gpu" else text for text in arguments]  # there may be no GPU here
    if parse_command_line(program, *arguments):
        return
    if program == "pip":
        extras = set(setup_cfg()["options.extras_require"])
        named = re.findall(r"elasticlib\[([\w,]+)\]", line)
        assert {extra for names in named for extra in names.split(",")} <= extras
    else:
        assert program in {"python3", ".", "openssl", "export"}


@pytest.mark.parametrize("page", PAGES)
def test_options_that_page_names_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    code = re.findall(r"`([^`\n]+)`", text)
    named = {flag for part in code for flag in re.findall(r"(?:^|\s)(--[a-z-]+)", part)}
    named |= {match[1] for part in code if (match := re.match(r"elasticlib ([a-z]+)", part))}
    assert named <= FLAGS | COMMANDS.keys() | OTHER_OPTIONS


def test_training_script_for_gpus_trains_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    (script,) = (code for language, code in read_page("gpu.md")[1] if language == "python")
    exec(script, {})
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        assert manager.steps() == [20]


# Installation


def test_table_of_extras_is_that_of_setup_cfg() -> None:
    extras = setup_cfg()["options.extras_require"]
    rows = {row[0].strip("`"): row[2] for row in table_rows("installation.md", "Extras")}
    assert set(rows) == set(extras)
    for name, text in rows.items():
        nested, _, packages = text.rpartition("; ")
        required = extras[name].split()
        included = [re.findall(r"[\w-]+", line)[1:] for line in required if "[" in line]
        assert re.findall(r"`(\w+)`", nested) == [extra for names in included for extra in names]
        versions = {line.replace(">=", " ") for line in required if "[" not in line}
        assert set(packages.split(", ")) == versions, name


def test_requirements_of_page_are_those_of_setup_cfg() -> None:
    options = setup_cfg()["options"]
    rows = {row[0]: row[1] for row in table_rows("installation.md", "Requirements")}
    required = dict(re.findall(r"(\w+)>=([\d.]+)", options["install_requires"]))
    assert rows["Python"].startswith(options["python_requires"].removeprefix(">="))
    assert rows["torch"].startswith(required["torch"])
    assert re.findall(r"[\d.]+", rows["attrs, filelock"]) == [
        required["attrs"],
        required["filelock"],
    ]


# Timeouts

# Where the code has the limits of the table "Fixed limits", in its order.
FIXED_LIMITS = (
    "workers.process_keeper.PREPARE_TIMEOUT_S",
    "workers.fork_client.CONTINUE_AFTER_S",
    "workers.fork_client.KILL_AFTER_S",
    "workers.worker_process.FILES_TIMEOUT_S",
    "workers.worker_process.VALUE_TIMEOUT_S",
    "workers.process_keeper.CLEAN_TIMEOUT_S",
    "rendezvous.reconcile.QUICK_FAILURE_S",
    "rendezvous.reconcile.RESTART_DELAY_S",
    "agent.hang_detector.PEER_REPORT_TIMEOUT_S",
    "checkpoint.snapshot_service.FLUSH_TIMEOUT_S",
    "checkpoint.end_plan.Timeouts.total_s",
    "checkpoint.end_plan.Timeouts.peers_s",
    "checkpoint.restore.PENDING_TIMEOUT_S",
    "observe.journal.CLOSE_TIMEOUT_S",
    "stores.tcp_server.ServerLimits.handshake_timeout_s",
    "stores.tcp_server.ServerLimits.keepalive_timeout_s",
    "checkpoint.save_handle.RESULT_TIMEOUT_S",
    "checkpoint.storage.FSSPEC_TIMEOUT_S",
    "in_place.group_backend.CONNECT_TIMEOUT_S",
    "launch.metadata_services.REQUEST_TIMEOUT_S",
    "launch.metadata_services.AZURE_TIMEOUT_S",
    "launch.metadata_services.FIND_TIMEOUT_S",
    "observe.summary.STATUS_TTL_S",
    "observe.summary.REFRESH_INTERVAL_S",
    "launch.observer.CLOSE_TIMEOUT_S",
    "launch.observer.STACKS_TIMEOUT_S",
    "launch.observer.STACKS_INTERVAL_S",
    "launch.observer.POLL_INTERVAL_S",
)
# Flags that are numbers without being times.
OTHER_NUMBERS = {
    *("spares", "node_rank", "master_port", "max_restarts", "snapshot_replicas"),
    "drain_exit_code",
}


def fields_with_defaults(*classes: type) -> dict[str, object]:
    """Return the default of each field that is a number, by `Class.field`."""
    return {
        f"{kind.__name__}.{field.name}": field.default
        for kind in classes
        for field in attrs.fields(kind)
        if isinstance(field.default, float | None)
    }


def default_timeouts() -> dict[str, object]:
    """Return the default of each setting that is a time, as the page names it."""
    options = LaunchOptions()
    flags = {
        row.name: value_at(options, row.fields[0])
        for dest, row in ROWS.items()
        if row.read in (integer, number) and row.fields and dest not in OTHER_NUMBERS
    }
    flags["--shutdown-timeout"] = options.agent.shutdown_timeout_s
    keys = {
        f"--rdzv-conf {row.name}": value_at(options, row.fields[0])
        for row in CONF.values()
        if isinstance(value_at(options, row.fields[0]), int | float)
    }
    timeouts = options.rendezvous.timeouts
    attempts = timeouts.lease_ttl / timeouts.keep_alive_interval
    keys["--rdzv-conf keep_alive_max_attempt"] = attempts
    fields = fields_with_defaults(HangLimits)
    return {
        **flags,
        **keys,
        **fields,
        "--hang-timeout": None,
        "AgentOptions.kill_timeout": options.agent.kill_timeout,
        "AgentOptions.regroup_grace": options.agent.regroup_grace,
        "RendezvousTimeouts.loop_timeout": timeouts.loop_timeout,
    }


def test_table_of_timeouts_has_each_setting_with_its_default() -> None:
    rows = {row[0].strip("`"): row[1] for row in table_rows("timeouts.md", "Options")}
    defaults = default_timeouts()
    assert set(rows) == set(defaults)
    for name, default in defaults.items():
        shown = {"off": None, "auto": None}.get(rows[name], rows[name])
        assert (shown if shown is None else float(shown)) == default, name


def test_table_of_fixed_limits_has_the_values_of_the_code() -> None:
    rows = table_rows("timeouts.md", "Fixed limits")
    assert len(rows) == len(FIXED_LIMITS)
    for (text, limit), path in zip(rows, FIXED_LIMITS, strict=True):
        package, module, *names = path.split(".")
        value: object = importlib.import_module(f"elasticlib.{package}.{module}")
        for name in names:
            value = getattr(value() if isinstance(value, type) else value, name)
        assert float(limit) == value, text


def test_page_of_timeouts_has_torchs_timeouts_of_process_groups() -> None:
    constants = importlib.import_module("torch.distributed.constants")
    text = (DOCS / "timeouts.md").read_text()
    gloo = constants.default_pg_timeout.total_seconds()
    assert f"{gloo:g} seconds for gloo" in text
    if constants.default_pg_nccl_timeout is not None:  # torch was built with NCCL
        assert f"{constants.default_pg_nccl_timeout.total_seconds():g} seconds for NCCL" in text


# Versions

# The number of each format, in the order of the table "Data formats".
FORMAT_VERSIONS = (
    "stores.tcp_protocol.PROTOCOL",
    "rendezvous.store_layout.FORMAT",
    "stores.file_store._MAGIC",
    "workers.worker_channel.LAYOUT_VERSION",
    "checkpoint.catalog.MANIFEST_FORMAT",
    "checkpoint.safetensors_header.FORMAT",
    "checkpoint.catalog.FENCE_FORMAT",
    "data.position.STATE_FORMAT",
    "logical.logical_workers.STATE_FORMAT",
    "observe.event.VERSION",
    "observe.job_status.VERSION",
    "observe.summary.VERSION",
    "observe.requests.VERSION",
)


def format_version(path: str) -> int:
    """Return the number of a format from the constant that the code compares."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(f"elasticlib.{module}"), name)
    if name == "_MAGIC":  # of a FileStore: text that ends with the number
        return int(value.rpartition(" ")[2])
    # The layout of a worker's page is a number of 8 bytes, whose second half is the version.
    return int(value) & 0xFFFFFFFF


def test_table_of_data_formats_has_the_versions_of_the_code() -> None:
    rows = table_rows("versioning.md", "Data formats")
    assert [int(row[1]) for row in rows] == [format_version(path) for path in FORMAT_VERSIONS]


# Comparison


def test_comparison_defines_each_source_that_it_cites_and_no_other() -> None:
    text = (DOCS / "comparison.md").read_text()
    cited = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert cited == set(re.findall(r"^\[([\w-]+)\]: https://", text, re.MULTILINE))


def test_tables_of_comparison_have_a_cell_for_each_system() -> None:
    for heading in (
        *("After a failure", "Changing the number of nodes"),
        *("Detecting and explaining problems", "Scope"),
    ):
        assert {len(row) for row in table_rows("comparison.md", heading)} == {7}, heading
