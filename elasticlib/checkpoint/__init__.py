"""Checkpoints: saves to disk, snapshots in memory, and restoring at any number of ranks."""
