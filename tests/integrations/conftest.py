"""Tests with real frameworks, schedulers and cluster tools: `make test-integrations`.

A test is skipped if its program is not installed.
"""
