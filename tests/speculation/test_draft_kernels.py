"""The drafter's kernels against draft.py under the same policy, and their bits: devices, threads, instruction sets,
ring slots and the sizes of commits change none. And that these tests see a wrong bit.

Each phase starts from the same input bits, so it differs from draft.py only by the order of sums (and by fused
multiply-adds): in float32 that is a few units of 2^-24 times sqrt K; a bfloat16 result then differs where a value lies
that near the middle between two of them, by one unit, in less than 1% of the elements.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_checks import assert_lattice, assert_near, assert_rounded
from draft_inputs import (
    BASE,
    CONFIGS,
    PLAIN,
    POLICY,
    commit,
    committed,
    delta_slices,
    draft,
    drafter_from,
    drafter_of,
    named,
    normed,
    on,
    random_params,
    reference_cache,
    slices,
    taps_of,
    two_taps,
    whole,
)
from helpers import assert_same_bits
from kernel_inputs import F32, round_bf16

from musejax import ffi
from musejax.config import MINI, ConfigError, DecodeConfig
from musejax.kernels.calls import Call
from musejax.kernels.draft_calls import DraftCall
from musejax.packing import pack_head
from musejax.params import BF16
from musejax.sharding import make_mesh
from musejax.speculation import draft as dr
from musejax.speculation import draft_kernels as dk
from musejax.speculation.packing import layout, pack_drafter

names = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture
def library():
    """The CPU library; what a test chose is undone after it."""
    lib = ffi.library("cpu")
    yield lib
    lib.set_threads(0)
    lib.set_isa("")


# ------------------------------------------------------------------ phases


class Block:
    """Random rows at the input of a layer."""

    def __init__(self, drafter, layer=0, seed=0):
        self.drafter, self.config, self.layer = drafter, drafter.config, layer
        rng, t, d = np.random.default_rng(seed), self.config.block_size, self.config.hidden_size
        self.p, self.packed = drafter.wide["layers"][layer], drafter.packed["layers"][layer]
        self.call = DraftCall(self.config)
        self.stream = round_bf16(rng.standard_normal((t, d), F32))
        self.delta = 0.5 * rng.standard_normal((t, 2, 2, self.config.conv_groups or 0), F32)
        self.rng = rng

    @property
    def operands(self):
        return slices(self.stream), delta_slices(self.delta)

    def input(self, name, gain) -> np.ndarray:
        """Input of a sublayer's first GEMM."""
        n = normed(self.stream, self.p[gain], self.config)
        return two_taps(n, self.delta[:, 0], self.p[name][0]) if self.config.has_conv else n

    def after(self, name, y) -> np.ndarray:
        """Stream after a sublayer with the output y."""
        z = two_taps(y, self.delta[:, 1], self.p[name][1]) if self.config.has_conv else y
        return round_bf16(self.stream + z)

    def linear(self, x, weight) -> np.ndarray:
        return np.asarray(dr.linear(jnp.asarray(x), self.p[weight], POLICY))


@names
def test_fc(name):
    drafter = named(name)
    config, taps = drafter.config, taps_of(drafter.config, 16)
    got = DraftCall(config).fc(jnp.asarray(taps), jnp.int32(11), drafter.packed["fc"])
    want = dr.linear(jnp.asarray(round_bf16(taps)), drafter.wide["fc"], POLICY)
    assert_rounded(whole(got)[:11], round_bf16(want)[:11])
    assert not whole(got)[11:].any(), "rows that do not count"


