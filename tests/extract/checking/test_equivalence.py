import msgspec
import pytest
import torch
import transformers
from small_models import DECODERS, SIZES, WHISPER, decoder, forward, inputs

from tune_model.extract.checking.equivalence import EquivalenceError, _error, _fill, check_equivalence, randomise
from tune_model.extract.plan import lower
from tune_model.extract.request import FactorySource, ModelInput, Phase, Request
from tune_model.extract.tracing.front_end import Trace
from tune_model.runtime.program import Call, Input, TensorType

QUICK = ("qwen3", "mistral", "gemma2", "gpt2")  # llama runs below, with regions
SLOW = tuple(pytest.param(m, marks=pytest.mark.slow) for m in DECODERS if m not in QUICK)


def raw(trace: Trace) -> Trace:
    return trace


@pytest.mark.parametrize("model_type", [*QUICK, *SLOW])
def test_decoders_give_the_logits_of_whole_sequences(model_type):
    """Prompts of length 1 and 6, decoded together in one cache, against transformers without a cache."""
    if model_type == "opt" and transformers.__version__ < "5.24":
        pytest.skip("this version makes a padding mask of ones by itself, which is refused")
    comparisons = check_equivalence(decoder(model_type), raw)
    assert {c.program for c in comparisons} == {"prefill", "decode"}
    assert len(comparisons) >= 10


def test_a_decoder_with_regions_gives_them_too():
    assert check_equivalence(decoder("llama"), lambda trace: lower(trace).trace)


def test_a_full_size_configuration_is_shrunk():
    """Meant sizes come from the configuration's defaults: 8 billion parameters would not fit here."""
    fields = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
    big = decoder("llama", **fields, intermediate_size=14336, vocab_size=128256, phases=("decode",))
    assert len(check_equivalence(big, raw)) == 11


