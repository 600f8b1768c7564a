"""Distributions as an installer leaves them in a folder: modules, and the metadata beside them."""

from __future__ import annotations

import os
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


def install(
    folder: Path, name: str, code: str, group: str = "elasticlib.rendezvous", **points: str
) -> Path:
    """A distribution of one module of that name, with entry points of that group."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    told = folder / f"{name}-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(METADATA.format(name=name))
    lines = [f"{point} = {target}" for point, target in points.items()]
    text = "\n".join([f"[{group}]", *lines, ""])
    (told / "entry_points.txt").write_text(text)
    return folder


def path_with(folder: Path) -> str:
    """A PYTHONPATH on which the folder's distributions are installed."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
