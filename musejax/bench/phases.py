"""The layers of `bench layer`, phase by phase: what the layer kernel saves by being one launch.

Each phase is a launch of its own, made of the kernel's functions, and XLA records a pass as one CUDA graph. The weights
are the kernel's own. Between two phases what the other ranks would send is this rank's own slice, 8 times: a copy on
the device, 7 a layer and at most 1 MB each, whose time counts. So does that of moving rows between plain arrays and the
frames of a phase.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from musejax.bench.layer import LoopedLayers
from musejax.cache import LayerCache
from musejax.config import NUM_SLICES
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.calls import Call, RowState
from musejax.kernels.forward import chain, layer_on_devices


def looped(x: jax.Array) -> jax.Array:
    """[n, ...] -> [8 n, ...]: as if every rank sent the same."""
    return jnp.tile(x, (NUM_SLICES,) + (1,) * (x.ndim - 1))


class PhasedLayers:
    """The layers of a `LoopedLayers`, used as it is; the same bits."""

    def __init__(self, layers: LoopedLayers):
        self.case, self.config, self.decode = layers.case, layers.config, layers.decode
        self.numbers, self.params = layers.numbers, layers.params
        self.expert_bytes, self.dense_bytes = layers.expert_bytes, layers.dense_bytes
        self.kept = [jnp.copy(x) for x in layers.kept]
        self.call = jax.jit(self._launch, donate_argnums=(1,))

    def _launch(self, stream, kept, params):
        case, call = self.case, Call(self.config, self.decode, "cuda")
        state = jnp.array([case.context, case.rows, 0], jnp.int32)
        rows = RowState(chain(case.rows), state, jnp.zeros(MAX_ROWS, jnp.int32))
        cos_sin = call.angles(case.context + jnp.arange(case.rows, dtype=jnp.int32))
        ids, after = [], []
        for n, (layer, p) in enumerate(zip(self.numbers, params, strict=True)):
            stored, flight = LayerCache(*kept[4 * n:4 * n + 2]), LayerCache(*kept[4 * n + 2:4 * n + 4])
            stream, chosen, stored, flight = rank_layer(call, layer, p, stream, cos_sin, rows, stored, flight)
            ids.append(chosen)
            after += [*stored, *flight]
        return stream, jnp.stack(ids), after

    def launch(self, stream):
        """One pass -> (stream, ids [layers, rows, k]); the caches are kept."""
        stream, ids, self.kept = self.call(stream, self.kept, self.params)
        return stream, ids


def rank_layer(call: Call, layer: int, p: dict, stream, cos_sin, rows: RowState, stored, flight):
    """One layer of one rank, exchanges looped back -> (stream, ids, stored, flight)."""
    q, gate, stored, flight = call.attn_in(layer, stream, cos_sin, rows, p, stored, flight)
    return layer_on_devices(call, layer, p, stream, q, gate, rows, stored, flight, gather=looped)
