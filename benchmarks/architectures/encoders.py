"""Encoders of text, images and sound, and models that read one sequence and write another."""

from typing import Any, Final

from architectures.architecture import SIZES, Architecture, encoder, single_pass

__all__ = ["SOUND", "TEXT", "TRANSLATORS", "VISION"]

_PICTURE: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}
_WAVE: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [32, 32],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_PIXELS: Final = {"pixel_values": (["batch", 3, 32, 32], "float32")}
_SOUND: Final = {"input_values": (["batch", "samples"], "float32")}
_PAIR: Final = {
    "input_ids": (["batch", "sequence"], "int64"),
    "attention_mask": (["batch", "sequence"], "int64"),
    "decoder_input_ids": (["batch", "answer"], "int64"),
}
_PAIR_GRID: Final = {"sequence": [16], "answer": [8]}
_T5: Final = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
_BART: Final = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}

TEXT: Final[tuple[Architecture, ...]] = (
    encoder("bert", "BERT, MiniLM, BGE, E5, GTE"),
    encoder("roberta", "RoBERTa", max_position_embeddings=66),
    encoder("xlm-roberta", "XLM-R, multilingual E5, BGE-M3", max_position_embeddings=66),
    encoder("camembert", "CamemBERT", max_position_embeddings=66),
    encoder("distilbert", "DistilBERT", dim=64, hidden_dim=96, n_layers=2, n_heads=4),
    encoder("electra", "ELECTRA", embedding_size=32),
    encoder("albert", "ALBERT", embedding_size=32),
    encoder("mpnet", "all-mpnet-base", max_position_embeddings=66),
    encoder("deberta-v2", "DeBERTa v3, mDeBERTa", relative_attention=True, position_buckets=8,
            pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm", max_relative_positions=-1,
            position_biased_input=False),
    encoder("modernbert", "ModernBERT, GTE-ModernBERT", global_attn_every_n_layers=2, local_attention=8),
    encoder("nomic_bert", "nomic-embed-text"),
    encoder("eurobert", "EuroBERT", head_dim=16, num_key_value_heads=2),
    encoder("esm", "ESM-2 (proteins)", max_position_embeddings=66, position_embedding_type="rotary",
            mask_token_id=3),
    encoder("bert", "cross-encoders, classifiers", architecture="BertForSequenceClassification"),
    encoder("qwen3", "Qwen3-Embedding", head_dim=16, num_key_value_heads=2),
    encoder("mistral", "e5-mistral", num_key_value_heads=2, sliding_window=None),
    encoder("t5", "T5, FLAN-T5, sentence-T5; text encoder of diffusion models", architecture="T5EncoderModel", **_T5),
    encoder("umt5", "UMT5 (text encoder of diffusion models)", architecture="UMT5EncoderModel", **_T5),
    encoder("clip_text_model", "CLIP, Stable Diffusion", projection_dim=32),
    encoder("siglip_text_model", "SigLIP", architecture="SiglipTextModel", projection_size=64),
)  # fmt: skip

VISION: Final[tuple[Architecture, ...]] = (
    single_pass("vit", "ViT", fields=_PICTURE),
    single_pass("vit", "ViT, classified", architecture="ViTForImageClassification", fields=_PICTURE),
    single_pass("deit", "DeiT", fields=_PICTURE),
    single_pass("beit", "BEiT", fields={**_PICTURE, "use_relative_position_bias": True}),
    single_pass("dinov2", "DINOv2", fields={**_PICTURE, "mlp_ratio": 2}),
    single_pass("dinov3_vit", "DINOv3", fields=_PICTURE, inputs=_PIXELS),
    single_pass("clip_vision_model", "CLIP", fields=_PICTURE),
    single_pass("siglip_vision_model", "SigLIP", fields=_PICTURE),
    single_pass("swin", "Swin", inputs=_PIXELS, fields={
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    }),
    single_pass("convnext", "ConvNeXt", inputs=_PIXELS, fields={
        "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 4, "image_size": 32,
    }),
    single_pass("resnet", "ResNet", inputs=_PIXELS, fields={
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2],
    }),
    single_pass("clip", "CLIP, image and text", inputs={
        "input_ids": (["batch", "sequence"], "int64"), **_PIXELS,
    }, grid={"sequence": [16]}, fields={
        "text_config": {**SIZES, "projection_dim": 32}, "vision_config": {**_PICTURE, "projection_dim": 32},
        "projection_dim": 32,
    }),
)  # fmt: skip

SOUND: Final[tuple[Architecture, ...]] = (
    single_pass("whisper", "Whisper", architecture="WhisperForConditionalGeneration", grid={"sequence": [8]}, fields={
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_source_positions": 20,
        "max_target_positions": 32, "num_mel_bins": 16, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    }),
    single_pass("wav2vec2", "wav2vec 2.0", inputs=_SOUND, grid={"samples": [800]}, fields=_WAVE),
    single_pass("hubert", "HuBERT", inputs=_SOUND, grid={"samples": [800]}, fields=_WAVE),
    single_pass("wavlm", "WavLM", inputs=_SOUND, grid={"samples": [800]}, fields=_WAVE),
    single_pass("audio-spectrogram-transformer", "AST", inputs={
        "input_values": (["batch", 64, 16], "float32"),
    }, fields={
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 64, "num_mel_bins": 16,
    }),
)  # fmt: skip

TRANSLATORS: Final[tuple[Architecture, ...]] = (
    single_pass("t5", "T5, FLAN-T5, one pass", architecture="T5ForConditionalGeneration", inputs=_PAIR,
                grid=_PAIR_GRID, fields={**_T5, "decoder_start_token_id": 0}),
    single_pass("bart", "BART, one pass", architecture="BartForConditionalGeneration", inputs=_PAIR, grid=_PAIR_GRID,
                fields=_BART),
    single_pass("marian", "OPUS-MT, one pass", architecture="MarianMTModel", inputs=_PAIR, grid=_PAIR_GRID,
                fields=_BART),
    single_pass("m2m_100", "M2M-100, NLLB, one pass", architecture="M2M100ForConditionalGeneration", inputs=_PAIR,
                grid=_PAIR_GRID, fields=_BART),
)  # fmt: skip