@names
def test_context(name):
    drafter = named(name)
    config, ctx = drafter.config, round_bf16(np.random.default_rng(3).standard_normal((16, 128), F32))
    call, cache, start = DraftCall(config), dk.init_cache(config), 20
    positions = start + jnp.arange(16)
    keys, values = call.context(slices(ctx), call.angles(positions), jnp.int32(start), jnp.int32(13),
                                drafter.packed["hidden_norm"], cache.keys, cache.values, drafter.packed["layers"])
    x = jnp.asarray(normed(ctx, drafter.wide["hidden_norm"], config))
    slots = cache.keys.shape[2]
    kept = np.arange(max(0, 13 - slots), 13)
    at = (start + kept) % slots
    others = np.setdiff1d(np.arange(slots), at)
    for i, p in enumerate(drafter.wide["layers"]):
        k, v = dr.keys_values(p, x, positions, config, POLICY)
        assert_rounded(np.asarray(keys)[i][:, at].swapaxes(0, 1), k[kept], equal=0.98)  # a norm and a rotation more
        assert_rounded(np.asarray(values)[i][:, at].swapaxes(0, 1), v[kept])
        assert not np.asarray(keys)[i][:, others].astype(F32).any(), "no row went there"


@names
def test_delta(name):
    block = Block(named(name))
    if not block.config.has_conv:
        return
    for mlp, (conv, gain) in enumerate((("attention_conv", "input_norm"), ("mlp_conv", "post_norm"))):
        got = block.call.delta(slices(block.stream), block.packed, mlp=bool(mlp))
        want = block.linear(normed(block.stream, block.p[gain], block.config), conv + "_proj")
        want = delta_slices(want.reshape(-1, 2, 2, block.config.conv_groups))
        assert_near(whole(got), whole(want))


@names
@pytest.mark.parametrize("length", [0, 9, 40, 330])
def test_attention(name, length):
    """Attention weights differ by a unit of 2^-8 in a score where q or k does: 2^-6 of a head's RMS is the bound for
    attention, and most elements are equal."""
    block = Block(named(name), seed=length)
    config, t = block.config, block.config.block_size
    cache = committed(block.drafter, length)
    positions = length + jnp.arange(t)
    got = block.call.attention(0, *block.operands, block.call.angles(positions), jnp.int32(length), block.packed,
                               cache.keys, cache.values)
    u = jnp.asarray(block.input("attention_conv", "input_norm"))
    q = dr.linear(u, block.p["q_proj"], POLICY).reshape(t, config.num_attention_heads, -1)
    q = dr.turn(dr.norm(q, block.p["q_norm"], config), positions, config, POLICY)
    k, v = dr.keys_values(block.p, u, positions, config, POLICY)
    ring = reference_cache(cache)
    held = dr.slot_positions(ring.keys.shape[1], cache.length)

    def seen(keys):
        return (jnp.abs(positions[:, None] - keys[None]) < config.sliding_window) & (keys >= 0)

    keys, values = ring.keys[0], ring.values[0]
    want = dr.attend(q, [(keys, values, seen(held)), (k, v, seen(positions))], POLICY)
    want = np.asarray(want).reshape(t, config.num_attention_heads, -1)
    assert_rounded(np.asarray(got).swapaxes(0, 1), want, share=2.0**-6, equal=0.95)


@names
def test_attn_out(name):
    block = Block(named(name))
    config, t = block.config, block.config.block_size
    o = round_bf16(block.rng.standard_normal((t, config.num_attention_heads, config.head_dim), F32))
    got = block.call.attn_out(jnp.asarray(o.swapaxes(0, 1), BF16), *block.operands, jnp.int32(0), block.packed)
    y = round_bf16(block.linear(o.reshape(t, -1), "o_proj"))
    assert_rounded(whole(got), block.after("attention_conv", y), equal=0.98)


@names
def test_up_and_down(name):
    block = Block(named(name))
    got = block.call.up(*block.operands, block.packed)
    u = block.input("mlp_conv", "post_norm")
    gate, up = (block.linear(u, weight) for weight in ("gate_proj", "up_proj"))
    act = round_bf16(jax.nn.silu(gate) * up)
    assert_rounded(whole(got), act)
    got = block.call.down(slices(act), *block.operands, jnp.int32(0), block.packed)
    y = round_bf16(block.linear(act, "down_proj"))
    assert_rounded(whole(got), block.after("mlp_conv", y), equal=0.98)


def hidden_of(drafter, stream) -> np.ndarray:
    return normed(whole(stream), drafter.wide["norm"], drafter.config)


