"""A small model of each family beside those of `models.SPECIMENS`: each runs in every mode in the unit tests, and in a
few combinations of the oracle's grid."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.helpers import models
from tests.helpers.models import VOCABULARY, Specimen

# Odd sizes on purpose: 27 neurons divide into no number of groups but their own factors, 3 key/value heads neither.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 27,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SIZES | {"num_key_value_heads": 3, "head_dim": 4}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_BERT = _SIZES | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
_OPT: dict[str, Any] = _SIZES | {"ffn_dim": 27, "dropout": 0.0}
_FALCON = _SIZES | {"ffn_hidden_size": 27, "bias": True}
_SIDE = {"layers": 2, "attention_heads": 6, "ffn_dim": 27}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "d_kv": 4,
    "d_ff": 27,
    "num_heads": 3,
    "num_layers": 3,  # the third gets what the second hands on
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "initializer_factor": 0.5,
}

_BART: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": 24, "max_position_embeddings": 48, "decoder_start_token_id": 2},
    **{f"{side}_{what}": number for side in ("encoder", "decoder") for what, number in _SIDE.items()},
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
}
_WHISPER: dict[str, Any] = _BART | {
    **{"num_mel_bins": 6, "max_source_positions": 4, "max_target_positions": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": [], "begin_suppress_tokens": []},
}
_BLOOM: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24, "n_head": 6, "n_layer": 2}
_BLOOM |= dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)
# Positions of keys and queries have projections of their own.
_RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4}


_VIT: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 27, "num_attention_heads": 6, "num_hidden_layers": 2},
    **{"image_size": 8, "patch_size": 4, "num_labels": 5},
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
_IMAGES: dict[str, Any] = {"image_size": 12, "patch_size": 2, "num_labels": 5}
_DINOV2: dict[str, Any] = {"hidden_size": 21, "num_attention_heads": 3, "image_size": 8, "patch_size": 4}
_DINOV2 |= {"num_hidden_layers": 2, "num_labels": 5}
# The number of heads is the stage's; the second stage is padded, and its second layer shifts windows.
_SWIN: dict[str, Any] = _IMAGES | {
    **{"embed_dim": 12, "depths": [1, 2], "num_heads": [3, 6], "window_size": 2, "mlp_ratio": 2.25},
    **{"drop_path_rate": 0.0, "layer_norm_eps": 1e-5},
}
_CONVNEXT: dict[str, Any] = _IMAGES | {"depths": [1, 2], "hidden_sizes": [9, 12], "num_stages": 2}
# 9, 10 and 3 divide into no number of groups but their own factors; a stage's first layer has a projection to skip.
_RESNET: dict[str, Any] = {"embedding_size": 6, "hidden_sizes": [9, 10], "depths": [2, 3], "num_labels": 5}


def _resnet(layer_type: str, **options: Any) -> Specimen:
    sizes = _RESNET | {"layer_type": layer_type} | options
    return Specimen(hf.ResNetForImageClassification, hf.ResNetConfig, num_heads=0, num_blocks=3, options=sizes)


def _grouped(model: Any, config: Any, **options: Any) -> Specimen:
    return Specimen(model, config, num_heads=3, options=_GROUPED | options)


# Sizes of an image's grid are multiples of the patches that are merged, two by two; tokens of images are in no batch.
_TOWER: dict[str, Any] = {
    **{"depth": 2, "num_heads": 3, "hidden_size": 24, "intermediate_size": 27, "out_hidden_size": 24},
    **{"patch_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
_QWEN3_VL: dict[str, Any] = {
    **{"text_config": _GROUPED | {"rope_parameters": _ROPE, "vocab_size": VOCABULARY + 4}, "vision_config": _TOWER},
    **{"image_token_id": VOCABULARY, "video_token_id": VOCABULARY + 1, "vision_start_token_id": VOCABULARY + 2},
    **{"vision_end_token_id": VOCABULARY + 3, "tie_word_embeddings": False},
}


def _whole_heads(
    model: Any, config: Any, sizes: dict[str, Any], *, num_heads: int = 6, num_blocks: int | None = None, **options: Any
) -> Specimen:
    return Specimen(model, config, num_heads=num_heads, num_blocks=num_blocks, options=sizes | options)


SPECIMENS: dict[str, Specimen] = {
    "bart": _whole_heads(hf.BartForConditionalGeneration, hf.BartConfig, _BART, num_blocks=10),
    "bert": _whole_heads(hf.BertForMaskedLM, hf.BertConfig, _BERT),
    "bloom": _whole_heads(hf.BloomForCausalLM, hf.BloomConfig, _BLOOM),
    "bloom_post_norm": _whole_heads(
        hf.BloomForCausalLM, hf.BloomConfig, _BLOOM, apply_residual_connection_post_layernorm=True
    ),
    "cohere": _grouped(hf.CohereForCausalLM, hf.CohereConfig, use_qk_norm=True, logit_scale=1.0),
    "convnext": Specimen(hf.ConvNextForImageClassification, hf.ConvNextConfig, num_blocks=3, options=_CONVNEXT),
    "deberta_v2": _whole_heads(hf.DebertaV2ForMaskedLM, hf.DebertaV2Config, _BERT | _RELATIVE),
    "dinov2": _whole_heads(hf.Dinov2ForImageClassification, hf.Dinov2Config, _DINOV2, num_heads=3, mlp_ratio=3),
    "falcon_grouped": _whole_heads(
        hf.FalconForCausalLM, hf.FalconConfig, _FALCON, num_heads=3, new_decoder_architecture=True, num_kv_heads=3
    ),
    "falcon_multi_query": _whole_heads(hf.FalconForCausalLM, hf.FalconConfig, _FALCON, multi_query=True),
    "gemma2": _grouped(hf.Gemma2ForCausalLM, hf.Gemma2Config, sliding_window=3, query_pre_attn_scalar=4),
    "glm": _grouped(hf.GlmForCausalLM, hf.GlmConfig, attention_bias=True, **_PARTIAL),
    "granite": _grouped(
        hf.GraniteForCausalLM, hf.GraniteConfig, residual_multiplier=0.7, embedding_multiplier=2.0, logits_scaling=2.0
    ),
    "olmo2": _grouped(hf.Olmo2ForCausalLM, hf.Olmo2Config),
    "opt_post_norm": _whole_heads(hf.OPTForCausalLM, hf.OPTConfig, _OPT, do_layer_norm_before=False),
    "phi": _grouped(hf.PhiForCausalLM, hf.PhiConfig, qk_layernorm=True),
    "phi3": _grouped(hf.Phi3ForCausalLM, hf.Phi3Config),
    "qwen3_vl": Specimen(
        hf.Qwen3VLForConditionalGeneration, hf.Qwen3VLConfig, num_heads=3, num_blocks=8, options=_QWEN3_VL
    ),
    "resnet": _resnet("basic"),
    "resnet_bottleneck": _resnet("bottleneck", hidden_sizes=[12, 20], hidden_act="gelu"),
    "stablelm_head_norms": _grouped(hf.StableLmForCausalLM, hf.StableLmConfig, qk_layernorm=True),
    "starcoder2": _grouped(
        hf.Starcoder2ForCausalLM, hf.Starcoder2Config, residual_dropout=0.0, embedding_dropout=0.0, sliding_window=3
    ),
    "swin": Specimen(hf.SwinForImageClassification, hf.SwinConfig, num_heads=3, num_blocks=6, options=_SWIN),
    "swinv2": Specimen(hf.Swinv2ForImageClassification, hf.Swinv2Config, num_heads=3, num_blocks=6, options=_SWIN),
    "t5": _whole_heads(hf.T5ForConditionalGeneration, hf.T5Config, _T5, num_heads=3),
    "vit": _whole_heads(hf.ViTForImageClassification, hf.ViTConfig, _VIT),
    "whisper": _whole_heads(hf.WhisperForConditionalGeneration, hf.WhisperConfig, _WHISPER, num_blocks=10),
}
ALL_SPECIMENS: dict[str, Specimen] = {**models.SPECIMENS, **SPECIMENS}
# Attention whose heads cannot be cut.
UNCUT = ("bloom", "bloom_post_norm", "falcon_multi_query", "olmo2", "stablelm_head_norms")
