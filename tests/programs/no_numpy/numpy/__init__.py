"""Stands for a NumPy that is not installed."""

raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