def final_stream(drafter, cache, anchor):
    """Stream after the last layer, phase by phase with all slices on one device."""
    call, config = DraftCall(drafter.config), drafter.config
    ids = jnp.full(config.block_size, config.mask_token_id).at[0].set(anchor)
    rows = drafter.packed.get("embed", drafter.target["embed"])[:, ids]
    if "mask_embedding" in drafter.packed:
        rows = rows.at[:, 1:].set(drafter.packed["mask_embedding"][:, None])
    cos_sin = call.angles(cache.length + jnp.arange(config.block_size))
    return dk.run_layers(call, drafter.packed, rows, cos_sin, cache, jnp.int32(0), gather=lambda x: x)


@names
@pytest.mark.parametrize("length", [0, 40, 330])
def test_whole_draft(name, length):
    """Rows after all layers: roundings that fell the other way have passed through two layers, each of which multiplies
    by sublayers of norm about 1: 2^-4 of the RMS at most, 2^-8 (one unit) on average."""
    drafter, anchor = named(name), 7
    cache = committed(drafter, length)
    got = draft(drafter.packed, drafter.target, cache, anchor, config=drafter.config)
    hidden = hidden_of(drafter, final_stream(drafter, cache, anchor))
    assert_lattice(got, drafter, hidden, anchor)
    want = np.asarray(dr.draft_hidden(drafter.wide, drafter.borrowed, reference_cache(cache), anchor,
                                      config=drafter.config, policy=POLICY))
    rms = np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    error = np.abs(hidden - want) / rms
    assert error.max() < 2.0**-4 and error.mean() < 2.0**-8, (error.max(), error.mean())


def phases(drafter, cache, anchor, num_tokens):
    """The lattice by phases, on one device."""
    head = dk.Head.of(drafter.packed, drafter.packed.get("lm_head", drafter.target["lm_head"]))
    return dk.run_head(DraftCall(drafter.config), head, final_stream(drafter, cache, anchor), jnp.int32(anchor),
                       jnp.int32(0), num_tokens, gather=lambda x: x)


@names
@pytest.mark.parametrize("length", [0, 40])
def test_a_pass_has_the_bits_of_its_phases(name, length):
    drafter, limit = named(name), named(name).config.vocab_size - 9
    cache = committed(drafter, length)
    got = draft(drafter.packed, drafter.target, cache, 9, config=drafter.config, num_tokens=limit)
    assert_same_lattice(got, phases(drafter, cache, 9, limit))
    with pytest.raises(AssertionError):
        assert_same_lattice(got, phases(drafter, cache, 10, limit))


@names
@pytest.mark.parametrize("count", [0, 1, 11, 16])
def test_a_commit_has_the_bits_of_its_phases(name, count):
    drafter, start = named(name), 20
    config, packed, before = drafter.config, drafter.packed, committed(drafter, start)
    call, taps, count = DraftCall(config), jnp.asarray(taps_of(config, 16, seed=2)), jnp.int32(count)
    ctx = call.fc(taps, count, packed["fc"])
    want = call.context(ctx, call.angles(start + jnp.arange(16)), jnp.int32(start), count, packed["hidden_norm"],
                        before.keys, before.values, packed["layers"])
    got = commit(packed, before, taps, start, count, config=config)
    assert int(got.length) == start + count
    assert_same_lattice(got[:2], want)


def test_ids_beyond_the_tokenizer_are_no_candidates():
    """A limit inside a slice; slices beyond it have no candidate at all."""
    drafter = drafter_of(BASE)
    cache = committed(drafter, 12)
    for limit in (512, 130, 70):
        got = draft(drafter.packed, drafter.target, cache, 3, config=BASE, num_tokens=limit)
        assert np.asarray(got.tokens).max() < limit and np.isfinite(got.scores).all()
        assert_lattice(got, drafter, hidden_of(drafter, final_stream(drafter, cache, 3)), 3, limit)


