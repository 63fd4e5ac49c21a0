"""From a checked configuration to what the rooms take: extract's `Request`, with every path resolved."""

import importlib.util
from pathlib import Path

from tune_model.extract.request import (
    ExportedSource,
    FactorySource,
    ModelInput,
    ModelSource,
    Phase,
    Request,
    TransformersSource,
)
from tune_model.extract.task import NumericRules
from tune_model.pipeline.config import Config, ExportedModel, InputSpec, TorchModel, TransformersModel, WorkloadConfig
from tune_model.pipeline.config.rules import forward_grid
from tune_model.runtime.errors import TuneModelError

__all__ = ["ModelNotFoundError", "make_request", "model_folder", "phases_of"]


class ModelNotFoundError(TuneModelError):
    """The configuration names a model that is not on this machine.

    Attributes:
        field: Of `$.model`: the one that names it.
    """

    def __init__(self, message: str, field: str = "path") -> None:
        super().__init__(message)
        self.field = field


def make_request(config: Config, folder: Path) -> Request:
    """Translate a configuration.

    Args:
        config: Checked.
        folder: Where the configuration file lies; its relative paths start there.

    Raises:
        ModelNotFoundError: A folder, file, package or hub id is not on this machine.
        SourceError: A saved program cannot be read, or has not the dtype or the inputs asked for.
    """
    workload = config.workload
    phases = phases_of(workload)
    request = Request(
        source=_source(config.model, folder),
        dtype=config.dtype or "",
        task=config.task,
        phases=phases,
        inputs=tuple(ModelInput(i.name, i.shape, _input_dtype(i, config)) for i in config.model.inputs),
        max_length=workload.max_length or 0,
        max_batch=workload.max_batch or max(max(phase.grid.get("batch", (1,))) for phase in phases),
        rules=NumericRules(
            allow_tf32=config.search.allow_tf32,
            allow_nondeterministic=config.search.allow_nondeterministic,
            batch_invariant=config.search.batch_invariant,
        ),
    )
    if not isinstance(config.model, ExportedModel):
        return request
    from tune_model.extract.tracing.exported import settle_exported

    return settle_exported(request)


def _input_dtype(spec: InputSpec, config: Config) -> str:
    """Return an input's dtype: the model's own by default, of a saved program whatever it takes there."""
    return spec.dtype or ("" if isinstance(config.model, ExportedModel) else config.dtype or "")


def phases_of(workload: WorkloadConfig) -> tuple[Phase, ...]:
    """Return the phases of a workload, in the order they are traced."""
    phases: list[Phase] = []
    if workload.prefill is not None:
        grid = {"batch": workload.prefill.batch, "sequence": workload.prefill.sequence}
        phases.append(Phase("prefill", grid, workload.prefill.weight))
    if workload.decode is not None:
        grid = {"batch": workload.decode.batch, "context": workload.decode.context}
        phases.append(Phase("decode", grid, workload.decode.weight))
    if workload.forward is not None:
        phases.append(Phase("forward", forward_grid(workload.forward), workload.forward.weight))
    return tuple(phases)


def _source(model: TransformersModel | TorchModel | ExportedModel, folder: Path) -> ModelSource:
    if isinstance(model, TorchModel):
        return FactorySource(model.factory, None if model.path is None else str(_existing(folder / model.path)))
    if isinstance(model, ExportedModel):
        return ExportedSource(str(_existing(folder / model.path)))
    if model.config is not None:
        return TransformersSource(config=model.config, architecture=model.architecture)
    place = _hub_folder(model.hub, model.revision) if model.hub is not None else model_folder(model.path or "", folder)
    return TransformersSource(folder=str(place), architecture=model.architecture)


def _existing(path: Path) -> Path:
    if not path.exists():
        msg = f"{path} does not exist; expected a file or folder of the model"
        raise ModelNotFoundError(msg)
    return path.resolve()


def model_folder(text: str, folder: Path) -> Path:
    """Return a model's place: a path from `folder`, or `package:NAME/FOLDER` inside an installed Python package.

    Raises:
        ModelNotFoundError: It is not there.
    """
    if not text.startswith("package:"):
        return _existing(folder / text)
    name, _, inner = text.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(name) if name else None
    except (ImportError, ValueError):  # a package inside a package that is not there, or no package's name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        msg = f"{text!r}: no Python package {name!r} is installed; expected package:NAME/FOLDER of one that is"
        raise ModelNotFoundError(msg)
    return _existing(Path(spec.submodule_search_locations[0]) / inner)


def _hub_folder(hub: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        msg = (
            f"{hub!r} is not in the local hub cache; download it first (hf download {hub}) or give $.model.path instead"
        )
        raise ModelNotFoundError(msg, "hub") from error
