"""The configuration file: its fields, how it is read, and how what is wrong with it is said.

    text -> `document` (data, and where each value stands) -> `overrides` -> `schema` (types) -> `rules` (sense)

Nothing here imports torch or looks for a model.
"""

from tune_model.pipeline.config.loading import LoadedConfig, dump_config, load_config, parse_config, shipped_configs
from tune_model.pipeline.config.overrides import Override, parse_override
from tune_model.pipeline.config.rules import budget_seconds
from tune_model.pipeline.config.schema import (
    Config,
    ExportedModel,
    InputSpec,
    TorchModel,
    TransformersModel,
    WorkloadConfig,
    json_schema,
)
from tune_model.pipeline.config.wording import ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "ExportedModel",
    "InputSpec",
    "LoadedConfig",
    "Override",
    "TorchModel",
    "TransformersModel",
    "WorkloadConfig",
    "budget_seconds",
    "dump_config",
    "json_schema",
    "load_config",
    "parse_config",
    "parse_override",
    "shipped_configs",
]
