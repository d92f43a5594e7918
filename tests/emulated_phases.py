"""The phase targets of the CUDA library on the emulator (emulated.py), with the face of `Call`."""

import ctypes
import functools

import emulated
import jax
import ml_dtypes
import numpy as np

from musejax.config import NUM_SLICES
from musejax.kernels.calls import Call
from musejax.kernels.schedule import Shape, dense_schedule, spans

_ROWS = ("parents", "state", "path")
_KEYS = ("keys", "values", "flight_keys", "flight_values")
PHASES = {
    "attn_in": (("stream", "cos_sin", *_ROWS, "dense", "small", *_KEYS), ("q", "gate", *_KEYS)),
    "attention": (("q", "gate", *_ROWS, *_KEYS), ("out", *_KEYS)),
    "attn_out": (("in", "dense", "small"), ("out",)),
    "pool": (("stream", "in", "dense", "small"), ("stream", "out", "scores_out")),
    "experts_up": (("in", "scores", *_ROWS, "experts", "small", "begin"), ("out", "ids", "weights_out")),
    "experts_down": (("in", "chosen", "experts", "small", "begin"), ("out",)),
    "combine": (("in", "chosen", "weights", "small"), ("out",)),
    "combine_partials": (("in", "chosen", "weights", "small", "begin"), ("out",)),
    "combine_gathered": (("in",), ("out",)),
    "unpool": (("in", "dense", "small"), ("out",)),
    "add_ffn": (("stream", "in", "small"), ("stream",)),
}
"""Of each target, in the order of `enum PhaseLaunch`: operands and results, as fields of EmulatedPhase."""

POINTERS = (*_ROWS, "dense", "experts", "small", "cos_sin", *_KEYS, "stream", "q", "gate", "ids", "in", "out",
            "scores", "weights", "scores_out", "weights_out", "chosen", "begin")
NUMBERS = ("phase", "rows", "slots", "window", "nvfp4", "experts_here", "groups", "max_units")
SMALLEST_FIRST = {"attn_out": 1, "combine_gathered": 1}  # axis of `in` that counts rows, 0 in the others


class _Phase(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in POINTERS), *((name, ctypes.c_int64) for name in NUMBERS)]


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles the phases for the emulator, or skips the test."""
    return emulated.compile_sources("phases.cc", "fibers.cc")


class EmulatedCall(Call):
    """`Call` whose phases of a layer run on the emulator; they give NumPy arrays.

    Args:
        blocks: SMs.
        seed: of the order in which warps take turns; 0 is in order.
        lost: units of each dense GEMM on the last SM that it does not run.
    """

    def __init__(self, config, decode, *, blocks=4, seed=0, lost=0, budget_ms=2000.0):
        super().__init__(config, decode)
        self.blocks, self.seed, self.lost, self.budget_ms = blocks, seed, lost, budget_ms

    def _run(self, target, results, *operands, alias=None, **attributes):
        if target not in PHASES:
            return super()._run(target, results, *operands, alias=alias, **attributes)
        names, result_names = PHASES[target]
        arrays = {name: np.ascontiguousarray(x) for name, x in zip(names, operands, strict=True)}
        rows = next((arrays[name].shape[0] for name in ("stream", "parents", "chosen") if name in arrays),
                    arrays["in"].shape[SMALLEST_FIRST.get(target, 0)] if "in" in arrays else 0)
        source = {result: operand for operand, result in (alias or {}).items()}
        out = [_result(x, None if i not in source else operands[source[i]])
               for i, x in enumerate(jax.tree.leaves(results))]
        arrays |= dict(zip(result_names, out, strict=True))
        phase = _Phase(phase=list(PHASES).index(target), rows=rows, window=attributes.get("window", 0),
                       nvfp4=attributes.get("nvfp4", False), groups=attributes.get("groups", 0), max_units=8)
        for name, x in arrays.items():
            setattr(phase, name, x.ctypes.data if x.size else None)
        slices = NUM_SLICES
        if "keys" in arrays:
            phase.slots = arrays["keys"].shape[1]
            slices = arrays["keys"].shape[0] * NUM_SLICES // self.config.num_key_value_heads
        for name in ("dense", "experts"):
            slices = arrays[name].shape[0] if name in arrays else slices
        if "experts" in arrays:
            phase.experts_here = arrays["experts"].shape[1]
        self._launch(phase, slices)
        return tuple(out) if isinstance(results, tuple) else out[0]

    def _launch(self, phase, slices):
        integers = np.array([self.model[name] for name in emulated.INTEGERS], np.int64)
        floats = np.array([self.model[name] for name in emulated.FLOATS], np.float32)
        schedule = np.array(spans(dense_schedule(Shape.of(self.config), slices, self.blocks)), np.int32)
        schedule[-1, :, 1] -= self.lost
        text = ctypes.create_string_buffer(512)
        code = library().EmulatePhase(
            ctypes.c_void_p(integers.ctypes.data), ctypes.c_void_p(floats.ctypes.data), ctypes.byref(phase), slices,
            self.blocks, ctypes.c_void_p(schedule.ctypes.data), ctypes.c_uint32(self.seed),
            ctypes.c_double(self.budget_ms), text, len(text))
        if code == 2:
            raise ValueError(f"the emulator was not compiled for top_k {self.config.num_experts_per_tok}, {slices} "
                             "slices")
        if code:
            raise emulated.WaitError(text.value.decode())


def _result(like, operand) -> np.ndarray:
    """Room for a result: a copy of the operand that it is made from, or what no phase writes."""
    dtype = ml_dtypes.bfloat16 if like.dtype == ml_dtypes.bfloat16 else like.dtype
    if operand is not None:
        return np.array(operand, dtype)
    return np.full(np.prod(like.shape) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(like.shape)


class EmulatedTwins:
    """As `Twins` of the GPU tests: the CPU library beside the emulator."""

    def __init__(self, config, decode, **how):
        self.cpu, self.emulator = Call(config, decode), EmulatedCall(config, decode, **how)

    def both(self, name: str, *operands, **attributes):
        """-> (results on the CPU, results of the emulator), as NumPy arrays."""
        return tuple(jax.tree.map(np.asarray, getattr(call, name)(*operands, **attributes))
                     for call in (self.cpu, self.emulator))