@pytest.mark.parametrize(
    "request_",
    [
        forward({"model_type": "bert", **SIZES}, batch=(1, 4), sequence=(16, 32)),
        forward({"model_type": "vit", **SIZES, "image_size": 32}, batch=(1, 4)),
        forward(WHISPER, architecture="WhisperForConditionalGeneration", batch=(1, 2), sequence=(1, 4)),
        pytest.param(
            forward({"model_type": "bloom", **SIZES}, architecture="BloomForCausalLM", batch=(1, 2), sequence=(4, 8)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            forward({"model_type": "falcon", **SIZES}, architecture="FalconForCausalLM", batch=(1, 2), sequence=(4, 8)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda r: r.source.config["model_type"],
)
def test_single_passes_give_the_model_s_outputs(request_):
    assert check_equivalence(request_, raw)


def test_a_small_copy_that_does_not_run_is_not_used():
    """Swin builds with a picture too small for its windows and fails when it runs."""
    swin = {"model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1], "num_heads": [2]}
    request = forward({**swin, "window_size": 8}, architecture="SwinModel", batch=(1, 2))
    pixels = ModelInput("pixel_values", ("batch", 3, 32, 32), "float32")
    assert check_equivalence(msgspec.structs.replace(request, inputs=(pixels,)), raw)


def test_weights_without_elements_are_left_alone():
    """DINOv3 has a weight for its register tokens even when it has none."""
    module = torch.nn.Module()
    module.register_tokens = torch.nn.Parameter(torch.zeros(1, 0, 4))
    module.weight = torch.nn.Parameter(torch.zeros(3, 4))
    randomise(module)
    assert module.weight.count_nonzero() == 12


def test_a_factory_s_module_gives_its_outputs():
    request = Request(
        FactorySource("small_models:make_mixed"),
        "float32",
        "forward",
        (Phase("forward", {"rows": (2, 5)}),),
        inputs(x=("rows", 8)),
    )
    assert {c.what.split()[0] for c in check_equivalence(request, raw)} == {"first", "best", "at", "all"}


ROTATED = Request(
    FactorySource("small_models:make_rotated"),
    "bfloat16",
    "forward",
    (Phase("forward", {"batch": (1, 2), "tokens": (4, 16)}),),
    inputs(x=("batch", "tokens", 24)),
)
COMPLEX = Request(
    FactorySource("small_models:make_complex"),
    "float32",
    "forward",
    (Phase("forward", {"rows": (2, 5)}),),
    inputs(x=("rows", 8)),
)


@pytest.mark.parametrize("request_", [ROTATED, COMPLEX], ids=["rotated", "complex"])
def test_complex_numbers_stay_complex(request_):
    """Model and program had both lost the imaginary parts of a complex buffer, and agreed."""
    assert check_equivalence(request_, lambda trace: lower(trace).trace)


def test_a_complex_input_is_filled_with_complex_numbers():
    given = _fill(Input("z", TensorType("complex64", ("rows", 8))), {"rows": 3}, 0)
    assert given.dtype == torch.complex64
    assert given.imag.count_nonzero() == 24


def test_an_error_of_complex_numbers_is_over_both_parts():
    """The imaginary part was dropped before comparing."""
    z = torch.tensor([3 + 4j, 0, float("inf")])
    assert _error(z, z) == 0.0
    assert _error(torch.tensor([3 + 4.5j, 0, float("inf")]), z) == pytest.approx(0.1)
    assert _error(z.conj(), z) == pytest.approx(8 / 5)
    with pytest.raises(EquivalenceError, match=r"an output is torch\.float32; the model gives torch\.complex64"):
        _error(z.real, z)


def without(op: str, change):
    """Sabotage every call of an operator."""

    def sabotage(trace: Trace) -> Trace:
        steps = tuple(
            Call(s.op, change(s.args), s.kwargs, s.results) if isinstance(s, Call) and s.op == op else s
            for s in trace.program.steps
        )
        return trace._replace(program=msgspec.structs.replace(trace.program, steps=steps))

    return sabotage


@pytest.mark.parametrize(
    ("model_type", "op", "change"),
    [
        ("mistral", "tune_model.cached_attention", lambda a: (*a[:5], 5, a[6])),
        ("llama", "tune_model.causal_attention", lambda a: (*a[:3], 0.251, *a[4:])),
        ("llama", "tune_model.append_kv", lambda a: (a[0], a[1], a[2], a[2], a[4])),
    ],
)
def test_a_wrong_program_is_noticed(model_type, op, change):
    with pytest.raises(EquivalenceError, match="differs from the eager model"):
        check_equivalence(decoder(model_type), without(op, change))


def test_inputs_with_names_and_sizes_of_their_own_are_compared_too():
    """A speech model's frames are fixed by its configuration, so the small copy has fewer; the words' are free."""
    request = forward(WHISPER, architecture="WhisperForConditionalGeneration", batch=(1, 2), tokens=(4, 8))
    features = ModelInput("input_features", ("batch", 80, 40), "float32")
    tokens = ModelInput("decoder_input_ids", ("batch", "tokens"), "int64")
    assert check_equivalence(msgspec.structs.replace(request, inputs=(features, tokens)), raw)


@pytest.mark.slow
def test_a_size_that_is_specialised_and_has_one_value_is_compared_at_one_value():
    config = {"model_type": "mamba", **SIZES}
    request = forward(config, architecture="MambaForCausalLM", batch=(1, 2), sequence=(4,))
    assert check_equivalence(request, raw)


def test_numbers_that_are_none_in_the_model_too_are_equal():
    """A logarithm of random numbers was refused as something that tracing misses."""
    request = Request(
        FactorySource("bad_models:PartlyUndefined"),
        "float32",
        "forward",
        (Phase("forward", {"rows": (2, 5)}),),
        inputs(x=("rows", 8)),
    )
    assert all(c.error <= 1e-5 for c in check_equivalence(request, raw))
    with pytest.raises(EquivalenceError, match="differs from the eager model"):
        check_equivalence(request, without("aten.add.Tensor", lambda a: (a[0], a[0])))


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 1, 4, 4)])
@pytest.mark.parametrize("name", ["attention_mask", "valid"])
def test_booleans_of_any_shape_are_made(name: str, shape: tuple[int, ...]):
    """One dimension fell over, and what was not called a mask got floating-point numbers."""
    made = _fill(Input(name, TensorType("bool", shape)), {}, 0)
    assert (made.dtype, tuple(made.shape)) == (torch.bool, shape)
    assert made.any()
