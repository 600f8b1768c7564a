"""Run a fault campaign against a training job: `python -m soak --faults 20`.

The exit code is 0 if nothing was lost. It is 1 otherwise, with a sentence for each loss, and 2 if
the campaign is invalid.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from elasticlib.workers.process_setup import set_parent_death_signal

from .campaign import Campaign, CampaignError, default_mix, draw, read, write
from .campaign_runner import run_campaign
from .report import Rates, as_json, as_markdown
from .soak_job import SoakJob, now
from .verification import TAG, find_leftovers, find_violations, run_baseline

INSIDE_NAMESPACES = "SOAK_INSIDE"  # the environment variable of the process in the namespaces
EXPENSIVE_KINDS = ("store", "hang", "stopped", "partition", "full", "corrupt")
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# The shell keeps running, because the first process of a namespace must reap orphans.
_MOUNT = (
    "mount -t tmpfs tmpfs /dev/shm || exit; "
    'mount -t tmpfs -o size=64m tmpfs "$1" || exit; shift; "$@"; exit $?'
)
NOTES = ("The store is partitioned and killed alone: the network of the workers keeps working.",)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="number of faults (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the campaign (default: 0)")
    parser.add_argument("--campaign", type=Path, help="run the campaign in this file instead")
    parser.add_argument("--spacing", default="15:25", help="steps between faults, MIN:MAX")
    parser.add_argument("--only", default="", help="comma-separated kinds of fault to draw from")
    parser.add_argument(
        "--cheap", action="store_true", help=f"without {', '.join(EXPENSIVE_KINDS)}"
    )
    parser.add_argument("--out", type=Path, default=Path("soak"), help="directory for the results")
    parser.add_argument("--keep", action="store_true", help="keep the directory of the job")
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def create_campaign(options: argparse.Namespace, has_disk: bool) -> Campaign:
    """Return the campaign that the command line describes.

    Args:
        options: The options of the command line.
        has_disk: The job has a small disk of its own, which can be filled.
    """
    if options.campaign is not None:
        campaign = read(options.campaign.read_text())
        if not has_disk and any(fault.kind == "full" for fault in campaign.faults):
            raise CampaignError("the fault `full` needs a mount, and mounts are not permitted here")
        return campaign
    excluded = [*(EXPENSIVE_KINDS if options.cheap else ()), *(() if has_disk else ("full",))]
    mix = default_mix(excluded)
    if options.only:
        mix = {name: mix.get(name, 0) for name in options.only.split(",")}
    low, _, high = options.spacing.partition(":")
    return draw(options.seed, options.faults, mix, (int(low), int(high or low)))


def can_mount() -> bool:
    """Return whether a child of this process may have its own shared memory and a small disk."""
    with tempfile.TemporaryDirectory() as directory:
        command = [*_UNSHARE, "sh", "-c", _MOUNT, "sh", directory, "true"]
        if shutil.which("unshare") is None:
            return False
        return not subprocess.run(command, capture_output=True, check=False).returncode


def run_soak(options: argparse.Namespace, campaign: Campaign) -> int:
    """Run the campaign in the directory of the options; return the exit code."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "campaign.jsonl").write_text(write(campaign))
    try:
        return _run(options.dir, campaign, options.out)
    except AssertionError as error:
        print(f"soak: FAILED: {error}", file=sys.stderr)
        return 1


def _run(directory: Path, campaign: Campaign, out: Path) -> int:
    """Run the campaign, verify the job, and write the results.

    Raises:
        AssertionError: The job does not end in time.
    """
    started_at = now()

    def log(text: str) -> None:
        print(f"{now() - started_at:7.1f} s {text}", flush=True)

    log(f"{len(campaign.faults)} faults over {campaign.steps} steps, seed {campaign.seed}")
    job = SoakJob(directory, campaign.steps)
    try:
        result = run_campaign(job, campaign, log, out / "faults.jsonl")
    finally:
        job.close()
    steps = job.history.steps.values()
    span = max(step.done_at for step in steps) - min(step.started_at for step in steps)
    owns_shared_memory = INSIDE_NAMESPACES in os.environ
    leftovers = find_leftovers(os.environ[TAG], directory / "tmp", owns_shared_memory)
    log(f"baseline: {campaign.steps} steps without faults, in one process")
    baseline = run_baseline(directory, campaign.steps)
    violations = [*result.violations, *find_violations(job, baseline), *leftovers]
    wall_s = span - job.history.waited_s
    rates = Rates(campaign.steps, job.history.useful_seconds(), wall_s, baseline.seconds)
    notes = list(NOTES)
    if not owns_shared_memory:
        notes.append("Shared memory was not checked, because other programs use it as well.")
    results = as_json(campaign, result, rates, violations, notes)
    (out / "soak.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "soak.md").write_text(as_markdown(results))
    print(as_markdown(results))
    print("something was lost" if violations else "nothing was lost")
    return 1 if violations else 0


def run_in_new_directory(
    options: argparse.Namespace, campaign: Campaign, arguments: list[str], has_disk: bool
) -> int:
    """Create the directory of the job, and run there; in a mount namespace if it is permitted."""
    options.dir = Path(tempfile.mkdtemp(prefix="soak-"))
    for name in ("checkpoints", "tmp"):
        (options.dir / name).mkdir()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {TAG: uuid.uuid4().hex, "TMPDIR": str(options.dir / "tmp")}
    os.environ["OMP_NUM_THREADS"] = "1"
    mount = (*_UNSHARE, "sh", "-c", _MOUNT, "sh", str(options.dir / "checkpoints"))
    soak = (sys.executable, "-m", "soak", *arguments, "--dir", str(options.dir))
    try:
        if not has_disk:
            print("soak: mounts are not permitted here, so no disk is filled", file=sys.stderr)
            return run_soak(options, campaign)
        pid = os.getpid()
        # All processes in the namespaces end together with the process that created them.
        process = subprocess.run(
            (*mount, *soak),
            env={**os.environ, INSIDE_NAMESPACES: "1"},
            preexec_fn=lambda: set_parent_death_signal(pid),
            check=False,
        )
        return process.returncode
    finally:
        if options.keep:
            print(f"the directory of the job: {options.dir}")
        else:
            shutil.rmtree(options.dir, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    is_inside = options.dir is not None
    try:
        has_disk = is_inside or can_mount()
        campaign = create_campaign(options, has_disk)
    except (CampaignError, OSError, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    if is_inside:
        return run_soak(options, campaign)
    return run_in_new_directory(options, campaign, arguments, has_disk)


if __name__ == "__main__":
    sys.exit(main())
