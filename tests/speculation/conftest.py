"""The NumPy reference of the DFlash 2 step, and drafters of random weights in its form and in ours."""

import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from musejax.speculation import draft as dr
from musejax.speculation import params as dp
from musejax.speculation.config import DraftConfig


@pytest.fixture(scope="session")
def reference(shared):
    """The module spec/dflash2_numpy.py."""
    path = shared / "spec" / "dflash2_numpy.py"
    assert path.is_file(), f"{shared} is there, but not {path}"
    spec = importlib.util.spec_from_file_location("dflash2_numpy", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@dataclass
class Case:
    """One drafter twice: `cfg`, `weights`, `embed`, `head` for the reference (float64), the rest for musejax."""

    cfg: Any
    weights: dict
    embed: np.ndarray
    head: np.ndarray
    config: DraftConfig
    params: dict
    borrowed: dr.Borrowed


def config_of(cfg) -> DraftConfig:
    return DraftConfig(
        vocab_size=cfg.vocab, hidden_size=cfg.hidden, num_hidden_layers=cfg.layers, num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads, head_dim=cfg.head_dim, intermediate_size=cfg.ffn, sliding_window=cfg.window,
        rms_norm_eps=cfg.eps, rope_theta=cfg.theta, max_position_embeddings=4096, block_size=cfg.block,
        mask_token_id=cfg.mask_id, target_layer_ids=cfg.taps, conv_kernel_size=2, conv_group_size=cfg.conv_group,
        selector_rank=cfg.rank, selector_top_k=cfg.top_k, output_multiplier=cfg.out_mult,
        final_logit_softcapping=cfg.softcap or None, input_embedding_scale=cfg.emb_scale)


def params_of(config: DraftConfig, weights: dict, dtype=jnp.float32) -> dict:
    rows = dp.required(config)
    assert {p.key for p in rows} == set(weights)
    return dp.assemble(config, {p.path: jnp.asarray(weights[p.key], dtype) for p in rows})


@pytest.fixture(scope="session")
def make_case(reference):
    """make_case(seed, **fields of the reference's Cfg) -> Case; weights are bfloat16 values."""
    def make(seed=0, **fields) -> Case:
        import ml_dtypes

        def rounded(x):
            return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)

        rng = np.random.default_rng(seed)
        cfg = reference.Cfg(**fields)
        weights = {name: rounded(w) for name, w in reference.random_weights(cfg, rng).items()}
        embed, head = (rounded(rng.normal(size=(cfg.vocab, cfg.hidden))) for _ in range(2))
        config = config_of(cfg)
        borrowed = dr.Borrowed(jnp.asarray(embed, jnp.float32)[None], jnp.asarray(head, jnp.float32)[None])
        return Case(cfg, weights, embed, head, config, params_of(config, weights), borrowed)

    return make
