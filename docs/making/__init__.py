"""Programs that make parts of the documentation: pictures, tables, outputs and the reference.

`make docs`, `make picture` and the tests use them. elasticlib does not import them.
"""
