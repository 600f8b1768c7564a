"""Under what other people ship: frameworks, schedulers, cluster tools. `make test-integrations`.

Each is skipped, and says so, where what it needs is not installed.
"""
