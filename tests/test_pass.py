"""A pass through the kernels, bit for bit: a row does not depend on the rows beside it, nor on devices, threads,
instruction sets, or on how the layers are cut into calls. And that these tests see a wrong bit."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import (
    F32,
    SMALL,
    WIDE,
    accepted,
    from_checkpoint,
    model_of,
    one_pass,
    random_cache,
    stored_bits,
    tokens_of,
)

from musejax import cache as reference_cache
from musejax import ffi
from musejax.config import DecodeConfig
from musejax.kernels import cache as kc
from musejax.kernels import forward as kf
from musejax.kernels.calls import Call, RowState
from musejax.model import forward as ref_forward
from musejax.nvfp4 import ACTIVATIONS
from musejax.packing import layout
from musejax.paths import nano_path
from musejax.sharding import make_mesh

MAX_LENGTH = 1100
ROW_COUNTS = (1, 2, 7, 8, 9, 15, 16)
# Positions stored: none; rows that end a block; that fill, and wrap, the rings of 24; that end a chunk and a group.
LENGTHS = (0, 9, 20, 250, 1018)
TREES = {
    "chain": tuple(range(-1, 15)),
    "star": (-1,) + (0,) * 15,
    "16 roots": (-1,) * 16,
    "two chains": (-1, -1, *range(14)),
    "comb": (-1, *(i // 2 * 2 for i in range(15))),
    "random": tuple(int(np.random.default_rng(1).integers(-1, i)) for i in range(16)),
    "another": tuple(int(np.random.default_rng(i).integers(max(-1, i - 4), i)) for i in range(16)),
}
activations = pytest.mark.parametrize("mode", ACTIVATIONS)


@pytest.fixture
def library():
    """The CPU library; what a test chose is undone after it."""
    lib = ffi.library("cpu")
    yield lib
    lib.set_threads(0)
    lib.set_isa("")


def alone(model, cache, tokens, parents, **run):
    """Every row decoded as the only row of its pass, after its ancestors, each in a pass of its own.

    Returns:
        stream [t, d], expert ids [L, t, k], keys and values in flight: list of [heads, t, c].
    """
    after, passes = {-1: cache}, []
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        passes.append(one_pass(model, after[parent], [token], **run))
        after[i] = accepted(passes[-1].cache, [0])
    flight = zip(*(jax.tree.leaves(p.cache.flight) for p in passes), strict=True)
    return (np.concatenate([p.stream for p in passes]), np.concatenate([p.expert_ids for p in passes], axis=1),
            [np.concatenate([np.asarray(x)[:, :1] for x in rows], axis=1) for rows in flight])


def assert_rows_alone(model, cache, tokens, parents, **run):
    out = one_pass(model, cache, tokens, parents, **run)
    stream, ids, flight = alone(model, cache, tokens, parents, **run)
    assert_same_bits(out.stream, stream)
    assert_same_bits(out.expert_ids, ids)
    for got, want in zip(jax.tree.leaves(out.cache.flight), flight, strict=True):
        assert_same_bits(np.asarray(got)[:, :len(tokens)], want)


def assert_same_pass(a, b):
    assert_same_bits(a.stream, b.stream)
    assert_same_bits(a.expert_ids, b.expert_ids)
    for x, y in zip(jax.tree.leaves(a.cache), jax.tree.leaves(b.cache), strict=True):
        assert_same_bits(x, y)


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_row_counts(rows):
    model = model_of(SMALL)
    assert_rows_alone(model, random_cache(SMALL, 250, MAX_LENGTH), tokens_of(SMALL, rows), range(-1, rows - 1))


@pytest.mark.parametrize("length", LENGTHS)
@activations
def test_chain_at_borders(length, mode):
    model = model_of(SMALL)
    assert_rows_alone(model, random_cache(SMALL, length, MAX_LENGTH), tokens_of(SMALL, 16, length), TREES["chain"],
                      decode=DecodeConfig(activations=mode))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("length", LENGTHS)
def test_trees(tree, length):
    model = model_of(SMALL)
    assert_rows_alone(model, random_cache(SMALL, length, MAX_LENGTH, seed=1), tokens_of(SMALL, 16, 3), TREES[tree])


@pytest.mark.parametrize("rows", [9, 16])
def test_wide_rows(rows):
    """K of 2,048 in two chunks; enough work for several threads."""
    model = model_of(WIDE)
    for mode in ("bf16", "nvfp4_per_token"):
        assert_rows_alone(model, random_cache(WIDE, 30, 64), tokens_of(WIDE, rows), TREES["random"][:rows],
                          decode=DecodeConfig(activations=mode))


def test_flat_combine():
    model = model_of(SMALL)
    assert_rows_alone(model, random_cache(SMALL, 30, 64), tokens_of(SMALL, 9), TREES["comb"][:9],
                      decode=DecodeConfig(combine="flat"))


@pytest.mark.parametrize("valid", [0, 1, 11, 15])
def test_padding(valid):
    """Rows beyond `valid` change nothing, choose no expert and leave keys and values in flight as they were."""
    model, cache = model_of(SMALL), random_cache(SMALL, 250, MAX_LENGTH)
    before = one_pass(model, cache, tokens_of(SMALL, 16, 8)).cache  # something in flight
    tokens = tokens_of(SMALL, 16)
    padded = one_pass(model, before, tokens, TREES["random"], valid)
    assert (np.asarray(padded.expert_ids)[:, valid:] == SMALL.num_local_experts).all()
    for got, was in zip(jax.tree.leaves(padded.cache.flight), jax.tree.leaves(before.flight), strict=True):
        assert_same_bits(np.asarray(got)[:, valid:], np.asarray(was)[:, valid:])
    if valid:
        short = one_pass(model, before, tokens[:valid], TREES["random"][:valid])
        assert_same_bits(np.asarray(padded.stream)[:valid], short.stream)
        assert_same_bits(np.asarray(padded.expert_ids)[:, :valid], short.expert_ids)
        for got, want in zip(jax.tree.leaves(padded.cache.flight), jax.tree.leaves(short.cache.flight), strict=True):
            assert_same_bits(got, want)
    for got, want in zip(jax.tree.leaves(padded.cache.layers), jax.tree.leaves(before.layers), strict=True):
        assert_same_bits(got, want)


# ------------------------------------------------------------------ accepted paths


PATHS = [((-1, 0, 0, 2, 2, 4, 1), (0, 2, 4, 5)), (TREES["chain"], tuple(range(16))), ((-1, 0, 1), ()),
         (TREES["random"], None), ((-1, -1, 1), (1,)), (TREES["chain"], tuple(range(13)))]
"""Trees and the path of each that is accepted; None: the deepest one."""


def deepest_path(parents):
    depth = np.asarray(kf.depths(jnp.asarray(parents, jnp.int32)))
    row, path = int(depth.argmax()), []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return tuple(path[::-1])


@pytest.mark.parametrize("length", [3, 15, 250])
@pytest.mark.parametrize("max_length", [MAX_LENGTH, 300])
def test_accepted_paths(length, max_length):
    """Six tree passes in a row, each with a path accepted: the cache, at every stage, of decoding the paths one by one.

    The rings of 24 wrap; a path of 16 is longer than what is left of them.
    """
    model = model_of(SMALL)
    cache = random_cache(SMALL, length, max_length)
    single = cache
    for step, (parents, path) in enumerate(PATHS):
        path = deepest_path(parents) if path is None else path
        tokens = tokens_of(SMALL, len(parents), step)
        out = one_pass(model, cache, tokens, parents)
        for row in path:
            one = one_pass(model, single, tokens[row:row + 1])
            assert_same_bits(np.asarray(out.stream)[row], one.stream[0])
            single = accepted(one.cache, [0])
        cache = accepted(out.cache, path)
        assert int(cache.length) == int(single.length)
        for got, want in zip(stored_bits(cache), stored_bits(single), strict=True):
            assert_same_bits(got, want)
        if step % 2:  # stored now, instead of by the next pass
            cache = kc.flush(cache)
    last = [one_pass(model, c, tokens_of(SMALL, 7)).stream for c in (cache, kc.flush(cache), single)]
    assert_same_bits(last[1], last[0])
    assert_same_bits(last[2], last[0])


def test_window_shorter_than_a_pass():
    """A ring of 8 slots: rows of one pass overwrite each other's."""
    config = replace(SMALL, sliding_window=8)
    model, cache = model_of(config), random_cache(config, 21, 100)
    for tree in ("chain", "another"):
        assert_rows_alone(model, cache, tokens_of(config, 16), TREES[tree])
    out = one_pass(model, cache, tokens_of(config, 16))
    single = cache
    for token in tokens_of(config, 16):
        single = accepted(one_pass(model, single, [token]).cache, [0])
    for got, want in zip(stored_bits(accepted(out.cache, range(16))), stored_bits(single), strict=True):
        assert_same_bits(got, want)


