"""Configurations without a fault, and one fault at a time to put into them (tests/data/config_faults.yaml)."""

import yaml
from sources import ROOT

CAUSAL = """\
name: tiny
model:
  source: transformers
  config: {model_type: llama, max_position_embeddings: 128}
task: causal-lm
dtype: float32
workload:
  max_length: 64
  max_batch: 4
  prefill: {batch: [1], sequence: [8, 32]}
  decode:
    batch: [1, 2]
    context: [32]
target: cpu
search: {effort: quick}
"""

FORWARD = """\
name: other
model:
  source: torch
  factory: package.module:build
  inputs:
    - {name: x, shape: [batch, 3, width], dtype: float32}
    - {name: y, shape: [batch], dtype: int64}
task: forward
workload:
  forward:
    batch: [1, 2]
    grid: {width: [8, 16]}
"""

ENCODER = """\
name: encoder
model: {source: transformers, config: {model_type: bert, max_position_embeddings: 64}}
task: encoder
workload:
  forward: {batch: [1], sequence: [16]}
"""

GOOD = {"causal": CAUSAL, "forward": FORWARD, "encoder": ENCODER}
FAULTS = yaml.safe_load((ROOT / "tests" / "data" / "config_faults.yaml").read_text(encoding="utf-8"))
