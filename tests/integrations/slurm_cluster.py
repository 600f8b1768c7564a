"""A Slurm cluster for tests: a controller and nodes, each in its own network namespace.

With namespaces (tests/hosts.py), the cluster has its own names and ports, a node can lose its
power, and nothing is left after the tests. The Debian packages slurmctld, slurmd and slurm-client
are required.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Cluster, Host, reason_hosts_unavailable
from jobs import TAG, Job, Node, leftover_files

from elasticlib.testing.waiting import wait_until

TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
GPUS = 2  # generic resources of each node, without devices
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
# A lost node is noticed after so many seconds, and one that comes back may serve again.
SlurmdTimeout=5
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
JobRequeue=1
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE
{nodes}
"""


class Slurm:
    """A controller on the host `head`, and nodes n1, n2 and so on."""

    def __init__(self, cluster: Cluster, folder: Path, count: int) -> None:
        self._cluster = cluster
        self.folder = folder
        self.head = cluster.add_host("head")
        self.nodes = {f"n{i}": cluster.add_host(f"n{i}") for i in range(1, count + 1)}
        for number in range(GPUS):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        (folder / "state").mkdir()
        self.configuration = folder / "slurm.conf"
        gpus = f"CPUs=2 Gres=gpu:{GPUS}"
        lines = [f"NodeName={n} NodeAddr={h.address} {gpus}" for n, h in self.nodes.items()]
        text = _CONFIGURATION.format(
            head=self.head, address=self.head.address, folder=folder, nodes="\n".join(lines)
        )
        self.configuration.write_text(text)

    def start(self) -> None:
        self._daemon(self.head, "slurmctld", "-D")
        for name in self.nodes:
            self.serve(name)
        self.wait_until_idle()

    def serve(self, name: str) -> None:
        self._daemon(self.nodes[name], "slurmd", "-D", "-N", name)

    def repair(self, name: str) -> None:
        """Restart a node that has lost its power, and delete its temporary files."""
        self.nodes[name].power_on()
        self.serve(name)
        self.wait_until_idle()
        for path in leftover_files(self._cluster.job.temporary):
            shutil.rmtree(path)

    def wait_until_idle(self) -> None:
        """Wait until no job is on any node."""
        wait_until("the nodes to be idle", lambda: self._states() == {"idle"}, 30.0)

    def _daemon(self, host: Host, name: str, *flags: str) -> Node:
        program = shutil.which(name)
        assert program is not None
        return host.start(f"{name}-{host}", program, *flags, SLURM_CONF=str(self.configuration))

    def _states(self) -> set[str]:
        return set(self.run_command("sinfo", "-h", "-N", "-o", "%T", check=False).split())

    def run_command(self, *command: str, check: bool = True, **extra: str) -> str:
        """Run a command of Slurm on the host of the controller, and return its output."""
        own = {
            "SLURM_CONF": str(self.configuration),
            "TMPDIR": str(self._cluster.job.shortcut),
            TAG: self._cluster.job.tag,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        process = subprocess.run(
            self.head.namespaces.enter(*command),
            env={**os.environ, **own, **extra},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert process.returncode == 0 or not check, f"{command}: {process.stdout}{process.stderr}"
        return process.stdout

    def submit(self, script: Path, *flags: str, **extra: str) -> str:
        """Submit a batch script, whose output is in JOB.out next to it. Return the job id."""
        where = (f"--chdir={script.parent}", f"--output={script.parent}/%A.out")
        return self.run_command(
            "sbatch", "--parsable", *where, *flags, str(script), **extra
        ).strip()

    def field(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`, such as JobState."""
        text = self.run_command("scontrol", "--oneliner", "show", "job", job)
        match = re.search(rf"\b{name}=(\S*)", text)
        assert match is not None, f"{name} of {text}"
        return match.group(1)

    def wait_for_state(
        self, job: str, state: str, *, details: Callable[[], str] | None = None
    ) -> None:
        def has_state() -> bool:
            return self.field(job, "JobState") == state

        wait_until(f"job {job} to be {state}", has_state, details=details)

    def cancel(self) -> None:
        """Cancel all jobs."""
        self.run_command("scancel", "--user=root", check=False)
        self.run_command("scancel", "--signal=KILL", "--user=root", check=False)


_MISSING = ", ".join(tool for tool in TOOLS if shutil.which(tool) is None)
_WHERE = "install slurmctld, slurmd and slurm-client"
needs_slurm = pytest.mark.skipif(bool(_MISSING), reason=f"no {_MISSING} here: {_WHERE}")


def _reason_unavailable() -> str:
    if _MISSING:
        return f"no {_MISSING} here: {_WHERE}"
    return reason_hosts_unavailable() or ("" if os.getuid() == 0 else "Slurm's daemons need root")


@pytest.fixture(scope="module")
def module_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a cluster with two nodes for all tests of a file."""
    if _reason_unavailable():
        pytest.skip(_reason_unavailable())
    job = Job(tmp_path_factory.mktemp("slurm"))
    cluster = Cluster(job)
    # The path is short, because the paths of sockets in it have a length limit.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        slurm = Slurm(cluster, folder, 2)
        slurm.start()
        yield slurm
        slurm.cancel()
        slurm.wait_until_idle()
        job.close()
        job.wait_until_gone()
        assert not leftover_files(job.temporary)
    finally:
        cluster.close()
        shutil.rmtree(folder)


@pytest.fixture
def slurm(module_slurm: Slurm) -> Iterator[Slurm]:
    """Return the cluster without any job, and cancel all jobs after the test."""
    module_slurm.wait_until_idle()
    yield module_slurm
    module_slurm.cancel()
    module_slurm.wait_until_idle()
