"""Flax NNX modules: they own parameters with their names and placements, and call the pure functions.

Decode does not go through them: a jitted step takes the plain dict (`MuseSpark.pure()`), because
dispatching thousands of Variables costs more than a step.
"""

from __future__ import annotations

import jax
from flax import nnx

from musejax import params as table
from musejax.config import DecodeConfig, ModelConfig
from musejax.model.forward import forward


class Leaves(nnx.Module):
    """A set of named parameters, such as those of one decoder layer."""

    def __init__(self, leaves: dict):
        for name, value in leaves.items():
            setattr(self, name, nnx.Param(value))


class MuseSpark(nnx.Module):
    """The decoder as a module: `MuseSpark(config, params)(tokens) -> logits`.

    Build it without memory by `nnx.eval_shape` over random parameters, or around
    `params.abstract_params(config, mesh)`.
    """

    def __init__(self, config: ModelConfig, params: dict, decode: DecodeConfig | None = None):
        """Args:
            params: pytree of `params.build`: arrays, or ShapeDtypeStruct for an abstract module.
        """
        self.config = config
        self.decode = (decode or DecodeConfig()).for_model(config)
        self.shared = Leaves({k: v for k, v in params.items() if k != "layers"})
        self.layers = nnx.List([Leaves(leaves) for leaves in params["layers"]])

    @classmethod
    def init(cls, config: ModelConfig, key: jax.Array, decode: DecodeConfig | None = None) -> MuseSpark:
        """Random parameters, as `params.init_params` draws them."""
        return cls(config, table.init_params(config, key), decode)

    def pure(self) -> dict:
        """The params pytree that every function of this package takes."""
        def values(leaves):
            return {name: v.get_value() for name, v in vars(leaves).items() if isinstance(v, nnx.Variable)}

        return {**values(self.shared), "layers": [values(layer) for layer in self.layers]}

    def __call__(self, tokens_t: jax.Array) -> jax.Array:
        """int32 [t] -> logits float32 [t, v], one sequence, no cache."""
        return forward(self.pure(), tokens_t, config=self.config, decode=self.decode)[0]
