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

from .campaign import Campaign, CampaignError, draw, read, usual_mix, write

INSIDE = "SOAK_INSIDE"
DEAR = ("store", "hang", "stopped", "partition", "full", "corrupt")
_MOUNT = (
    "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs -o size=64m tmpfs \"$1\" && shift && "
    'exec "$@"'
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


def inside(args: argparse.Namespace, arguments: list[str]) -> list[str] | None:
    """The command that runs this with a shared memory of its own and a small disk for the
    checkpoints; None where that is not permitted."""
    command = ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", str(args.folder / "checkpoints")]
    if shutil.which("unshare") is None:
        return None
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        return None
    return [*command, sys.executable, "-m", "soak", *arguments, "--folder", str(args.folder)]


def run(args: argparse.Namespace) -> int:
    # Late, as they import torch, which the help needs not.
    from .nodes import SoakFailed
    from .play import play

    try:
        campaign = campaign_of(args, INSIDE in os.environ)
    except (CampaignError, OSError, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "campaign.jsonl").write_text(write(campaign))
    try:
        return play(args.folder, campaign, args.out, own_memory=INSIDE in os.environ)
    except SoakFailed as error:
        print(f"soak: FAILED: {error}", file=sys.stderr)
        return 1


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    if args.folder is not None:
        return run(args)
    args.folder = Path(tempfile.mkdtemp(prefix="soak-"))
    (args.folder / "checkpoints").mkdir()
    (args.folder / "tmp").mkdir()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {"SOAK_TAG": uuid.uuid4().hex, "TMPDIR": str(args.folder / "tmp")}
    os.environ |= {"OMP_NUM_THREADS": "1"}
    try:
        command = inside(args, arguments)
        if command is None:
            print("soak: no mounts are permitted here, so no disk can be full", file=sys.stderr)
            return run(args)
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode
    finally:
        if args.keep:
            print(f"the job's folder: {args.folder}")
        else:
            shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
