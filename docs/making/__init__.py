"""What stands in the pages because the code says so: pictures, tables, the reference.

Nothing here is imported by elasticlib; `docs/conf.py`, `make docs` and the tests use it.
"""
