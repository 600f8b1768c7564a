"""The secret of a job: its sources, the nodes that it rejects, and processes that never see it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from jobs import Job, check_consistent_world
from launch_commands import DUMP_ENVIRONMENT, SPAWN, run
from ports import free_port

from elasticlib import RendezvousOptions
from elasticlib.errors import ConfigError
from elasticlib.launch.secret import read_secret

VARIABLE = "ELASTICLIB_SECRET"
SECRET = b"sixteen or more bytes"


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (SECRET + b"\n", SECRET),
        (SECRET, SECRET),
        (SECRET + b"\n\n", SECRET + b"\n"),
        (b" " + SECRET + b" \xff", b" " + SECRET + b" \xff"),
    ],
)
def test_secret_is_the_content_of_a_file_without_one_final_newline(
    tmp_path: Path, content: bytes, secret: bytes
) -> None:
    (tmp_path / "secret").write_bytes(content)
    assert read_secret({}, str(tmp_path / "secret"), "--secret-file") == secret


def test_secret_in_the_environment_has_the_same_bytes_as_in_a_file() -> None:
    environment = {VARIABLE: SECRET.decode() + "\udcff"}
    assert read_secret(environment, None, "--secret-file") == SECRET + b"\xff"
    assert read_secret({}, None, "--secret-file") is None


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 70_000, b"fifteen bytes!!\n"])
def test_file_with_an_invalid_secret_is_rejected_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match=r"--secret-file .*secret' holds 16 to 65536 bytes"):
        read_secret({}, str(tmp_path / "secret"), "--secret-file")


def test_missing_file_empty_variable_and_two_sources_are_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--secret-file .*none' cannot be read: No such file"):
        read_secret({}, str(tmp_path / "none"), "--secret-file")
    with pytest.raises(ConfigError, match=f"{VARIABLE} holds 16 to 65536 bytes, got 15: ") as error:
        read_secret({VARIABLE: "fifteen bytes!!"}, None, "--secret-file")
    assert "fifteen" not in str(error.value)
    with pytest.raises(ConfigError, match=f"{VARIABLE} is empty"):
        read_secret({VARIABLE: ""}, None, "--secret-file")
    (tmp_path / "secret").write_text("same")
    with pytest.raises(ConfigError, match=f"{VARIABLE} and --secret-file both") as raised:
        read_secret({VARIABLE: "same"}, str(tmp_path / "secret"), "--secret-file")
    assert "same" not in str(raised.value)


def test_a_secret_file_is_accepted_with_any_store(tmp_path: Path) -> None:
    """Requests of operators are signed with it, also where the store itself does not check it."""
    options = RendezvousOptions(
        endpoint=str(tmp_path), run_id="job", backend="file", secret_file="path"
    )
    assert options.secret_file == "path"
    with pytest.raises(ConfigError, match="secret_file must be the path of a file"):
        RendezvousOptions(secret_file="")


@pytest.mark.faults
def test_nodes_with_the_secret_run_the_job_and_others_are_rejected_with_the_reason(
    job: Job,
) -> None:
    (job.folder / "secret").write_text("open sesame, please\n")
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes", "2:3", "--rdzv-endpoint", endpoint)
    conf = ("--rdzv-conf", f"secret_file={job.folder / 'secret'}")
    host = job.start_agent("host", *flags, **{VARIABLE: "open sesame, please"})
    host.wait_for_log("this node hosts the store")
    wrong = job.start_agent("wrong", *flags, **{VARIABLE: "open barley, please"})
    none = job.start_agent("none", *flags)
    guest = job.start_agent("guest", *flags, *conf)
    check_consistent_world(job.wait_for_world(2))
    assert (wrong.exit_code(), none.exit_code()) == (1, 1)
    assert (
        f"{endpoint} has another secret than this client, or is not our store: give all nodes"
        in wrong.text
    )
    assert f"{endpoint} asks for a shared secret, and this client has none: give" in none.text
    job.finish()
    assert (host.exit_code(), guest.exit_code()) == (0, 0)
    for node in job.nodes:
        assert "open sesame, please" not in node.text
        assert "open barley, please" not in node.text


@pytest.mark.faults
def test_node_with_a_secret_rejects_a_store_without_one(job: Job) -> None:
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", job.start_store())
    node = job.start_agent("a", *flags, **{VARIABLE: "open sesame, please"})
    assert node.exit_code() == 1
    assert "asks for no secret, and this client has one" in node.text


@pytest.mark.faults
def test_workers_do_not_inherit_the_secret(tmp_path: Path) -> None:
    (tmp_path / "dump.py").write_text(DUMP_ENVIRONMENT)
    script = (str(tmp_path / "dump.py"), str(tmp_path))
    done = run(*SPAWN, *script, **{VARIABLE: "open sesame, please"})
    assert done.returncode == 0, done.stderr
    assert VARIABLE not in json.loads((tmp_path / "0.json").read_text())


@pytest.mark.faults
def test_two_sources_of_the_secret_are_an_error_before_anything_starts(tmp_path: Path) -> None:
    flags = ("--rdzv-conf", "secret_file=s", "--no-python", "touch", str(tmp_path / "started"))
    done = run(*SPAWN, *flags, **{VARIABLE: "open sesame, please"})
    assert done.returncode == 2
    assert done.stderr == (
        "elasticrun: error: ELASTICLIB_SECRET and --rdzv-conf secret_file both give a secret: "
        "remove one of them\n"
    )
    assert not (tmp_path / "started").exists()


@pytest.mark.faults
def test_store_command_requires_the_secret_of_its_file(job: Job) -> None:
    (job.folder / "secret").write_text("open sesame, please\n")
    command = (sys.executable, "-m", "elasticlib.launch.cli", "store", "--bind", "127.0.0.1:0")
    store = job.start("store", *command, "--secret-file", str(job.folder / "secret"))
    endpoint = store.wait_for_log(r"(127\.0\.0\.1:\d+)").group(1)
    job.finish()
    node = job.start_agent("a", "--rdzv-endpoint", endpoint, **{VARIABLE: "open sesame, please"})
    assert node.exit_code() == 0
    rejected = job.start("rejected", *command, "--secret-file", "/nowhere")
    assert rejected.exit_code() == 2
    assert "--secret-file '/nowhere' cannot be read: No such file" in rejected.text
