"""The architectures that people deploy: some of them tried here, and the page about all of them."""

from pathlib import Path

import pytest
import yaml
from architectures.decoders import DECODERS
from architectures.encoders import SOUND, TEXT, TRANSLATORS, VISION
from architectures.page import page_of
from architectures.summary import summarise
from architectures.trial import try_model

from tune_model.pipeline.bench.result import read_result
from tune_model.pipeline.config.loading import parse_config

TABLES = {"decoders": DECODERS, "text": TEXT, "vision": VISION, "sound": SOUND, "translators": TRANSLATORS}
BY_NAME = {one.name: one for table in reversed(TABLES.values()) for one in table}
RESULT = Path("benchmarks") / "results" / "models.cpu.json"


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",  # weights of [inputs, outputs], a fused projection, tied words
        "qwen3",  # norms of heads, grouped queries
        "phi3",  # projections that the checkpoint has merged
        "distilbert",
        "t5 (T5EncoderModel)",  # a bias for every distance
        "vit",  # patches
        "clip",  # two models, and outputs within outputs
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma2", "mixtral", "deepseek_v2", "modernbert", "siglip_vision_model", "swin", "wav2vec2")
        ),
    ],
)
def test_a_model_gives_what_the_original_gives(name: str, tmp_path: Path):
    one = BY_NAME[name]
    config = tmp_path / "model.yaml"
    config.write_text(yaml.safe_dump(dict(one.document)), encoding="utf-8")
    row = try_model(config, tmp_path)
    assert row["status"] == "works", row
    assert row["tokens"] in {None, (36, 36)}
    assert row["attention"] == (4 if name in {"clip", "swin"} else 2)
    assert not any("not compared" in note for note in row["notes"])
    assert row["own_kernels"] or name == "gpt2"  # whose weights cannot be packed as they are


def test_a_refusal_is_a_row_with_its_reason(tmp_path: Path):
    config = tmp_path / "model.yaml"
    config.write_text(yaml.safe_dump(dict(BY_NAME["bloom"].document)), encoding="utf-8")
    row = try_model(config, tmp_path)
    assert (row["status"], row["error"]) == ("refused", "TraceError")
    assert row["says"].startswith("bloom takes no position_ids")


def test_every_configuration_is_sound():
    for table in TABLES.values():
        assert len({one.name for one in table}) == len(table)
        for one in table:
            assert parse_config(yaml.safe_dump(dict(one.document)), one.name).task == one.task


def test_the_result_has_a_row_for_every_architecture(repository: Path):
    result = read_result(repository / RESULT)
    assert {(row["shard"], row["row"]) for row in result.rows} == {
        (shard, one.name) for shard, table in TABLES.items() for one in table
    }
    assert {key: float(f"{value:.6g}") for key, value in summarise(result.rows).items()} == result.summary


def test_the_page_says_what_the_result_says(repository: Path):
    page = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == page_of(read_result(repository / RESULT)), "make it again: benchmarks/models.py --shard page"
