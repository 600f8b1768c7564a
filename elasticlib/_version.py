"""The package's version, read by setup.cfg and by `import elasticlib`, and those of its company."""

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Which elasticlib, torch and Python this is, by name, without importing torch; empty for what
    is not installed."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {"elasticlib": __version__, "torch": torch, "python": platform.python_version()}
