"""The packed form of a drafter against the text of ffi/common/draft_layout.h; there and back; refusals; placement."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from draft_inputs import BASE, CONFIGS, PLAIN, random_params
from helpers import assert_same_bits
from jax.sharding import PartitionSpec as P

from musejax.config import ConfigError
from musejax.params import BF16
from musejax.sharding import AXIS, make_mesh
from musejax.speculation import params as dp
from musejax.speculation.config import NANO_DRAFTER
from musejax.speculation.packing import (
    check_packable,
    is_packed,
    layout,
    pack_drafter,
    packing_problems,
    param_specs,
    place,
    unpack_drafter,
)
from musejax.tiles import PackingError

SIZES = {**CONFIGS, "nano": NANO_DRAFTER}


def random_bits(config, extras):
    """Every bfloat16 pattern but NaN as often as the next."""
    patterns = np.random.default_rng(1).permutation(2**16).astype(np.uint16)
    patterns = patterns[(patterns & 0x7FFF) <= 0x7F80]
    rows = dp.table(config) if extras else dp.required(config)
    return dp.assemble(config, {p.path: np.resize(np.roll(patterns, i), p.shape).view(BF16)
                                for i, p in enumerate(rows)})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("extras", [False, True], ids=["borrows", "own"])
def test_round_trip(name, extras):
    config = SIZES[name]
    params = random_bits(config, extras)
    packed = pack_drafter(params, config)
    assert is_packed(packed) and not is_packed(params)
    back = unpack_drafter(packed, config)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert_same_bits(a, b)


def element(data, rows, k, row, column) -> np.uint16:
    """One bf16 of a chunk-major weight, by the formula of layout.h."""
    chunk, tiles = min(k, 1024), -(-rows // 16)
    tile = (column // chunk * tiles + row // 16) * (chunk // 16) + column % chunk // 16
    lane, register = row % 8 * 4 + column % 8 // 2, row % 16 // 8 + 2 * (column % 16 // 8)
    at = tile * 512 + lane * 16 + register * 4 + column % 2 * 2
    return data[at:at + 2].view(np.uint16)[0]


@pytest.mark.parametrize("name", SIZES)
def test_every_section_by_the_text(name):
    """Elements at random places of each weight, found where the text says."""
    config, rng = SIZES[name], np.random.default_rng(2)
    params = random_params(config, extras=True)
    packed, at = pack_drafter(params, config), layout(config)
    p, q, c = params["layers"][-1], packed["layers"][-1], config.head_dim
    d, groups = config.hidden_size, config.conv_groups
    heads, kv = config.num_attention_heads // 8, config.num_key_value_heads // 8

    def channel(i):  # of a head, as packed -> as published
        return i if config.rope_half else i % (c // 2) * 2 + i // (c // 2)

    def qkv(s, row):
        part, first = ("q_proj", 0) if row < heads * c else ("k_proj", heads * c) if row < (heads + kv) * c else (
            "v_proj", (heads + kv) * c)
        count, row = (heads if part == "q_proj" else kv), row - first
        head, i = s * count + row // c, row % c
        return p[part][head * c + (i if part == "v_proj" else channel(i))]

    def gate_up(s, row):
        name = "gate_proj" if row % 16 < 8 else "up_proj"
        return p[name][s * config.intermediate_size // 8 + row // 16 * 8 + row % 8]

    def plain(w):
        return lambda s, row: w[s * len(w) // 8 + row]

    def conv(w):
        return lambda s, row: w[row // (groups // 8) * groups + s * groups // 8 + row % (groups // 8)]

    dense = {"qkv": (qkv, (heads + 2 * kv) * c, d), "out": (plain(p["o_proj"]), d // 8, config.q_width),
             "gate_up": (gate_up, config.intermediate_size // 4, d),
             "down": (plain(p["down_proj"]), d // 8, config.intermediate_size)}
    if config.has_conv:
        dense |= {n: (conv(p[n + "_proj"]), groups // 2, d) for n in ("attention_conv", "mlp_conv")}
    whole = {"fc": (plain(params["fc"]), d // 8, config.taps_width),
             "lm_head": (plain(params["lm_head"]), config.vocab_size // 8, d)}
    if config.has_selector:
        whole["selector"] = plain(params["selector"]), config.selector_rank // 8, d
    sections = [(q["dense"][:, at["dense." + n]:], *rest) for n, rest in dense.items()]
    sections += [(packed[n], *rest) for n, rest in whole.items()]
    for data, row_of, rows, k in sections:
        for _ in range(40):
            s, row, column = rng.integers(8), rng.integers(rows), rng.integers(k)
            assert element(data[s], rows, k, row, column) == row_of(s, row)[column].view(np.uint16)
    for n in ("input_norm", "post_norm"):
        assert_same_bits(q["small"][at["small." + n]:][:d], p[n].astype(np.float32))
    if config.has_conv:
        assert_same_bits(q["small"][at["small.mlp_conv"]:][:4 * d], p["mlp_conv"].astype(np.float32).reshape(-1))
    assert at["small.count"] == len(q["small"]) and q["dense"].shape == (8, at["dense.bytes"])
    assert all(at["dense." + n] % 256 == 0 for n in dense)


REFUSED = {
    "hidden_size: .* multiple of 128 .*, got 192": {"hidden_size": 192},
    "num_attention_heads: .* multiple of 8": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},
    "num_key_value_heads: .* multiple of 8": {"num_key_value_heads": 4},
    "intermediate_size: .* multiple of 128": {"intermediate_size": 192},
    "intermediate_size: expected at most 1024 or a multiple of it": {"intermediate_size": 1152},
    r"taps \* hidden_size: expected at most 1024": {"target_layer_ids": tuple(range(9))},
    "vocab_size: .* multiple of 8": {"vocab_size": 500},
    "hidden_size / conv_group_size: .* multiple of 8 .*, got 4": {"conv_group_size": 32},
    "selector_rank: .* multiple of 16 .*, got 24": {"selector_rank": 24},
    "head_dim: expected one of 16, 32, 64, 128, got 8": {"head_dim": 8},
    "block_size: expected at most 16": {"block_size": 17},
    r"selector_top_k: expected at most the vocabulary of a slice \(64\), got 65": {"selector_top_k": 65},
}


@pytest.mark.parametrize("text", REFUSED)
def test_sizes_that_have_no_packed_form(text):
    config = replace(BASE, **REFUSED[text])
    with pytest.raises(ConfigError, match=f"(?s)no packed form.*{text}.*plain JAX"):
        check_packable(config)
    assert packing_problems(config)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_have_one(name):
    assert not packing_problems(SIZES[name])


def test_leaves_that_do_not_fit():
    params = random_params(BASE)
    wrong = {**params, "fc": params["fc"][:, :-1], "norm": params["norm"].astype(np.float32)}
    del wrong["selector"]
    with pytest.raises(PackingError, match=r"(?s)fc: expected bfloat16 \[128, 384\], got bfloat16 \[128, 383\].*"
                                           r"norm: .*got float32 \[128\].*selector: .*got none"):
        pack_drafter(wrong, BASE)


def test_placement():
    packed, mesh = pack_drafter(random_params(BASE, extras=True), BASE), make_mesh(4)
    specs = param_specs(packed)
    assert specs["layers"][0] == {"dense": P(AXIS), "small": P()} and specs["successor"] == P()
    assert all(specs[n] == P(AXIS) for n in ("fc", "selector", "lm_head", "embed", "mask_embedding"))
    placed = place(packed, mesh)
    assert placed["fc"].sharding.shard_shape(placed["fc"].shape)[0] == 2
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(packed), strict=True):
        assert_same_bits(a, b)


def test_dflash_1_has_no_more_than_it_needs():
    config = replace(BASE, **PLAIN)
    packed = pack_drafter(random_params(config), config)
    assert set(packed) == {"fc", "hidden_norm", "norm", "layers"}
    at = layout(config)
    assert at["dense.qkv"] == at["dense.attention_conv"] and at["selector.bytes"] == 0
