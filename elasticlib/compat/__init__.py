"""torch's names and shapes: the fields of its LaunchConfig, its failures, and torchrun's variables.

Only `launch` imports this package, through `launching.py`.
"""
