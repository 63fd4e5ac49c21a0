import msgspec
import pytest
import torch
from small_models import SIZES, WHISPER, decoder, forward

from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.extract.tracing.front_end import SourceError, Trace, TraceError
from tune_model.extract.tracing.transformers_model import trace_transformers
from tune_model.runtime.program import Call, Items, Program, Ref, Size, TensorType, ValueRange


def numbered(program: Program) -> tuple[object, ...]:
    """A program without the names of its values, to compare structure."""
    names: dict[str, str] = {}

    def arg(value):
        if isinstance(value, Ref):
            return Ref(names.get(value.name, value.name))
        return Items(tuple(arg(v) for v in value.items)) if isinstance(value, Items) else value

    steps = []
    for step in program.steps:
        args = tuple(arg(a) for a in step.args), tuple((k, arg(a)) for k, a in step.kwargs)
        names |= {r: f"v{len(names)}" for r in step.results if r}
        steps.append((step.op, *args, tuple(program.values[r] for r in step.results)))
    outputs = tuple((o.name, names[o.value]) for o in program.outputs)
    return program.symbols, program.inputs, program.weights, program.constants, tuple(steps), outputs


@pytest.fixture(scope="module")
def llama() -> tuple[Trace, ...]:
    return trace_transformers(decoder("llama"))


def test_a_decoder_has_one_append_and_one_attention_per_layer(llama):
    prefill, decode = (t.program for t in llama)
    assert [i.name for i in prefill.inputs[:3]] == ["input_ids", "positions", "logits_index"]
    assert [i.name for i in decode.inputs[:2]] == ["input_ids", "positions"]
    caches = ["k_cache.0", "v_cache.0", "k_cache.1", "v_cache.1"]
    for program in (prefill, decode):
        found = [i for i in program.inputs if i.role == "cache"]
        assert [i.name for i in found] == caches
        assert {i.type for i in found} == {TensorType("float32", ("batch", 2, 32, 16))}
        assert program.outputs[0].name == "logits"
        assert program.values[program.outputs[0].value] == TensorType("float32", ("batch", 1, 128))
        assert sum(s.op == "tune_model.append_kv" for s in program.steps) == 2
    fresh = [s for s in prefill.steps if s.op == "tune_model.causal_attention"]
    cached = [s for s in decode.steps if s.op == "tune_model.cached_attention"]
    assert [s.args[3:] for s in fresh] == [(0.25, None, None)] * 2
    assert [s.args[1:] for s in cached] == [
        (Ref(f"k_cache.{i}"), Ref(f"v_cache.{i}"), Ref("positions"), 0.25, None, None) for i in range(2)
    ]
    assert all(isinstance(s, Call) for s in (*prefill.steps, *decode.steps))


def test_the_decode_phase_knows_how_far_the_cache_is_filled(llama):
    decode = llama[1].program
    context = decode.symbols[-1]
    assert (context.name, context.input, context.default, context.maximum) == ("context", None, 20, 31)
    assert decode.inputs[1].values == ValueRange("context", "context")
    assert decode.symbols[0].maximum == 4


def test_windows_and_soft_caps_are_arguments():
    (prefill,) = trace_transformers(decoder("gemma2", phases=("prefill",)))
    found = [s.args[3:] for s in prefill.program.steps if s.op == "tune_model.causal_attention"]
    assert found == [(0.0625, 4, 50.0), (0.0625, None, 50.0)]


@pytest.mark.filterwarnings("error")
def test_sinks_are_weights_that_attention_takes_last():
    for trace in trace_transformers(decoder("gpt_oss", num_local_experts=4, head_dim=16)):
        sources = {w.name: w.sources for w in trace.program.weights}
        calls = [
            s for s in trace.program.steps if s.op in {"tune_model.causal_attention", "tune_model.cached_attention"}
        ]
        assert len(calls) == 2
        assert [sources[s.args[-1].name] for s in calls] == [(f"model.layers.{i}.self_attn.sinks",) for i in range(2)]


