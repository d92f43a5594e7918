"""The layer kernel at the released sizes has the same bits whatever valid schedule of dense units it runs, every time.

With stages given back before their loads had returned, the even schedule failed this on an H200: 78 of 2,000 launches
had other bits (scripts/LOG.md). The other schedules here differ from the shipped one in one point each, so that the one
that fails says where to look.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from musejax import ffi
from musejax.bench.cases import Case
from musejax.bench.layer import LoopedLayers
from musejax.kernels import schedule as ks

LAUNCHES, STREAMS = 2000, 4


def even(shape, slices, sms, gemms=ks.GEMMS):
    """Some GEMMs in equal spans, whatever chunk a unit is of; the others as shipped."""
    counts, shipped = ks.unit_counts(shape, slices), ks.dense_schedule(shape, slices, sms)
    return ks.Schedule(tuple(
        tuple(unit for gemm in ks.TURN for unit in (
            (ks.Unit(gemm, n) for n in range(counts[gemm] * i // sms, counts[gemm] * (i + 1) // sms))
            if gemm in gemms else (unit for unit in shipped.sms[i] if unit.gemm == gemm)))
        for i in range(sms)))


def mirrored(shape, slices, sms):
    """The shipped parts in reverse order of SMs: chunks still have SMs of their own, and the SMs without work are the
    first, which own part of the residual stream."""
    counts, shipped = ks.unit_counts(shape, slices), ks.dense_schedule(shape, slices, sms)
    sizes = [[sum(unit.gemm == gemm for unit in units) for gemm in ks.TURN] for units in reversed(shipped.sms)]
    begins = np.cumsum([[0] * len(ks.TURN), *sizes], axis=0)
    assert list(begins[-1]) == [counts[gemm] for gemm in ks.TURN]
    return ks.Schedule(tuple(
        tuple(ks.Unit(gemm, int(n)) for j, gemm in enumerate(ks.TURN) for n in range(begins[i][j], begins[i + 1][j]))
        for i in range(sms)))


SCHEDULES = {"shipped": ks.dense_schedule, "mirrored": mirrored, "even": even} | {
    f"even {gemm}": partial(even, gemms=(gemm,)) for gemm in ("qkvg", "out", "router", "pooler")}


@jax.jit
def differing(a, b):
    return (a.view(jnp.uint32) != b.view(jnp.uint32)).sum()


def first_difference(layers, stream, want) -> str:
    """Where streams after layers begin to differ, of launches until one does."""
    for n in range(LAUNCHES):
        layers.launch(stream)
        wrong = np.asarray(layers.tapped).view(np.uint32) != want
        if wrong.any():
            layer = int(np.flatnonzero(wrong.any((1, 2)))[0])
            error = np.abs(np.asarray(layers.tapped)[layer] - want.view(np.float32)[layer])
            rows = np.flatnonzero(wrong[layer].any(1)).tolist()
            worst = np.argsort(-error.max(0))[:16].tolist()
            return (f"launch {n}, from layer {layer} on, rows {rows}, {wrong[layer].any(0).sum()} columns, the worst "
                    f"{worst}, row maxima {error.max(1).tolist()}")
    return f"no difference in {LAUNCHES} more launches with taps"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_launch_has_the_same_bits(gpu, schedule):
    library = ffi.library("cuda")
    sms = library.multiprocessors()[0]
    number, sizes = next((i, z) for i, z in enumerate(library.layer_instances()) if z[0] == 8192 and z[-1] == 1)
    shape, slices = ks.Shape(*sizes[:7]), sizes[-1]

    def use(make):
        library.set_schedule(number, sms, ks.spans(make(shape, slices, sms)).ravel().tolist())

    layers, tapped = (LoopedLayers(Case(layers=8), taps=taps) for taps in (False, True))
    streams = [layers.stream(i) for i in range(STREAMS)]
    use(ks.dense_schedule)
    want = jax.block_until_ready([layers.launch(stream)[0] for stream in streams])
    tapped.launch(streams[0])
    want_tapped = np.asarray(tapped.tapped).view(np.uint32)
    try:
        use(SCHEDULES[schedule])
        wrong = np.asarray(jnp.stack([differing(layers.launch(streams[i % STREAMS])[0], want[i % STREAMS])
                                      for i in range(LAUNCHES)]))
        ffi.raise_wait_error()
        launches = np.flatnonzero(wrong)
        where = first_difference(tapped, streams[0], want_tapped) if launches.size else ""
    finally:
        use(ks.dense_schedule)
    assert not launches.size, (f"{launches.size} of {LAUNCHES} launches have other bits, the first is {launches[0]}; "
                               f"{where}")
