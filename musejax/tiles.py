"""Tiles of the packed form: 16 rows of a weight in the order in which an MMA takes them, and back.

The layout is that of `ffi/common/layout.h`. Packing is NumPy and writes into views; unpacking takes NumPy or JAX
arrays. Comments on array shapes say: T row tiles of 16 rows, C chunks of columns, J tiles of 16 (NVFP4: 64) columns;
register/2 is the half of 16 columns, register%2 the half of 16 rows, lane/4 = row%8, lane%4 a pair of columns.
"""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from musejax.nvfp4 import BLOCK, E4M3
from musejax.params import BF16, F32, U8

U16, U32 = np.dtype(np.uint16), np.dtype(np.uint32)
MAX_LISTED = 5
"""Bad scales that an error writes out; the rest is counted."""

_MASK = 0x81C081C0  # sign and three code bits in both halves of a register


class PackingError(ValueError):
    """Values that the packed form cannot hold; the text names them."""


# ------------------------------------------------------------------ bits, in NumPy and JAX


def bits(x, dtype: np.dtype):
    """The same bits of contiguous rows as another dtype; the last axis shrinks or grows."""
    if not isinstance(x, jax.Array):
        return x.view(dtype)
    if x.dtype.itemsize < dtype.itemsize:
        x = x.reshape(*x.shape[:-1], -1, dtype.itemsize // x.dtype.itemsize)
    y = lax.bitcast_convert_type(x, dtype)
    return y.reshape(*x.shape[:-1], -1) if y.ndim > x.ndim else y


def _tiled(x, paired: bool):
    """Rows [..., N, K] -> [..., T, 2, 8, K]; `paired`, gate and up rows [..., 2, N, K] -> tiles of 8 + 8 rows."""
    if paired:
        return x.reshape(*x.shape[:-2], -1, 8, x.shape[-1]).swapaxes(-4, -3)
    return x.reshape(*x.shape[:-2], -1, 2, 8, x.shape[-1])


def _untiled(x, paired: bool):
    """The inverse of `_tiled`."""
    if paired:
        x = x.swapaxes(-4, -3)
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def _axes(x, *last: int) -> tuple[int, ...]:
    """A permutation of the last axes, those before them left alone."""
    lead = x.ndim - len(last)
    return (*range(lead), *(lead + a for a in last))


# ------------------------------------------------------------------ bf16 tiles


def pack_bf16(out: np.ndarray, x: np.ndarray, chunk: int, paired: bool = False) -> None:
    """Writes matrices [..., N, K] of bf16 into bytes [..., N * K * 2], a view."""
    k = x.shape[-1]
    src = _tiled(x.view(U32), paired)
    rows = 16 * src.shape[-4]
    # [..., T, register%2, lane/4, C, J, register/2, lane%4]
    src = src.reshape(*src.shape[:-1], k // chunk, chunk // 16, 2, 4)
    dst = out.view(U32).reshape(*src.shape[:-7], k // chunk, rows // 16, chunk // 16, 8, 4, 4)
    for register in range(4):  # one by one, since NumPy copies long axes fast
        part = src[..., register % 2, :, :, :, register // 2, :]
        dst[..., register] = part.transpose(_axes(part, 2, 0, 3, 1, 4))


def unpack_bf16(data, rows: int, k: int, chunk: int, paired: bool = False):
    """bytes [..., rows * k * 2] -> bf16 [..., rows, k], or [..., 2, rows / 2, k] if paired."""
    x = bits(data, U32)
    x = x.reshape(*x.shape[:-1], k // chunk, rows // 16, chunk // 16, 8, 4, 2, 2)
    x = x.transpose(_axes(x, 1, 6, 3, 0, 2, 5, 4))
    x = x.reshape(*x.shape[:-4], k // 2)
    return bits(_untiled(x, paired), BF16)


# ------------------------------------------------------------------ nvfp4 tiles


def _word(bytes_of: list[np.ndarray]) -> np.ndarray:
    """Code words from the published bytes (codes of an even column and the next) of registers 0 to 3, all uint32."""
    x0, x1, x2, x3 = ((c & 8) << 12 | (c & 7) << 6 | (c & 0x80) << 24 | (c & 0x70) << 18 for c in bytes_of)
    d = x0 ^ x2
    w = x0 | (x0 ^ x1) >> 6 | d << 4 | d >> 28  # all bits but 4, 5, 13, 14 of each half
    e = (x3 ^ w << 2 ^ w >> 6) & _MASK  # what those have to add to x3
    sign = e & 0x80808080  # bits 29, 21, 13, 5 of the word: each enters x3 here and 8 bits below
    sign ^= sign >> 8
    sign ^= sign >> 16
    return w | (e & 0x01000100) << 6 | (e & 0x00400040) >> 2 | sign >> 2


def nvfp4_tile_bytes(k: int) -> int:
    """Of a row tile: its codes, then its scales."""
    return k // 64 * (512 + 64)


@functools.lru_cache
def _fields(bias: int) -> np.ndarray:
    """uint32 [256]: E5M3 field of each legal E4M3 byte, subnormal numbers normalised; 0 for the others."""
    mantissa, exponent = np.frexp(np.arange(0x7F, dtype=U8).view(E4M3).astype(F32))
    out = np.zeros(256, U32)
    out[1:0x7F] = ((exponent - 1 + bias) * 8 + (2 * mantissa - 1) * 8)[1:]
    return out


def pack_nvfp4(out: np.ndarray, codes: np.ndarray, scale: np.ndarray, bias: int, paired: bool) -> None:
    """Writes matrices of codes [..., N, K/2] and scale bytes [..., N, K/16] into bytes [..., T, row tile], a view."""
    j = codes.shape[-1] // 32
    src = _tiled(codes.view(U32), paired)  # a byte a lane
    src = src.reshape(*src.shape[:-1], j, 4, 2)  # [..., T, register%2, lane/4, J, step, register/2]
    parts = [np.ascontiguousarray(src[..., r % 2, :, :, :, r // 2]) for r in range(4)]
    dst = out[..., :j * 512].view(U32).reshape(*out.shape[:-1], j, 8, 4, 4)
    for lane in range(4):
        word = _word([x >> 8 * lane for x in parts])
        dst[..., lane, :] = word.transpose(_axes(word, 0, 2, 1, 3))
    field = _fields(bias)[_tiled(scale, paired)]
    field = field.reshape(*field.shape[:-1], j, 4)  # [..., T, register%2, lane/4, J, step]
    low, high = (field & 15) << 4 | field >> 4 << 8, (field & 15) << 12 | field >> 4
    word = low[..., 0] | high[..., 2] | (low[..., 1] | high[..., 3]) << 16
    word = word.transpose(_axes(word, 0, 3, 2, 1))
    np.copyto(out[..., j * 512:].view(U32).reshape(word.shape), word)


def unpack_nvfp4(data, rows: int, k: int, bias: int, paired: bool):
    """bytes [..., rows / 16 row tiles] -> codes uint8 [..., rows, k/2] and scales E4M3 [..., rows, k/16]."""
    xp = jnp if isinstance(data, jax.Array) else np
    t, j = rows // 16, k // 64
    data = data.reshape(*data.shape[:-1], t, nvfp4_tile_bytes(k))
    w = bits(data[..., :j * 512], U32)
    values = (w, w ^ w << 6, w ^ (w >> 4 | w << 28), w << 2 ^ w >> 6)
    codes = xp.stack([(x >> 6 & 7 | x >> 12 & 8 | x >> 18 & 0x70 | x >> 24 & 0x80).astype(U8) for x in values], axis=-1)
    codes = codes.reshape(*w.shape[:-1], j, 8, 4, 4, 2, 2)  # [..., T, J, lane/4, lane%4, step, register/2, register%2]
    codes = codes.transpose(_axes(codes, 0, 6, 2, 1, 4, 5, 3))
    codes = _untiled(codes.reshape(*codes.shape[:-4], k // 2), paired)

    w = bits(data[..., j * 512:], U32)
    low, high = w >> 4 & 15 | w >> 4 & 0xF0, w >> 12 & 15 | w << 4 & 0xF0  # of the half at bit 0
    field = xp.stack([low, w >> 20 & 15 | w >> 20 & 0xF0, high, w >> 28 & 15 | w >> 12 & 0xF0], axis=-1)
    edge = bias - 6  # exponent field of the smallest normal number, 2^-6
    below = (8 | field & 7) >> (xp.maximum(edge, field >> 3) - (field >> 3))
    byte = xp.where(field >> 3 >= edge, field - (bias - 7) * 8, below).astype(U8)
    byte = byte.reshape(*w.shape[:-1], j, 8, 2, 4)  # [..., T, J, lane/4, register%2, step]
    byte = byte.transpose(_axes(byte, 0, 3, 2, 1, 4))
    return codes, bits(_untiled(byte.reshape(*byte.shape[:-2], k // 16), paired), E4M3)


class BadScales:
    """Scales that have no field: counts them, and remembers some. Threads may share it."""

    def __init__(self, layer: int):
        self.layer, self.total, self.texts, self._lock = layer, 0, [], threading.Lock()

    def look(self, name: str, expert: int, bits: np.ndarray, codes: np.ndarray) -> None:
        """Takes one expert's scale bytes [s, (2,) N, K/16] and codes [s, (2,) N, K/2]."""
        nonzero = bits != 0
        if nonzero.all() and bits.max() < 0x7F:
            return
        lost = ~nonzero & ((codes.reshape(*bits.shape, BLOCK // 2) & 0x77) != 0).any(axis=-1)
        bad = lost | (bits >= 0x7F)
        s, n = bits.shape[0], bits.shape[-2]
        texts = []
        for index in np.argwhere(bad)[:MAX_LISTED]:
            part = index[1] if bits.ndim == 4 else 0
            byte = bits[tuple(index)]
            what = "0 over codes that are not 0" if not byte else "NaN" if byte & 0x7F == 0x7F else f"byte {byte:#04x}"
            texts.append((name != "gate_up", expert, f"{name}_scale of layer {self.layer}, expert {expert}, row "
                          f"{(part * s + index[0]) * n + index[-2]}, block {index[-1]}: {what}"))
        with self._lock:
            self.total += int(bad.sum())
            self.texts = sorted(self.texts + texts, key=lambda text: text[:2])[:MAX_LISTED]

    def raise_if_any(self) -> None:
        if self.total:
            more = f"\n  and {self.total - len(self.texts)} more" if self.total > len(self.texts) else ""
            raise PackingError(f"expected NVFP4 block scales that are positive, or 0 over codes of 0, got {self.total} "
                               "others:\n  " + "\n  ".join(text for *_, text in self.texts) + more
                               + "\nFetch or quantise the checkpoint again.")
