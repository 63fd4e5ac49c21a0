"""Every way a configuration can be wrong gets one line that names the place, what is there and what should be."""

import json
import math
import os
from pathlib import Path

import pytest
from good_configs import CAUSAL, FAULTS, GOOD

from tune_model.pipeline.config import (
    ConfigError,
    Override,
    budget_seconds,
    dump_config,
    json_schema,
    load_config,
    shipped_configs,
)


def load(tmp_path: Path, text: str | bytes, *overrides: str):
    path = tmp_path / "model.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(str(path), overrides)


def refusal(tmp_path: Path, text: str | bytes, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path}{os.sep}")


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_one_fault_one_line(tmp_path, fault):
    good = GOOD[fault["in"]]
    assert good.count(fault["replace"]) == 1
    assert refusal(tmp_path, good.replace(fault["replace"], fault["by"])) == fault["message"]


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
)

# Text that is no usable YAML, and how the message begins.
UNREADABLE = {
    "empty": ("", "model.yaml:1: $ is null; expected a mapping with name, model, task"),
    "only comments": ("# nothing\n", "model.yaml:1: $ is null; expected a mapping"),
    "a list": ("- name: x\n", 'model.yaml:1: $ is [{"name": "x"}]; expected a mapping with name'),
    "text": ("hello", 'model.yaml:1: $ is "hello"; expected a mapping'),
    "not YAML": ("name: [1, 2\nmodel: x", "model.yaml:2: not valid YAML: while parsing a flow sequence"),
    "a tab": ("name: x\n\tmodel: y", "model.yaml:2: not valid YAML"),
    "two documents": (f"{CAUSAL}---\nname: y\n", "model.yaml:16: not valid YAML: expected a single document"),
    "a key twice": (f"{CAUSAL}name: y\n", "model.yaml:16: $.name is given twice; expected once."),
    "a number as key": ("1: x", "model.yaml:1: $ has the key 1; expected text (quote it)."),
    "a list as key": ("[1, 2]: x", "model.yaml:1: $ has the key a list or mapping; expected text"),
    "a Python object": ("name: !!python/object/apply:os.getcwd []", "model.yaml:1: the tag tag:yaml.org,2002:python"),
    "an unknown alias": ("name: *nowhere", "model.yaml:1: not valid YAML: found undefined alias"),
    "itself": ("name: &a [*a]", "model.yaml:1: $.name[0] contains itself through an alias."),
    "an alias bomb": (BOMB, "model.yaml:1: aliases or lists expand to more than 20000 values."),
    "depth": ("[" * 60 + "]" * 60, "model.yaml:1: values are nested too deeply; expected at most 50 levels."),
    "depth beyond the parser's own": (
        "[" * 5000,
        "model.yaml:1: values are nested too deeply; expected at most 50 levels.",
    ),
    "a number without end": (f"name: {'9' * 5000}", "model.yaml:1: a number of 5000 digits is too long."),
    "Latin-1": (
        "name: x\n# café\n".encode("latin-1"),
        "model.yaml:2: has byte 0xe9, which is not UTF-8; expected UTF-8",
    ),
    "binary": (b"name: \x00\x01", "model.yaml:1: not valid YAML: character 0 is not allowed."),
    "too large": (b"#" * (128 << 10) + b"#", "model.yaml: is larger than 131072 bytes; expected a configuration."),
}


