"""The request behind an artifact, with the model where its configuration says: an artifact itself holds no paths."""

from pathlib import Path
from typing import TYPE_CHECKING

from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    from tune_model.extract.request import Request
    from tune_model.package.read import Artifact

__all__ = ["stored_request"]


def stored_request(artifact: "Artifact", folder: Path) -> "Request":
    """Return what extract was asked for.

    Where the configuration's model is not here, it is the request in the manifest: for transformers models the same
    configuration, but no weights.

    Args:
        artifact: Open.
        folder: Where relative paths of the configuration start.
    """
    from tune_model.pipeline.config import parse_config
    from tune_model.pipeline.request import make_request

    try:
        return make_request(parse_config(artifact.config(), str(artifact.path)), folder)
    except TuneModelError:
        # Made elsewhere, or by a version whose configurations had other fields.
        return artifact.manifest.request