def test_ties_go_to_the_lower_id():
    """Ids that share their row of the LM head, within a slice and across slices."""
    lent = random_params(BASE, 5, True)
    twin = np.arange(512) % 32
    lent["lm_head"] = lent["lm_head"][twin]
    drafter = drafter_from(BASE, random_params(BASE, 4), lent)
    got = draft(drafter.packed, drafter.target, committed(drafter, 9), 3, config=BASE)
    tokens = np.asarray(got.tokens)
    assert (np.diff(tokens, axis=1) == 32).all() and (tokens[:, 0] < 32).all()


# ------------------------------------------------------------------ bits


def assert_same_lattice(a, b):
    for x, y in zip(a, b, strict=True):
        assert_same_bits(x, y)


def everything(drafter, mesh=None, length=40):
    """Cache and lattice after commits of 16, on a mesh."""
    cache = committed(drafter, length, mesh=mesh)
    params, target = on(drafter, mesh)
    made = draft(params, target, cache, 9, config=drafter.config, num_tokens=drafter.config.vocab_size - 9, mesh=mesh)
    return [np.asarray(x) for x in (*cache, *made)]


@names
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices(name, devices):
    one, many = everything(named(name)), everything(named(name), make_mesh(devices))
    assert_same_lattice(many, one)


@pytest.mark.parametrize("hidden", [128, 1024, 2048])  # one, one full and two chunks
def test_sums_and_softcap_have_the_bits_of_the_target(hidden):
    """The drafter's own GEMM, norm and vector tanh against those of the target's LM head, from the same packed head."""
    model = replace(MINI, hidden_size=hidden, vocab_size=512)
    config = replace(BASE, hidden_size=hidden, conv_group_size=hidden // 8, output_multiplier=model.output_multiplier,
                     final_logit_softcapping=model.final_logit_softcapping, target_layer_ids=(0,),
                     rms_norm_eps=model.rms_norm_eps)
    rng = np.random.default_rng(hidden)
    stream = round_bf16(rng.standard_normal((16, hidden), F32))
    gain = rng.standard_normal(hidden, F32).astype(BF16)
    rows = (rng.standard_normal((8, 64, hidden), F32) / np.sqrt(F32(hidden))).astype(BF16)  # the cap makes no ties
    head = jnp.asarray(pack_head(model, rows))
    target = Call(model, DecodeConfig())
    _, raw, ids = target.head(jnp.asarray(stream), jnp.asarray(gain), head, jnp.int32(0), num_tokens=None, top=8)
    selector = jnp.zeros((8, layout(config)["selector.bytes"]), jnp.uint8)
    got = DraftCall(config).head(slices(stream), jnp.asarray(gain, jnp.float32), head, selector, jnp.int32(0),
                                 num_tokens=None)
    assert_same_bits(got.values, target.softcap(raw)[:, 1:])
    assert_same_bits(got.ids, np.asarray(ids)[:, 1:])


def test_devices_hold_their_own():
    mesh = make_mesh(4)
    drafter = drafter_of(BASE)
    params, _ = on(drafter, mesh)
    cache = committed(drafter, 20, mesh=mesh)
    assert cache.keys.sharding.shard_shape(cache.keys.shape)[1] == 2
    dense = params["layers"][0]["dense"]
    assert dense.sharding.shard_shape(dense.shape)[0] == 2
    assert params["predecessor"].sharding.is_fully_replicated


@pytest.mark.parametrize("name", ["base", "K of 2048, heads of 128", "window of 300"])
def test_threads_and_instruction_sets(name, library):
    drafter, runs = named(name), []
    for isa in ("scalar", "avx2", "avx512"):
        if not library.set_isa(isa):
            continue
        for threads in (1, 2, 7) if isa != "scalar" else (1,):
            library.set_threads(threads)
            runs.append(everything(drafter, length=330))
    for run in runs[1:]:
        assert_same_lattice(run, runs[0])


@pytest.mark.parametrize("name", ["base", "window below the block", "window of 300"])
def test_commits_of_any_size(name):
    """Rows one by one, in odd pieces and by 16, around the ring's end: the same bits, and the same draft."""
    drafter = named(name)
    length = drafter.config.sliding_window + 21
    one, *others = (committed(drafter, length, size=size) for size in (1, 5, 16))
    for other in others:
        assert_same_lattice(other, one)
    nothing = commit(drafter.packed, one, jnp.ones((16, drafter.config.taps_width)), length, 0, config=drafter.config)
    assert_same_lattice(nothing, one)


