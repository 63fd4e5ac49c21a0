"""Which model an artifact is of: what tells saved coverage of one model from that of another."""

import hashlib
from typing import Any, Final

import msgspec

from tune_model.extract.request import ExportedSource, FactorySource, Request, TransformersSource
from tune_model.runtime.coverage import ModelIdentity

__all__ = ["identify"]

_DIGITS: Final = 16

_PASSING: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Fields of a transformers configuration that say who saved it and how, not which model it is."""


def identify(name: str, request: Request) -> ModelIdentity:
    """Return a model's identity, which a re-tune, another dtype or another workload leaves as it is.

    Args:
        name: As the configuration calls the model.
        request: Portable (`portable_request`), such as a manifest's.
    """
    source = request.source
    facts: list[Any] = [[item.name, item.shape] for item in request.inputs]
    match source:
        case TransformersSource():
            config = {key: value for key, value in (source.config or {}).items() if key not in _PASSING}
            kind, facts = str(config.get("model_type", "")), [*facts, config, source.architecture]
        case FactorySource():
            kind = source.factory
        case ExportedSource():
            kind = source.path
    digest = hashlib.sha256(msgspec.json.encode([kind, facts], order="deterministic")).hexdigest()
    tag = {TransformersSource: "transformers", FactorySource: "torch", ExportedSource: "pt2"}[type(source)]
    return ModelIdentity(name, request.task, f"{tag} {kind} {digest[:_DIGITS]}")
