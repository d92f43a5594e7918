"""The CUDA layer kernel on the emulator of tests/emulator: the same source, its threads as fibers on the CPU.

Sums inside an MMA are made in float64 here, so results stand beside the CPU twin within tolerances, and beside
themselves bit for bit.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from kernel_inputs import cxx

from musejax.config import NUM_SLICES, DecodeConfig
from musejax.kernels import forward as kf
from musejax.kernels.attributes import model_attribute, theta_index
from musejax.kernels.calls import Call
from musejax.kernels.schedule import Shape, dense_schedule, spans

INTEGERS = ("hidden", "heads", "kv_heads", "head_dim", "moe_hidden", "moe_inner", "experts", "top_k", "vocab",
            "combine_groups", "activations")
FLOATS = ("rms_eps", "post_eps", "route_eps", "attention_scale", "output_multiplier", "softcap", "gate_temperature",
          "gate_floor", "routed_scale")


class _Rank(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("stream", "q", "gate", "ids", "state", "pointers")]


class WaitError(RuntimeError):
    """A wait inside the kernel did not end, or the launch was refused.

    Attributes:
        accepted: of each rank's state afterwards.
        streams: float32 [t, d] of each rank afterwards.
    """

    def __init__(self, text, accepted=(), streams=()):
        super().__init__(text)
        self.accepted, self.streams = list(accepted), list(streams)


class Result(NamedTuple):
    """What a launch left.

    Attributes:
        stream: float32 [t, d], of rank 0.
        ids: int32 [L, t, k].
        taps: float32 [L, t, d], streams after every layer that ran whole.
        q, gate: uint16 [heads, t, c].
        kept: of each layer keys, values, flight keys, flight values: uint16 [heads, .., c].
    """

    stream: np.ndarray
    ids: np.ndarray
    taps: np.ndarray
    q: np.ndarray
    gate: np.ndarray
    kept: list


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles the kernel for the emulator, or skips the test."""
    return compile_sources("layers.cc", "fibers.cc")


