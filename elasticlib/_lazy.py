"""Lazy loading of public names, so that importing a package costs milliseconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, modules: Mapping[str, tuple[str, ...]], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module that loads its names on first use.

    Args:
        package: The `__name__` of the module.
        modules: The public names of each module. A module is named relative to `elasticlib`.
        submodules: The public submodules. They are also loaded on first use.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"elasticlib.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    names = sorted(module_of)
    return load, lambda: sorted([*names, *submodules]), names