@pytest.mark.parametrize(("text", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_is_no_configuration_is_refused(tmp_path, text, message):
    assert refusal(tmp_path, text).startswith(message)


OVERRIDES = {
    "no value": (
        "search.effort",
        "--set search.effort: there is no '='; expected FIELD=VALUE, such as search.effort=quick.",
    ),
    "no field": ("=1", '--set =1: the field is ""; expected names and indices, such as workload.decode.batch[0].'),
    "a strange field": ("a..b=1", '--set a..b=1: the field is "a..b"; expected names and indices'),
    "no YAML": ("name=[1", "--set name=[1: the value is not valid YAML"),
    "unknown field": (
        "search.efort=quick",
        "--set search.efort=quick: $.search.efort is not a known field; expected one of ",
    ),
    "wrong value": (
        "search.effort=max",
        '--set search.effort=max: $.search.effort is "max"; expected balanced, quick or',
    ),
    "inside a value": (
        "workload.decode.batch=[1,0]",
        "--set workload.decode.batch=[1,0]: $.workload.decode.batch[1] is 0; expected a positive integer.",
    ),
    "through text": ("name.first=x", '--set name.first=x: $.name is "tiny"; expected a mapping.'),
    "past the end": (
        "workload.decode.batch[2]=4",
        "--set workload.decode.batch[2]=4: $.workload.decode.batch is a list of 2; expected a list with an index 2.",
    ),
    "a new mapping": (
        "output.colour=red",
        "--set output.colour=red: $.output.colour is not a known field; expected one of",
    ),
}


@pytest.mark.parametrize(("override", "message"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_faults_of_overrides_name_the_flag(tmp_path, override, message):
    assert refusal(tmp_path, CAUSAL, override).startswith(message)


def test_a_file_that_is_no_mapping_is_blamed_not_the_flag(tmp_path):
    assert "model.yaml:1: $ is [" in refusal(tmp_path, "- name: x\n", "target=cpu")


def test_overrides_replace_add_and_are_typed(tmp_path):
    loaded = load(
        tmp_path,
        CAUSAL,
        "target=cuda:sm_90",
        "workload.decode.batch[1]=4",
        "output.weights=embed",
        "search.budget=1.5m",
    )
    config = loaded.config
    assert config.target == "cuda:sm_90"
    assert config.workload.decode.batch == (1, 4)
    assert config.output.weights == "embed"
    assert budget_seconds(config) == 90.0
    assert load(tmp_path, CAUSAL, "search.budget=10m", "search.budget=null").config.search.budget is None


def test_other_flags_can_override_too(tmp_path):
    (tmp_path / "model.yaml").write_text(CAUSAL)
    with pytest.raises(ConfigError, match=r'^--effort max: \$.search.effort is "max"; expected balanced, quick or'):
        load_config(str(tmp_path / "model.yaml"), [Override("--effort max", ("search", "effort"), "max")])


def test_a_fault_found_later_is_worded_like_one_found_here(tmp_path):
    loaded = load(tmp_path, CAUSAL)
    message = str(loaded.error(("model", "config", "model_type"), "a type that transformers knows"))
    assert message.endswith(
        'model.yaml:4: $.model.config.model_type is "llama"; expected a type that transformers knows.'
    )
    assert loaded.folder == tmp_path.resolve()


def test_scalars_are_read_as_yaml_1_2(tmp_path):
    text = CAUSAL.replace(
        "model_type: llama", "model_type: llama, a: 1e-5, b: no, c: 1:30, d: 010, e: 2020-01-01, f: ~"
    )
    config = load(tmp_path, text).config.model.config
    assert config == {
        "model_type": "llama", "a": 1e-5, "b": "no", "c": "1:30", "d": 10, "e": "2020-01-01", "f": None,
        "max_position_embeddings": 128,
    }  # fmt: skip
    assert math.isclose(config["a"], 0.00001)


def test_places_that_hold_no_file(tmp_path):
    with pytest.raises(
        ConfigError, match=r"nowhere.yaml: there is no such file; expected a path, or a shipped one: bert"
    ):
        load_config(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(ConfigError, match=r"this is a folder; expected a YAML file"):
        load_config(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"there is no such file"):
        load_config(str(tmp_path / "file" / "model.yaml"))


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configurations_load_and_round_trip(tmp_path, name):
    config = load_config(name).config
    assert load_config(name.removesuffix(".yaml")).config == config
    assert load(tmp_path, dump_config(config)).config == config
    assert shipped_configs()[name].read_text(encoding="utf-8").startswith("# "), "an example says what it shows"


def test_the_seven_examples_are_shipped():
    names = {"quickstart", "tiny-llama", "llama-3-8b", "qwen3-8b", "bert-base", "vit-b16", "whisper-small"}
    assert names <= {name.removesuffix(".yaml") for name in shipped_configs()}


def test_a_file_of_a_shipped_name_wins(tmp_path, monkeypatch):
    (tmp_path / "tiny-llama.yaml").write_text(CAUSAL)
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny-llama.yaml").config.name == "tiny"


def test_the_schema_describes_every_field():
    schema = json_schema()
    json.dumps(schema, allow_nan=False)
    assert schema["$defs"]["Config"]["required"] == ["name", "model", "task", "workload"]
    for name, definition in schema["$defs"].items():
        assert definition["additionalProperties"] is False, name
        assert definition["description"], name
        for field, body in definition["properties"].items():
            assert field == "source" or "description" in body or "$ref" in json.dumps(body), f"{name}.{field}"


@pytest.mark.parametrize("model", ["{source: pt2, path: a.pt2}", "{source: transformers, config: {model_type: vit}}"])
def test_inputs_that_the_model_knows_need_not_be_listed(tmp_path, model):
    """A saved program has its own, and those of many transformers models are derived; both used to be refused."""
    text = f"name: x\nmodel: {model}\ntask: forward\nworkload: {{forward: {{batch: [1]}}}}\n"
    assert load(tmp_path, text).config.model.inputs == ()


def test_the_dtype_by_default_is_bfloat16_and_of_a_saved_program_its_own(tmp_path):
    text = GOOD["forward"].replace("dtype: bfloat16\n", "")
    assert load(tmp_path, text).config.dtype == "bfloat16"
    saved = "name: a\nmodel: {source: pt2, path: a.pt2}\ntask: forward\nworkload: {forward: {}}\n"
    config = load(tmp_path, saved).config
    assert config.dtype is None
    assert load(tmp_path, dump_config(config)).config == config
