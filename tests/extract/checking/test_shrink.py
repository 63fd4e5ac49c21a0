import pytest
from transformers import AutoConfig

from tune_model.extract.checking.shrink import small_configs


def test_one_layer_of_every_kind_stays():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=26)
    small = next(small_configs(config))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types) == 6
    assert config.num_hidden_layers == 26


@pytest.mark.parametrize(
    ("heads", "key_heads", "expected"), [(32, 8, (8, 2)), (32, 32, (4, 4)), (71, 1, (8, 1)), (16, 2, (16, 2))]
)
def test_heads_keep_their_grouping(heads, key_heads, expected):
    config = AutoConfig.for_model(
        "llama", hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=key_heads
    )
    small = next(small_configs(config))
    assert (small.num_attention_heads, small.num_key_value_heads) == expected
    assert small.hidden_size == expected[0] * small.head_dim


def test_windows_become_short_enough_to_matter_and_tokens_fit_the_vocabulary():
    small = next(small_configs(AutoConfig.for_model("mistral")))
    assert small.sliding_window == 4
    assert small.vocab_size == 256
    gpt2 = next(small_configs(AutoConfig.for_model("gpt2")))
    assert gpt2.eos_token_id < gpt2.vocab_size


def test_the_last_resort_is_the_configuration_itself():
    config = AutoConfig.for_model("llama")
    assert [c.num_hidden_layers for c in small_configs(config)] == [2, 2, 32]
