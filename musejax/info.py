"""Parameter and byte counts of a model, from the parameter table alone: nothing needs weights."""

from __future__ import annotations

from collections.abc import Iterable

from musejax.config import FULL, ModelConfig
from musejax.params import Param, table

NVFP4_BLOCK = 16
"""Elements that share one 8-bit scale."""


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """How many parameters each part has; the first seven entries are of one layer.

    `vectors` are gains, residual gates and the router's selection bias. `active` counts what one token uses:
    everything of the layers except the experts it is not routed to.
    """
    rows = table(config)
    layer = [row for row in rows if row.path[:2] == ("layers", 0)]
    layers, per_layer = config.num_hidden_layers, _size(layer)
    experts = _size(_of(layer, "experts"))
    expert, remainder = divmod(experts, config.num_local_experts)
    assert not remainder, "experts are stacked, so their size is a multiple of their number"
    active = layers * (per_layer - experts + config.num_experts_per_tok * expert)
    lm_head = _size(_of(rows, "lm_head"))
    return {
        "attention": _size(_of(layer, "attention")),
        "pooler_and_unpooler": _size(_of(layer, "pooling")),
        "router": _size(row for row in _of(layer, "router") if len(row.hf_shape) > 1),
        "vectors": _size(row for row in layer if len(row.hf_shape) == 1),
        "one_expert": expert,
        "all_experts": experts,
        "layer": per_layer,
        "all_layers": layers * per_layer,
        "embedding": _size(_of(rows, "embedding")),
        "lm_head": lm_head,
        "total": _size(rows),
        "active": active,
        "active_with_lm_head": active + lm_head,
    }


def byte_counts(config: ModelConfig) -> dict[str, int]:
    """Bytes in the published dtypes, and with the experts in NVFP4 as released: not in the first and last layer."""
    rows = table(config)
    layer = [row for row in rows if row.path[:2] == ("layers", 0)]
    experts = _of(layer, "experts")
    saved = _nbytes(experts) - sum(_nvfp4_nbytes(row) for row in experts)
    quantised = max(config.num_hidden_layers - 2, 0)
    return {
        "experts_of_a_layer": _nbytes(experts),
        "rest_of_a_layer": _nbytes(layer) - _nbytes(experts),
        "layer": _nbytes(layer),
        "total": _nbytes(rows),
        "layer_nvfp4": _nbytes(layer) - saved,
        "total_nvfp4": _nbytes(rows) - quantised * saved,
    }


def config_summary(config: ModelConfig) -> dict:
    """The published sizes by name, per-layer lists shortened to counts."""
    sizes = dict(config.to_hf()["text_config"])
    for name in ("layer_types", "layer_rope_theta", "mlp_layer_types", "model_type", "dtype", "attention_bias",
                 "attention_dropout", "hidden_act", "tie_word_embeddings", "rope_parameters"):
        sizes.pop(name, None)
    full = config.layer_types.count(FULL)
    return {**sizes, "rope_theta": config.rope_theta, "full_attention_layers": full,
            "sliding_attention_layers": config.num_hidden_layers - full,
            "layers_without_rotation": config.layer_rope_theta.count(0.0), "slices": config.num_slices}


def _of(rows: Iterable[Param], group: str) -> list[Param]:
    return [row for row in rows if row.group == group]


def _size(rows: Iterable[Param]) -> int:
    return sum(row.size for row in rows)


def _nbytes(rows: Iterable[Param]) -> int:
    return sum(row.nbytes for row in rows)


def _nvfp4_nbytes(row: Param) -> int:
    """Packed 4-bit values, one scale byte a block, and for each matrix two float32 scales (weight and input)."""
    matrices = row.hf_shape[0] * (2 if row.layout == "gate_up" else 1)
    return row.size // 2 + row.size // NVFP4_BLOCK + matrices * 2 * 4
