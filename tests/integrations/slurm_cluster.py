"""A real Slurm for tests: a controller and nodes, each in its own network namespace.

With namespaces (tests/hosts.py), the cluster has its own names and ports, a node can lose its
power, and nothing is left after the tests. Needs Debian's slurmctld, slurmd and slurm-client.
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
GPUS = 2
"""Of each node, in name only."""
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
        self.idle()

    def serve(self, name: str) -> None:
        self._daemon(self.nodes[name], "slurmd", "-D", "-N", name)

    def repair(self, name: str) -> None:
        """A node that had lost its power, and all that was in its temporary folder."""
        self.nodes[name].power_on()
        self.serve(name)
        self.idle()
        for path in leftover_files(self._cluster.job.temporary):
            shutil.rmtree(path)

    def idle(self) -> None:
        """Waits until no job is on any node."""
        wait_until("the nodes to be idle", lambda: self._states() == {"idle"}, 30.0)

    def _daemon(self, host: Host, name: str, *flags: str) -> Node:
        program = shutil.which(name)
        assert program is not None
        return host.start(f"{name}-{host}", program, *flags, SLURM_CONF=str(self.configuration))

    def _states(self) -> set[str]:
        return set(self.tell("sinfo", "-h", "-N", "-o", "%T", check=False).split())

    def tell(self, *command: str, check: bool = True, **extra: str) -> str:
        """Run a command of Slurm on the host of the controller, and return its output."""
        own = {
            "SLURM_CONF": str(self.configuration),
            "TMPDIR": str(self._cluster.job.shortcut),
            TAG: self._cluster.job.tag,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        done = subprocess.run(
            self.head.namespaces.enter(*command),
            env={**os.environ, **own, **extra},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: Path, *flags: str, **extra: str) -> str:
        """A batch script, in its own folder, where what it says is in JOB.out; the job's id."""
        where = (f"--chdir={script.parent}", f"--output={script.parent}/%A.out")
        return self.tell("sbatch", "--parsable", *where, *flags, str(script), **extra).strip()

    def field(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`, such as JobState."""
        told = self.tell("scontrol", "--oneliner", "show", "job", job)
        found = re.search(rf"\b{name}=(\S*)", told)
        assert found is not None, f"{name} of {told}"
        return found.group(1)

    def wait_for_state(
        self, job: str, state: str, *, details: Callable[[], str] | None = None
    ) -> None:
        def has_state() -> bool:
            return self.field(job, "JobState") == state

        wait_until(f"job {job} to be {state}", has_state, details=details)

    def cancel(self) -> None:
        """End all that there is."""
        self.tell("scancel", "--user=root", check=False)
        self.tell("scancel", "--signal=KILL", "--user=root", check=False)


_MISSING = ", ".join(tool for tool in TOOLS if shutil.which(tool) is None)
_WHERE = "install slurmctld, slurmd and slurm-client"
needs_slurm = pytest.mark.skipif(bool(_MISSING), reason=f"no {_MISSING} here: {_WHERE}")


def _why_not() -> str:
    if _MISSING:
        return f"no {_MISSING} here: {_WHERE}"
    return reason_hosts_unavailable() or ("" if os.getuid() == 0 else "Slurm's daemons need root")


@pytest.fixture(scope="module")
def whole_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes, started once for a file of tests, and all gone after it."""
    if _why_not():
        pytest.skip(_why_not())
    job = Job(tmp_path_factory.mktemp("slurm"))
    cluster = Cluster(job)
    # Sockets lie in it, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        slurm = Slurm(cluster, folder, 2)
        slurm.start()
        yield slurm
        slurm.cancel()
        slurm.idle()
        job.close()
        job.wait_until_gone()
        assert not leftover_files(job.temporary)
    finally:
        cluster.close()
        shutil.rmtree(folder)


@pytest.fixture
def slurm(whole_slurm: Slurm) -> Iterator[Slurm]:
    """The same, with nothing to do before and after a test."""
    whole_slurm.idle()
    yield whole_slurm
    whole_slurm.cancel()
    whole_slurm.idle()
