"""Versions of elasticlib, torch and Python. setup.cfg reads `__version__` as well."""

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of elasticlib, torch and Python by name, without importing torch.

    The version of a package that is not installed is empty.
    """
    import platform
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {"elasticlib": __version__, "torch": torch, "python": platform.python_version()}
