"""Parameter and byte counts of a model, from the parameter table alone: nothing needs weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from musejax.config import FULL, ModelConfig
from musejax.nvfp4 import BLOCK
from musejax.params import Param, table


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """How many parameters each part has; the first seven entries are of one layer.

    `vectors` are gains, residual gates and the router's selection bias. `active` counts what one token uses:
    everything of the layers except the experts it is not routed to.
    """
    rows = table(replace(config, nvfp4_layers=()))
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
    """Bytes with all experts in BF16, and with the experts in NVFP4 as released: not in the first and last layer.

    The NVFP4 entries are absent if the sizes are no multiples of its block.
    """
    rows = table(replace(config, nvfp4_layers=()))
    layer = [row for row in rows if row.path[:2] == ("layers", 0)]
    experts = _of(layer, "experts")
    counts = {
        "experts_of_a_layer": _nbytes(experts),
        "rest_of_a_layer": _nbytes(layer) - _nbytes(experts),
        "layer": _nbytes(layer),
        "total": _nbytes(rows),
    }
    if config.moe_hidden_size % BLOCK or config.moe_intermediate_size % BLOCK:
        return counts
    quantised = table(replace(config, nvfp4_layers=(0,)))
    saved = _nbytes(rows) - _nbytes(quantised)
    return counts | {"layer_nvfp4": _nbytes(layer) - saved,
                     "total_nvfp4": _nbytes(rows) - max(config.num_hidden_layers - 2, 0) * saved}


def config_summary(config: ModelConfig) -> dict:
    """The published sizes by name, per-layer lists shortened to counts."""
    sizes = dict(config.to_hf()["text_config"])
    for name in ("layer_types", "layer_rope_theta", "mlp_layer_types", "model_type", "dtype", "attention_bias",
                 "attention_dropout", "hidden_act", "tie_word_embeddings", "rope_parameters"):
        sizes.pop(name, None)
    full = config.layer_types.count(FULL)
    return {**sizes, "rope_theta": config.rope_theta, "full_attention_layers": full,
            "sliding_attention_layers": config.num_hidden_layers - full,
            "layers_without_rotation": config.layer_rope_theta.count(0.0), "slices": config.num_slices,
            "nvfp4_expert_layers": ranges(config.nvfp4_layers) or "none"}


def ranges(layers: Sequence[int]) -> str:
    """Ascending layer indices as text: (1, 2, 3, 5) -> "1-3,5"."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _of(rows: Iterable[Param], group: str) -> list[Param]:
    return [row for row in rows if row.group == group]


def _size(rows: Iterable[Param]) -> int:
    return sum(row.parameters for row in rows)


def _nbytes(rows: Iterable[Param]) -> int:
    return sum(row.nbytes for row in rows)
