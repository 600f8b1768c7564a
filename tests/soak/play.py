"""One soak from its beginning to its report."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .campaign import Campaign
from .proof import TAG, left, undisturbed, wrong_with
from .report import Rates, as_json, as_markdown, as_text
from .stage import Stage, now
from .storm import storm
from .under_torchrun import Trial


def play(folder: Path, campaign: Campaign, out: Path, *, own_memory: bool) -> int:
    """Exit code 0 if nothing was lost. Raises SoakFailed where the job did not come to its end."""
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
    print(as_text(found))
    print("something was lost" if wrong else "nothing was lost")
    return 1 if wrong else 0


def play_under_torchrun(folder: Path, campaign: Campaign, out: Path, seconds: float) -> int:
    """As far as it gets, in so many seconds at most; exit code 0 however far that is."""
    began = now()

    def say(text: str) -> None:
        print(f"{now() - began:7.1f} s {text}", flush=True)

    told = Trial(folder, say).play(campaign, seconds).as_json()
    (out / "torchrun.json").write_text(json.dumps(told, indent=1) + "\n")
    faults = [life["faults"] for life in told["lives"]]
    print(f"started {len(faults)} times, for {faults} faults; recoveries {told['all']}")
    return 0