def test_append():
    """Blocks of any size give the bits of single tokens, also with the last block padded."""
    model, tokens, decode = model_of(SMALL), tokens_of(SMALL, 40), DecodeConfig()

    def run(size):
        cache, streams = kc.init_cache(SMALL, 64), []
        for begin in range(0, 40, size):
            block = tokens[begin:begin + size]
            stream, cache = kf.jit_append(model.packed, cache, jnp.asarray(np.pad(block, (0, size - len(block)))),
                                          len(block), config=SMALL, decode=decode)
            streams.append(np.asarray(stream)[:len(block)])
        assert int(cache.length) == 40
        return np.concatenate(streams), stored_bits(cache)

    (stream, kept), *others = (run(size) for size in (1, 7, 16))
    for other, kept_other in others:
        assert_same_bits(other, stream)
        for a, b in zip(kept_other, kept, strict=True):
            assert_same_bits(a, b)


# ------------------------------------------------------------------ devices, threads, instruction sets


CHOICES = [(2, DecodeConfig()), (4, DecodeConfig()), (8, DecodeConfig()), (2, DecodeConfig(combine="flat")),
           (4, DecodeConfig(activations="nvfp4_static")), (8, DecodeConfig(activations="nvfp4_per_token"))]


@pytest.mark.parametrize("devices, decode", CHOICES, ids=[f"{n} {d.combine} {d.activations}" for n, d in CHOICES])
def test_devices(devices, decode):
    """Two tree passes with an accepted path between."""
    model = model_of(SMALL)

    def run(mesh):
        cache = random_cache(SMALL, 250, 300, mesh=mesh)
        first = one_pass(model, cache, tokens_of(SMALL, 16), TREES["random"], decode=decode, mesh=mesh, trace=True)
        cache = jax.block_until_ready(accepted(first.cache, deepest_path(TREES["random"])))
        return first, one_pass(model, cache, tokens_of(SMALL, 16, 1), TREES["comb"], 11, decode=decode, mesh=mesh,
                               trace=True)

    one, many = run(None), run(make_mesh(devices))
    for a, b in zip(one, many, strict=True):
        assert_same_pass(b, a)
        assert_same_bits(b.streams, a.streams)
        assert_same_bits(a.streams[-1], a.stream)
    assert many[1].cache.layers[0].keys.sharding.shard_shape((8, 24, 64))[0] == 8 // devices