@pytest.mark.parametrize("rows", range(17))
def test_commit_across_the_end_of_the_ring(rows):
    drafter = drafter_of(BASE)
    before, taps = committed(drafter, 20), jnp.asarray(taps_of(BASE, 16, seed=1))
    at_once = commit(drafter.packed, before, taps, 20, rows, config=BASE)
    single = before
    for i in range(rows):
        single = commit(drafter.packed, single, jnp.roll(taps, -i, axis=0), 20 + i, 1, config=BASE)
    assert int(single.length) == 20 + rows
    assert_same_lattice(at_once, single)


def test_the_slots_of_the_ring_do_not_matter():
    """Sums go by absolute position: a ring of one slot less, or one long enough not to wrap, holds the same rows."""
    config = replace(BASE, sliding_window=40)
    drafter = drafter_of(config)
    made = [draft(drafter.packed, drafter.target, committed(drafter, 70, max_length=n), 9, config=config)
            for n in (40, 39)]
    assert_same_lattice(*made)
    wide = replace(config, sliding_window=80)  # the cache is that of a longer window, the draft looks at 40
    cache = committed(drafter_from(wide, drafter.host, random_params(config, 100, True)), 70)
    assert_same_lattice(draft(drafter.packed, drafter.target, cache, 9, config=config), made[0])


def test_rows_beyond_the_limit_are_refused():
    drafter = drafter_of(BASE)
    with pytest.raises(ConfigError, match="taps: expected at most 16 rows a call, got 17"):
        commit(drafter.packed, dk.init_cache(BASE), jnp.ones((17, BASE.taps_width)), 0, 17, config=BASE)
    with pytest.raises(ConfigError, match="max_length: expected at least 1, got 0"):
        dk.init_cache(BASE, 0)


@names
def test_several_gpus_exchange_in_the_kernels(name, monkeypatch):
    """The program of one device of two, as GPUs would have it: a call a pass, on parts, and no collective."""
    drafter, mesh, connected = named(name), make_mesh(2), []
    config, (params, target) = drafter.config, on(drafter, mesh)
    monkeypatch.setattr(dk, "ordinals", lambda mesh: (0, 1))
    monkeypatch.setattr(ffi, "connect_draft", lambda *given: connected.append(given))
    cache = dk.init_cache(config, None, mesh)
    texts = [jax.jit(lambda params, target, cache: dk.draft(params, target, cache, 9, config=config, mesh=mesh))
             .lower(params, target, cache).as_text(),
             jax.jit(lambda params, cache, taps: dk.commit_context(params, cache, taps, 0, 3, config=config, mesh=mesh))
             .lower(params, cache, jnp.zeros((16, config.taps_width))).as_text()]
    for text, call in zip(texts, ("@musejax_draft(", "@musejax_draft_commit("), strict=True):
        assert text.count(call) == 1 and text.count("@musejax_") == 2, "and the angles"
        assert "devices = array<i64: 0, 1>" in text or "devices = dense<[0, 1]> : tensor<2xi64>" in text
        assert "all_gather" not in text
        assert f"tensor<4x{layout(config)['dense.bytes']}xui8>" in text
    model = DraftCall(config).model
    assert connected == [(model, config.num_hidden_layers, cache.keys.shape[2], (0, 1))] * 2


# ------------------------------------------------------------------ faults that must be seen


def _without_the_last_tap(host):
    for p in host["layers"]:
        p["mlp_conv"] = p["mlp_conv"] * np.asarray([1, 0], BF16)[None, :, None]


def _swapped_slice(host):
    """Columns of the first slice of o_proj in the place of the second's."""
    w = host["layers"][0]["o_proj"].copy()
    w[:16], w[16:32] = w[16:32].copy(), w[:16].copy()
    host["layers"][0]["o_proj"] = w


