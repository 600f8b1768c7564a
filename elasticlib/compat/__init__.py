"""torch's names and shapes: the fields of its LaunchConfig, its failures, torchrun's variables.

Only the package `launch` imports this one.
"""