def compile_sources(*sources) -> ctypes.CDLL:
    """Compiles files of tests/emulator, which may include headers of the kernel, or skips the test."""
    if "fibers.cc" in sources and os.uname().machine != "x86_64":
        pytest.skip(f"the emulator switches fibers on x86_64 only, this is {os.uname().machine}")
    compiler, here = cxx(), Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "library.so")
        subprocess.run([*compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-w",
                        f"-I{here / 'emulator'}", f"-I{here.parent / 'ffi'}",
                        *(str(here / "emulator" / source) for source in sources), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


@functools.cache
def _dense_units_library() -> ctypes.CDLL:
    return compile_sources("dense_units.cc")


def dense_units(config, slices) -> list[int]:
    """Units of the kernel's dense GEMMs for a rank of so many slices, in the order of `enum Dense`."""
    out = np.zeros(5, np.int32)
    function = _dense_units_library().DenseUnits
    function.restype = ctypes.c_bool
    if not function(config.hidden_size, config.num_experts_per_tok, slices, ctypes.c_void_p(out.ctypes.data)):
        raise ValueError(f"dense_units.cc has no instance for hidden {config.hidden_size}, {slices} slices")
    return out.tolist()


def _array(x, dtype):
    x = np.array(x)
    return np.ascontiguousarray(x.view(np.uint16) if dtype is np.uint16 else x.astype(dtype, copy=False))


def embed(model, tokens, length, parents):
    """-> (stream float32 [t, d], cosines and sines [bases, t, 2, c/2]), by the CPU twin."""
    call = Call(model.config, DecodeConfig())
    stream = np.array(kf.embed(call, model.packed, np.asarray(tokens, np.int32), False))
    positions = length + kf.depths(np.asarray(parents, np.int32))
    return stream, np.array(call.angles(positions))


def run(model, cache, tokens, parents=None, valid=None, *, decode=None, slices=8, ranks=1, blocks=4, seed=0,
        layers=None, first=True, last=True, start=None, max_units=8, budget_ms=None, change=None,
        schedule=None, rough=False, accepted=None) -> Result:
    """One launch.

    Args:
        slices: of a rank; with one rank of fewer than 8 slices the exchanges are looped back.
        ranks: 1, or 8 / slices ranks that run at once.
        blocks: SMs of each rank.
        seed: of the order in which warps take turns; 0 is in order.
        layers: range of layers; all by default.
        start: a `Result` to go on from, where `first` is false.
        change: called with the arrays of each layer before the launch, to break something.
        schedule: int32 [blocks, 5, 2] (`schedule.spans`), by default of `dense_schedule`.
        accepted: of each rank's state, by default the cache's.
        rough: warps of unequal speeds, blocks that stop, and words and copies that arrive late, out of order.
        budget_ms: of a wait, by the emulator's clock, which each reading advances; 2 s by default, more if rough.
    """
    config, t = model.config, len(tokens)
    decode = decode or DecodeConfig()
    parents = np.arange(t) - 1 if parents is None else parents
    parents, layers = _array(parents, np.int32), layers or range(config.num_hidden_layers)
    length = int(cache.length)
    states = [np.array([length, t if valid is None else valid, n], np.int32)
              for n in accepted or [int(cache.accepted)] * ranks]
    before = np.array(states)
    path = _array(cache.path, np.int32)
    stream, cos_sin = embed(model, tokens, length, parents)
    if start is not None:
        stream = start.stream.copy()
    attribute = model_attribute(config, decode)
    heads = config.num_attention_heads * slices // NUM_SLICES
    kept = [[_array(x, np.uint16) for x in (*cache.layers[i], *cache.flight[i])] for i in layers]
    if start is not None:
        kept = [[x.copy() for x in layer] for layer in start.kept]
    given, keep, numbers = (_Rank * ranks)(), [], []
    results = []
    for r in range(ranks):
        part = slice(r * slices, (r + 1) * slices)
        of_rank = {
            "stream": stream.copy(),
            "q": np.zeros((heads, t, config.head_dim), np.uint16) if start is None else
                 start.q[r * heads:(r + 1) * heads].copy(),
            "gate": np.zeros((heads, t, config.head_dim), np.uint16) if start is None else
                    start.gate[r * heads:(r + 1) * heads].copy(),
            "ids": np.full((len(layers), t, config.num_experts_per_tok), config.num_local_experts, np.int32),
        }
        pointers, arrays, taps = [], [], []
        for n, i in enumerate(layers):
            p = model.packed["layers"][i]
            kv = config.num_key_value_heads * slices // NUM_SLICES
            theta = theta_index(config, i)
            tap = np.zeros_like(stream) if last or n + 1 < len(layers) else None
            mine = {"dense": _array(np.asarray(p["dense"])[part], np.uint8),
                    "experts": _array(np.asarray(p["experts"])[part], np.uint8),
                    "small": _array(p["small"], np.float32),
                    "cos_sin": None if theta < 0 else np.ascontiguousarray(cos_sin[theta])}
            mine |= {name: np.ascontiguousarray(x[r * kv:(r + 1) * kv]).copy()
                     for name, x in zip(("keys", "values", "flight_keys", "flight_values"), kept[n], strict=True)}
            if change:
                change(n, mine)
            taps.append(tap)
            arrays.append(mine)
            pointers += [None if x is None else x.ctypes.data for x in (*mine.values(), tap)]
            if r == 0:
                numbers += [mine["keys"].shape[1], config.window(i) or 0, int(i in config.nvfp4_layers)]
        table = (ctypes.c_void_p * len(pointers))(*pointers)
        given[r] = _Rank(*(of_rank[name].ctypes.data for name in ("stream", "q", "gate", "ids")),
                         states[r].ctypes.data, ctypes.cast(table, ctypes.c_void_p))
        keep.append((table, arrays))
        results.append((of_rank, arrays, taps))
    integers = np.array([attribute[name] for name in INTEGERS], np.int64)
    floats = np.array([attribute[name] for name in FLOATS], np.float32)
    numbers, text = np.array(numbers, np.int64), ctypes.create_string_buffer(512)
    if schedule is None:
        schedule = spans(dense_schedule(Shape.of(config), slices, blocks))
    schedule = _array(schedule, np.int32)

    def at(x):
        return ctypes.c_void_p(x.ctypes.data)

    code = library().EmulateLayers(
        at(integers), at(floats), len(layers), int(first), int(last), t, at(parents), at(path), ranks,
        ctypes.byref(given), at(numbers), slices, blocks, at(schedule), ctypes.c_uint32(seed),
        ctypes.c_bool(rough), ctypes.c_int64(max_units), ctypes.c_double(budget_ms or (1e6 if rough else 2000.0)), text,
        len(text))
    if code == 2:
        raise ValueError(f"the emulator was not compiled for top_k {config.num_experts_per_tok}, {slices} slices")
    if code:
        raise WaitError(text.value.decode(), [x[2] for x in states], [x["stream"] for x, _, _ in results])
    assert (np.array(states) == before).all(), "a launch that did not give up leaves its state as it was"
    of_rank, _, taps = results[0]
    taps = [x for x in taps if x is not None]
    kept = [[np.concatenate([arrays[n][name] for _, arrays, _ in results])
             for name in ("keys", "values", "flight_keys", "flight_values")] for n in range(len(layers))]
    return Result(of_rank["stream"], of_rank["ids"], np.stack(taps) if taps else np.zeros((0, *stream.shape)),
                  np.concatenate([x["q"] for x, _, _ in results]), np.concatenate([x["gate"] for x, _, _ in results]),
                  kept)
