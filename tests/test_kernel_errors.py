"""Wrong operands and attributes of the FFI targets: errors name operation, expected, got and argument; the next call
works."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import SMALL, accepted, model_of, one_pass, random_cache

from musejax.cache import LayerCache
from musejax.config import DecodeConfig
from musejax.kernels import cache as kc
from musejax.kernels import forward as kf
from musejax.kernels.calls import Call, RowState
from musejax.params import BF16
from musejax.sharding import make_mesh

ROWS = 4
ERRORS = (RuntimeError, ValueError)


@pytest.fixture
def call():
    return Call(SMALL, DecodeConfig())


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def row_state(t=ROWS, parents=None, length=0, valid=None, accepted=0, path=None):
    parents = kf.chain(t) if parents is None else jnp.asarray(parents)
    state = jnp.asarray([length, t if valid is None else valid, accepted], jnp.int32)
    return RowState(parents, state, jnp.arange(16, dtype=jnp.int32) if path is None else jnp.asarray(path, jnp.int32))


def pair(slots=32, heads=8, dtype=jnp.bfloat16):
    return LayerCache(zeros(heads, slots, 64, dtype=dtype), zeros(heads, slots, 64, dtype=dtype))


def attention(call, *, layer=2, t=ROWS, q=None, rows=None, stored=None, flight=None):
    q = zeros(16, t, 64) if q is None else q
    return call.attention(layer, q, q, rows or row_state(t), stored or pair(), flight or pair(16))


def layers(call, *, t=ROWS, stream=None, q=None, cos_sin=None, rows=None, slots=(24, 24, 40)):
    cache = kc.init_cache(SMALL, 40)._replace(layers=tuple(pair(n) for n in slots))
    q = zeros(16, t, 64) if q is None else q
    stream = zeros(t, 128, dtype=jnp.float32) if stream is None else stream
    cos_sin = zeros(2, t, 2, 32, dtype=jnp.float32) if cos_sin is None else cos_sin
    return call.layers(range(3), model_of(SMALL).packed["layers"], stream, q, q, cos_sin, rows or row_state(t), cache,
                       first=True, last=True)


def packed(layer=0, **changes):
    return {**model_of(SMALL).packed["layers"][layer], **changes}


def stream(t=ROWS, width=128, dtype=jnp.float32):
    return zeros(t, width, dtype=dtype)


def experts_up(call, *, layer=0, t=ROWS, p=None, scores=None, begin=0, rows=None):
    scores = zeros(8, t, 2, dtype=jnp.float32) if scores is None else scores
    return call.experts_up(layer, zeros(8, t, 16), scores, rows or row_state(t), p or packed(layer), jnp.int32(begin))


def with_model(call, **changes):
    """Other members of the attribute `model`."""
    call.model = {**call.model, **changes}
    return call


def raw(target, results, *operands, **attributes):
    return jax.ffi.ffi_call("musejax_" + target, results)(*operands, **attributes)


def head(call, *, t=ROWS, lm_head=None, top=1):
    params = model_of(SMALL).packed
    return call.head(stream(t), params["final_norm"], params["lm_head"] if lm_head is None else lm_head, jnp.int32(0),
                     num_tokens=None, top=top)


def experts_down(call, ids):
    return call.experts_down(0, zeros(8, len(ids) * 4, 16), ids, packed(), jnp.int32(0))


def numbers(*shape):
    return zeros(*shape, dtype=jnp.float32)


def ids(*shape):
    return zeros(*shape, dtype=jnp.int32)


def head_with_one_result(call):
    params = model_of(SMALL).packed
    return raw("head", [jax.ShapeDtypeStruct((8, 4, 64), np.float32)], stream(), params["final_norm"],
               params["lm_head"], jnp.int32(0), model=call.model, num_tokens=np.int64(512), top=np.int64(1))


def layers_without_operands(call):
    one = np.zeros(1, np.int64)
    return raw("layers", [F32_4], stream(), window=one, theta=one, nvfp4=one, tap=one, devices=one, first=True,
               last=True, model=call.model)


def layers_on_two_cpus(call):
    one, two = np.zeros(1, np.int64), np.arange(2)
    return raw("layers", [F32_4], stream(), window=one, theta=one, nvfp4=one, tap=one, devices=two, first=True,
               last=True, model=call.model)


F32_4 = jax.ShapeDtypeStruct((4,), np.float32)
ROW_LIMIT, EARLIER = "at most 16 rows", "-1 or an earlier row"
BYTES = r"\[8,\d+\]"

# What is called; then operation, expected, got and argument, as regular expressions.
SHAPES = {
    "stream too narrow": (lambda c: layers(c, stream=stream(width=120)),
                          "layers", r"\[4,128\]", r"\[4,120\]", "stream"),
    "q without a head": (lambda c: layers(c, q=zeros(15, 4, 64)), "layers", r"\[16,4,64\]", r"\[15,4,64\]", "q"),
    "angles of other rows": (lambda c: layers(c, cos_sin=numbers(2, 5, 2, 32)),
                             "layers", r"\[2,4,2,32\]", r"\[2,5,2,32\]", "cos_sin"),
    "heads that do not share": (lambda c: attention(c, q=zeros(8, 4, 64)),
                                "attention", "the heads that share the key/value heads here", "8", "q"),
    "flight too short": (lambda c: attention(c, flight=pair(15)),
                         "attention", r"\[8,16,64\]", r"\[8,15,64\]", "flight_keys"),
    "a of other rows": (lambda c: c.pool(0, stream(), zeros(8, 5, 16), packed()),
                        "pool", r"\[8,4,16\]", r"\[8,5,16\]", "a"),
    "dense too short": (lambda c: c.attn_out(0, zeros(16, 4, 64), packed(dense=packed()["dense"][:, :-16])),
                        "attn_out", BYTES, BYTES, "dense"),
    "experts of another layer": (lambda c: experts_up(c, layer=1, p=packed(1, experts=packed(0)["experts"])),
                                 "experts_up", r"\[8,16,\d+\]", r"\[8,16,\d+\]", "experts"),
    "small of another layer": (lambda c: c.add_ffn(1, stream(), zeros(8, 4, 16), packed(0)),
                               "add_ffn", r"\[\d+\]", r"\[\d+\]", "small"),
    "ids of another top_k": (lambda c: experts_down(c, ids(4, 3)), "experts_down", r"\[4,4\]", r"\[4,3\]", "ids"),
    "head of another size": (lambda c: head(c, lm_head=zeros(8, 256, dtype=jnp.uint8)),
                             "head", r"\[8,16384\]", r"\[8,256\]", "lm_head"),
    "sums of one slice": (lambda c: c.logprob(numbers(4), numbers(4), numbers(1, 4)),
                          "logprob", r"\[8,4\]", r"\[1,4\]", "sums"),
    "path too short": (lambda c: attention(c, rows=row_state(path=[0, 1])), "attention", r"\[16\]", r"\[2\]", "path"),
}
DTYPES = {
    "stream in bfloat16": (lambda c: layers(c, stream=stream(dtype=BF16)), "layers", "float32", "bfloat16", "stream"),
    "q in float32": (lambda c: layers(c, q=numbers(16, 4, 64)), "layers", "bfloat16", "float32", "q"),
    "cache in float32": (lambda c: attention(c, stored=pair(dtype=jnp.float32)),
                         "attention", "bfloat16", "float32", "keys"),
    "parents in float32": (lambda c: attention(c, rows=row_state(parents=np.float32([-1, 0, 1, 2]))),
                           "attention", "int32", "float32", "parents"),
    "scores in bfloat16": (lambda c: experts_up(c, scores=zeros(8, 4, 2)),
                           "experts_up", "float32", "bfloat16", "scores"),
    "float16": (lambda c: c.embed_norm(zeros(8, 4, 16, dtype=jnp.float16)),
                "embed_norm", "bfloat16", "another dtype", "rows"),
}
ROW_STATES = {
    "17 rows": (lambda c: layers(c, t=17), "layers", "1 to 16 rows", "17", "parents"),
    "17 rows, attention": (lambda c: attention(c, t=17), "attention", "1 to 16 rows", "17", "parents"),
    "17 rows, pool": (lambda c: c.pool(0, stream(17), zeros(8, 17, 16), packed()), "pool", ROW_LIMIT, "17", "stream"),
    "17 rows, head": (lambda c: head(c, t=17), "head", ROW_LIMIT, "17", "stream"),
    "17 rows, unpool": (lambda c: c.unpool(0, zeros(17, 128), packed()), "unpool", ROW_LIMIT, "17", "m"),
    "17 rows, attn_out": (lambda c: c.attn_out(0, zeros(16, 17, 64), packed()), "attn_out", ROW_LIMIT, "17", "o"),
    "17 rows, experts_up": (lambda c: experts_up(c, t=17), "experts_up", "1 to 16 rows", "17", "parents"),
    "17 rows, experts_down": (lambda c: experts_down(c, ids(17, 4)), "experts_down", ROW_LIMIT, "17", "ids"),
    "a parent after its child": (lambda c: attention(c, rows=row_state(parents=[-1, 2, 0, 1])),
                                 "attention", EARLIER, "2", "parents"),
    "a row that is its parent": (lambda c: layers(c, rows=row_state(parents=[0, 0, 1, 2])),
                                 "layers", EARLIER, "0", "parents"),
    "a parent of -2": (lambda c: attention(c, rows=row_state(parents=[-1, 0, -2, 1])),
                       "attention", EARLIER, "-2", "parents"),
    "more valid rows than rows": (lambda c: attention(c, rows=row_state(valid=5)),
                                  "attention", "at most the number of rows", "5", r"state\[1\]"),
    "valid rows below 0": (lambda c: attention(c, rows=row_state(valid=-1)), "attention", ".*", "-1", r"state\[1\]"),
    "length below 0": (lambda c: attention(c, rows=row_state(length=-3)),
                       "attention", "a length of at least 0", "-3", r"state\[0\]"),
    "length beyond the slots": (lambda c: attention(c, rows=row_state(length=33)),
                                "attention", "a slot for each of 33 positions.*", "32", "keys"),
    "length beyond the slots of a layer": (lambda c: layers(c, rows=row_state(length=41)),
                                           "layers", "a slot for each of 41 .*", "40", r"layers\[2\]\.keys"),
    "window longer than the slots": (lambda c: attention(c, layer=0, rows=row_state(length=33), stored=pair(20)),
                                     "attention", ".* or for a window of 24", "20", "keys"),
    "more accepted than stored": (lambda c: attention(c, rows=row_state(length=2, accepted=3)),
                                  "attention", "at most 16 accepted rows and the length", "3", r"state\[2\]"),
    "17 accepted": (lambda c: layers(c, rows=row_state(length=30, accepted=17)), "layers", ".*", "17", r"state\[2\]"),
    "accepted below 0": (lambda c: attention(c, rows=row_state(accepted=-1)), "attention", "at least 0 accepted rows",
                         "-1, the state of a pass that gave up: .*", r"state\[2\]"),
    "a path beyond the buffer": (lambda c: attention(c, rows=row_state(length=9, accepted=2, path=[3, 16, *[0] * 14])),
                                 "attention", "rows 0 to 15", "16", "path"),
}
VALUES = {
    "experts beyond the last": (lambda c: experts_up(c, begin=1),
                                "experts_up", "a block of the model's experts", "1", "begin"),
    "experts before the first": (lambda c: experts_up(c, begin=-1), "experts_up", ".*", "-1", "begin"),
    "top 0": (lambda c: head(c, top=0), "head", "1 to the vocabulary of a slice", "0", "top"),
    "groups that there are not": (lambda c: c.combine_partials(0, zeros(8, 16, 16), ids(4, 4), numbers(4, 4), packed(),
                                                               jnp.int32(0), 9),
                                  "combine_partials", r"owner groups of ep\(R\)", "9", "groups"),
    "hidden": (lambda c: layers(with_model(c, hidden=100)), "layers", "a multiple of 128 .*", "100", r"model\.hidden"),
    "moe_inner": (lambda c: experts_up(with_model(c, moe_inner=1152)),
                  "experts_up", "a multiple of 128 up to 1024, .*", "1152", r"model\.moe_inner"),
    "heads": (lambda c: attention(with_model(c, heads=12)),
              "attention", "multiples of 8 that divide heads", "8", r"model\.kv_heads"),
    "head_dim": (lambda c: attention(with_model(c, head_dim=256)),
                 "attention", "16, 32, 64 or 128", "256", r"model\.head_dim"),
    "kv_heads": (lambda c: attention(with_model(c, kv_heads=6)), "attention", ".*", "6", r"model\.kv_heads"),
    "experts": (lambda c: experts_up(with_model(c, experts=9)),
                "experts_up", "a multiple of 8", "9", r"model\.experts"),
    "top_k": (lambda c: experts_up(with_model(c, top_k=17)),
              "experts_up", "1 to the number of experts", "17", r"model\.top_k"),
    "combine_groups": (lambda c: experts_up(with_model(c, combine_groups=3)),
                       "experts_up", "0 or a divisor of the number of experts", "3", r"model\.combine_groups"),
    "activations": (lambda c: experts_up(with_model(c, activations=3)),
                    "experts_up", "0, 1 or 2", "3", r"model\.activations"),
    "vocab": (lambda c: with_model(c, vocab=12).softcap(numbers(4)),
              "softcap", "a multiple of 8", "12", r"model\.vocab"),
    "an operand too few": (lambda c: raw("softcap", F32_4, model=c.model), "softcap", "an operand", "none", "raw"),
    "an operand too many": (lambda c: raw("softcap", F32_4, numbers(4), numbers(4), model=c.model),
                            "softcap", "1", "2", "operands"),
    "a layer without operands": (layers_without_operands, "layers", "an operand", "none", "q"),
    "layers on two CPU devices": (layers_on_two_cpus, "layers", "one CPU device", "2", "devices"),
    "a result too few": (head_with_one_result, "head", "a result", "none", "values"),
}
MISMATCHES = SHAPES | DTYPES | ROW_STATES | VALUES


def assert_calls_work():
    out = jax.block_until_ready(attention(Call(SMALL, DecodeConfig())))
    assert out[0].shape == (16, 4, 64) and not np.asarray(out[0]).any()


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch(name, call):
    run, operation, expected, got, argument = MISMATCHES[name]
    with pytest.raises(ERRORS, match=rf"{operation}: expected {expected}, got {got} \(argument {argument}\)"):
        jax.block_until_ready(run(call))
    assert_calls_work()


@pytest.mark.parametrize("change, text", [({"rms_eps": 1}, "expected F32 but got S64"),
                                          ({"top_k": None}, "expected 20 attributes but got 19")])
def test_attributes_that_cannot_be_decoded(change, text, call):
    """XLA's own words: a member of another type, or none."""
    call.model = {k: v for k, v in {**call.model, **change}.items() if v is not None}
    with pytest.raises(ERRORS, match=text):
        jax.block_until_ready(attention(call))
    assert_calls_work()


@pytest.mark.parametrize("devices", [1, 2])
def test_error_in_a_pass(devices):
    """A cache that is full: the pass raises, and the same pass from a good cache has its bits."""
    model, mesh, tokens = model_of(SMALL), make_mesh(devices), np.arange(4)
    good = one_pass(model, random_cache(SMALL, 30, 40, mesh=mesh), tokens, mesh=mesh)
    full = accepted(accepted(good.cache, [0, 1, 2, 3]), [4, 5, 6, 7, 8, 9, 10])
    assert int(full.length) == 41
    with pytest.raises(ERRORS, match=r"expected a slot for each of 41 positions.*, got 40 \(argument .*keys\)"):
        one_pass(model, full, tokens, mesh=mesh)
    again = one_pass(model, random_cache(SMALL, 30, 40, mesh=mesh), tokens, mesh=mesh)
    assert_same_bits(again.stream, good.stream)