@pytest.mark.parametrize("devices", [2, 8])
def test_head_on_devices(devices):
    config, model, decode = SMALL, model_of(SMALL), DecodeConfig()
    stream = jnp.asarray(np.random.default_rng(4).standard_normal((7, config.hidden_size)).astype(F32))

    def run(mesh):
        same = dict(config=config, decode=decode, mesh=mesh)
        params = model.on(mesh)
        choice = jax.block_until_ready(kf.jit_greedy(params, stream, num_tokens=490, **same))
        both = jax.block_until_ready(kf.jit_logits(params, stream, **same))
        return choice, both, jax.block_until_ready(
            kf.jit_token_logprobs(params, stream, choice.ids, num_tokens=490, **same))

    one, many = run(None), run(make_mesh(devices))
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        assert_same_bits(a, b)
    assert_same_bits(one[2], one[0].logprobs)


def test_taps():
    """Streams after chosen layers, on one device and on several, are those of the trace."""
    model = model_of(SMALL)
    for mesh in (None, make_mesh(2)):
        cache = random_cache(SMALL, 30, 64, mesh=mesh)
        traced = one_pass(model, cache, tokens_of(SMALL, 8), mesh=mesh, trace=True)
        tapped = one_pass(model, cache, tokens_of(SMALL, 8), mesh=mesh, taps=(0, 2))
        assert_same_bits(tapped.stream, traced.stream)
        assert_same_bits(tapped.taps, np.asarray(traced.streams)[[1, 3]])


@pytest.mark.parametrize("devices", [2, 8])
def test_devices_wide(devices):
    model, mesh, cache = model_of(WIDE), make_mesh(devices), random_cache(WIDE, 30, 64)
    for mode in ("bf16", "nvfp4_static"):
        a, b = (one_pass(model, random_cache(WIDE, 30, 64, mesh=m) if m else cache, tokens_of(WIDE, 9),
                         TREES["random"][:9], decode=DecodeConfig(activations=mode), mesh=m) for m in (None, mesh))
        assert_same_pass(b, a)


