"""Where bits are dropped: the named rounding points and the two numeric policies.

`exact` does all arithmetic in float32 and rounds nowhere: for comparison with the reference library.
`canon` rounds to bfloat16 at every point of ROUNDING_POINTS and nowhere else; GEMMs multiply bfloat16
values and accumulate in float32 (see `sum_dtype`); the residual stream stays float32. NVFP4 experts may quantise
their inputs besides (`DecodeConfig.activations`); with `nvfp4_static` their `swiglu` is quantised from float32 and
not rounded first.

Rounded values are carried as float32 arrays that hold bfloat16 values. XLA may drop a pair of
float32 -> bfloat16 -> float32 converts ("excess precision"), so rounding is `lax.reduce_precision`,
which it never drops. No bits are promised here: XLA chooses the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

ROUNDING_POINTS = {
    "embed_norm": "embedding row after its weightless norm",
    "gain": "1 + gamma of a centred or input-scaled norm",
    "norm": "output of a centred norm (input, pre-FFN, pre-expert, final)",
    "qkv": "q, k, v and gate projections",
    "qk_norm": "q and k after their per-head norm",
    "rope": "q and k after rotation",
    "attention_probs": "exp(score), when the policy keeps it in bfloat16",
    "attention": "attention output of one head, after the division",
    "gated_output": "head norm times sigmoid(gate), one rounding for both",
    "o_proj": "attention output projection",
    "scaled": "input times gain, before an input-scaled norm (post-expert, post-FFN)",
    "post_norm": "normed branch before the residual gate",
    "pooler": "pooler projection",
    "swiglu": "silu(gate) * up, from float32 accumulators",
    "down": "expert output row",
    "combine_partial": "one owner group's weighted sum, in ep(R) order",
    "combine": "weighted sum of expert rows",
    "unpooler": "unpooler projection",
    "final_stream": "residual stream before the final norm",
}
"""Every place where `canon` rounds to bfloat16 (spec section 3.1), by the name the code uses."""


def round_bf16(x: jax.Array) -> jax.Array:
    """float32 -> nearest bfloat16 value (ties to even), still a float32 array."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


@dataclass(frozen=True)
class Policy:
    """A numeric policy; hashable, so that jitted functions take it as a static argument.

    Attributes:
        name: `exact` or `canon`.
        probs: `bfloat16` keeps exp(score) in bfloat16 without a running maximum (the kernels' rule);
            `float32` is a plain stable softmax, as the golden values were made.
    """

    name: str
    probs: str

    def __post_init__(self):
        if self.name not in ("exact", "canon") or self.probs not in ("float32", "bfloat16"):
            raise ValueError(f"policy: expected exact or canon with float32 or bfloat16 probabilities, got {self}")
        if self.name == "exact" and self.probs != "float32":
            raise ValueError("policy: exact keeps probabilities in float32")

    @property
    def rounds(self) -> bool:
        return self.name == "canon"

    def round(self, point: str, x: jax.Array) -> jax.Array:
        """x, rounded if this policy rounds at `point` (a key of ROUNDING_POINTS)."""
        if point not in ROUNDING_POINTS:
            raise KeyError(f"rounding point: expected one of {', '.join(ROUNDING_POINTS)}, got {point!r}")
        return round_bf16(x) if self.rounds else x

    def einsum(self, equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """One GEMM of rounded values -> float32, accumulated in `sum_dtype()`.

        XLA's CPU backend has no dot of bfloat16 operands with a float32 result; there the values are widened
        first, which changes no product.
        """
        if not self.rounds or sum_dtype() == jnp.float64:
            return einsum_f32(equation, x, w)

        def narrow(x, w):
            return jnp.einsum(equation, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16),
                              preferred_element_type=jnp.float32)

        return lax.platform_dependent(x, w, cpu=partial(einsum_f32, equation), default=narrow)


def storage_dtype(policy: Policy, platform: str):
    """dtype in which rounded values (weights of GEMMs, keys, values) are kept on a platform, without loss.

    bfloat16 where the policy rounds, except on CPUs: XLA's CPU backend has no bfloat16 arithmetic and would
    widen whole weights and caches in every step.
    """
    return jnp.bfloat16 if policy.rounds and platform != "cpu" else jnp.float32


def sum_dtype():
    """dtype in which GEMMs and norms add: float32, or float64 inside `with jax.enable_x64(True):`.

    For comparison with golden values, which are summed in float64; values, weights and results stay float32. It is
    read when a function is traced, and JAX keeps traces inside and outside apart.
    """
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32


def einsum_f32(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """GEMM of float32 values -> float32, accumulated in `sum_dtype()`; HIGHEST forbids TF32 on GPUs."""
    dtype = sum_dtype()
    x, w = (a.astype(jnp.float32).astype(dtype) for a in (x, w))
    return jnp.einsum(equation, x, w, precision=lax.Precision.HIGHEST, preferred_element_type=dtype).astype(jnp.float32)


EXACT = Policy("exact", probs="float32")
CANON = Policy("canon", probs="bfloat16")
CANON_F32_PROBS = Policy("canon", probs="float32")
POLICIES = {"exact": EXACT, "canon": CANON}
