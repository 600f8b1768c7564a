"""Logical workers: training whose weights are bitwise equal at any world size."""
