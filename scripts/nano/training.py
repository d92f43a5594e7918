"""The training step of the nano model, and its checkpoints.

The model is `musejax.model.forward` under the CANON policy, so training rounds where inference rounds. Master
weights are float32; GEMMs take them in bfloat16. The router's selection bias is moved by the load of the experts,
everything else by AdamW.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from nano.batches import Rows
from safetensors import safe_open
from safetensors.numpy import save_file

from musejax.config import DecodeConfig, ModelConfig
from musejax.model.forward import forward
from musejax.params import assemble, init_params, leaf_of, table

DECODE = DecodeConfig(experts="all")  # every expert for every row: differentiable, and GEMMs of fixed shape


@dataclasses.dataclass(frozen=True)
class Settings:
    """Choices of the optimiser.

    Attributes:
        lr: peak learning rate; warm-up is linear over the first `warmup` of training, then linear to 0.
        question_weight: weight of the loss on question tokens; answer tokens have 1.
        bias_rate: step of the router's selection bias, scaled by the schedule like the learning rate.
        drop: share of the weights of attention, experts and pooling that a step leaves out (DropConnect).
        ema: decay of the averaged weights, which are the ones evaluated and shipped.
    """

    lr: float = 3e-3
    warmup: float = 0.02
    weight_decay: float = 0.3
    clip: float = 1.0
    beta2: float = 0.95
    ema: float = 0.998
    question_weight: float = 0.25
    bias_rate: float = 1e-3
    drop: float = 0.15

    def schedule(self, fraction: float) -> float:
        """Learning rate over its peak, after this fraction of training."""
        fraction = min(max(fraction, 0.0), 1.0)
        return min(fraction / self.warmup, 1.0) * min(1.0, (1 - fraction) / (1 - self.warmup))

    def optimizer(self, config: ModelConfig) -> optax.GradientTransformation:
        """AdamW without the learning rate; vectors do not decay."""
        decays = assemble(config, ((p, p.group != "norms" and p.path[-1] != "router_bias") for p in table(config)))
        return optax.chain(optax.clip_by_global_norm(self.clip), optax.scale_by_adam(b2=self.beta2),
                           optax.add_decayed_weights(self.weight_decay, mask=decays))


def losses(params: dict, batch: Rows, config: ModelConfig, remat: bool = False):
    """Sums over a batch of tokens [b, t + 1]: ((answer loss, question loss), (answer tokens, question tokens), loads).

    Padding is never a target, and it follows the text, so that no real row sees it.

    Returns:
        losses float32 [2], counts float32 [2], and rows that chose each expert, float32 [L, e].
    """
    decode = DECODE.for_model(config)
    tokens = batch.tokens

    def one(sequence):
        logits, trace = forward(params, sequence, config=config, decode=decode, remat=remat)
        return logits, trace.expert_ids

    logits, ids_bltj = jax.vmap(one)(tokens[:, :-1])
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    place = jnp.arange(1, tokens.shape[1])
    real = place < batch.length[:, None]
    answer = real & (place >= batch.prompt[:, None])
    masks = jnp.stack([answer, real & ~answer]).astype(jnp.float32)
    chosen = ids_bltj[..., None] == jnp.arange(config.num_local_experts)
    loads = (chosen & real[:, None, :, None, None]).sum((0, 2, 3)).astype(jnp.float32)
    return jnp.einsum("kbt,bt->k", masks, nll), masks.sum((1, 2)), loads


def thinned(params: dict, step, drop: float, config: ModelConfig) -> dict:
    """The parameters with a share `drop` of the inner weights at 0 and the others larger, another choice each step.

    The problems are few, and this keeps the model from learning them by heart too soon.
    """
    rows = table(config)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), len(rows))

    def thin(p, key):
        leaf = leaf_of(params, p)
        if not drop or p.group not in ("attention", "experts", "pooling"):
            return leaf
        return jnp.where(jax.random.bernoulli(key, 1 - drop, leaf.shape), leaf / (1 - drop), 0.0)

    return assemble(config, ((p, thin(p, key)) for p, key in zip(rows, keys, strict=True)))


def init_state(config: ModelConfig, settings: Settings, seed: int) -> dict:
    """{"params", "opt", "ema", "step"}: everything the step changes."""
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return {"params": params, "opt": settings.optimizer(config).init(params),
            "ema": jax.tree.map(jnp.copy, params), "step": jnp.zeros((), jnp.int32)}


def train_step(state: dict, batch: Rows, rate, *, config: ModelConfig, settings: Settings, remat: bool = False):
    """One step at `rate` (the schedule's value) -> (state, metrics).

    Metrics are float32 [5]: answer loss, question loss, gradient norm, largest share of an expert times the number
    of experts (1 is even) over all layers, and answer tokens.
    """
    def loss(params):
        sums, counts, loads = losses(thinned(params, state["step"], settings.drop, config), batch, config, remat)
        weights = jnp.array([1.0, settings.question_weight])
        return (weights * sums).sum() / (weights * counts).sum(), (sums, counts, loads)

    (_, (sums, counts, loads)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    updates, opt = settings.optimizer(config).update(grads, state["opt"], state["params"])
    params = jax.tree.map(lambda p, u: p - settings.lr * rate * u, state["params"], updates)
    params["layers"] = [
        {**layer, "router_bias": layer["router_bias"] + settings.bias_rate * rate * jnp.sign(load.mean() - load)}
        for layer, load in zip(params["layers"], loads, strict=True)]
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    step = state["step"] + 1
    decay = jnp.minimum(settings.ema, (1.0 + step) / (10.0 + step))
    ema = jax.tree.map(lambda a, p: a * decay + p * (1 - decay), state["ema"], params)
    peak = (loads.max(-1) / loads.mean(-1)).max()
    metrics = jnp.stack([*(sums / jnp.maximum(counts, 1)), norm, peak, counts[0]])
    return {"params": params, "opt": opt, "ema": ema, "step": step}, metrics


def answer_loss(params: dict, batch: Rows, *, config: ModelConfig):
    """float32 [2]: summed loss of the answer tokens, and their number."""
    sums, counts, _ = losses(params, batch, config)
    return jnp.stack([sums[0], counts[0]])


def shipped(params: dict, config: ModelConfig) -> dict:
    """The parameters as they are written: bfloat16, router float32."""
    return assemble(config, ((p, leaf_of(params, p).astype(p.dtype)) for p in table(config)))


def _names(tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def save_state(folder: Path, tree, info: dict) -> None:
    """Writes `state.safetensors` in one atomic step; `info` (JSON) travels in its header."""
    folder.mkdir(parents=True, exist_ok=True)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    draft = folder / "state.partial"
    save_file(dict(zip(_names(tree), leaves, strict=True)), draft, metadata={"info": json.dumps(info)})
    os.replace(draft, folder / "state.safetensors")


def load_state(folder: Path, like) -> tuple[dict, dict] | None:
    """(tree, info) of `save_state`, or None if nothing was saved yet.

    Args:
        like: a pytree of the same structure and shapes.
    """
    path = folder / "state.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, "np") as file:
        info = json.loads(file.metadata()["info"])
        wanted, stored = _names(like), set(file.keys())
        if set(wanted) != stored:
            raise ValueError(f"{path}: expected the state of this model, got other tensors: "
                             f"{', '.join(sorted(set(wanted) ^ stored)[:4])}")
        leaves = [jnp.asarray(file.get_tensor(name)) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), info
