"""hivemind's DHT without the rest of hivemind: its `__init__` files import torch and all else (2 s, 250 MB); this takes 0.1 s, 40 MB.

While the context is open, `hivemind`, `hivemind.utils` and `hivemind.dht` are bare packages: submodules are found on disk as usual, and a
name that a submodule wants from a package is looked up in that package's submodules. Afterwards the bare packages are gone, so that a
later `import hivemind` by somebody else gets the real one, with the very same submodules.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

_PACKAGES: Final = ("hivemind", "hivemind.utils", "hivemind.dht")
# Asked in this order before the others, which may import torch.
_LIGHT: Final = ("serializer", "logging", "timed_storage", "asyncio", "nested", "performance_ema")


@contextmanager
def packages() -> Iterator[None]:
    """Import hivemind's submodules inside. Raises: ImportError: hivemind is not installed."""
    if "hivemind" in sys.modules:
        yield
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("hivemind is not installed")
    warning = logging.getLevelName(logging.WARNING)
    root = next(iter(spec.submodule_search_locations))
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = ["/".join([root, *name.split(".")[1:]])]
        package.__getattr__ = _finder(name, package.__path__)  # type: ignore[method-assign]
        sys.modules[name] = package
    try:
        yield
    finally:
        for name in _PACKAGES:
            sys.modules.pop(name, None)
        logging.addLevelName(logging.WARNING, warning)  # hivemind renames the level for the whole process


def _finder(package: str, path: list[str]) -> Callable[[str], object]:
    """The `__getattr__` of a bare package."""
    found = [module.name for module in pkgutil.iter_modules(path)]
    order = [*(name for name in _LIGHT if name in found), *(name for name in found if name not in _LIGHT)]

    def find(name: str) -> object:
        if name.startswith("__") or name in found or package == "hivemind":  # a submodule, which Python then finds by itself
            raise AttributeError(f"{package} has no {name} yet")
        for module in order:
            loaded = importlib.import_module(f"{package}.{module}")
            if hasattr(loaded, name):
                return getattr(loaded, name)
        raise AttributeError(f"{package} has no {name}")

    return find
