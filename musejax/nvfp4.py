"""NVFP4: 4-bit values with 8-bit block scales, for expert weights and, if wanted, the activations they meet.

Format (spec section 6, as NVIDIA ModelOpt writes it; `spec/reference_numpy.py` decides every rounding):

    value = e2m1(code) * e4m3(scale of its block) * global scale

    code      4 bits: sign, then an index into E2M1 = 0 0.5 1 1.5 2 3 4 6. Two to a byte along K: element 2i in the low
              nibble, 2i + 1 in the high one.
    scale     one E4M3 number (bias 7, subnormals m * 2^-9, largest 448) for BLOCK = 16 elements along K.
    global    one float32 number a matrix; gate and up have one each. Activations: a decode scale, see below.

The product of code and scale has at most 6 significant bits: it is exact in bfloat16, and a GEMM multiplies these
grid values as they are. Global scales multiply its float32 accumulators.

Weights are quantised in NumPy (`quantize_weight`), activations in JAX under jit (`quantize_activation`), both with
the bits of the reference. XLA rewrites 1 / (1 / x) and flushes subnormal numbers on CPUs, so the activation quantiser
keeps such pairs apart by barriers, and treats rows below TINY as rows of zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

BLOCK = 16
"""Elements along K that share a block scale."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Value of each code; code 8 is -0."""

ACTIVATIONS = ("bf16", "nvfp4_static", "nvfp4_per_token")
"""What GEMMs of NVFP4 experts multiply weights with; see `quantize_activation`."""

TINY = 2.0**-100
"""Per-token rows whose largest magnitude is below this count as zeros: their scales could be subnormal numbers."""

# Smallest magnitude of each nonzero code: its lower neighbour's midpoint, which belongs to the even code of the two.
_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


# ------------------------------------------------------------------ NumPy: codes, scales, weights


