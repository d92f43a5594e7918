"""Breaking one side on purpose: what can be broken, and the packed weights of both sides."""

from __future__ import annotations

import copy

import numpy as np

from musejax.config import ConfigError, ModelConfig
from musejax.packing import layout, pack_params, unpack_params

INJECTIONS = {
    "k-order": "other side: the same values in another order in sums over K, of all GEMMs but o_proj",
    "combine-order": "other side: combine in another order (flat for ep(R), ep(8) for flat)",
    "slice": "other side: the sign of one weight of o_proj in slice 5 of the middle layer",
    "tie": "both sides: two experts of the middle layer tie for the last place; other side: takes the higher id",
}

_HIDDEN_ROWS = ("o_proj", "unpooler")
_HIDDEN_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "pooler", "router", "input_norm", "ffn_norm",
                   "post_ffn_norm", "attention_residual_gate", "ffn_residual_gate")


def _reversed_rows(x: np.ndarray, axis: int) -> np.ndarray:
    """Blocks of 16 rows in reversed order; x [s, ..., rows of a slice, ...], rows on `axis`."""
    cut = x.reshape(*x.shape[:axis], x.shape[axis] // 16, 16, *x.shape[axis + 1:])
    return np.flip(cut, (0, axis)).reshape(x.shape)


def reversed_columns(x: np.ndarray, blocks: int) -> np.ndarray:
    """Blocks of columns in reversed order, also of codes and scales."""
    cut = x.reshape(*x.shape[:-1], blocks, -1)
    return np.flip(cut, -2).reshape(x.shape)


def _other_k_order(config: ModelConfig, params: dict) -> dict:
    """The same model with columns of the stream, of h and of c (spec section 3.1) in reversed blocks of 16.

    Weights that make such columns have their rows moved along with the columns of those that take them, so all values
    are the same, and sums over K and sums of squares add them in another order.
    """
    d, m, f = (n // 16 for n in (config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size))

    def layer(p):
        out = {name: _reversed_rows(x, 1) if name in _HIDDEN_ROWS else
               reversed_columns(x, d) if name in _HIDDEN_COLUMNS else x for name, x in p.items()}
        out["pooler"] = _reversed_rows(out["pooler"], 1)
        out["expert_norm"] = reversed_columns(p["expert_norm"], m)
        for end in ("", "_scale"):
            if "gate_up" + end in p:
                out["gate_up" + end] = reversed_columns(_reversed_rows(p["gate_up" + end], 3), m)
                out["down" + end] = reversed_columns(p["down" + end], f)
        # Rows of y keep their order, and with it the combine.
        return out

    return {"embed": _reversed_rows(params["embed"], 2), "final_norm": reversed_columns(params["final_norm"], d),
            "lm_head": reversed_columns(params["lm_head"], d), "layers": [layer(p) for p in params["layers"]]}


def _with_tie(config: ModelConfig, params: dict, swapped: bool) -> dict:
    """In the middle layer the first and the last expert tie for the last place; `swapped`, each has the other's id."""
    i, k, last = config.num_hidden_layers // 2, config.num_experts_per_tok, config.num_local_experts - 1
    if k > last:
        raise ConfigError(f"inject: tie needs an expert that is not chosen, and all {k} are")
    p = {name: np.array(x, order="C") for name, x in params["layers"][i].items()}
    router = p["router"].reshape(last + 1, -1)
    router[last] = router[0]
    top = p["router_bias"].max()
    p["router_bias"][1:k] = top + 4
    p["router_bias"][[0, last]] = top + 2
    for name in p:
        if swapped and name.startswith(("gate_up", "down")):
            axis = 0 if name.endswith(("_global", "_input_scale")) else 1
            order = np.arange(last + 1)
            order[[0, last]] = last, 0
            p[name] = np.take(p[name], order, axis=axis)
    return params | {"layers": [p if j == i else layer for j, layer in enumerate(params["layers"])]}


def _with_other_sign(config: ModelConfig, packed: dict) -> dict:
    """The sign of the largest weight among the first 64 of o_proj in slice 5 of the middle layer."""
    packed = copy.deepcopy(packed)
    i = config.num_hidden_layers // 2
    start = layout(config, i)["dense.out"]
    words = packed["layers"][i]["dense"][5, start:start + 128].view(np.uint16)
    words[(words & 0x7FFF).argmax()] ^= 0x8000
    return packed


def injected(kind: str | None, config: ModelConfig, packed: dict) -> tuple[dict, dict]:
    """Packed params of this side and of the other side."""
    if kind == "slice":
        return packed, _with_other_sign(config, packed)
    if kind in ("k-order", "tie"):
        params = unpack_params(packed, config)
        if kind == "k-order":
            return packed, pack_params(_other_k_order(config, params), config)
        return tuple(pack_params(_with_tie(config, params, swapped), config) for swapped in (False, True))
    return packed, packed
