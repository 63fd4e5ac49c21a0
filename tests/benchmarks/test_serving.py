"""The serving benchmark's own rules: what its summary means, and that a peer that fails costs itself only."""

import math
from typing import Any, NamedTuple

import torch
from deployment.artifacts import straighten
from deployment.models import encoders, llama, tiny_llama
from deployment.summary import summarise
from deployment.timings import meet

from tune_model.pipeline.bench.interleave import Contender
from tune_model.pipeline.config.loading import parse_config


def encoder(name: str, tokens: int, ratio: float, high: float, eager: float) -> dict[str, Any]:
    return {
        "shard": "encoders",
        "row": name,
        "tokens": tokens,
        "compile_freezing_ratio": ratio,
        "compile_freezing_ratio_high": high,
        "eager_ratio": eager,
        "eager_ratio_high": eager,
    }


def test_encoders_are_summed_up_by_peer():
    rows = [encoder("a", 16, 1.0, 1.1, 2.0), encoder("b", 256, 1.44, 1.5, 3.0), encoder("c", 1024, 1.2, 1.25, 1.0)]
    made = summarise([*rows, {"shard": "encoders", "row": "d", "failed": "x"}])
    assert math.isclose(made["encoder_geomean_vs_freezing"], (1.0 * 1.44 * 1.2) ** (1 / 3))
    assert made["encoder_worst_vs_freezing"] == 1.1
    assert math.isclose(made["encoder_geomean_vs_eager"], 6**0.5)
    assert made["encoder_rows"] == 3
    assert "encoder_geomean" not in made


def test_llama_rows_become_the_names_they_are_known_by():
    decode = {"shard": "decode", "row": "b1", "tuned_ms": 4.0, "max_autotune_ms": 6.0, "max_autotune_ratio": 1.5}
    decode |= {"tuned_wall_ms": 4.5, "max_autotune_called_ms": 6.25, "max_autotune_called_wall_ms": 7.0}
    prefill = {"shard": "prefill", "row": "2048", "tuned_ms": 46.0}
    made = summarise([decode, prefill])
    assert made["decode_b1_ms"] == 4.0
    assert made["decode_b1_ms_max_autotune"] == 6.0
    assert made["decode_b1_ms_max_autotune_called"] == 6.25
    assert (made["decode_b1_wall_ms"], made["decode_b1_wall_ms_max_autotune_called"]) == (4.5, 7.0)
    assert "decode_b1_wall_ms_max_autotune" not in made
    assert math.isclose(made["decode_b1_vs_max_autotune"], 1 / 1.5)
    assert made["prefill_2048_ms"] == 46.0


class Told(NamedTuple):
    lines: list[str]

    def tell(self, line: str) -> None:
        self.lines.append(line)


def test_a_peer_that_cannot_be_prepared_costs_itself_only():
    def impossible() -> Any:
        raise RuntimeError("out of memory")

    said = Told([])
    ours = Contender("tuned", lambda: torch.ones(10).sum())
    peers = [("broken", impossible), ("eager", lambda: lambda: torch.ones(1000).sum())]
    row = meet(said, "row", ours, peers, torch.device("cpu"), budget_s=0.05)
    assert row["broken_failed"] == "RuntimeError: out of memory"
    assert row["eager_ratio_low"] <= row["eager_ratio"] <= row["eager_ratio_high"]
    assert row["tuned_ms"] > 0
    assert "broken failed" in said.lines[0]


def test_every_models_configuration_is_sound():
    import yaml

    models = [llama(small=False), tiny_llama(), *encoders("cpu", small=False), *encoders("cuda", small=False)]
    for model in [*models, *encoders("cpu", small=True)]:
        parse_config(yaml.safe_dump(dict(model.config)), model.name)


def test_parameters_that_a_layout_turned_are_straightened():
    """A peer would be timed on weights in a layout that its user does not have."""
    model = torch.nn.Linear(3, 5)
    before = model.weight.detach().clone()
    model.weight.data = before.t().contiguous().t()
    assert straighten(model) == 1
    assert model.weight.is_contiguous()
    assert torch.equal(model.weight, before)
    assert straighten(model) == 0
