"""Small models with random weights of all classes of Transformers' mappings, and of timm's modules, with inputs."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
TIMM = "timm"
LAYERS, LENGTH = 4, 8
MOST_PARAMETERS = 4.5e7
# Sizes by the names that configs have for them. What is not named keeps its default.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 32),
    **dict.fromkeys(("emb_dim", "output_dim", "projection_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "kv_channels", "qk_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("state_size", "mamba_d_state", "index_topk"), 8),
    **{"vocab_size": 97, "vocab_size_per_layer_input": 97, "num_labels": 7, "image_size": 32, "patch_size": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mamba_n_heads": 8, "mamba_d_head": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"num_kv_shared_layers": 0, "moe_k": 2, "num_expert_group": 1, "hidden_size_global": 64},
    **{"index_n_heads": 4, "index_head_dim": 8, "zero_expert_num": 2, "num_nextn_predict_layers": 0},
}
# Of convolutional and other nets of stages: entries of these lists are divided, and stages have few layers.
_WIDTHS: tuple[str, ...] = ("hidden_sizes", "embed_dims", "embed_dim", "neck_hidden_sizes", "base_attn_unit_dims")
_WIDTHS += ("stage_in_channels", "stage_mid_channels", "stage_out_channels")
_DEPTHS = ("depths", "depth", "n_attn_blocks", "stage_num_blocks")
_ROTARY = {"rope_type": "default", "rope_theta": 1e4}
# What the sizes above contradict, or what has another name there, by model type.
_OPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "blt_global_transformer": {"hidden_size": 64, "head_dim": 16},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROTARY)},
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.6, "hidden_dim": 320},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * LAYERS, "intermediate_size": [48] * LAYERS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    **{name: {"patch_size": 2, "image_size": 64} for name in ("mobilevit", "mobilevitv2")},
    "perceiver": {
        **{"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": LAYERS},
        **{"num_self_attention_heads": 4, "num_cross_attention_heads": 1, "image_size": 224},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "ngram_vocab_size_base": 100, "hc_lowrank": 8, "split_ngram_parts": 2},
    },
    "reformer": {
        **{"axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2, "num_buckets": 2},
        **{"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4},
    },
    "regnet": {"groups_width": 16},
    **{name: {"window_size": 2} for name in ("donut-swin", "swin", "swinv2")},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
# Left out one after the other until a model can be built.
_ATTEMPTS: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("num_key_value_heads",),
    ("rotary_dim",),
    _WIDTHS,
    ("pad_token_id", "bos_token_id", "eos_token_id"),
)


class Case(NamedTuple):
    """A model to be built: a class of a mapping, or a module of timm."""

    mapping: str
    family: str
    model: str = ""

    @property
    def name(self) -> str:
        return "/".join(filter(None, self))


def cases(folder: str | None = None) -> list[Case]:
    """All classes of the mappings, and all of timm's modules if it can be imported (`folder`: from there)."""
    modeling_auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found = []
    for mapping, names in MAPPINGS.items():
        for family, classes in getattr(modeling_auto, names).items():
            found += [Case(mapping, family, name) for name in ((classes,) if isinstance(classes, str) else classes)]
    return found + [Case(TIMM, name) for name in (import_timm(folder).list_modules() if folder else ())]


def import_timm(folder: str | None = None) -> Any:
    """timm, which needs torchvision's Python part only; a folder has both beside a PyTorch for CPUs."""
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    return importlib.import_module("timm")


# ---- models ---------------------------------------------------------------------------------------------------------


def build(case: Case) -> nn.Module:
    """A model in training mode without dropout and noise, the same each time; no bias is zero and no norm is one.

    Raises:
        Exception: of any kind: it cannot be built that small.
    """
    torch.manual_seed(0)
    model = _of_timm(case.family) if case.mapping == TIMM else _of_transformers(case)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for module in model.modules():
        for name, value in vars(module).items():
            is_probability = "drop" in name or (name == "p" and "drop" in type(module).__name__.lower())
            is_noise = name == "jitter_noise"  # of routers: subnetworks would draw other numbers
            if (is_probability or is_noise) and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.train()


def _of_transformers(case: Case) -> nn.Module:
    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, case.model)
    problem: Exception | None = None
    for left_out in _ATTEMPTS:
        try:
            config = model_class.config_class(**_settings(model_class.config_class, left_out))
            if case.mapping == "causal" and hasattr(config, "is_decoder"):
                config.is_decoder = True
            with torch.device("meta"):
                if sum(parameter.numel() for parameter in model_class(config).parameters()) > MOST_PARAMETERS:
                    raise ValueError(f"more than {MOST_PARAMETERS / 1e6:.0f}M parameters")
            model: nn.Module = model_class(config).float()
            run(model)
            return model
        except Exception as error:  # of any kind
            problem = problem or error
    assert problem is not None
    raise problem


