"""One rank of 8 whose exchanges are looped back, as `bench layer` runs it, beside the reference layer with the same
weights: `reference.rank_layer` is `decoder_layer` cut to a rank (tests/test_bench_layer.py)."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from musejax.bench import reference
from musejax.config import NUM_SLICES, DecodeConfig
from musejax.model.attention import Rows
from musejax.packing import unpack_layer

RESIDUAL_BOUND = 2.0**-6  # of RMS(row): a residual after a layer, from the same input bits (design section 7)


@cache
def _unpack(config, layer):
    """In one program, for the sake of memory."""

    @jax.jit
    def unpack(packed):
        p = unpack_layer(config, layer, packed)
        p |= {name: p[name][0] for name in (*reference.EXPERT_LEAVES, "router")}
        p["post_expert_norm"] = p["post_expert_norm"][:config.moe_hidden_size // NUM_SLICES]
        p |= {name: p[name].max() for name in ("gate_up_input_scale", "down_input_scale")}
        return p

    return unpack


@cache
def _reference(config, layer, admitted, decode):
    return jax.jit(partial(reference.rank_layer, layer=layer, slots=admitted, config=config, decode=decode))


def table_slice(config, layer, packed) -> dict:
    """One packed slice as `reference.random_slice` names it."""
    return _unpack(config, layer)(packed)


def reference_layer(config, layer, packed, stream, stored, context, admitted, decode=None):
    """-> (stream float32 [t, d], ids [t, j]) after a layer, for a chain of rows after `context` positions. Sums in
    float64: at the released sizes the reference with float32 sums is itself up to 0.020 RMS(row) away from that."""
    layer = config.layer_types.index(config.layer_types[layer])  # layers of a kind share a program
    at = jnp.arange(stream.shape[0], dtype=jnp.int32)
    rows = Rows(context + at, jnp.int32(len(at)), at[:, None] >= at)
    run = _reference(config, layer, admitted, decode or DecodeConfig())
    with jax.enable_x64(True):
        out, ids, _ = run(table_slice(config, layer, packed), stream, stored=stored, length=jnp.int32(context),
                          rows=rows)
    return np.asarray(out), np.asarray(ids)


def row_errors(got, got_ids, want, want_ids) -> np.ndarray:
    """The largest of each row over RMS(row), of rows with the same experts; at least nine in ten must have them."""
    same = (np.sort(got_ids, -1) == np.sort(want_ids, -1)).all(-1)
    assert same.mean() >= 0.9, f"rows with other experts: {np.flatnonzero(~same)}"
    error = np.abs(got - want).max(-1) / np.sqrt((want.astype(np.float64)**2).mean(-1))
    return error[same]
