"""Sharded state is committed by all ranks at once, and read at any other world size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "programs" / "sharding_worker.py"


def run(folder: Path, world: int, act: str) -> list[str]:
    """What the ranks print."""
    store = folder.parent / f"store.{world}.{act}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(store), str(rank), str(world), act],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for text in said:
        assert text.endswith("done\n"), text
    return said


def test_fsdp2_and_dtensors_saved_at_two_ranks_are_loaded_at_two_and_at_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    said = run(folder, 2, "save")
    assert "refused: step 4 was not saved: rank 1 failed, and says why" in said[0]
    assert "refused: " in said[1]
    assert sorted(os.listdir(folder)) == [
        ".lock",
        "fence.json",
        "step-0000000002",
        "step-0000000003",
    ]
    newest = folder / "step-0000000003"
    names = sorted(name.partition(".")[0] for name in os.listdir(newest))
    assert names == ["manifest", "part-00000", "part-00001"]
    run(folder, 1, "load")


def test_sharded_state_needs_a_folder_that_all_ranks_share(tmp_path: Path) -> None:
    code = (
        "import torch, torch.distributed as dist, sys; from elasticlib import CheckpointManager;"
        "from torch.distributed.tensor import distribute_tensor, Shard;"
        "from torch.distributed.device_mesh import init_device_mesh as mesh;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "t = distribute_tensor(torch.ones(2), mesh('cpu', (1,)), [Shard(0)]);"
        "CheckpointManager(sys.argv[1], shared=False).save(1, t)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], timeout=60, capture_output=True, text=True
    )
    assert "sharded state needs one folder that all ranks see" in ended.stderr
