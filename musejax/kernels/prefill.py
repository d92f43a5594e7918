"""Prompts through plain JAX on the kernels' weights and cache: faster for long ones, and not bit-exact."""

from __future__ import annotations

import jax

from musejax.cache import Cache
from musejax.config import DecodeConfig, ModelConfig
from musejax.kernels.cache import KernelCache, none_accepted
from musejax.model import forward as fwd
from musejax.packing import unpack_head, unpack_layer


class UnpackedLayers:
    """`params["layers"]` in table form, each layer unpacked when it is asked for: one copy of the weights in memory."""

    def __init__(self, layers, config: ModelConfig):
        self.layers, self.config = layers, config

    def __getitem__(self, layer: int) -> dict:
        return unpack_layer(self.config, layer, self.layers[layer])


def table_view(params: dict, config: ModelConfig) -> dict:
    """Packed params as the plain JAX functions take them; for use under jit, where all is unpacked only for its use."""
    return {"embed": params["embed"], "final_norm": params["final_norm"],
            "lm_head": unpack_head(config, params["lm_head"]), "layers": UnpackedLayers(params["layers"], config)}


def append_reference(params: dict, cache: KernelCache, tokens_t, num_valid, *, config: ModelConfig,
                     decode: DecodeConfig) -> tuple[jax.Array, KernelCache]:
    """`kernels.forward.append` in plain JAX, for any number of rows; `cache` must have no rows in flight to store.

    Returns:
        (residual stream [t, d], cache longer by num_valid).
    """
    view = Cache(cache.layers, cache.length)
    stream, view = fwd.append(table_view(params, config), view, tokens_t, num_valid, config=config, decode=decode)
    return stream, none_accepted(cache._replace(layers=view.layers, length=view.length))