@pytest.mark.parametrize(
    "model_type", ["gpt2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("llama", "gemma2", "mixtral"))]
)
def test_decode_derived_from_prefill_is_what_tracing_one_token_gives(model_type):
    derived = trace_transformers(decoder(model_type))[1]
    (traced,) = trace_transformers(decoder(model_type, phases=("decode",)))
    assert numbered(derived.program) == numbered(traced.program)
    assert derived.constants.keys() == traced.constants.keys()


def test_tied_weights_have_the_name_that_is_saved():
    (prefill,) = trace_transformers(decoder("llama", phases=("prefill",), tie_word_embeddings=True))
    names = [w.sources for w in prefill.program.weights]
    assert ("model.embed_tokens.weight",) in names
    assert ("lm_head.weight",) not in names


def test_rotary_frequencies_are_constants_with_their_values(llama):
    prefill = llama[0]
    (constant,) = prefill.program.constants
    expected = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert torch.allclose(prefill.constants[constant.key].double(), expected)


def test_every_size_is_written_over_the_program_s_symbols(llama):
    """No `-1`, no tracer symbols: what a reader needs to know without running anything."""
    prefill = llama[0]
    sizes = [s.args[1].items for s in prefill.program.steps if s.op == "aten.view.default"]
    assert (Size("batch"), Size("sequence"), 4, 16) in sizes
    assert not any(item == -1 for items in sizes for item in items)


def test_an_encoder_takes_a_mask_and_keeps_it_small():
    config = {"model_type": "bert", **SIZES}
    (trace,) = trace_transformers(forward(config, batch=(1, 4), sequence=(16, 32)))
    program = trace.program
    assert [i.name for i in program.inputs] == ["input_ids", "attention_mask"]
    assert [o.name for o in program.outputs] == ["last_hidden_state", "pooler_output"]
    attention = [s for s in program.steps if s.op == "aten.scaled_dot_product_attention.default"]
    assert len(attention) == 2
    mask = attention[0].args[3]
    assert program.values[mask.name] == TensorType("bool", ("batch", 1, 1, "sequence"))
    assert {s.name: s.maximum for s in program.symbols}["sequence"] == 512


def test_an_image_model_takes_pixels():
    config = {"model_type": "vit", **SIZES, "image_size": 32, "patch_size": 16}
    (trace,) = trace_transformers(forward(config, batch=(1, 4)))
    assert [i.type for i in trace.program.inputs] == [TensorType("float32", ("batch", 3, 32, 32))]


def test_a_speech_model_takes_features_and_tokens():
    request = forward(WHISPER, architecture="WhisperForConditionalGeneration", batch=(1, 2), sequence=(1, 4))
    (trace,) = trace_transformers(request)
    assert [i.type.shape for i in trace.program.inputs] == [("batch", 80, 40), ("batch", "sequence")]
    assert [o.name for o in trace.program.outputs] == ["logits"]


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (decoder("bloom"), TraceError, "bloom takes no position_ids"),
        (decoder("falcon"), TraceError, "falcon does not take the attention implementation"),
        (decoder("mamba"), TraceError, "mamba has linear_attention layers; expected attention"),
        (
            decoder("llama4_text", num_local_experts=4, attention_chunk_size=4, intermediate_size_mlp=96),
            TraceError,
            "neither causal nor a sliding window",
        ),
        (
            decoder("lfm2", layer_types=["conv", "full_attention"]),
            TraceError,
            "lfm2 has conv layers; expected attention",
        ),
        (decoder("no_such_model"), SourceError, "no_such_model"),
        (
            decoder("llama", quantization_config={"quant_method": "mxfp4"}),
            SourceError,
            "the weights are stored as mxfp4, which are not the weights that are traced",
        ),
        (decoder("llama", quantization_config={}), SourceError, "the weights are stored as other numbers"),
        (decoder("llama", quantization_config=[4]), SourceError, "the weights are stored as other numbers"),
        (decoder("llama", hidden_size="wide"), SourceError, "the llama config was refused by transformers"),
        (decoder("llama", num_attention_heads=5), SourceError, "hidden size|hidden_size"),
        (
            Request(TransformersSource(config={"hidden_size": 4}), "float32", "encoder", (Phase("forward", {}),)),
            SourceError,
            "no model_type",
        ),
        (
            Request(TransformersSource(), "float32", "encoder", (Phase("forward", {}),)),
            SourceError,
            "exactly one of a folder and an inline config",
        ),
        (forward({"model_type": "bert"}, architecture="BertForNothing"), SourceError, "BertForNothing"),
        (msgspec.structs.replace(decoder("llama"), dtype="float99"), SourceError, "float99"),
        (msgspec.structs.replace(decoder("llama"), max_length=16), TraceError, "context 20 leaves no slot"),
        (
            forward({"model_type": "bert", **SIZES}, batch=(1,), sequence=(16, 513)),
            TraceError,
            "sequence is 513 in the grid; the model takes 1 to 512",
        ),
        (msgspec.structs.replace(decoder("llama"), max_length=0), TraceError, "needs max_length and max_batch"),
        (
            msgspec.structs.replace(decoder("llama"), phases=(Phase("generate", {}),)),
            TraceError,
            "phases prefill and decode; got 'generate'",
        ),
    ],
)
def test_what_cannot_be_traced_faithfully_is_refused(request_, error, says):
    with pytest.raises(error, match=says):
        trace_transformers(request_)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    source = TransformersSource(folder=str(tmp_path))
    with pytest.raises(SourceError, match=r"has no config\.json"):
        trace_transformers(Request(source, "float32", "encoder", (Phase("forward", {}),)))
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(SourceError, match=r"config\.json was refused"):
        trace_transformers(Request(source, "float32", "encoder", (Phase("forward", {}),)))


def test_tracing_leaves_transformers_as_it_was():
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = masking_utils.find_packed_sequence_indices
    with pytest.raises(TraceError):
        trace_transformers(decoder("bloom"))
    assert masking_utils.find_packed_sequence_indices is before
    assert "tune_model" not in ALL_ATTENTION_FUNCTIONS