def wide_passes():
    model = model_of(WIDE)
    return [one_pass(model, random_cache(WIDE, 300, 320), tokens_of(WIDE, 9), TREES["random"][:9],
                     decode=DecodeConfig(activations=mode)) for mode in ACTIVATIONS]


@pytest.mark.parametrize("threads", [2, 7])
def test_threads(threads, library):
    library.set_threads(1)
    assert library.threads() == 1
    one = wide_passes()
    library.set_threads(threads)
    assert library.threads() == threads
    for a, b in zip(wide_passes(), one, strict=True):
        assert_same_pass(a, b)


@pytest.fixture(scope="module")
def scalar_passes():
    """Passes and logits as plain C++ computes them; then the fastest set again."""
    library = ffi.library("cpu")
    assert library.set_isa("scalar") and library.isa() == "scalar"
    try:
        return passes_and_logits()
    finally:
        library.set_isa("")


def passes_and_logits():
    model = model_of(SMALL)
    passes = [one_pass(model, random_cache(SMALL, 250, MAX_LENGTH), tokens_of(SMALL, 16), TREES["random"],
                       decode=DecodeConfig(activations=mode)) for mode in ACTIVATIONS]
    return passes + wide_passes(), kf.jit_logits(model.packed, passes[0].stream, config=SMALL, decode=DecodeConfig())


@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_instruction_sets(name, scalar_passes, library):
    if not library.set_isa(name):
        pytest.skip(f"this machine has no {name}")
    assert library.isa() == name
    passes, logits = passes_and_logits()
    for a, b in zip(passes, scalar_passes[0], strict=True):
        assert_same_pass(a, b)
    for a, b in zip(logits, scalar_passes[1], strict=True):
        assert_same_bits(a, b)


def test_unknown_instruction_set(library):
    before = library.isa()
    assert not library.set_isa("sse9") and library.isa() == before
    assert library.set_isa("")


def test_concurrent_passes(library):
    """Two Python threads at once: one has the library's threads, the other works alone."""
    library.set_threads(2)
    want, failures = wide_passes(), []
    start = threading.Barrier(2)

    def work():
        try:
            start.wait()
            for _ in range(5):
                for a, b in zip(wide_passes(), want, strict=True):
                    assert_same_pass(a, b)
        except BaseException as err:
            failures.append(err)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


# ------------------------------------------------------------------ layer calls


class Layers:
    """The layers of SMALL after the embedding of a tree, run in several ways."""

    def __init__(self, mode):
        self.model = model_of(SMALL)
        self.call = Call(SMALL, DecodeConfig(activations=mode))
        self.cache = accepted(one_pass(self.model, random_cache(SMALL, 250, 300), tokens_of(SMALL, 5)).cache, [0, 1, 2])
        parents = jnp.asarray(TREES["random"], jnp.int32)
        self.rows = RowState(parents, jnp.stack([self.cache.length, 14, self.cache.accepted]), self.cache.path)
        self.cos_sin = self.call.angles(self.cache.length + kf.depths(parents))
        self.stream = self.call.embed_norm(self.model.packed["embed"][:, tokens_of(SMALL, 16)])
        self.heads = jnp.zeros((SMALL.num_attention_heads, 16, SMALL.head_dim), jnp.bfloat16)

    def run(self, layers, stream, q, gate, cache, first, last):
        """Taps after every layer that runs whole."""
        whole = tuple(layers)[:len(layers) - (not last)]
        return self.call.layers(layers, self.model.packed["layers"], stream, q, gate, self.cos_sin, self.rows, cache,
                                first=first, last=last, taps=whole)

    def one_call(self):
        stream, _, _, ids, taps, cache = self.run(range(3), self.stream, self.heads, self.heads, self.cache, True, True)
        return stream, ids, taps, cache

    def split(self, ends):
        """Calls that end with the projections of layer `end`, from which the next one starts."""
        stream, q, gate, cache, ids, taps, begin = self.stream, self.heads, self.heads, self.cache, [], [], 0
        for call, end in enumerate((*ends, 3)):
            last = end == 3
            stream, q, gate, chosen, tapped, cache = self.run(range(begin, end + (not last)), stream, q, gate, cache,
                                                              call == 0, last)
            assert last or (np.asarray(chosen[-1]) == SMALL.num_local_experts).all(), "no choice in a layer not run"
            ids, taps, begin = [*ids, *chosen[:end - begin]], [*taps, *tapped], end
        return stream, jnp.stack(ids), jnp.stack(taps), cache

    def phases(self):
        """The layers phase by phase; one device has all slices, so that nothing is gathered."""
        stream, ids, taps, kept = self.stream, [], [], []
        for i, p in enumerate(self.model.packed["layers"]):
            q, gate, *both = self.call.attn_in(i, stream, self.cos_sin, self.rows, p, self.cache.layers[i],
                                               self.cache.flight[i])
            stream, chosen, *both = kf.layer_on_devices(self.call, i, p, stream, q, gate, self.rows, *both,
                                                        gather=lambda x: x)
            ids, taps, kept = [*ids, chosen], [*taps, stream], [*kept, both]
        layers, flight = zip(*kept, strict=True)
        return stream, jnp.stack(ids), jnp.stack(taps), self.cache._replace(layers=layers, flight=flight)


