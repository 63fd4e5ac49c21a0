"""Tune whole models: every matmul, reduction and attention raced on the target, winners packed into one artifact.

Public names are imported when they are first used, so `import tune_model` stays light. What is not named here may
change from version to version.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tune_model.package import load as load
    from tune_model.package.attach import Attachment as Attachment
    from tune_model.package.attach import attach as attach
    from tune_model.package.attach.attachment import NotAnsweredError as NotAnsweredError
    from tune_model.package.attach.attachment import OtherModelError as OtherModelError
    from tune_model.package.format.wire import ArtifactError as ArtifactError
    from tune_model.package.load import TunedForOtherMachineWarning as TunedForOtherMachineWarning
    from tune_model.package.load import WeightsNeededError as WeightsNeededError
    from tune_model.package.load import WritableByAllWarning as WritableByAllWarning
    from tune_model.package.parts import OtherMachineError as OtherMachineError
    from tune_model.package.signature import SignatureError as SignatureError
    from tune_model.package.signature import SigningKeyError as SigningKeyError
    from tune_model.package.system import DeviceError as DeviceError
    from tune_model.runtime.coverage import NotTunedError as NotTunedError
    from tune_model.runtime.errors import TuneModelError as TuneModelError
    from tune_model.runtime.execution.executor import InputError as InputError
    from tune_model.runtime.generation.completion import Completion as Completion
    from tune_model.runtime.generation.completion import CompletionFailedError as CompletionFailedError
    from tune_model.runtime.generation.completion import Generation as Generation
    from tune_model.runtime.generation.sampling import Sampling as Sampling
    from tune_model.runtime.generation.scheduler import Scheduler as Scheduler
    from tune_model.runtime.operators.allowed import OperatorError as OperatorError
    from tune_model.runtime.tuned import ForkedProcessError as ForkedProcessError
    from tune_model.runtime.tuned import TunedModel as TunedModel
    from tune_model.runtime.weights.bound import StaleWeightsWarning as StaleWeightsWarning
    from tune_model.runtime.weights.checkpoint import CheckpointError as CheckpointError
    from tune_model.runtime.weights.names import WeightError as WeightError

__version__ = "0.1.0"

_PUBLIC = {
    "ArtifactError": "tune_model.package.format.wire",
    "Attachment": "tune_model.package.attach",
    "CheckpointError": "tune_model.runtime.weights.checkpoint",
    "Completion": "tune_model.runtime.generation.completion",
    "CompletionFailedError": "tune_model.runtime.generation.completion",
    "DeviceError": "tune_model.package.system",
    "ForkedProcessError": "tune_model.runtime.tuned",
    "Generation": "tune_model.runtime.generation.completion",
    "InputError": "tune_model.runtime.execution.executor",
    "NotAnsweredError": "tune_model.package.attach.attachment",
    "NotTunedError": "tune_model.runtime.coverage",
    "OperatorError": "tune_model.runtime.operators.allowed",
    "OtherMachineError": "tune_model.package.parts",
    "OtherModelError": "tune_model.package.attach.attachment",
    "Sampling": "tune_model.runtime.generation.sampling",
    "Scheduler": "tune_model.runtime.generation.scheduler",
    "SignatureError": "tune_model.package.signature",
    "SigningKeyError": "tune_model.package.signature",
    "StaleWeightsWarning": "tune_model.runtime.weights.bound",
    "TuneModelError": "tune_model.runtime.errors",
    "TunedForOtherMachineWarning": "tune_model.package.load",
    "TunedModel": "tune_model.runtime.tuned",
    "WeightError": "tune_model.runtime.weights.names",
    "WeightsNeededError": "tune_model.package.load",
    "WritableByAllWarning": "tune_model.package.load",
    "attach": "tune_model.package.attach",
    "load": "tune_model.package",
}

__all__ = [
    "ArtifactError",
    "Attachment",
    "CheckpointError",
    "Completion",
    "CompletionFailedError",
    "DeviceError",
    "ForkedProcessError",
    "Generation",
    "InputError",
    "NotAnsweredError",
    "NotTunedError",
    "OperatorError",
    "OtherMachineError",
    "OtherModelError",
    "Sampling",
    "Scheduler",
    "SignatureError",
    "SigningKeyError",
    "StaleWeightsWarning",
    "TuneModelError",
    "TunedForOtherMachineWarning",
    "TunedModel",
    "WeightError",
    "WeightsNeededError",
    "WritableByAllWarning",
    "__version__",
    "attach",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the room that defines it."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
