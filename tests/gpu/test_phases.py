"""The phase targets on a GPU: each beside the CPU library from the same input bits, their chain beside the layer kernel
bit for bit, and `score`, which runs them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import accepted, model_of, random_bf16, random_cache, run_pass, tokens_of
from phase_checks import check_layer, run_layer, start_of

from musejax import ffi, score
from musejax.config import MINI, NANO, DecodeConfig
from musejax.kernels import forward as kf
from musejax.kernels.calls import Call, RowState
from musejax.nvfp4 import ACTIVATIONS

CONFIGS = {name: replace(config, nvfp4_layers=(1, 2, 3, 4), max_position_embeddings=4096)
           for name, config in (("nano", NANO), ("mini", MINI))}
"""NVFP4 experts in all layers but the first and the last, as released; room for the longest context here."""

TREE = tuple(int(np.random.default_rng(1).integers(-1, i)) for i in range(16))
MAX_LENGTH = 1100
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(autouse=True)
def on_cpu(cpu):
    """Inputs are made on the CPU; a wait that did not end is an error of its test."""
    with jax.default_device(cpu):
        yield
    ffi.raise_wait_error()


def both_of(twins):
    def both(name, *operands):
        out = []
        for device, call in (twins.cpu, twins.gpu):
            placed = [x if isinstance(x, int) else jax.device_put(x, device) for x in operands]
            results = getattr(call, name)(*placed)
            assert all(x.devices() == {device} for x in jax.tree.leaves(results))
            out.append(jax.tree.map(np.asarray, results))
        return tuple(out)

    return both


@pytest.fixture
def check(twins):
    """check(config, layer, rows, length, ...): all phases of a layer."""

    def run(config, layer, rows, length, mode="bf16", combine="ep(8)", **start):
        decode = DecodeConfig(activations=mode, combine=combine)
        pair = twins(config, decode)
        check_layer(both_of(pair), model_of(config), layer, start_of(pair.cpu[1], layer, rows, length, **start), decode)

    return run


@configs
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("layer, mode", [(0, "bf16"), *((2, mode) for mode in ACTIVATIONS)])
def test_phases(check, config, layer, mode, rows):
    check(config, layer, rows, 40, mode, parents=TREE[:rows], seed=rows)


@configs
@pytest.mark.parametrize("full", [False, True], ids=["window", "full"])
@pytest.mark.parametrize("length", [0, 9, 15, 16, 63, 64, 250, 256, 1018, 1024])
def test_contexts(check, config, full, length):
    """None stored, and the borders of blocks, windows, chunks and groups; some rows accepted, some padding."""
    layer = next(i for i in range(config.num_hidden_layers) if (config.window(i) is None) == full)
    check(config, layer, 16, length, parents=TREE, valid=13, accepted=min(length, 6))


@configs
def test_flat_combine(check, config):
    check(config, 1, 9, 40, combine="flat")


# ------------------------------------------------------------------ bits on the GPU


@configs
@pytest.mark.parametrize("mode, combine", [*((mode, "ep(8)") for mode in ACTIVATIONS), ("bf16", "flat")])
def test_chain_is_the_layer_kernel(gpu, config, mode, combine):
    """As XLA runs them in one program, recorded as a CUDA graph from the second run on."""
    model, t, valid = model_of(config), 16, 14
    call = Call(config, DecodeConfig(activations=mode, combine=combine), gpu.platform)
    cache = random_cache(config, 250, MAX_LENGTH)
    rng = np.random.default_rng(3)
    flight = jax.tree.map(lambda x: jnp.asarray(random_bf16(rng, x.shape)), cache.flight)
    cache = accepted(cache._replace(flight=flight), [0, 2, 5])
    layers = model.packed["layers"]

    def inputs(params, cache, tokens):
        parents = jnp.asarray(TREE, jnp.int32)
        rows = RowState(parents, jnp.stack([cache.length, jnp.int32(valid), cache.accepted]), cache.path)
        return kf.embed(call, params, tokens, False), call.angles(cache.length + kf.depths(parents)), rows

    @jax.jit
    def whole(params, cache, tokens):
        stream, cos_sin, rows = inputs(params, cache, tokens)
        heads = jnp.zeros((config.num_attention_heads, t, config.head_dim), jnp.bfloat16)
        stream, _, _, ids, _, cache = call.layers(range(len(layers)), params["layers"], stream, heads, heads, cos_sin,
                                                  rows, cache, first=True, last=True)
        return stream, ids, cache.layers, cache.flight

    @jax.jit
    def phases(params, cache, tokens):
        stream, cos_sin, rows = inputs(params, cache, tokens)
        stored, flight, ids = list(cache.layers), list(cache.flight), []
        for i, p in enumerate(params["layers"]):
            stream, chosen, stored[i], flight[i] = run_layer(call, i, p, stream, cos_sin, rows, stored[i], flight[i])
            ids.append(chosen)
        return stream, jnp.stack(ids), tuple(stored), tuple(flight)

    placed = jax.device_put((model.packed, cache, tokens_of(config, t)), gpu)
    want, *rest = whole(*placed)
    for _ in range(3):
        got, *others = phases(*placed)
        assert_same_bits(got[:valid], want[:valid])
        for x, y in zip(jax.tree.leaves(others), jax.tree.leaves(rest), strict=True):
            assert_same_bits(x, y)
    wrong = np.array(layers[1]["dense"])
    wrong[3, 1001] ^= 0x40
    changed = [*layers[:1], {**layers[1], "dense": jnp.asarray(wrong)}, *layers[2:]]
    got, *_ = phases(jax.device_put({**model.packed, "layers": changed}, gpu), *placed[1:])
    with pytest.raises(AssertionError):
        assert_same_bits(got[:valid], want[:valid])


@configs
@pytest.mark.parametrize("mode", ACTIVATIONS)
def test_score_has_the_bits_of_decoding(gpu, config, mode):
    decode, tokens = DecodeConfig(activations=mode), tokens_of(config, 40)
    params = jax.device_put(model_of(config).packed, gpu)
    with jax.default_device(gpu):
        scored = score.logprobs(params, tokens, config=config, decode=decode, rows=9, trace=True)
        cache = score.init_cache(config, 64)
        for begin in range(0, 32, 16):
            part = jnp.asarray(tokens[begin:begin + 16])
            out = run_pass(params, cache, part, kf.chain(16), 16, config=config, decode=decode, trace=True)
            assert_same_bits(out.streams, scored.streams[:, begin:begin + 16])
            assert_same_bits(out.expert_ids, scored.expert_ids[:, begin:begin + 16])
            cache = accepted(out.cache, range(16))
    assert np.isfinite(scored.logprobs).all() and len(scored.logprobs) == 39


@configs
def test_score_over_two_devices(gpu, config):
    """Half of the experts each."""
    if len(jax.devices(gpu.platform)) < 2:
        pytest.skip("needs two CUDA devices, here is one")
    params, tokens, decode = model_of(config).packed, tokens_of(config, 20), DecodeConfig()
    meshes = [score.make_mesh(n, gpu.platform) for n in (1, 2)]
    with jax.default_device(gpu):
        one, two = (score.logprobs(params, tokens, config=config, decode=decode, mesh=mesh) for mesh in meshes)
    assert_same_bits(one, two)


def test_sizes_without_an_instance_are_refused(twins):
    config = replace(MINI, num_experts_per_tok=3)
    call, device = Call(config, DecodeConfig(), "gpu"), twins(config).gpu[0]
    m = jax.device_put(random_bf16(np.random.default_rng(0), (2, config.moe_hidden_size)), device)
    with pytest.raises(Exception, match="unpool: expected sizes that the library was compiled for"):
        call.unpool(0, m, jax.device_put(model_of(config).packed["layers"][0], device)).block_until_ready()
