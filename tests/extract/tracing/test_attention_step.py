import pytest
import torch
from transformers import masking_utils

from tune_model.extract.tracing.attention_step import CausalMask, classify_mask


def test_causal_and_sliding_masks_are_recognised():
    assert classify_mask(masking_utils.causal_mask_function, None) == CausalMask(None)
    rule = masking_utils.sliding_window_causal_mask_function(4096)
    assert classify_mask(rule, 4096) == CausalMask(4096)


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (masking_utils.bidirectional_mask_function, None),
        (masking_utils.sliding_window_causal_mask_function(4096), None),
        (masking_utils.sliding_window_causal_mask_function(4096), 4095),
        (masking_utils.sliding_window_causal_mask_function(4096), 4097),
        (masking_utils.causal_mask_function, 4096),
        (masking_utils.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)), None),
        (lambda b, h, q, kv: (kv <= q) & (q < 500_000), None),
        (lambda b, h, q, kv: kv < q, None),
    ],
)
def test_anything_else_is_not_mistaken_for_them(rule, window):
    assert classify_mask(rule, window) is None
