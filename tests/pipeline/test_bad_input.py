"""Every way the input of `tune` and `plan` can be wrong, through the command itself.

One `error:` line that names the file, the field, what is there and what should be; exit code 2; nothing left behind.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from command_line import refusal
from good_configs import CAUSAL, ENCODER, FAULTS, GOOD
from safetensors.torch import save_file

SMALL = """\
name: small
model:
  source: torch
  factory: bad_models:Linear
  inputs:
    - {name: x, shape: [batch, 8], dtype: float32}
task: forward
dtype: float32
workload:
  forward: {batch: [1, 4]}
target: cpu
search: {effort: quick}
"""
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; nothing may appear in it. Records would go to a folder inside it, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write(here: Path, text: str | bytes) -> str:
    (here / "model.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return "model.yaml"


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_the_configuration(here, capsys, fault):
    config = write(here, GOOD[fault["in"]].replace(fault["replace"], fault["by"]))
    assert refusal(["tune", config], here, capsys) == fault["message"]
    assert refusal(["plan", config], here, capsys) == fault["message"]


UNREADABLE: dict[str, tuple[str | bytes, str]] = {
    "cut off": (CAUSAL[: CAUSAL.index("llama")], "model.yaml:4: not valid YAML: .*found '<stream end>'"),
    "garbage": (b"\x7fELF\x02\x01\x01\x00" + bytes(range(256)), "model.yaml:.: .*UTF-8"),
    "zeros": (bytes(64), "model.yaml:1: not valid YAML: character 0 is not allowed"),
    "nothing": (b"", r"model.yaml:1: \$ is null; expected a mapping"),
    "a list": ("- a\n- b\n", r"model.yaml:1: \$ is \[.*\]; expected a mapping with name, model, task"),
    "a sentence": ("tune my model", 'model.yaml:1: \\$ is "tune my model"; expected a mapping'),
}


@pytest.mark.parametrize(("text", "says"), UNREADABLE.values(), ids=UNREADABLE)
def test_no_configuration_at_all(here, capsys, text, says):
    assert re.match(says, refusal(["tune", write(here, text)], here, capsys))


def test_a_configuration_that_is_not_there(here, capsys):
    (here / "folder.yaml").mkdir()
    assert refusal(["gone.yaml"], here, capsys).startswith("gone.yaml: there is no such file; expected a path, or a")
    assert refusal(["plan", "folder.yaml"], here, capsys) == "folder.yaml: this is a folder; expected a YAML file."


# Configuration, and what the error begins with (a regular expression): file, line and field, then what is wrong.
FACTORY = r"model.yaml:4: \$.model.factory: "
LLAMA = r"model.yaml:4: \$.model.config: "
MODELS: dict[str, tuple[str, str]] = {
    "a type that transformers does not know": (
        CAUSAL.replace("llama", "lamma"),
        LLAMA + "transformers .* knows no model type 'lamma'; expected one of its .* types, such as .*did you mean",
    ),
    "no language model": (
        CAUSAL.replace("llama", "vit"),
        LLAMA + "transformers has no AutoModelForCausalLM for vit, .*; expected another task",
    ),
    "a field that transformers refuses": (
        CAUSAL.replace("llama", "llama, hidden_size: wide"),
        LLAMA + "the llama config was refused by transformers: .*hidden_size",
    ),
    "a field with a slip": (
        CAUSAL.replace("llama", "llama, num_hiden_layers: 2"),
        LLAMA + r"num_hiden_layers is no field of transformers' LlamaConfig \(did you mean num_hidden_layers\?\)",
    ),
    "an unknown activation": (
        CAUSAL.replace("llama", "llama, hidden_act: silly"),
        LLAMA + "transformers could not build AutoModelForCausalLM.*: KeyError: 'silly'",
    ),
    "an unknown class": (
        CAUSAL.replace("model:\n", "model:\n  architecture: LlamaForNothing\n"),
        r"model.yaml:5: \$.model.config: the model class 'LlamaForNothing' is not in this transformers; expected one",
    ),
    "a recurrent model with a cache of its own": (
        CAUSAL.replace("llama", "mamba"),
        LLAMA + "mamba has linear_attention layers; expected attention over keys and values in every layer",
    ),
    "a model that computes its attention itself": (
        CAUSAL.replace("llama", "falcon, num_hidden_layers: 1, hidden_size: 64, num_attention_heads: 4"),
        LLAMA + "falcon does not take the attention implementation .*; expected a model that",
    ),
    "control flow by data": (
        SMALL.replace("Linear", "Branching"),
        FACTORY + r".*cannot be traced at bad_models.py:\d+ \(return self.linear\(x\) if x.sum\(\) > 0 else x\): it "
        "decides by a value that is computed while it runs; expected control flow that depends on sizes alone",
    ),
    "a number out of a tensor": (
        SMALL.replace("Linear", "Reading"),
        FACTORY + ".*takes the number out of a tensor .*; expected tensors throughout",
    ),
    "results whose size depends on data": (
        SMALL.replace("Linear", "Selecting"),
        FACTORY + ".*a size depends on .*, a value computed while the model runs; expected",
    ),
    "no result": (SMALL.replace("Linear", "Silent"), FACTORY + ".*returns a NoneType.*; expected at least one tensor"),
    "shapes that do not fit": (
        SMALL.replace("Linear", "Narrow"),
        FACTORY + r".*cannot be traced at bad_models.py:\d+ \(return x @ .*\): RuntimeError: ",
    ),
    "a forward that fails with real numbers alone": (
        SMALL.replace("Linear", "Doubling"),
        FACTORY
        + r"forward at batch 1: the model itself fails for random inputs in float32: RuntimeError: mat1 and mat2 ",
    ),
    "random numbers": (
        SMALL.replace("Linear", "Drawing"),
        FACTORY
        + "forward, output: the model gives something else each time it is called; expected outputs that depend",
    ),
    "no numbers": (
        SMALL.replace("Linear", "Undefined"),
        FACTORY + "the model gives no finite number for random inputs",
    ),
    "a forward that exits": (SMALL.replace("Linear", "Leaving"), FACTORY + ".*bad_models.py:.*SystemExit: gone"),
    "a lazy module": (
        SMALL.replace("Linear", "Lazy"),
        FACTORY + r"the factory bad_models:Lazy returned a module whose linear.0.weight is not initialised \(of a lazy "
        r"module\); expected it to be initialised: call the module once with a sample input before returning it",
    ),
    "a scripted module": (
        SMALL.replace("Linear", "scripted"),
        FACTORY + "the factory bad_models:scripted returned a RecursiveScriptModule; scripted and traced modules are "
        "not supported: expected the plain torch.nn.Module, before torch.jit",
    ),
    "a module of torch.jit.trace": (
        SMALL.replace("Linear", "jit_traced"),
        FACTORY + ".*returned a TopLevelTracedModule; scripted and traced modules are not supported",
    ),
    "a module that is scripted in part": (
        SMALL.replace("Linear", "partly_scripted"),
        FACTORY + ".*returned a module whose inner is a RecursiveScriptModule; scripted and traced modules are not",
    ),
    "a quantised module": (
        SMALL.replace("Linear", "quantised"),
        FACTORY + r".*whose inner is a torch.ao.nn.quantized.dynamic.*\.Linear; quantised modules are not supported",
    ),
    "sparse weights": (
        SMALL.replace("Linear", "Sparse"),
        FACTORY + r".*whose linear.weight is a tensor of layout torch.sparse_coo; expected a dense tensor \(torch.str",
    ),
    "a program of torch.export": (
        SMALL.replace("Linear", "exported"),
        FACTORY + r".*a GraphModule that cannot be brought to float32 and evaluation mode: .*for source: pt2\)",
    ),
    "a factory that exits": (SMALL.replace("Linear", "leaving"), FACTORY + ".*failed: SystemExit: gone"),
    "a factory that fails": (SMALL.replace("Linear", "failing"), FACTORY + ".*failed: ValueError: no such file"),
    "a factory of numbers": (SMALL.replace("Linear", "number"), FACTORY + ".*returned a int; expected a torch"),
    "no factory": (SMALL.replace("Linear", "not_callable"), FACTORY + ".*is a int; expected a callable"),
    "an unknown factory": (SMALL.replace("Linear", "Nothing"), FACTORY + ".*could not be imported: .*'Nothing'"),
    "an unknown module": (SMALL.replace("bad_models", "no_module"), FACTORY + ".*could not be imported: .*'no_module'"),
    "a folder that is not there": (
        SMALL.replace("  inputs", "  path: gone\n  inputs"),
        r"model.yaml:5: \$.model.path: .*gone does not exist; expected a file or folder of the model",
    ),
    "an unknown package": (
        ENCODER.replace("config: {model_type: bert, max_position_embeddings: 64}", "path: package:no_package/x"),
        r"model.yaml:2: \$.model.path: .*no Python package 'no_package' is installed; expected package:NAME/FOLDER",
    ),
    "a model that was never downloaded": (
        ENCODER.replace("config: {model_type: bert, max_position_embeddings: 64}", "hub: nobody/nothing"),
        r"model.yaml:2: \$.model.hub: 'nobody/nothing' is not in the local hub cache; download it first",
    ),
    "weights to embed, but none": (
        SMALL + "output: {weights: embed}\n",
        r'model.yaml:13: \$.output.weights is "embed"; expected external, since the model comes without weights',
    ),
}


@pytest.mark.parametrize(("config", "says"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_be_tuned(here, capsys, config, says):
    assert re.match(says, refusal(["tune", write(here, config)], here, capsys))


FOLDER = ENCODER.replace("config: {model_type: bert, max_position_embeddings: 64}", "path: bert")
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
SAVED: dict[str, tuple[str, dict[str, str], str]] = {
    "a folder without a configuration": (FOLDER, {}, r"model.yaml:2: \$.model.path: .*bert has no config.json"),
    "half a configuration": (
        FOLDER,
        {"config.json": '{"model_type": "be'},
        r"model.yaml:2: \$.model.path: .*config.json was refused by transformers",
    ),
    "longer than the model's positions": (
        FOLDER.replace("[16]", "[16, 65]"),
        {"config.json": json.dumps(BERT)},
        r"model.yaml:4: \$.workload: .*sequence is 65 in the grid; the model takes 1 to 64",
    ),
    "weights to embed in a folder without any": (
        FOLDER + "output: {weights: embed}\ntarget: cpu\n",
        {"config.json": json.dumps(BERT)},
        r"model.yaml:6: \$.output.weights: .*bert: holds no safetensors file",
    ),
    "a saved program of nonsense": (
        SMALL.replace("torch\n  factory: bad_models:Linear", "pt2\n  path: bert/model.pt2"),
        {"model.pt2": "no zip file"},
        r"model.yaml:4: \$.model.path: .*model.pt2 could not be read as a torch.export program",
    ),
    "a saved program that is not there": (
        SMALL.replace("torch\n  factory: bad_models:Linear", "pt2\n  path: bert/model.pt2"),
        {},
        r"model.yaml:4: \$.model.path: .*model.pt2 does not exist",
    ),
}


@pytest.mark.parametrize(("config", "files", "says"), SAVED.values(), ids=SAVED)
def test_a_model_on_disk_that_cannot_be_tuned(here, capsys, config, files, says):
    (here / "bert").mkdir()
    for name, text in files.items():
        (here / "bert" / name).write_text(text)
    assert re.match(says, refusal(["tune", write(here, config)], here, capsys))


def test_weights_to_embed_that_do_not_fit_are_refused_before_tuning(here, capsys):
    """Only after hours of tuning, or never where just a shape differed."""
    (here / "bert").mkdir()
    (here / "bert" / "config.json").write_text(json.dumps(BERT))
    save_file({"embeddings.word_embeddings.weight": torch.zeros(64, 16)}, here / "bert" / "model.safetensors")
    config = write(here, FOLDER + "output: {weights: embed}\ntarget: cpu\n")
    says = r"model.yaml:6: \$.output.weights: \d+ of \d+ weights are missing from the checkpoint: "
    assert re.match(says, refusal(["tune", config], here, capsys))


TARGETS = {
    "no GPU": ("cuda", r"the target is cuda, but torch .* sees no NVIDIA GPU; use target cpu"),
    "another GPU": ("cuda:sm_90", r"cannot measure for NVIDIA H200 \(sm_90\): this machine has no such GPU; plan only"),
    "no such GPU": ("cuda:sm_77", r"target is cuda:sm_77; expected one of cuda:sm_80, "),
}


@NO_GPU
@pytest.mark.parametrize(("target", "says"), TARGETS.values(), ids=TARGETS)
def test_a_target_that_cannot_be_measured_is_refused_before_the_model_is_built(here, capsys, target, says):
    """Tracing a large model takes half a minute; this factory fails when it is called."""
    config = write(here, SMALL.replace("Linear", "failing").replace("target: cpu", f"target: {target}"))
    assert re.match(rf"model.yaml:11: \$.target: {says}", refusal(["tune", config], here, capsys))


def test_no_compiler(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    error = refusal(["tune", write(here, SMALL)], here, capsys)
    assert error.startswith("model.yaml:11: $.target: no g++ on PATH; tuning for a CPU compiles C++ kernels")


OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "a budget without a unit": (("--budget", "90"), "--budget 90: $.search.budget is 90; expected a dur"),
    "a budget of words": (("--budget", "soon"), '--budget soon: $.search.budget is "soon"; expected a dur'),
    "a budget of nothing": (("--budget", "0s"), '--budget 0s: $.search.budget is "0s"; expected a duration'),
    "an override without a value": (("--set", "target"), "--set target: there is no '='; expected FIELD=VALUE"),
    "an override of nothing": (("--set", "=="), '--set ==: the field is ""; expected names and indices'),
    "an unknown field": (("--set", "serach.effort=quick"), "--set serach.effort=quick: $.serach is not a known field"),
    "an unknown effort": (("--effort", "max"), "Invalid value for '--effort': 'max' is not one of 'quick', 'bal"),
    "an unknown option": (("--fast",), "No such option '--fast'"),
    "two configurations": (("other.yaml",), "Got unexpected extra argument"),
    "records without a name": (("--records", ""), "argument '' after --records is empty; expected a value (is a va"),
    "output without a name": (("--output=",), "argument '--output=' is empty; expected a value (is a variable unset?)"),
    "output that is the folder above": (("-o", ".."), "..: names no file; expected a path such as model.tuned"),
}


@pytest.mark.parametrize(("options", "says"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_make_no_sense(here, capsys, options, says):
    assert refusal(["tune", write(here, SMALL), *options], here, capsys).startswith(says)


def test_usage_errors_say_where_help_is(here, capsys):
    assert refusal(["tune"], here, capsys) == "Missing argument 'CONFIG.yaml'. (see tune-model tune --help)"
    assert refusal(["tnue"], here, capsys).startswith("No such command 'tnue'.")


# Options, and what the error begins with. Permission bits would not bind root; files where folders are needed do.
PLACES: dict[str, tuple[tuple[str, ...], str]] = {
    "a file that is no artifact": (("-o", "notes"), "notes: is a file but no artifact; expected an artifact"),
    "a folder for a file": (("-o", "things"), "things: is a folder; expected a file or nothing; end the path"),
    "a folder of other things": (("-o", "things/"), "things: is a folder of other things; expected an artifact or"),
    "a file for a folder": (("-o", "notes/"), "notes: is not a folder; expected one or nothing; choose another path"),
    "inside a file": (("-o", "notes/a.tuned"), "notes/a.tuned: cannot be written: Not a directory; expected"),
    "inside nothing": (("-o", "gone/a.tuned"), "gone/a.tuned: cannot be written: No such file or directory; expected"),
    "a link": (("-o", "link"), "link: is a link or device; expected a file or nothing; choose another path"),
    "a full device": (("-o", "/dev/full"), "/dev/full: is a link or device; expected a file or nothing"),
    "a read-only file system": (("-o", "/proc/a.tuned"), "/proc/a.tuned: cannot be written: "),
    "records inside a file": (("--records", "notes/x"), "notes/x: cannot hold records or kernels: "),
    "records in a file": (("--records", "notes"), "notes: cannot hold records or kernels: "),
    "a folder for the records": (("--records", "odd"), "odd/records.sqlite: cannot hold records or kernels: is not a"),
    "a file for the kernels": (("--records", "things"), "things/kernels: cannot hold records or kernels: is not"),
}


@pytest.mark.parametrize(("options", "says"), PLACES.values(), ids=PLACES)
def test_places_that_cannot_take_it_are_refused_before_the_model_is_built(here, capsys, options, says):
    (here / "notes").write_text("precious")
    (here / "things").mkdir()
    (here / "things" / "kernels").write_text("precious")
    (here / "odd" / "records.sqlite").mkdir(parents=True)
    (here / "link").symlink_to("notes")
    config = write(here, SMALL.replace("Linear", "failing"))
    assert refusal(["tune", config, *options], here, capsys).startswith(says)