def _swapped_heads(host):
    w = host["layers"][1]["k_proj"]
    host["layers"][1]["k_proj"] = np.concatenate([w[16:32], w[:16], w[32:]])


def _one_gain(host):
    host["layers"][1]["q_norm"] = np.ones_like(host["layers"][1]["q_norm"])


def _swapped_sides(host):
    p = host["layers"][0]
    p["attention_conv_proj"] = np.roll(p["attention_conv_proj"], len(p["attention_conv_proj"]) // 2, axis=0)


@pytest.mark.parametrize("fault", [None, _without_the_last_tap, _swapped_slice, _swapped_heads, _one_gain,
                                   _swapped_sides])
def test_comparison_sees(fault):
    """Kernels with a fault in their weights, against draft.py without."""
    good = drafter_of(BASE)
    host = jax.tree.map(np.copy, good.host)
    if fault:
        fault(host)
    bad = replace(good, packed=jax.tree.map(jnp.asarray, pack_drafter(host, BASE)))
    cache = committed(good, 40)
    hidden = hidden_of(bad, final_stream(bad, cache, 7))
    want = np.asarray(dr.draft_hidden(good.wide, good.borrowed, reference_cache(cache), 7, config=BASE, policy=POLICY))
    error = np.abs(hidden - want) / np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    assert (error.mean() < 2.0**-8) == (fault is None), error.mean()


@pytest.mark.parametrize("change", [{"sliding_window": 23}, {"rope_half": False}, {"rope_theta": 9e3},
                                    {"output_multiplier": 0.51}, {"final_logit_softcapping": None}], ids=str)
def test_comparison_sees_constants(change):
    good, config = drafter_of(BASE), replace(BASE, **change)
    bad = drafter_from(config, good.host, random_params(config, 100, True))
    cache = committed(good, 40)
    made = [draft(d.packed, good.target, cache, 7, config=d.config) for d in (good, bad)]
    with pytest.raises(AssertionError):
        assert_same_lattice(made[1], made[0])


def test_devices_see_a_wrong_first_slice(monkeypatch):
    """Every device takes its columns for those of slice 0."""
    one = everything(drafter_of(BASE))
    monkeypatch.setattr(dk, "_first_slice", lambda dense: jnp.int32(0))
    drafter, mesh = drafter_of(BASE), make_mesh(2)
    params, target = on(drafter, mesh)
    run = jax.jit(lambda params, target, cache: dk.draft(params, target, cache, 9, config=BASE, num_tokens=503,
                                                         mesh=mesh))
    with pytest.raises(AssertionError):
        assert_same_lattice([np.asarray(x) for x in run(params, target, committed(drafter, 40, mesh=mesh))], one[3:])


def test_dflash_1_is_dflash_2_with_neutral_additions():
    """Convolutions at identity and a successor codebook of zeros give the bits of the plain body."""
    def neutral(name, x):
        if name in ("attention_conv", "mlp_conv"):
            return np.zeros_like(x) + np.asarray([1, 0], BF16)[None, :, None]
        return np.zeros_like(x) if name.endswith("conv_proj") else x

    good = random_params(BASE)
    host = {**good, "successor": np.zeros_like(good["successor"]),
            "layers": [{k: neutral(k, v) for k, v in p.items()} for p in good["layers"]]}
    config = replace(BASE, **PLAIN)
    kept = {"fc", "hidden_norm", "norm"}
    plain = {k: v for k, v in host.items() if k in kept}
    plain["layers"] = [{k: v for k, v in p.items() if "conv" not in k} for p in host["layers"]]
    lent = random_params(BASE, 100, True)
    two = drafter_from(replace(BASE, selector_top_k=16), host, lent)
    one = drafter_from(config, plain, {k: v for k, v in lent.items() if k in kept | {"embed", "lm_head"}}
                       | {"layers": plain["layers"]})
    made = [draft(d.packed, d.target, committed(d, 30), 3, config=d.config) for d in (two, one)]
    assert_same_lattice(*made)