@activations
def test_split_layers_and_phases(mode):
    layers = Layers(mode)
    want = layers.one_call()
    for got in (layers.split([1]), layers.split([2]), layers.split([0, 1, 2]), layers.phases()):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_same_bits(a, b)


# ------------------------------------------------------------------ in place


@pytest.mark.parametrize("devices", [1, 2])
def test_donated_cache_stays_in_place(devices):
    """The compiled step aliases every array of the cache and copies none of those of keys and values."""
    model, mesh = model_of(SMALL), make_mesh(devices) if devices > 1 else None
    cache = kc.init_cache(SMALL, 100, mesh)
    lowered = kf.jit_append.lower(model.on(mesh), cache, jnp.zeros(4, jnp.int32), 4, config=SMALL,
                                  decode=DecodeConfig(), mesh=mesh)
    text = lowered.compile().as_text()
    heads = SMALL.num_key_value_heads // devices
    shapes = [f"bf16[{heads},{slots},{SMALL.head_dim}]" for slots in (24, 100, 16)]
    copies = [line.strip() for line in text.splitlines() if " copy(" in line and any(s in line for s in shapes)]
    assert all(s in text for s in shapes) and not copies, copies
    assert text.splitlines()[0].count("may-alias") >= len(jax.tree.leaves((cache.layers, cache.flight)))
    arrays = jax.tree.leaves((cache.layers, cache.flight))
    before = [s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards]
    _, after = kf.jit_append(model.on(mesh), cache, jnp.zeros(4, jnp.int32), 4, config=SMALL, decode=DecodeConfig(),
                             mesh=mesh)
    jax.block_until_ready(after)
    assert all(x.is_deleted() for x in arrays)
    assert before == [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves((after.layers, after.flight))
                      for s in x.addressable_shards]


# ------------------------------------------------------------------ sabotage


def changed(model, name, layer, index, mask):
    """Packed params with bits of one byte flipped."""
    packed = {**model.packed, "layers": [dict(p) for p in model.packed["layers"]]}
    array = np.asarray(packed["layers"][layer][name]).copy()
    array[index] ^= mask
    packed["layers"][layer][name] = jnp.asarray(array)
    return packed


def byte_of(section, layer):
    """Where a byte of a weight lies that every row meets, or in all experts."""
    at, middle = layout(SMALL, layer), slice(None)
    return {"qkvg": ("dense", (3, at["dense.qkvg"] + 1001)), "out": ("dense", (3, at["dense.out"] + 1001)),
            "pooler": ("dense", (3, at["dense.pooler"] + 1001)), "router": ("dense", (3, at["dense.router"] + 7)),
            "unpooler": ("dense", (3, at["dense.unpooler"] + 1001)),
            "gate_up": ("experts", (3, middle, at["experts.gate_up"] + 101)),
            "down": ("experts", (3, middle, at["experts.down"] + 101)),
            }[section]


