"""NVFP4 experts against the NumPy reference, which decides where bits are dropped."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax import params as table
from musejax.checkpoint import load_params
from musejax.config import MINI, ConfigError, DecodeConfig
from musejax.model.experts import all_experts, hit_experts
from musejax.numerics import CANON, EXACT
from musejax.nvfp4 import quantize_weight

CONFIG = dataclasses.replace(MINI, nvfp4_layers=(0,))
E, J = CONFIG.num_local_experts, CONFIG.num_experts_per_tok
ROWS = 48
MODES = {"bf16": "w4a16", "nvfp4_static": "static", "nvfp4_per_token": "per_token"}


@pytest.fixture(scope="module")
def weights():
    """-> (tensors by the names the reference uses, leaves as in memory). Gate and up differ in size."""
    rng = np.random.default_rng(0)
    rows = {p.path[2]: p for p in table.table(CONFIG) if p.path[:2] == ("layers", 0) and p.group == "experts"}
    m, f = CONFIG.moe_hidden_size, CONFIG.moe_intermediate_size
    gate_up = rng.normal(size=(E, 2, f, m)).astype(np.float32) / 11 * np.float32([1, 1.7])[:, None, None]
    gate_up, down = quantize_weight(gate_up), quantize_weight(rng.normal(size=(E, m, f)).astype(np.float32) / 11)
    published = {
        "gate_up": gate_up.packed.reshape(rows["gate_up"].hf_shape),
        "gate_up_scale": gate_up.scale.reshape(rows["gate_up_scale"].hf_shape),
        "gate_up_global": gate_up.global_scale, "down": down.packed, "down_scale": down.scale,
        "down_global": down.global_scale,
        "gate_up_input_scale": np.float32(4 / 2688) * (1 - np.arange(2 * E, dtype=np.float32).reshape(E, 2) / 99),
        "down_input_scale": np.float32(6 / 2688) * (1 - np.arange(E, dtype=np.float32)[::-1] / 99),
    }
    tensors = {p.hf_key.partition("0.")[2]: published[n].view(np.uint8) if p.dtype.itemsize == 1 else published[n]
               for n, p in rows.items()}
    return tensors, {n: jnp.asarray(table.slice_tensor(p, published[n])) for n, p in rows.items()}


@pytest.fixture(scope="module")
def inputs():
    """-> (bfloat16 values [t, m] as float32, expert ids [t, j])."""
    rng = np.random.default_rng(1)
    h = np.asarray(rng.normal(size=(ROWS, CONFIG.moe_hidden_size)), jnp.bfloat16).astype(np.float32)
    return h, rng.permuted(np.tile(np.arange(E), (ROWS, 1)), axis=1)[:, :J].astype(np.int32)


def by_reference(reference, tensors, inputs, policy, mode):
    h, ids = inputs
    run = reference.nvfp4_experts(tensors, reference.Policy(policy), mode)
    return np.stack([[run(e, h[t:t + 1])[0] for e in ids[t]] for t in range(len(h))])


def clean_share(got, want):
    """Share of bfloat16 results that are equal: other orders of sums and another exp flip few roundings."""
    return np.mean(np.asarray(got) == want)


@pytest.mark.parametrize("activations", MODES)
def test_canon_rounds_where_the_reference_does(reference, weights, inputs, activations):
    tensors, leaves = weights
    want = by_reference(reference, tensors, inputs, "canonical", MODES[activations])
    decode = DecodeConfig(policy=CANON, activations=activations)
    got = jax.jit(partial(hit_experts, decode=decode))(*inputs, leaves)
    assert clean_share(got, want) > 0.98
    assert_same_bits(got, np.asarray(got).astype(jnp.bfloat16).astype(np.float32))
    others = {mode: by_reference(reference, tensors, inputs, "canonical", mode) for mode in MODES.values()}
    assert [m for m in others if clean_share(got, others[m]) > 0.5] == [MODES[activations]]
    assert clean_share(jax.jit(partial(all_experts, decode=decode))(*inputs, leaves), want) > 0.98


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("name", ["hf_tiny", "hf_mini"])
def test_experts_of_the_fixtures(reference, shared, name, activations):
    """Each NVFP4 layer's experts on the inputs and routes of a reference run. Whole layers would differ more: one
    rounding of an expert input that flips moves 4-bit codes."""
    folder = shared / "data" / name
    config, params = load_params(folder, overlay=folder / "nvfp4")
    tensors = reference.read_checkpoint(folder) | reference.read_checkpoint(folder / "nvfp4")
    spec = reference.Config.from_hf(json.loads((folder / "config.json").read_text()))
    model = reference.Model(spec, tensors, "canonical", MODES[activations])
    taps = []
    model.forward(np.load(folder / "expected.npz")["input_ids"], taps=taps)
    run = jax.jit(partial(hit_experts, decode=DecodeConfig(activations=activations)))
    for i in config.nvfp4_layers:
        inputs = taps[i]["expert_input"], taps[i]["topk_ids"].astype(np.int32)
        want = by_reference(reference, model.layer_weights(i), inputs, "canonical", MODES[activations])
        experts = {n: w for n, w in params["layers"][i].items() if n.startswith(("gate_up", "down"))}
        assert clean_share(run(*inputs, experts), want) > 0.98, f"layer {i}"


BREAKS = {
    "gate and up scales swapped": ("bf16", lambda p: p | {"gate_up_global": p["gate_up_global"][:, ::-1]}),
    "nibbles swapped": ("bf16", lambda p: p | {"down": p["down"] >> 4 | p["down"] << 4}),
    "smallest input scale": ("nvfp4_static", lambda p: p | {
        "gate_up_input_scale": jnp.full_like(p["gate_up_input_scale"], p["gate_up_input_scale"].min())}),
    "second input scale ignored": ("nvfp4_static", lambda p: p | {
        "down_input_scale": jnp.ones_like(p["down_input_scale"])}),
}


@pytest.mark.parametrize("what", BREAKS)
def test_the_comparison_sees(reference, weights, inputs, what):
    activations, spoil = BREAKS[what]
    tensors, leaves = weights
    want = by_reference(reference, tensors, inputs, "canonical", MODES[activations])
    got = hit_experts(*inputs, spoil(leaves), DecodeConfig(activations=activations))
    assert clean_share(got, want) < 0.9


def test_input_scales_matter_in_static_mode_only(weights, inputs):
    _, leaves = weights
    other = leaves | {n: 2 * leaves[n] for n in ("gate_up_input_scale", "down_input_scale")}
    for activations in MODES:
        run = jax.jit(partial(hit_experts, decode=DecodeConfig(activations=activations)))
        same = np.array_equal(run(*inputs, leaves), run(*inputs, other))
        assert same == (activations != "nvfp4_static")


def test_exact_is_the_mathematics(reference, weights, inputs):
    tensors, leaves = weights
    want = by_reference(reference, tensors, inputs, "exact", "w4a16")
    got = jax.jit(partial(hit_experts, decode=DecodeConfig(policy=EXACT)))(*inputs, leaves)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_experts_not_hit_are_not_read(weights):
    _, leaves = weights
    ids, h = jnp.asarray([[3, 5]]), jnp.ones((1, CONFIG.moe_hidden_size))
    keep = jnp.asarray([3, 5])
    poisoned = {n: jnp.full_like(w, jnp.nan).at[:, keep].set(w[:, keep]) if n.endswith("_scale") and w.ndim > 2 else w
                for n, w in leaves.items()}
    for activations in MODES:
        decode = DecodeConfig(activations=activations)
        assert_same_bits(hit_experts(h, ids, poisoned, decode), hit_experts(h, ids, leaves, decode))


def test_choices_are_checked():
    with pytest.raises(ConfigError, match=r"activations: expected one of bf16, .*, got 'fp8'"):
        DecodeConfig(activations="fp8")
    with pytest.raises(ConfigError, match="policy exact rounds nothing, expected bf16, got nvfp4_static"):
        DecodeConfig(policy=EXACT, activations="nvfp4_static")
