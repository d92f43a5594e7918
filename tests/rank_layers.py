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

# Of RMS(row): a residual after a layer, from the same input bits.
RESIDUAL_BOUND = 2.0**-6
# At the released sizes, the largest of 8,192 columns and the RMS over them. Float32 sums of XLA on a CPU beside its
# float64 sums are 0.020 and 0.0021 apart; gains that are off by half a unit of bfloat16 gave 0.028 and 0.0058. The
# kernel on an H200 at nine contexts, twice, XLA choosing its GEMMs anew: 0.018 to 0.027 and 0.0035 to 0.0052. So the
# largest tells of gross errors, and the RMS of fine ones.
LARGEST_BOUND, RMS_BOUND = 2.0**-5, 0.0055


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
    """-> (stream float32 [t, d], ids [t, j]) after a layer, for a chain of rows after `context` positions."""
    layer = config.layer_types.index(config.layer_types[layer])  # layers of a kind share a program
    at = jnp.arange(stream.shape[0], dtype=jnp.int32)
    rows = Rows(context + at, jnp.int32(len(at)), at[:, None] >= at)
    run = _reference(config, layer, admitted, decode or DecodeConfig())
    out, ids, _ = run(table_slice(config, layer, packed), stream, stored=stored, length=jnp.int32(context), rows=rows)
    return np.asarray(out), np.asarray(ids)


def row_errors(got, got_ids, want, want_ids) -> np.ndarray:
    """[rows, 2], the largest error of a row and the RMS of its errors, over RMS(row); of rows with the same experts,
    which at least nine in ten must have."""
    same = (np.sort(got_ids, -1) == np.sort(want_ids, -1)).all(-1)
    assert same.mean() >= 0.9, f"rows with other experts: {np.flatnonzero(~same)}"
    error = np.abs(got - want).astype(np.float64)
    error = np.stack([error.max(-1), np.sqrt((error**2).mean(-1))], axis=-1)
    return (error / np.sqrt((want.astype(np.float64)**2).mean(-1))[:, None])[same]


def check_released(errors) -> None:
    """The errors of a layer of the released sizes, all rows."""
    largest, rms = errors.max(0)
    assert largest <= LARGEST_BOUND and rms <= RMS_BOUND, f"largest {largest:.4f}, RMS {rms:.5f} of RMS(row)"
