"""Version of the package, read by setup.cfg and by `import elasticlib` alike."""

__version__ = "0.1.0"
