"""Runs `python -m elasticlib.launch`, which is the same as `elasticrun`."""

from .entry import main

main()
