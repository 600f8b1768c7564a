"""Soak test: one real training job, thousands of faults, and a check that no sample is lost.

`python -m soak --faults 20` (with tests/ on PYTHONPATH), or `make soak FAULTS=20`, runs it.
"""
