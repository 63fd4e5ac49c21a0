"""From a checked configuration to programs and tasks; what extract refuses is said where the configuration asks it."""

from typing import TYPE_CHECKING

from tune_model.pipeline.config import ConfigError, LoadedConfig, TorchModel, TransformersModel
from tune_model.pipeline.request import ModelNotFoundError, make_request
from tune_model.pipeline.streams import prints_of_others
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    from tune_model.extract.plan import Extraction
    from tune_model.extract.request import Request
    from tune_model.pipeline.config import Config

__all__ = ["extract_configured"]


def extract_configured(loaded: LoadedConfig) -> "tuple[Request, Extraction]":
    """Trace the model of a configuration and bind its workload.

    Raises:
        ConfigError: The model is not here, cannot be built or traced, or does not run at the sizes of the workload.
    """
    from tune_model.extract.plan import extract
    from tune_model.extract.regions.group import Grouping
    from tune_model.extract.tracing.exported import SavedDtypeError
    from tune_model.extract.tracing.front_end import GridError

    try:
        request = make_request(loaded.config, loaded.folder)
        effort = loaded.config.search.effort
        # Residual sums in another place make new matmuls, which take longest to tune; heads within attention do not.
        widest = Grouping(sums_with_norms=effort == "thorough", heads_with_attention=effort != "quick")
        with prints_of_others():
            return request, extract(request, operators=loaded.config.workload.operators, widest=widest)
    except ConfigError:
        raise
    except ModelNotFoundError as error:
        raise loaded.place(error, ("model", error.field)) from error
    except SavedDtypeError as error:
        raise loaded.place(error, ("dtype",)) from error
    except GridError as error:
        raise loaded.place(error, ("workload",)) from error
    except TuneModelError as error:
        raise loaded.place(error, ("model", _source_field(loaded.config))) from error


def _source_field(config: "Config") -> str:
    """Return the field that says which model it is."""
    match config.model:
        case TransformersModel(config=None, hub=None):
            return "path"
        case TransformersModel(config=None):
            return "hub"
        case TransformersModel():
            return "config"
        case TorchModel():
            return "factory"
    return "path"
