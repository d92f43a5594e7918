"""Bounds that the drafter's kernels keep beside draft.py, from the same input bits."""

import jax
import jax.numpy as jnp
import numpy as np
from draft_inputs import POLICY
from kernel_inputs import F32

from musejax.speculation import draft as dr


def assert_rounded(got, want, share=2.0**-7, equal=0.99):
    """bfloat16 values [.., n]: within 2 units in the last place, or `share` of the RMS of the last axis (a sum may
    cancel), and nearly all equal."""
    got, want = np.asarray(got, F32), np.asarray(want, F32)
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 2.0**-126))) - 7)
    rms = np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    error = np.abs(got - want)
    assert (error <= np.maximum(2 * unit, share * rms)).all(), (error / rms).max()
    assert np.mean(got == want) >= equal, f"{np.mean(got == want):.4f} of the elements are equal"


def assert_near(got, want, share=2.0**-16):
    """float32 values: within `share` of the RMS of the last axis, K of up to 2,048 being summed in another order."""
    got, want = np.asarray(got, F32), np.asarray(want, F32)
    rms = np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    assert (np.abs(got - want) <= share * rms).all(), (np.abs(got - want) / rms).max()


def assert_lattice(got, drafter, hidden, anchor, num_tokens=None):
    """Against draft.py from the same final-normed rows. Logits differ by 2^-16 of themselves, so candidates whose gaps
    exceed 1e-3 stand in the same places."""
    static = dict(config=drafter.config, policy=POLICY)
    unary = dr.unary_logits(drafter.borrowed, jnp.asarray(hidden), num_tokens=num_tokens, **static)
    want = dr.lattice(drafter.wide, jnp.asarray(hidden), unary, anchor, **static)
    best = np.asarray(jax.lax.top_k(unary, drafter.config.candidates + 1)[0])
    clear = np.diff(best, axis=1) < -1e-3  # to the next one
    apart = clear & np.concatenate([np.ones_like(clear[:, :1]), clear[:, :-1]], axis=1)
    same = np.asarray(got.tokens) == np.asarray(want.tokens)
    assert same[apart].all() and apart.mean() > 0.8
    np.testing.assert_allclose(got.coverage, want.coverage, atol=1e-4)
    before = np.concatenate([np.ones_like(same[:1]), same[:-1]])
    both = before[:, :, None] & same[:, None, :]
    np.testing.assert_allclose(np.asarray(got.scores)[both], np.asarray(want.scores)[both], atol=2e-3)