@pytest.mark.parametrize("layer", [0, 1], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize("section", ["qkvg", "out", "pooler", "router", "unpooler", "gate_up", "down"])
def test_a_weight_byte_is_seen(section, layer):
    """Each section of the packed weights is read: a wrong bit shows in the pass, with the place of the first one."""
    model, tokens = model_of(SMALL), tokens_of(SMALL, 8)
    name, index = byte_of(section, layer)
    good = one_pass(model, random_cache(SMALL, 30, 64), tokens)
    bad = one_pass(model, random_cache(SMALL, 30, 64), tokens, params=changed(model, name, layer, index, 0x20))
    with pytest.raises(AssertionError, match=r"of 1024 elements differ \(float32, shape \(8, 128\)\), first at \(\d"):
        assert_same_bits(bad.stream, good.stream)


def test_a_tail_of_the_window_is_seen():
    """The oldest key of a full ring counts, the one before it does not exist any more."""
    model, tokens = model_of(SMALL), tokens_of(SMALL, 1)
    cache = random_cache(SMALL, 30, 64)

    def with_key(position):
        keys = np.asarray(cache.layers[0].keys).copy()
        keys[:, position % 24] += keys.dtype.type(1)
        layers = (cache.layers[0]._replace(keys=jnp.asarray(keys)), *cache.layers[1:])
        return one_pass(model, cache._replace(layers=layers), tokens)

    good = one_pass(model, cache, tokens)
    assert_same_bits(with_key(6).stream, good.stream)  # the row at 30 sees 7 to 30
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(with_key(7).stream, good.stream)


# ------------------------------------------------------------------ the shipped model


@pytest.fixture(scope="module")
def nano():
    return from_checkpoint(nano_path())


def test_nano_rows_and_devices(nano):
    """A filled cache of real text: chains and trees, one and several devices."""
    config, mesh = nano.config, make_mesh(2)
    tokens = tokens_of(config, 80)

    def filled(mesh):
        cache = kc.init_cache(config, 128, mesh)
        for begin in range(0, 80, 16):
            out = one_pass(nano, cache, tokens[begin:begin + 16], mesh=mesh)
            cache = jax.block_until_ready(accepted(out.cache, range(16)))
        return cache

    cache = filled(None)
    assert_rows_alone(nano, cache, tokens[:16], TREES["random"])
    a, b = (one_pass(nano, filled(m), tokens[:9], TREES["comb"][:9], mesh=m) for m in (None, mesh))
    assert_same_pass(b, a)


def test_nano_against_reference(nano):
    """A chain of 40 tokens. Rounding differences grow through six layers; what counts are near choices of tokens."""
    config, decode, tokens = nano.config, DecodeConfig(), tokens_of(nano.config, 40)
    cache, streams = kc.init_cache(config, 64), []
    for begin in (0, 16, 32):
        block = tokens[begin:begin + 16]
        out = one_pass(nano, cache, block)
        cache = accepted(out.cache, range(len(block)))
        streams.append(out.stream)
    stream = np.concatenate(streams)
    want, _ = jax.jit(ref_forward.append, static_argnames=("config", "decode"))(
        nano.table, reference_cache.init_cache(config, decode.policy, 64), jnp.asarray(tokens), 40, config=config,
        decode=decode)
    rms = np.sqrt(np.square(np.asarray(want)).mean(1))
    error = np.abs(stream - want).max(1) / rms
    assert np.median(error) < 2.0**-5, "as large as the whole-layer bound of the design"
    raw = np.concatenate([kf.jit_logits(nano.packed, jnp.asarray(s), config=config, decode=decode)[0] for s in streams])
    want_raw = np.asarray(ref_forward.raw_logits(nano.table, want, config, decode))
    clear = np.sort(want_raw, 1)[:, -1] - np.sort(want_raw, 1)[:, -2] > 4 * np.abs(raw - want_raw).max(1)
    assert clear.sum() >= 10
    assert_same_bits(raw.argmax(1)[clear], want_raw.argmax(1)[clear])


def test_nano_greedy_logprobs(nano):
    """The log-probability of a greedy token is that of the token itself; both near float64."""
    config, decode = nano.config, DecodeConfig()
    out = one_pass(nano, kc.init_cache(config, 64), tokens_of(config, 16))
    limit = config.vocab_size - 100
    choice = kf.jit_greedy(nano.packed, out.stream, config=config, decode=decode, num_tokens=limit)
    raw, capped = kf.jit_logits(nano.packed, out.stream, config=config, decode=decode)
    assert_same_bits(choice.ids, np.asarray(raw)[:, :limit].argmax(1).astype(np.int32))
    x = np.asarray(capped, np.float64)[:, :limit]
    want = x.max(1) - np.log(np.exp(x).sum(1))
    assert (np.abs(choice.logprobs - want) <= 2.0**-19).all(), "a few units in the last place of logits near 10"
    given = kf.jit_token_logprobs(nano.packed, out.stream, choice.ids, config=config, decode=decode, num_tokens=limit)
    assert_same_bits(given, choice.logprobs)
    assert F32(0) > np.asarray(given).max()
