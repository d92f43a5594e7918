"""The training step of the drafter (dflash2.md section 7): float32 master weights, AdamW, averaged weights."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from musejax.numerics import CANON
from musejax.speculation.config import DraftConfig
from musejax.speculation.draft import Borrowed
from musejax.speculation.params import init_params
from musejax.speculation.train import Metrics, Sequences, loss

POLICY = CANON  # bfloat16 probabilities as well: all GEMMs of a step are then of one kind


@dataclasses.dataclass(frozen=True)
class Settings:
    """Choices of the optimiser.

    Attributes:
        lr: peak learning rate; linear warm-up over the first `warmup` of training, then a cosine to `floor` of it.
        anchors: blocks of a sequence in a step.
        gamma: decay of the loss along a block, None for the published value.
        ema: decay of the averaged weights, which are the ones evaluated and shipped.
    """

    lr: float = 2e-3
    warmup: float = 0.04
    floor: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    beta2: float = 0.95
    ema: float = 0.998
    anchors: int = 16
    gamma: float | None = None

    def schedule(self, fraction: float) -> float:
        """Learning rate over its peak, after this fraction of training."""
        fraction = min(max(fraction, 0.0), 1.0)
        if fraction < self.warmup:
            return fraction / self.warmup
        cosine = 0.5 + 0.5 * math.cos(math.pi * (fraction - self.warmup) / (1 - self.warmup))
        return self.floor + (1 - self.floor) * cosine

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW without the learning rate; vectors do not decay."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip), optax.scale_by_adam(b2=self.beta2),
            optax.add_decayed_weights(self.weight_decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))


def init_state(config: DraftConfig, settings: Settings, seed: int) -> dict:
    """{"params", "opt", "ema", "step"}: everything the step changes."""
    params = init_params(config, jax.random.key(seed))
    return {"params": params, "opt": settings.optimizer().init(params), "ema": jax.tree.map(jnp.copy, params),
            "step": jnp.zeros((), jnp.int32)}


def train_step(state: dict, store: Sequences, borrowed: Borrowed, rows_b, rate, *, config: DraftConfig,
               settings: Settings, seed: int, num_tokens: int | None, remat: bool = False):
    """One step on these rows of the store, at `rate` (the schedule's value) -> (state, figures).

    Figures are float32 [7]: the fields of Metrics, then the norm of the gradient.
    """
    batch = jax.tree.map(lambda x: x[rows_b], store)
    key = jax.random.fold_in(jax.random.key(seed), state["step"])

    def objective(params) -> tuple[jax.Array, Metrics]:
        return loss(params, borrowed, batch, key, config=config, policy=POLICY, anchors=settings.anchors,
                    gamma=settings.gamma, num_tokens=num_tokens, remat=remat)

    (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state["params"])
    updates, opt = settings.optimizer().update(grads, state["opt"], state["params"])
    params = jax.tree.map(lambda p, u: p - settings.lr * rate * u, state["params"], updates)
    step = state["step"] + 1
    decay = jnp.minimum(settings.ema, (1.0 + step) / (10.0 + step))
    ema = jax.tree.map(lambda a, p: a * decay + p * (1 - decay), state["ema"], params)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    return {"params": params, "opt": opt, "ema": ema, "step": step}, jnp.stack([*metrics, norm])
