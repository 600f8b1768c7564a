"""The chaos soak: one real training job, thousands of faults, and the proof that nothing was lost.

`python -m soak --faults 20` (with tests/ on PYTHONPATH), or `make soak FAULTS=20`.
"""