def e2m1_encode(x: np.ndarray) -> np.ndarray:
    """float32 -> codes uint8 0..15: nearest, ties to the even code, saturating at 6; keeps the sign of zero."""
    magnitude = np.abs(x)
    codes = np.left_shift(np.signbit(x), 3, dtype=np.uint8)
    for bound, inclusive in _STEPS:
        codes += (magnitude >= bound) if inclusive else (magnitude > bound)
    return codes


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """Non-negative float32 -> E4M3: nearest, ties to even, saturating at 448 (a plain cast gives NaN above 464)."""
    return np.minimum(x, np.float32(E4M3_MAX)).astype(E4M3)


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes [..., K] -> bytes [..., K/2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: np.ndarray) -> np.ndarray:
    """Bytes [..., K/2] -> codes [..., K]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def dequantize(packed: np.ndarray, scale: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """Values in float32, NumPy; the multiplication by the global scale is the only one that rounds.

    Args:
        packed: uint8 [..., N, K/2].
        scale: E4M3 [..., N, K/16].
        global_scale: float32 [...].
    """
    grid = E2M1[unpack(packed)] * np.repeat(scale.astype(np.float32), BLOCK, axis=-1)
    return grid * np.asarray(global_scale, np.float32)[..., None, None]


class Weight(NamedTuple):
    """Quantised matrices. packed: uint8 [..., N, K/2]. scale: E4M3 [..., N, K/16]. global_scale: float32 [...]."""

    packed: np.ndarray
    scale: np.ndarray
    global_scale: np.ndarray


def quantize_weight(w: np.ndarray) -> Weight:
    """ModelOpt's recipe, one global scale for each [N, K] matrix: amax / 2688, block scales amax_block / (6 global).

    Block scales are at least 2^-9. A matrix of zeros gets global scale 0.

    Args:
        w: [..., N, K], K a multiple of 16, any dtype that float32 holds.

    Raises:
        ValueError: K is not a multiple of 16, or values are not finite.
    """
    if w.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4: expected rows of a multiple of {BLOCK} elements, got {list(w.shape)}")
    blocks = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    total = amax.max(axis=(-2, -1)) / np.float32(E2M1_MAX * E4M3_MAX)
    if not np.isfinite(total).all():
        raise ValueError("NVFP4: expected finite weights, got infinity or NaN")
    divisor = np.where(total > 0, total, np.float32(1))[..., None, None]
    scale = e4m3_encode(np.maximum(amax / (np.float32(E2M1_MAX) * divisor), np.float32(2.0**-9)))
    codes = e2m1_encode(blocks / (scale.astype(np.float32) * divisor)[..., None])
    return Weight(pack(codes.reshape(w.shape)), scale, total)


# ------------------------------------------------------------------ JAX: decoding


def grid(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """uint8 [..., K/2] and E4M3 [..., K/16] -> e2m1 * e4m3, float32 [..., K], exact."""
    nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.uint32)
    m = nibbles & 7  # bits of a float32: 0, 0.5 = 0x3F000000, then exponent and one mantissa bit
    bits = jnp.where(m < 2, m * 0x3F000000, ((m >> 1) + 126) << 23 | (m & 1) << 22) | (nibbles & 8) << 28
    blocks = lax.bitcast_convert_type(bits, jnp.float32).reshape(*scale.shape, BLOCK)
    return (blocks * scale.astype(jnp.float32)[..., None]).reshape(*packed.shape[:-1], -1)


# ------------------------------------------------------------------ JAX: activations


def round_e2m1(x: jax.Array) -> jax.Array:
    """float32 -> nearest E2M1 value, ties to the even code, saturating at 6."""
    magnitude = jnp.abs(x)
    value = jnp.zeros_like(x)
    for (bound, inclusive), low, high in zip(_STEPS, E2M1, E2M1[1:8], strict=False):
        over = (magnitude >= bound) if inclusive else (magnitude > bound)
        value = value + jnp.where(over, high - low, 0)  # exact sums
    return jnp.copysign(value, x)


def round_e4m3(x: jax.Array) -> jax.Array:
    """Non-negative float32 -> nearest E4M3 value as float32, ties to even, saturating at 448; NaN stays NaN."""
    x = jnp.minimum(x, E4M3_MAX)
    subnormal = lax.round(x * 512.0, lax.RoundingMethod.TO_NEAREST_EVEN) * (1 / 512)
    return jnp.where(x < 2.0**-6, subnormal, lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3))


class Activation(NamedTuple):
    """Quantised rows: x is about values * scale (of each block) * decode.

    Attributes:
        values: E2M1 values, float32 [t, k/16, 16].
        scale: E4M3 values, float32 [t, k/16].
        decode: float32 [t, 1], multiplies accumulators.
    """

    values: jax.Array
    scale: jax.Array
    decode: jax.Array

    @property
    def grid(self) -> jax.Array:
        """values * scale, float32 [t, k], exact in bfloat16."""
        return (self.values * self.scale[..., None]).reshape(self.values.shape[0], -1)


def quantize_activation(x_tk: jax.Array, mode: str, input_scale: jax.Array | float = 1.0) -> Activation:
    """Rows -> NVFP4, with the bits of the reference, every operation rounded to float32. NaN stays NaN.

    Args:
        x_tk: float32 [t, k], k a multiple of 16.
        mode: `nvfp4_static` takes `input_scale` as the decode scale of every row; `nvfp4_per_token` takes
            amax / 2688 of the row itself (0 for rows below TINY) and ignores `input_scale`.
        input_scale: float32 [], positive.
    """
    one = jnp.float32(1)
    blocks = x_tk.reshape(x_tk.shape[0], -1, BLOCK)
    amax = jnp.abs(blocks).max(axis=-1)
    if mode == "nvfp4_per_token":
        row = amax.max(axis=-1, keepdims=True)
        dead = row < TINY
        decode = jnp.where(dead, 0, row * np.float32(1 / (E2M1_MAX * E4M3_MAX)))
        encode = one / jnp.where(dead, one, decode)
        amax = jnp.where(dead, 0, amax)
    elif mode == "nvfp4_static":
        decode = jnp.broadcast_to(jnp.asarray(input_scale, jnp.float32), (x_tk.shape[0], 1))
        encode = one / decode
    else:
        raise ValueError(f"mode: expected nvfp4_static or nvfp4_per_token, got {mode!r}")
    encode, sixth = lax.optimization_barrier((encode, amax * np.float32(1 / E2M1_MAX)))
    scale = round_e4m3(encode * sixth)
    step = lax.optimization_barrier(scale * lax.optimization_barrier(one / encode))
    inverse = lax.optimization_barrier(jnp.where(scale > 0, one / jnp.where(scale > 0, step, one), 0))
    return Activation(round_e2m1(blocks * inverse[..., None]), scale, decode)
