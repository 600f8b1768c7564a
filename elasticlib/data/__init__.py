"""Samplers and datasets: each sample is used exactly once at any sequence of world sizes."""
