"""`python -m soak --faults 20`: plays a fault campaign against a training job, and counts.

Exit code 0 means that nothing was lost; 1 comes with a sentence for each thing that was.
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

from elasticlib.workers.supervisor_protocol import set_parent_death_signal

from .campaign import Campaign, CampaignError, draw, read, usual_mix, write
from .proof import TAG, left, undisturbed, wrong_with
from .report import Rates, as_json, as_markdown
from .stage import Stage, now
from .storm import storm

INSIDE = "SOAK_INSIDE"
DEAR = ("store", "hang", "stopped", "partition", "full", "corrupt")
_SPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# The shell stays, as the first process of a namespace must reap what others leave.
_MOUNT = (
    "mount -t tmpfs tmpfs /dev/shm || exit; "
    'mount -t tmpfs -o size=64m tmpfs "$1" || exit; shift; "$@"; exit $?'
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign (default 0)")
    parser.add_argument("--campaign", type=Path, help="play the one in this file instead")
    parser.add_argument("--spacing", default="15:25", help="steps between two, MIN:MAX")
    parser.add_argument("--only", default="", help="kinds to draw from, with commas between")
    parser.add_argument("--cheap", action="store_true", help=f"none of {', '.join(DEAR)}")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="a folder for what is found")
    parser.add_argument("--keep", action="store_true", help="keep the job's own folder")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def campaign_of(args: argparse.Namespace, room: bool) -> Campaign:
    """room: whether there is a small disk to fill."""
    if args.campaign is not None:
        found = read(args.campaign.read_text())
        if not room and any(fault.kind == "full" for fault in found.faults):
            raise CampaignError("full needs a disk of its own, and mounts are not permitted here")
        return found
    without = [*(DEAR if args.cheap else ()), *(() if room else ("full",))]
    mix = usual_mix(without)
    if args.only:
        mix = {name: mix.get(name, 0) for name in args.only.split(",")}
    low, _, high = args.spacing.partition(":")
    return draw(args.seed, args.faults, mix, (int(low), int(high or low)))


def can_mount() -> bool:
    """Whether this process may have a shared memory of its own, and a small disk to fill."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_SPACES, "sh", "-c", _MOUNT, "sh", folder, "true"]
        found = shutil.which("unshare") is not None
        return found and not subprocess.run(command, capture_output=True, check=False).returncode


def run(args: argparse.Namespace, campaign: Campaign) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "campaign.jsonl").write_text(write(campaign))
    try:
        return play(args.folder, campaign, args.out, own_memory=INSIDE in os.environ)
    except AssertionError as error:
        print(f"soak: FAILED: {error}", file=sys.stderr)
        return 1


def play(folder: Path, campaign: Campaign, out: Path, *, own_memory: bool) -> int:
    """Exit code 0 if nothing was lost. Raises AssertionError if the job does not end in time."""
    began = now()

    def say(text: str) -> None:
        print(f"{now() - began:7.1f} s {text}", flush=True)

    say(f"{len(campaign.faults)} faults over {campaign.steps} steps, seed {campaign.seed}")
    stage = Stage(folder, campaign.steps)
    try:
        told = storm(stage, campaign, say, out / "played.jsonl")
    finally:
        stage.close()
    steps = stage.ledger.steps.values()
    wall = max(step.done for step in steps) - min(step.began for step in steps) - stage.ledger.held
    gone = left(os.environ[TAG], folder / "tmp", own_memory)
    say(f"the undisturbed run of {campaign.steps} steps, in one process")
    calm = undisturbed(folder, campaign.steps)
    wrong = [*told.wrong, *wrong_with(stage, calm), *gone]
    rates = Rates(campaign.steps, stage.ledger.useful_seconds(), wall, calm.seconds)
    asides = ["the store is cut and killed alone: a partition leaves the workers' own network"]
    if not own_memory:
        asides.append("shared memory was not counted: it is others', too")
    found = as_json(campaign, told, rates, wrong, asides)
    (out / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "soak.md").write_text(as_markdown(found))
    print(as_markdown(found))
    print("something was lost" if wrong else "nothing was lost")
    return 1 if wrong else 0


def begin(args: argparse.Namespace, campaign: Campaign, arguments: list[str], room: bool) -> int:
    """Make the job's folder, and run it there, in a mount namespace where that is permitted."""
    args.folder = Path(tempfile.mkdtemp(prefix="soak-"))
    for name in ("checkpoints", "tmp"):
        (args.folder / name).mkdir()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {TAG: uuid.uuid4().hex, "TMPDIR": str(args.folder / "tmp")}
    os.environ["OMP_NUM_THREADS"] = "1"
    mounted = (*_SPACES, "sh", "-c", _MOUNT, "sh", str(args.folder / "checkpoints"))
    again = (sys.executable, "-m", "soak", *arguments, "--folder", str(args.folder))
    try:
        if not room:
            print("soak: no mounts are permitted here, so no disk can be full", file=sys.stderr)
            return run(args, campaign)
        environment = {**os.environ, INSIDE: "1"}
        mine = os.getpid()
        # All that is in the namespaces ends with the process that has made them.
        done = subprocess.run(
            (*mounted, *again),
            env=environment,
            preexec_fn=lambda: set_parent_death_signal(mine),
            check=False,
        )
        return done.returncode
    finally:
        if args.keep:
            print(f"the job's folder: {args.folder}")
        else:
            shutil.rmtree(args.folder, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    inside = args.folder is not None
    try:
        room = inside or can_mount()
        campaign = campaign_of(args, room)
    except (CampaignError, OSError, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    return run(args, campaign) if inside else begin(args, campaign, arguments, room)


if __name__ == "__main__":
    sys.exit(main())
