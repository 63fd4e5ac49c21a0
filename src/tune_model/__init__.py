"""Tune whole models: every matmul, reduction and attention raced on the target, winners packed into one artifact.

Public names are imported when they are first used, so `import tune_model` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tune_model.package import load as load
    from tune_model.package.attach import attach as attach
    from tune_model.runtime.generation.sampling import Sampling as Sampling

__version__ = "0.1.0"

_PUBLIC = {
    "Sampling": "tune_model.runtime.generation.sampling",
    "attach": "tune_model.package.attach",
    "load": "tune_model.package",
}

__all__ = ["Sampling", "__version__", "attach", "load"]


def __getattr__(name: str) -> Any:
    """Import a public name from the room that defines it."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