def _settings(config_class: Any, left_out: tuple[str, ...]) -> dict[str, Any]:
    """Of a config with few layers and small sizes."""
    options = _OPTIONS.get(config_class.model_type, {})
    try:
        default = config_class(**options)
    except Exception:  # some options fit few layers only
        default = config_class()
    given = {name: value for name, value in default.to_dict().items() if name not in left_out}
    settings: dict[str, Any] = {}
    has_stages = isinstance(given.get("depths", given.get("depth")), list)
    for name, value in given.items():
        if "drop" in name and isinstance(value, float | list):
            settings[name] = [0.0] * len(value) if isinstance(value, list) else 0.0
        elif name in _WIDTHS and isinstance(value, list) and all(isinstance(width, int) for width in value):
            settings[name] = [max(8, width // 4) for width in value]
        elif name in _DEPTHS and isinstance(value, list):
            settings[name] = [min(2, depth) for depth in value]
        elif name == "image_size" and value is not None:
            size = 64 if has_stages else _SIZES[name]
            settings[name] = [size, size] if isinstance(value, list | tuple) else size
        elif has_stages:
            settings |= {name: value // 4} if name == "embed_dim" else {}
        elif name in _SIZES and (value is None or (isinstance(value, int) and not isinstance(value, bool))):
            settings[name] = _SIZES[name]
        elif isinstance(value, list) and len(value) == _num_layers(given):
            settings[name] = _few(value)
    if "qk_rope_head_dim" in settings:  # latent attention: what is called head_dim is that of the rotary part
        settings |= {name: size for name, size in (("head_dim", 4), ("num_key_value_heads", 4)) if name in settings}
    for name in config_class.sub_configs:
        inner = getattr(default, name, None)
        if inner is not None and not isinstance(inner, dict):
            of_type = {"model_type": inner.model_type} if inner.model_type else {}
            settings[name] = _settings(type(inner), left_out) | of_type | options.get(name, {})
    return settings | {name: value for name, value in options.items() if name not in config_class.sub_configs}


def _num_layers(settings: Mapping[str, Any]) -> int | None:
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
    return next((settings[name] for name in names if isinstance(settings.get(name), int)), None)


def _few(values: list[Any]) -> list[Any]:
    """The first of a list with an entry per layer; the last ones are of the kinds that are not among these."""
    first = values[:LAYERS]
    missing = [value for index, value in enumerate(values) if value not in first and value not in values[:index]]
    return first[: LAYERS - len(missing)] + missing[:LAYERS]


def _of_timm(module: str) -> nn.Module:
    """The smallest model of a module with more than a layer per stage; of few layers if it is large and can be."""
    timm = import_timm()
    names = [name for name in timm.list_models(module=module) if not name.startswith(_SHALLOW)]
    sizes: dict[tuple[str, int | None], int] = {}
    for name in sorted(names, key=_rank_of_size)[:6]:
        for depth in (None, LAYERS):
            try:
                with torch.device("meta"):
                    model: nn.Module = timm.create_model(name, **({} if depth is None else {"depth": depth}))
            except Exception:  # it has no such argument, or a depth for each stage
                continue
            sizes[name, depth] = sum(parameter.numel() for parameter in model.parameters())
            if sizes[name, depth] <= MOST_PARAMETERS:
                break
    name, depth = min(sizes, key=sizes.__getitem__)
    if sizes[name, depth] > MOST_PARAMETERS:
        raise ValueError(f"more than {MOST_PARAMETERS / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    created: nn.Module = timm.create_model(name, num_classes=7, **({} if depth is None else {"depth": depth}))
    return created


_SHALLOW = ("test_", "resnet10", "resnet14", "resnetv2_10", "resnetv2_14")
_SMALL_FIRST = ("atto", "femto", "pico", "nano", "micro", "tiny", "xxs", "xxt", "xs", "small", "mini", "_s")


def _rank_of_size(name: str) -> tuple[int, int, str]:
    words = [index for index, word in enumerate(_SMALL_FIRST) if word in name]
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    return (min(words, default=len(_SMALL_FIRST)), max(numbers, default=0), name)


# ---- inputs ---------------------------------------------------------------------------------------------------------


def run(model: nn.Module) -> list[Tensor]:
    """Outputs of a forward pass with the model's example, with the same random numbers each time: logits of a model
    of Transformers, all tensors of one of timm."""
    torch.manual_seed(3)
    if not hasattr(model, "config"):
        return [tensor for tensor in tree_leaves(model(_images_of(model))) if isinstance(tensor, Tensor)]
    inputs = _inputs(model)
    try:
        output: Any = model(**inputs, use_cache=False)
    except TypeError as problem:
        if "use_cache" not in str(problem):
            raise
        output = model(**inputs)
    logits = getattr(output, "logits", None)
    return [output[0] if logits is None else logits]


def _images_of(model: Any) -> Tensor:
    channels, *size = model.default_cfg["input_size"] if hasattr(model, "default_cfg") else (3, 32, 32)
    if not model.default_cfg.get("fixed_input_size"):
        size = [max(96, *model.default_cfg.get("min_input_size", (3, 0, 0))[1:])] * 2
    return _normal(2, channels, *size).to(next(model.parameters()).dtype)


def _inputs(model: Any) -> dict[str, Tensor]:
    config, dtype = model.config, next(model.parameters()).dtype
    rows = 2 * getattr(config, "num_codebooks", 1)
    tokens = torch.arange(3, 3 + rows * LENGTH).view(rows, LENGTH) % 90 + 3
    name = model.main_input_name
    if name == "inputs" and "ForImageClassification" in type(model).__name__:  # Perceiver's, of any kind of data
        name = "pixel_values"
    if name == "pixel_values":
        size = getattr(config, "image_size", None) or 32
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs = {name: _normal(2, getattr(config, "num_channels", 3), height, width).to(dtype)}
    elif name == "input_features":
        inputs = {name: _normal(*_shape_of_features(config)).to(dtype)}
    elif name == "input_values":
        inputs = {name: _normal(2, 2000).to(dtype)}
    else:
        inputs = {name: tokens}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    return inputs


def _shape_of_features(config: Any) -> tuple[int, ...]:
    """Whisper's features are [mel bins, time], those of other speech models [time, features]."""
    if hasattr(config, "num_mel_bins"):
        return (2, config.num_mel_bins, 2 * config.max_source_positions)
    return (2, 32, getattr(config, "input_feat_per_channel", 80))


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
