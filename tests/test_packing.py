"""The packed form against the text of ffi/common/layout.h, read element by element; there and back; refusals."""

import re
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from jax.sharding import PartitionSpec as P

from musejax import packing
from musejax.config import MINI, NANO, RELEASED, ConfigError
from musejax.nvfp4 import E2M1, unpack
from musejax.packing import (
    PackingError,
    abstract_packed,
    check_packable,
    is_packed,
    layout,
    pack_head,
    pack_layer,
    pack_params,
    packed_table,
    packing_problems,
    unpack_head,
    unpack_layer,
    unpack_params,
)
from musejax.params import build, leaf_of, table
from musejax.sharding import AXIS, DEVICE_COUNTS, make_mesh

TWO = replace(MINI, num_hidden_layers=2, layer_types=(), layer_rope_theta=(), nvfp4_layers=(1,), num_local_experts=8)
CONFIGS = {
    "mini": replace(MINI, nvfp4_layers=(1,)),
    "nano": replace(NANO, nvfp4_layers=(1,)),
    "dense K 2048, expert K 512": replace(TWO, hidden_size=2048, num_attention_heads=32, moe_hidden_size=512),
    "expert K 2048 and 512": replace(TWO, moe_hidden_size=2048, moe_intermediate_size=512),
    "vocabulary slices of 56": replace(TWO, vocab_size=448),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
layers = pytest.mark.parametrize("layer", [0, 1], ids=["bf16", "nvfp4"])


def random_leaf(param, rng):
    """Random bits. bfloat16: every pattern as often as the next; NVFP4 scales: all 127 legal bytes."""
    if param.dtype == ml_dtypes.bfloat16:
        patterns = rng.permutation(2**16).astype(np.uint16)
        return np.resize(patterns, param.shape).view(param.dtype)
    x = rng.integers(0, 256, param.nbytes, np.uint8).view(param.dtype).reshape(param.shape)
    return (x.view(np.uint8) % 0x7F).view(param.dtype) if param.dtype.itemsize == 1 and param.per_element == 0 else x


def clear_under_zero_scales(leaves):
    """Codes under scales of 0 become +-0."""
    for name in ("gate_up", "down"):
        if name + "_scale" in leaves:
            zero = np.repeat(leaves[name + "_scale"].view(np.uint8) == 0, 8, axis=-1)
            leaves[name] = np.where(zero, leaves[name] & 0x88, leaves[name])
    return leaves


def random_layer(config, layer, seed=0):
    rng = np.random.default_rng(seed)
    return clear_under_zero_scales(
        {p.path[2]: random_leaf(p, rng) for p in table(config) if p.path[:2] == ("layers", layer)})


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    params = build(config, lambda p: random_leaf(p, rng))
    params["layers"] = [clear_under_zero_scales(leaves) for leaves in params["layers"]]
    return params


def assert_same_leaves(a, b):
    assert set(a) == set(b)
    for name in a:
        assert_same_bits(a[name], b[name])


# ------------------------------------------------------------------ there and back


@configs
@layers
def test_round_trip(config, layer):
    leaves = random_layer(config, layer)
    packed = pack_layer(config, layer, leaves)
    unpacked = unpack_layer(config, layer, packed)
    assert list(unpacked) == list(leaves), "the order of the table"
    assert_same_leaves(unpacked, leaves)
    assert_same_leaves(jax.jit(lambda x: unpack_layer(config, layer, x))(packed), leaves)
    for row in packed_table(config):
        if row.path[:2] == ("layers", layer):
            array = packed[row.path[2]]
            assert (array.shape, array.dtype, array.nbytes) == (row.shape, row.dtype, row.nbytes)


def test_bits_of_the_round_trip():
    """What the round trips run over: all values there are."""
    leaves = random_layer(CONFIGS["mini"], 1)
    assert len(np.unique(leaves["q_proj"].view(np.uint16))) == 2**16
    assert set(np.unique(leaves["down_scale"].view(np.uint8))) == set(range(0x7F))
    assert set(np.unique(unpack(leaves["down"]))) == set(range(16))
    under_zero = leaves["down_scale"].view(np.uint8).repeat(8, axis=-1) == 0
    assert set(np.unique(leaves["down"][under_zero])) == {0x00, 0x08, 0x80, 0x88}
    assert np.isnan(leaves["router"]).any(), "float32 NaN with payload"


@configs
def test_head(config):
    head = random_layer_head(config)
    packed = pack_head(config, head)
    assert packed.shape == (8, layout(config, 0)["head.bytes"])
    assert_same_bits(unpack_head(config, packed), head)
    assert_same_bits(jax.jit(lambda x: unpack_head(config, x))(packed), head)


def random_layer_head(config):
    return random_leaf(next(p for p in table(config) if p.path == ("lm_head",)), np.random.default_rng(1))


def test_whole_model():
    config = CONFIGS["vocabulary slices of 56"]
    params = random_params(config)
    packed = pack_params(params, config)
    assert is_packed(packed) and not is_packed(params)
    assert is_packed(packed["layers"][1]) and not is_packed(params["layers"][1])
    assert_same_bits(packed["embed"], params["embed"])
    for unpacked in (unpack_params(packed, config), jax.jit(lambda x: unpack_params(x, config))(packed)):
        for param in table(config):
            assert_same_bits(leaf_of(unpacked, param), leaf_of(params, param))
    for row in packed_table(config):
        assert (leaf_of(packed, row).shape, leaf_of(packed, row).dtype) == (row.shape, row.dtype)


@layers
def test_some_of_the_slices(layer):
    """Inside a shard_map a device unpacks what it owns."""
    config = CONFIGS["mini"]
    leaves, mesh = random_layer(config, layer), make_mesh(4)
    specs = {"dense": P(AXIS), "experts": P(AXIS), "small": P()}
    split = {p.path[2]: P(AXIS) if p.split else P() for p in table(config) if p.path[:2] == ("layers", layer)}
    unpacked = jax.jit(jax.shard_map(lambda x: unpack_layer(config, layer, x), mesh=mesh, in_specs=(specs,),
                                     out_specs=split))(pack_layer(config, layer, leaves))
    assert_same_leaves({name: unpacked[name] for name in leaves}, leaves)


# ------------------------------------------------------------------ against the text of layout.h


def place(row, column):
    """Lane and register of an element of a tile of 16 rows."""
    return row % 8 * 4 + column % 8 // 2, row % 16 // 8 + 2 * (column % 16 // 8)


def bf16_at(data, rows, k, row, column, chunk):
    """Offset in bytes of an element in [chunk][row tile][tile of 16 columns]; one chunk is row-tile-major."""
    lane, register = place(row, column)
    tile = (column // chunk * (rows // 16) + row // 16) * (chunk // 16) + column % chunk // 16
    return int(data[tile * 256 + (lane * 4 + register) * 2 + column % 2])


def nvfp4_at(data, k, row, column):
    """bfloat16 bits of code and scale of an element, as a kernel makes them from words [uint32]."""
    lane, register = place(row, column)
    tile, step = column // 64, column % 64 // 16
    start = row // 16 * (k // 64) * (512 + 64) // 4
    w = int(data[start + tile * 128 + lane * 4 + step])
    x = [w, w ^ w << 6, w ^ (w >> 4 | w << 28), w << 2 ^ w >> 6][register] & 0x81C081C0
    s = int(data[start + k // 64 * 128 + tile * 16 + row % 8 * 2 + row % 16 // 8])
    half = s >> 16 * (step % 2) & 0xFFFF
    half = half if step < 2 else half >> 8 | (half & 0xFF) << 8  # the other two fields, at the same bits
    return x >> 16 * (column % 2) & 0xFFFF, half & 0x0FF0 | 0x7000


def value(bits):
    """A bfloat16 as a float64."""
    return float(np.uint32(bits << 16).view(np.float32))


def some(rows, k, count=3000):
    """Every element, or as many drawn at random."""
    every = np.arange(rows * k)
    picked = every if rows * k <= count else np.random.default_rng(2).choice(every, count, replace=False)
    return [(int(i) // k, int(i) % k) for i in picked]


@configs
def test_dense_elements(config):
    leaves = random_layer(config, 0)
    dense, at = pack_layer(config, 0, leaves)["dense"], layout(config, 0)
    s = 5
    qkvg = np.concatenate([leaves[n][s] for n in ("q_proj", "k_proj", "v_proj", "gate_proj")])
    for name, x in (("qkvg", qkvg), ("out", leaves["o_proj"][s]), ("pooler", leaves["pooler"][s]),
                    ("unpooler", leaves["unpooler"][s])):
        rows, k = x.shape
        data = dense[s, at["dense." + name]:].view(np.uint16)
        for row, column in some(rows, k):
            expected = int(x.view(np.uint16)[row, column])
            assert bf16_at(data, rows, k, row, column, min(k, 1024)) == expected, (name, row, column)
    n, k = leaves["router"][s].shape
    length = min(k, 1024) // 8  # [range][row][column of the range]
    data = dense[s, at["dense.router"]:].view(np.uint32)
    for row, column in some(n, k):
        here = (column // length * n + row) * length + column % length
        assert data[here] == leaves["router"][s].view(np.uint32)[row, column], (row, column)


def published_order(gate_up):
    """[2, F/s, K] -> rows as the tiles take them: 8 gate rows, then the 8 up rows that belong to them."""
    return np.concatenate([gate_up[part, i:i + 8] for i in range(0, gate_up.shape[1], 8) for part in (0, 1)])


@configs
def test_bf16_expert_elements(config):
    leaves = random_layer(config, 0)
    experts, at = pack_layer(config, 0, leaves)["experts"], layout(config, 0)
    s, e = 6, 3
    for name, x in (("gate_up", published_order(leaves["gate_up"][s, e])), ("down", leaves["down"][s, e])):
        rows, k = x.shape
        data = experts[s, e, at["experts." + name]:].view(np.uint16)
        for row, column in some(rows, k):
            assert bf16_at(data, rows, k, row, column, k) == int(x.view(np.uint16)[row, column]), (name, row, column)


@configs
def test_nvfp4_elements(config):
    """Codes and scales as bfloat16 numbers; their product is exact, 2^-19 times that of code and scale."""
    leaves = random_layer(config, 1)
    experts, at = pack_layer(config, 1, leaves)["experts"], layout(config, 1)
    s, e = 2, 4
    # A code is 2^-126 times its value. A scale 2^x * m has the exponent field x + 10, and 0x7000 adds 224 to it.
    power = -126 + 224 - 127 + at["scale_bias"]
    assert power == -19
    for name, order in (("gate_up", published_order), ("down", lambda x: x)):
        codes = unpack(order(leaves[name][s, e]))
        scales = order(leaves[name + "_scale"][s, e])
        rows, k = codes.shape
        data = experts[s, e, at["experts." + name]:].view(np.uint32)
        for row, column in some(rows, k, 6000):
            code, scale = nvfp4_at(data, k, row, column)
            assert value(code) == float(E2M1[codes[row, column]]) * 2.0**-126, (name, row, column)
            assert (code >> 15) == codes[row, column] >> 3, "the sign of zero"
            product = value(code) * value(scale)
            expected = float(E2M1[codes[row, column]]) * float(scales[row, column // 16])
            assert product == expected * 2.0**power, (name, row, column)
            assert float(ml_dtypes.bfloat16(product)) == product


def test_head_elements():
    config = CONFIGS["vocabulary slices of 56"]
    head = random_layer_head(config)
    data = pack_head(config, head)[7].view(np.uint16)
    for row in range(64):
        for column in range(0, 128, 3):
            expected = int(head[7].view(np.uint16)[row, column]) if row < 56 else 0
            assert bf16_at(data, 64, 128, row, column, 128) == expected, (row, column)


@layers
def test_small(layer):
    config = CONFIGS["mini"]
    leaves = random_layer(config, layer)
    small, at = pack_layer(config, layer, leaves)["small"], layout(config, layer)
    names = [key.removeprefix("small.") for key in at if key.startswith("small.") and key != "small.count"]
    kept = [name for name in names if name in leaves]
    assert len(kept) == (12 if layer else 8)
    assert sum(leaves[name].size for name in kept) == at["small.count"] == len(small)
    for name in kept:
        stored = small[at["small." + name]:][:leaves[name].size].view(np.uint32)
        bits = leaves[name].reshape(-1)
        wide = bits.view(np.uint32) if bits.dtype == np.float32 else bits.view(np.uint16).astype(np.uint32) << 16
        assert_same_bits(stored, wide)


@pytest.mark.parametrize("config", [*CONFIGS.values(), replace(RELEASED, nvfp4_layers=(1,))],
                         ids=[*CONFIGS, "released"])
def test_sections(config):
    """Aligned, in order, without overlap; what lies between them is 0; no more of it than alignment asks for."""
    for layer in (0, 1):
        at = layout(config, layer)
        assert at["chunk"] == packing.CHUNK
        offsets = {k: v for k, v in at.items() if k.split(".")[0] in ("dense", "experts", "head")}
        assert all(v % 256 == 0 for v in offsets.values()), offsets
        shapes = {p.path[2]: p for p in table(config) if p.path[:2] == ("layers", layer)}
        dense = sum(p.nbytes for p in shapes.values() if p.group in ("attention", "pooling", "router")
                    and p.split) // 8
        assert 0 <= at["dense.bytes"] - dense < 5 * 256
        experts = sum(p.nbytes for p in shapes.values() if p.group == "experts" and p.split) // 8
        assert 0 <= at["experts.bytes"] - experts // config.num_local_experts < 2 * 256


def test_padding_is_zero():
    config = CONFIGS["mini"]
    ones = {p.path[2]: np.full(p.nbytes, 255, np.uint8).view(p.dtype).reshape(p.shape)
            for p in table(config) if p.path[:2] == ("layers", 0)}
    packed = pack_layer(config, 0, ones)
    size = {name: sum(ones[n].nbytes for n in names) for name, names in (
        ("dense", ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj", "pooler", "router", "unpooler")),
        ("experts", ("gate_up", "down")))}
    for name, count in size.items():
        assert (packed[name] == 255).sum() == count and (packed[name] == 0).sum() == packed[name].size - count
    at = layout(config, 1)
    experts = pack_layer(config, 1, random_layer(config, 1))["experts"]
    end = at["experts.down"] + 16 // 16 * 128 // 64 * (512 + 64)
    assert end < at["experts.bytes"] and not experts[..., end:].any()


# ------------------------------------------------------------------ breakage


@layers
def test_a_flipped_bit_is_seen(layer):
    """At the element whose bit it is, and nowhere else."""
    config = CONFIGS["mini"]
    leaves = random_layer(config, layer)
    if layer == 0:
        name, leaf, index = "dense", "k_proj", (4, 27, 43)
        q_rows, (lane, register) = 128, place(27, 43)
        where = (4, ((q_rows + 27) // 16 * 8 + 43 // 16) * 512 + (lane * 4 + register) * 4 + 2 * (43 % 2))
    else:
        name, leaf, index = "experts", "gate_up_scale", (4, 9, 1, 5, 4)  # up row 5: row 13 of the first tile
        leaves[leaf].view(np.uint8)[index] = 0x42
        where = (4, 9, 2 * 512 + 64 + (5 * 2 + 1) * 4)
    packed = pack_layer(config, layer, leaves)
    packed[name][where] ^= 0x10
    unpacked = unpack_layer(config, layer, packed)
    with pytest.raises(AssertionError, match=r"1 of \d+ elements differ.*first at " + re.escape(str(index))):
        assert_same_bits(unpacked.pop(leaf), leaves.pop(leaf))
    assert_same_leaves(unpacked, leaves)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("byte, what", [(0x80, "byte 0x80"), (0xB3, "byte 0xb3"), (0x7F, "NaN"), (0xFF, "NaN"),
                                        (0x00, "0 over codes that are not 0")])
def test_bad_scales(byte, what):
    config = CONFIGS["mini"]
    leaves = random_layer(config, 1)
    leaves["gate_up"] |= 0x11  # no code of 0
    leaves["gate_up_scale"].view(np.uint8)[leaves["gate_up_scale"].view(np.uint8) == 0] = 1
    leaves["gate_up_scale"].view(np.uint8)[3, 5, 1, 7, 2] = byte
    leaves["down_scale"].view(np.uint8)[1, 6:] = 0x81
    total = 1 + leaves["down_scale"][1, 6:].size
    with pytest.raises(PackingError) as err:
        pack_layer(config, 1, leaves)
    text = str(err.value)
    row = 128 + 3 * 16 + 7  # up rows follow the gate rows, 16 of each a slice
    assert f"gate_up_scale of layer 1, expert 5, row {row}, block 2: {what}" in text
    assert "down_scale of layer 1, expert 6, row 16, block 0: byte 0x81" in text
    assert f"got {total} others" in text and f"and {total - 5} more" in text


def test_wrong_leaves():
    leaves = random_layer(CONFIGS["mini"], 0)
    leaves["q_proj"] = leaves["q_proj"].astype(np.float32)
    del leaves["down"]
    with pytest.raises(PackingError, match=r"(?s)layers\.0\.q_proj: expected bfloat16 \[8, 128, 128\], got float32.*"
                                           r"layers\.0\.down: expected .* got none"):
        pack_layer(CONFIGS["mini"], 0, leaves)


def test_wrong_packed_arrays():
    packed = pack_layer(CONFIGS["mini"], 0, random_layer(CONFIGS["mini"], 0))
    with pytest.raises(PackingError, match=r"layers\.1\.experts: expected uint8 \[s, 16, 3584\], got uint8"):
        unpack_layer(CONFIGS["mini"], 1, packed)


PROBLEMS = {
    "hidden_size": (dict(hidden_size=192), r"N of o_proj.*of 128, got 192; .*of 16, this size allows 1, 2, 4$"),
    "hidden_size, chunks": (dict(hidden_size=1152), "multiple of 128 up to 1024, or of 1024, .*got 1152"),
    "num_attention_heads": (dict(num_attention_heads=12, num_key_value_heads=4),
                            r"multiple of 8, got 12; .*allows 1, 2, 4$"),
    "num_key_value_heads": (dict(num_key_value_heads=2), r"multiple of 8, got 2; .*allows 1, 2$"),
    "head_dim": (dict(head_dim=24), r"multiple of 16, the rows of a tile, got 24"),
    "q_width": (dict(num_attention_heads=24), "K of o_proj.*or of 1024, .*got 1536"),
    "moe_hidden_size": (dict(moe_hidden_size=64), r"K of unpooler, gate_up.*got 64; .*allows 1, 2, 4$"),
    "moe_hidden_size, chunks": (dict(moe_hidden_size=3 * 512), "or of 1024, .*got 1536"),
    "moe_intermediate_size": (dict(moe_intermediate_size=24), "K of down.*got 24; .*allows none$"),
    "moe_intermediate_size, chunks": (dict(moe_intermediate_size=1280), "or of 1024, .*got 1280"),
    "num_local_experts": (dict(num_local_experts=9), "N of router.*multiple of 8, got 9; .*allows 1$"),
    "vocab_size": (dict(vocab_size=516), "N of lm_head.*multiple of 8, got 516; .*allows 1, 2, 4$"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_sizes_that_do_not_pack(name):
    changes, message = PROBLEMS[name]
    config = replace(MINI, **changes)
    problem = next(p for p in packing_problems(config) if p.startswith(name.partition(",")[0] + " "))
    assert re.search(message, problem), problem
    for use in (lambda: check_packable(config), lambda: layout(config, 0), lambda: packed_table(config)):
        with pytest.raises(ConfigError, match=r"(?s)no packed form on a mesh of 1.*got .*`reference`") as err:
            use()
        assert problem in str(err.value)


def test_sizes_that_pack():
    for config in (MINI, NANO, RELEASED, *CONFIGS.values()):
        assert packing_problems(config) == []
        for devices in DEVICE_COUNTS:
            check_packable(config, devices)
    with pytest.raises(ConfigError, match=r"(?s)mesh of 3.*mesh: expected 1, 2, 4 or 8 devices, got 3"):
        check_packable(MINI, 3)


@pytest.mark.parametrize("devices", DEVICE_COUNTS)
def test_abstract(devices):
    """Released sizes, without memory; every device holds its slices and a copy of the rest."""
    config = replace(RELEASED, nvfp4_layers=tuple(range(1, 61)))
    rows = packed_table(config)
    tree = abstract_packed(config, make_mesh(devices))
    per_device = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    assert per_device == sum(r.nbytes // (devices if r.split else 1) for r in rows)
    assert {r.name for r in rows if not r.split} == {"final_norm", *(f"layers.{i}.small" for i in range(62))}
    assert sum(r.nbytes for r in rows) < 1.001 * sum(p.nbytes for p in table(config))
