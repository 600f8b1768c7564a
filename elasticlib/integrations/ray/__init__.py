"""Elastic jobs on a Ray cluster: the agents are Ray actors, one a node, placed and replaced.

`ray_launch` is `elastic_launch` there; `python -m elasticlib.integrations.ray` is `elasticrun`.
"""

from __future__ import annotations

from .launch import ray_launch as ray_launch
from .launch import run_job as run_job
from .options import ENDPOINT as ENDPOINT
from .options import RayOptions as RayOptions

__all__ = ["ENDPOINT", "RayOptions", "ray_launch", "run_job"]
