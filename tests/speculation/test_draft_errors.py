"""Wrong operands and attributes of a drafter's FFI targets: errors name operation, expected, got and argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_inputs import BASE, drafter_of

from musejax.kernels.draft_calls import DraftCall, Top, tree
from musejax.speculation import draft_kernels as dk

T, D = BASE.block_size, BASE.hidden_size
ERRORS = (RuntimeError, ValueError)


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def numbers(*shape):
    return zeros(*shape, dtype=jnp.float32)


def integer(value):
    return jnp.int32(value)


@pytest.fixture
def call():
    return DraftCall(BASE)


def stream(t=T, width=D // 8, dtype=jnp.bfloat16):
    return zeros(8, t, width, dtype=dtype)


def delta(t=T, groups=4):
    return numbers(8, t, groups)


def angles(t=T):
    return numbers(t, 2, 8)


def weights(**changes):
    return {**drafter_of(BASE).packed["layers"][0], **changes}


def rings(heads=8, slots=24, layers=2, dtype=jnp.bfloat16):
    return [zeros(layers, heads, slots, 16, dtype=dtype)] * 2


def fc(call, taps=None, count=3, weight=None):
    packed = drafter_of(BASE).packed
    return call.fc(numbers(16, 3 * D) if taps is None else taps, integer(count),
                   packed["fc"] if weight is None else weight)


def context(call, ctx=None, cos_sin=None, start=0, count=3, norm=None, kept=None, layers=None):
    packed = drafter_of(BASE).packed
    return call.context(stream() if ctx is None else ctx, angles() if cos_sin is None else cos_sin, integer(start),
                        integer(count), packed["hidden_norm"] if norm is None else norm, *(kept or rings()),
                        layers or packed["layers"])


def attention(call, x=None, coefficients=None, cos_sin=None, length=0, p=None, kept=None, layer=0):
    return call.attention(layer, stream() if x is None else x, delta() if coefficients is None else coefficients,
                          angles() if cos_sin is None else cos_sin, integer(length), p or weights(), *(kept or rings()))


def whole(call, rows=None, cos_sin=None, anchor=0, length=0, kept=None, p=None, devices=(), **changes):
    drafter = drafter_of(BASE)
    end = {name: drafter.packed[name] for name in ("norm", "selector", "predecessor", "successor")}
    end = {**end, "lm_head": drafter.target["lm_head"], **changes}
    return call.draft(stream() if rows is None else rows, angles() if cos_sin is None else cos_sin, integer(anchor),
                      integer(length), end["norm"], end["lm_head"], end["selector"], end["predecessor"],
                      end["successor"], *(kept or rings()), p or drafter.packed["layers"], num_tokens=None,
                      devices=devices)


def commit(call, taps=None, start=0, count=3, weight=None, norm=None, kept=None, p=None, devices=()):
    packed = drafter_of(BASE).packed
    return call.commit(numbers(16, 3 * D) if taps is None else taps, angles(), integer(start), integer(count),
                       packed["fc"] if weight is None else weight, packed["hidden_norm"] if norm is None else norm,
                       *(kept or rings()), p or packed["layers"], devices=devices)


def grow(_, anchor=0, tokens=None, scores=None, coverage=None, nodes=16, width=8, spine=0, tau=1.0):
    return tree(integer(anchor), zeros(T - 1, 8, dtype=jnp.int32) if tokens is None else tokens,
                numbers(T - 1, 8, 8) if scores is None else scores, numbers(T - 1) if coverage is None else coverage,
                nodes=nodes, width=width, spine=spine, tau=tau)


def attn_out(call, o=None, x=None, begin=0, p=None):
    o = zeros(16, T, 16) if o is None else o
    return call.attn_out(o, stream() if x is None else x, delta(), integer(begin), p or weights())


def down(call, act=None, begin=0):
    return call.down(zeros(8, T, 32) if act is None else act, stream(), delta(), integer(begin), weights())


def head(call, x=None, norm=None, lm_head=None, selector=None, begin=0):
    drafter = drafter_of(BASE)
    return call.head(stream() if x is None else x, drafter.packed["norm"] if norm is None else norm,
                     drafter.target["lm_head"] if lm_head is None else lm_head,
                     drafter.packed["selector"] if selector is None else selector, integer(begin), num_tokens=None)


def lattice(call, gate=None, ids=None, predecessor=None, anchor=0):
    q, packed = T - 1, drafter_of(BASE).packed
    top = Top(numbers(8, q, 8), zeros(8, q, 8, dtype=jnp.int32) if ids is None else ids, 1 + numbers(8, q),
              numbers(8, q, 4) if gate is None else gate)
    return call.lattice(top, packed["predecessor"] if predecessor is None else predecessor, packed["successor"],
                        integer(anchor))


def with_model(call, **changes):
    call.model = {**call.model, **changes}
    return call


def unconnected(call):
    """No GPU is asked for."""
    call._connect = lambda *_: None
    return call


BYTES = r"\[8,\d+\]"
# What is called; then operation, expected, got and argument, as regular expressions.
MISMATCHES = {
    "taps of two layers": (lambda c: fc(c, numbers(16, 2 * D)), "fc", r"\[16,384\]", r"\[16,256\]", "taps"),
    "taps in bfloat16": (lambda c: fc(c, zeros(16, 3 * D)), "fc", "float32", "bfloat16", "taps"),
    "17 taps": (lambda c: fc(c, numbers(17, 3 * D)), "fc", "1 to 16 rows", "17", "taps"),
    "more taps than rows": (lambda c: fc(c, count=17), "fc", "0 to 16", "17", "count"),
    "fc too short": (lambda c: fc(c, weight=zeros(8, 256, dtype=jnp.uint8)), "fc", BYTES, r"\[8,256\]", "fc"),
    "context too narrow": (lambda c: context(c, stream(width=15)), "context", r"\[8,16,16\]", r"\[8,16,15\]", "ctx"),
    "context without a slice": (lambda c: context(c, zeros(7, 16, 16)), "context", r"\[8,16,16\]", r"\[7,16,16\]",
                                "ctx"),
    "angles of other rows": (lambda c: context(c, cos_sin=angles(15)), "context", r"\[16,2,8\]", r"\[15,2,8\]",
                             "cos_sin"),
    "start below 0": (lambda c: context(c, start=-1), "context", r"0 to \d+", "-1", "start"),
    "count below 0": (lambda c: context(c, count=-1), "context", "0 to 16", "-1", "count"),
    "norm in bfloat16": (lambda c: context(c, norm=zeros(D)), "context", "float32", "bfloat16", "hidden_norm"),
    "rings in float32": (lambda c: context(c, kept=rings(dtype=jnp.float32)), "context", "bfloat16", "float32", "keys"),
    "rings of other heads": (lambda c: context(c, kept=rings(heads=4)), "context", r"\[2,8,24,16\]", r"\[2,4,24,16\]",
                             "keys"),
    "rings of three layers": (lambda c: context(c, kept=rings(layers=3)), "context", "an operand", "none",
                              r"layers\[2\]\.dense"),
    "rings without slots": (lambda c: whole(c, kept=rings(slots=0)), "", "at least one layer and one slot",
                            "0", "keys"),
    "weights of half the slices": (lambda c: context(c, layers=[weights(dense=weights()["dense"][:4])] * 2),
                                   "context", r"\[2,4,24,16\]", r"\[2,8,24,16\]", "keys"),
    "embedding rows in float32": (lambda c: c.embed(stream(dtype=jnp.float32)), "embed", "bfloat16", "float32", "rows"),
    "17 rows of the embedding": (lambda c: c.embed(stream(17)), "embed", "1 to 16 rows", "17", "rows"),
    "a block of 17": (lambda c: whole(c, stream(17), angles(17)), "", "an anchor and 1 to 15 drafted positions", "17",
                      "rows"),
    "rows too narrow": (lambda c: whole(c, stream(width=8)), "", r"\[8,16,16\]", r"\[8,16,8\]", "rows"),
    "rows of half the slices": (lambda c: whole(c, zeros(4, T, 16)), "", r"\[8,16,16\]", r"\[4,16,16\]", "rows"),
    "an anchor below 0": (lambda c: whole(c, anchor=-1), "", "0 to 511", "-1", "anchor"),
    "length below 0": (lambda c: whole(c, length=-2), "", r"0 to \d+", "-2", "length"),
    "gain of another width": (lambda c: whole(c, norm=numbers(64)), "", r"\[128\]", r"\[64\]", "norm"),
    "lm_head of half the slices": (lambda c: whole(c, lm_head=drafter_of(BASE).target["lm_head"][:4]), "", BYTES,
                                   r"\[4,\d+\]", "lm_head"),
    "no selector": (lambda c: whole(c, selector=zeros(8, 0, dtype=jnp.uint8)), "", BYTES, r"\[8,0\]", "selector"),
    "no predecessor": (lambda c: whole(c, predecessor=zeros(0, 0)), "", r"\[512,32\]", r"\[0,0\]", "predecessor"),
    "successor of fewer tokens": (lambda c: whole(c, successor=zeros(256, 32)), "", r"\[512,32\]", r"\[256,32\]",
                                  "successor"),
    "one layer too many": (lambda c: whole(c, p=drafter_of(BASE).packed["layers"] * 2), "", r"\d+", r"\d+",
                           "operands"),
    "one layer too few": (lambda c: whole(c, p=drafter_of(BASE).packed["layers"][:1]), "", "an operand", "none",
                          r"layers\[1\]\.dense"),
    "a pass on two devices": (lambda c: whole(unconnected(c), devices=(0, 1)), "", "none on a CPU", "2", "devices"),
    "a commit without rows": (lambda c: commit(c, numbers(0, 3 * D)), "commit", "1 to 16 rows", "0", "taps"),
    "a commit of two layers' taps": (lambda c: commit(c, numbers(16, 2 * D)), "commit", r"\[16,384\]", r"\[16,256\]",
                                     "taps"),
    "a commit of too many rows": (lambda c: commit(c, count=17), "commit", "0 to 16", "17", "count"),
    "a commit below 0": (lambda c: commit(c, start=-1), "commit", r"0 to \d+", "-1", "start"),
    "fc of half the slices": (lambda c: commit(c, weight=drafter_of(BASE).packed["fc"][:4]), "commit", BYTES,
                              r"\[4,\d+\]", "fc"),
    "a commit's norm in bfloat16": (lambda c: commit(c, norm=zeros(D)), "commit", "float32", "bfloat16",
                                    "hidden_norm"),
    "a commit into half the heads": (lambda c: commit(c, kept=rings(heads=4)), "commit", r"\[2,8,24,16\]",
                                     r"\[2,4,24,16\]", "keys"),
    "a commit on two devices": (lambda c: commit(unconnected(c), devices=(0, 1)), "commit", "none on a CPU", "2",
                                "devices"),
    "tokens in float32": (lambda c: grow(c, tokens=numbers(T - 1, 8)), "tree", "int32", "float32", "tokens"),
    "no candidates": (lambda c: grow(c, tokens=zeros(T - 1, 0, dtype=jnp.int32)), "tree",
                      "at least one position and one candidate", "0", "tokens"),
    "scores of fewer predecessors": (lambda c: grow(c, scores=numbers(T - 1, 7, 8)), "tree", r"\[15,8,8\]",
                                     r"\[15,7,8\]", "scores"),
    "coverage of another block": (lambda c: grow(c, coverage=numbers(T)), "tree", r"\[15\]", r"\[16\]", "coverage"),
    "33 nodes": (lambda c: grow(c, nodes=33), "tree", "1 to 32", "33", "nodes"),
    "no children": (lambda c: grow(c, width=0), "tree", "at least 1", "0", "width"),
    "a spine below 0": (lambda c: grow(c, spine=-1), "tree", "at least 0", "-1", "spine"),
    "tau of 0": (lambda c: grow(c, tau=0.0), "tree", "a number above 0", "0.000000", "tau"),
    "small of another drafter": (lambda c: c.delta(stream(), weights(small=numbers(100)), mlp=True), "delta",
                                 r"\[\d+\]", r"\[100\]", "small"),
    "17 rows": (lambda c: attention(c, stream(17)), "attention", "1 to 16 rows", "17", "stream"),
    "delta of other groups": (lambda c: attention(c, coefficients=delta(groups=8)), "attention", r"\[8,16,4\]",
                              r"\[8,16,8\]", "delta"),
    "keys of half the heads": (lambda c: attention(c, kept=rings(4)), "attention", r"\[2,8,24,16\]", r"\[2,4,24,16\]",
                               "keys"),
    "a layer that is not": (lambda c: attention(c, layer=2), "attention", "a layer of the rings", "2", "layer"),
    "dense too short": (lambda c: attention(c, p=weights(dense=weights()["dense"][:, :-16])), "attention", BYTES, BYTES,
                        "dense"),
    "o of half the heads": (lambda c: attn_out(c, zeros(8, T, 16)), "attn_out", r"\[16,16,16\]", r"\[8,16,16\]", "o"),
    "a slice beyond the last": (lambda c: attn_out(c, begin=1), "attn_out", "0 to 0", "1", "begin"),
    "act of other rows": (lambda c: down(c, zeros(8, 15, 32)), "down", r"\[8,16,32\]", r"\[8,15,32\]", "act"),
    "down before the first slice": (lambda c: down(c, begin=-1), "down", "0 to 0", "-1", "begin"),
    "up of float32": (lambda c: c.up(stream(dtype=jnp.float32), delta(), weights()), "up", "bfloat16", "float32",
                      "stream"),
    "head of another size": (lambda c: head(c, lm_head=zeros(8, 256, dtype=jnp.uint8)), "head", BYTES, r"\[8,256\]",
                             "lm_head"),
    "selector of four slices": (lambda c: head(c, selector=drafter_of(BASE).packed["selector"][:4]), "head", BYTES,
                                r"\[4,\d+\]", "selector"),
    "gate of one slice": (lambda c: lattice(c, gate=numbers(1, T - 1, 4)), "lattice", r"\[8,15,4\]", r"\[1,15,4\]",
                          "gate"),
    "ids in float32": (lambda c: lattice(c, ids=numbers(8, T - 1, 8)), "lattice", "int32", "float32", "ids"),
    "codebook of another rank": (lambda c: lattice(c, predecessor=zeros(512, 16)), "lattice", r"\[512,32\]",
                                 r"\[512,16\]", "predecessor"),
    "an anchor beyond the vocabulary": (lambda c: lattice(c, anchor=512), "lattice", "0 to 511", "512", "anchor"),
    "hidden": (lambda c: fc(with_model(c, hidden=100)), "fc", "a multiple of 128 .*", "100", r"model\.hidden"),
    "taps * hidden": (lambda c: fc(with_model(c, taps=9)), "fc", "a multiple of 128 .*", "1152",
                      r"model\.taps \* hidden"),
    "head_dim": (lambda c: whole(with_model(c, head_dim=8)), "", "16, 32, 64 or 128", "8", r"model\.head_dim"),
    "kv_heads": (lambda c: whole(with_model(c, kv_heads=4)), "", "multiples of 8 .*", "4", r"model\.kv_heads"),
    "conv_groups": (lambda c: whole(with_model(c, conv_groups=12)), "", "a multiple of 8 .*", "12",
                    r"model\.conv_groups"),
    "rank": (lambda c: head(with_model(c, rank=24)), "head", "a multiple of 16, or 0", "24", r"model\.rank"),
    "vocab": (lambda c: head(with_model(c, vocab=500)), "head", "a multiple of 8", "500", r"model\.vocab"),
    "window": (lambda c: whole(with_model(c, window=0)), "", "at least 1", "0", r"model\.window"),
    "candidates": (lambda c: head(with_model(c, candidates=65)), "head", "1 to the vocabulary of a slice", "65",
                   r"model\.candidates"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch(name, call):
    run, operation, expected, got, argument = MISMATCHES[name]
    operation = f"draft_{operation}" if operation else "draft"
    with pytest.raises(ERRORS, match=rf"{operation}: expected {expected}, got {got} \(argument {argument}\)"):
        jax.block_until_ready(run(call))


def test_good_operands_pass(call):
    """What the cases above change one operand of."""
    out = [whole(call), commit(call), grow(call), fc(call), context(call), attention(call), attn_out(call), down(call),
           head(call), lattice(call), call.up(stream(), delta(), weights()),
           call.delta(stream(), weights(), mlp=False)]
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(jax.block_until_ready(out)))


def test_error_in_a_draft(call):
    """An anchor outside the vocabulary: the draft raises, the next one works."""
    drafter, cache = drafter_of(BASE), dk.init_cache(BASE)
    run = jax.jit(lambda anchor: dk.draft(drafter.packed, drafter.target, cache, anchor, config=BASE))
    with pytest.raises(ERRORS, match=r"expected 0 to 511, got 512 \(argument anchor\)"):
        jax.block_until_ready(run(integer(512)))
    assert np.isfinite(np.asarray(run(integer(511)).scores)).all()
