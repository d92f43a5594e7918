"""Attributes of FFI calls, cast to the exact types that the handlers decode (ffi/bindings/pass.h)."""

from __future__ import annotations

import numpy as np

from musejax.config import DecodeConfig, ModelConfig, combine_groups
from musejax.nvfp4 import ACTIVATIONS


def model_attribute(config: ModelConfig, decode: DecodeConfig) -> dict:
    """Members of the struct `ModelAttribute`: sizes as int64, constants as float32."""
    sizes = {
        "hidden": config.hidden_size, "heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "moe_hidden": config.moe_hidden_size, "moe_inner": config.moe_intermediate_size,
        "experts": config.num_local_experts, "top_k": config.num_experts_per_tok, "vocab": config.vocab_size,
        "combine_groups": combine_groups(decode.combine), "activations": ACTIVATIONS.index(decode.activations),
    }
    constants = {
        "rms_eps": config.rms_norm_eps, "post_eps": config.post_norm_eps, "route_eps": config.route_eps,
        "attention_scale": config.attention_scale, "output_multiplier": config.output_multiplier,
        "softcap": config.final_logit_softcapping, "gate_temperature": config.residual_gate_temperature,
        "gate_floor": config.residual_gate_floor, "routed_scale": config.routed_scaling_factor,
    }
    return {k: int(v) for k, v in sizes.items()} | {k: np.float32(v) for k, v in constants.items()}


def thetas(config: ModelConfig) -> list[float]:
    """Distinct rotary bases of the layers, ascending; layers without rotation have none."""
    return sorted({theta for theta in config.layer_rope_theta if theta})


def theta_index(config: ModelConfig, layer: int) -> int:
    """Index of a layer's base in `thetas`, -1 for no rotation."""
    theta = config.layer_rope_theta[layer]
    return thetas(config).index(theta) if theta else -1


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """theta^(-2j/c) for each base, float32 [bases, c/2] (spec section 3.2)."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    rows = [np.float32(1.0) / np.float32(theta) ** exponent for theta in thetas(config)]
    return np.asarray(rows, np.float32).reshape(-1, config.head_dim // 2)


def layer_attributes(config: ModelConfig, layers: range, taps: tuple[int, ...], devices: tuple[int, ...] = ()) -> dict:
    """Attributes of the target `musejax_layers`, int64 arrays: window, theta, nvfp4 and tap, one entry a layer, and
    devices, the ordinals of the GPUs that share the layers."""
    return {
        "window": np.array([config.window(i) or 0 for i in layers], np.int64),
        "theta": np.array([theta_index(config, i) for i in layers], np.int64),
        "nvfp4": np.array([i in config.nvfp4_layers for i in layers], np.int64),
        "tap": np.array([i in taps for i in layers], np.int64),
        "devices": np.array(devices, np.int64),
    }
