"""The list of expert visits and its partition among SMs (`ffi/layer/partition.h`), compiled for the host."""

import ctypes
import itertools
import pathlib
import random
import shutil
import subprocess

import pytest

FFI = pathlib.Path(__file__).parents[1] / "ffi"
VISIT_PAIRS = 8
ROWS = 16

SOURCE = """
#include "layer/partition.h"
using namespace musejax::layer;
static_assert(kVisitPairs == 8, "");

extern "C" void unit_range(int visits, int units, int block, int blocks, int* out) {
  const UnitSpan span = UnitRange(visits, units, block, blocks);
  out[0] = span.begin, out[1] = span.end;
}

// The kernel's steps, pair by pair: rows that chose an expert, masks of visits, places. -> visits; -1: out of bounds.
extern "C" int list_visits(const int* ids, int top_k, int experts, int* out) {
  uint32_t hits[256] = {};
  for (int pair = 0; pair < 16 * top_k; ++pair)
    if (ids[pair] < experts) hits[ids[pair]] |= 1u << pair / top_k;
  VisitMasks<8> masks = {};
  for (int e = 0; e < 256; ++e) {
    masks.one[e / 32] |= uint32_t(VisitsOf(hits[e]) >= 1) << e % 32;
    masks.two[e / 32] |= uint32_t(VisitsOf(hits[e]) >= 2) << e % 32;
  }
  const int visits = VisitsBelow(masks, 256);
  for (int pair = 0; pair < 16 * top_k; ++pair) {
    if (ids[pair] >= experts) continue;
    const PairPlace place = PlaceOf(hits[ids[pair]], pair / top_k);
    const int visit = VisitsBelow(masks, ids[pair]) + place.visit;
    if (visit >= visits || place.column >= place.count) return -1;
    int* entry = out + 10 * visit;
    entry[2 + place.column] = pair;
    if (place.column == 0) entry[0] = ids[pair], entry[1] = place.count;
  }
  return visits;
}
"""


def build(folder, source=SOURCE, ffi=FFI):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (c++)")
    (folder / "partition.cc").write_text(source)
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{ffi}", str(folder / "partition.cc"), "-o",
                    str(folder / "partition.so")], check=True)
    return ctypes.CDLL(str(folder / "partition.so"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("partition"))


def spans_of(library, visits, units, blocks):
    out = (ctypes.c_int * 2)()
    spans = []
    for block in range(blocks):
        library.unit_range(visits, units, block, blocks, out)
        spans.append(tuple(out))
    return spans


def check_spans(spans, total):
    """Every unit once, in order, balanced to one unit."""
    assert spans[0][0] == 0 and spans[-1][1] == total
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    sizes = [end - begin for begin, end in spans]
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("units", [1, 2, 4, 16, 32, 128, 256])
def test_spans_cover_every_unit_once(library, units):
    for blocks in (1, 2, 3, 7, 8, 78, 131, 132, 148, 1024):
        for visits in range(129) if blocks in (1, 132) else (0, 1, 2, 48, 49, 127, 128):
            check_spans(spans_of(library, visits, units, blocks), visits * units)


def visits_of(ids, experts):
    """The list by definition: experts ascending, up to 8 of an expert's pairs a visit, ascending."""
    visits = []
    for expert in range(experts):
        pairs = [pair for pair, e in enumerate(ids) if e == expert]
        visits += [(expert, pairs[i:i + VISIT_PAIRS]) for i in range(0, len(pairs), VISIT_PAIRS)]
    return visits


def listed(library, ids, top_k, experts):
    out = (ctypes.c_int * (10 * ROWS * top_k))()
    count = library.list_visits((ctypes.c_int * len(ids))(*ids), top_k, experts, out)
    assert count >= 0, "a place out of bounds"
    return [(out[10 * i], list(out[10 * i + 2:10 * i + 2 + out[10 * i + 1]])) for i in range(count)]


def choices(valid, top_k, experts, crowd, seed):
    """ids of 16 rows: distinct in a row, `crowd` experts that every row chooses, `experts` in padding rows."""
    rng = random.Random(seed)
    ids = []
    for row in range(ROWS):
        chosen = list(range(experts - crowd, experts))
        chosen += rng.sample(range(experts - crowd), top_k - crowd)
        rng.shuffle(chosen)
        ids += chosen if row < valid else [experts] * top_k
    return ids


@pytest.mark.parametrize("valid", [0, 1, 2, 7, 8, 9, 15, 16])
@pytest.mark.parametrize(("top_k", "experts"), [(8, 256), (4, 16), (1, 8)])
def test_list_of_visits(library, valid, top_k, experts):
    for crowd in {0, 1, top_k}:
        ids = choices(valid, top_k, experts, crowd, seed=valid)
        assert listed(library, ids, top_k, experts) == visits_of(ids, experts)


def test_checks_see_a_broken_partition(tmp_path):
    text = (FFI / "layer/partition.h").read_text()
    wrong = [("units * (block + 1) / blocks", "(units * block + units - 1) / blocks"),
             (" + Popcount(masks.two[i] & below)", ""), ("(1u << row) - 1", "(2u << row) - 1")]
    failures = 0
    for i, (old, new) in enumerate(wrong):
        ffi = tmp_path / str(i)
        (ffi / "layer").mkdir(parents=True)
        shutil.copytree(FFI / "common", ffi / "common")
        assert text.count(old) == 1
        (ffi / "layer/partition.h").write_text(text.replace(old, new))
        library = build(ffi, ffi=ffi)
        ids = choices(16, 8, 256, 2, seed=1)
        try:
            check_spans(spans_of(library, 49, 32, 132), 49 * 32)
            assert listed(library, ids, 8, 256) == visits_of(ids, 256)
        except AssertionError:
            failures += 1
    assert failures == len(wrong)
