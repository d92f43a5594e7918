"""How the layer kernel shares out its work, compiled for the host: expert visits and their partition among SMs
(`ffi/layer/partition.h`), attention units and the order of their sums (`ffi/layer/attention_units.h`)."""

import ctypes
import itertools
import random
import shutil
from typing import NamedTuple

import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import F32, FFI, compile_library, in_order

VISIT_PAIRS = 8
ROWS = 16
EXPERTS = 256
SMS = (1, 7, 16, 66, 132, 148)
UNITS = (1, 2, 4, 16, 32, 128, 256)

SOURCE = """
#include "layer/attention_units.h"
#include "layer/partition.h"
using namespace musejax::layer;
static_assert(kVisitPairs == 8, "as the entries of list_visits");

extern "C" int visit_cost() { return kVisitCost; }

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

extern "C" int first_seen(int position, int window) { return FirstSeen(position, window); }
extern "C" int max_units(int slots) { return MaxUnits(slots); }
extern "C" int tail_blocks() { return kTailBlocks; }

// out: begin and end of the history, then of every unit, in blocks. -> units of whole groups, all units
extern "C" void history_of(int length, int stored, int window, int most, int* counts, int* out) {
  const History h = HistoryOf(length, stored, window, most);
  counts[0] = h.group_units, counts[1] = h.units;
  out[0] = h.blocks.begin, out[1] = h.blocks.end;
  for (int u = 0; u < h.units; ++u) out[2 * u + 2] = h.BlocksOf(u).begin, out[2 * u + 3] = h.BlocksOf(u).end;
}

extern "C" int tails_to(int length, int stored, int window, int position) {
  return HistoryOf(length, stored, window, 1 << 30).TailsTo(position);
}

// -> stages; out: begin and end of each.
extern "C" int stages_of(int begin, int end, int* out) {
  int stages = 0;
  ForStages(Blocks{begin, end}, [&](Blocks part) {
    out[2 * stages] = part.begin, out[2 * stages + 1] = part.end;
    ++stages;
  });
  return stages;
}

// Sums of values [blocks][3] as the kernel makes them: a unit's stage by stage, then units and tail blocks by level.
extern "C" void row_sums(int length, int stored, int window, int position, const float* values, float* out) {
  const History h = HistoryOf(length, stored, window, 1 << 30);
  LevelSums<3> sums;
  for (int i = 0; i < h.units + h.TailsTo(position); ++i) {
    float item[3] = {}, chunk[3] = {};
    const auto add = [&](int block) {
      for (int j = 0; j < 3; ++j) chunk[j] += values[3 * block + j];
    };
    const auto end_chunk = [&] {
      for (int j = 0; j < 3; ++j) item[j] += chunk[j], chunk[j] = 0.0f;
    };
    if (i < h.units) {
      const Blocks blocks = h.BlocksOf(i);
      ForStages(blocks, [&](Blocks part) {
        for (int b = part.begin; b < part.end; ++b) add(b);
        if (EndsChunk(part.end) || part.end == blocks.end) end_chunk();
      });
    } else {
      add(h.blocks.end + i - h.units);
      end_chunk();
    }
    sums.Add(item, EndsChunk(h.EndOf(i)), EndsGroup(h.EndOf(i)));
  }
  sums.End();
  for (int j = 0; j < 3; ++j) out[j] = sums.total[j];
}
"""


@pytest.fixture(scope="module")
def library():
    return compile_library(SOURCE)


def broken(folder, header, old, new):
    """The library with a part of one header replaced."""
    shutil.copytree(FFI / "common", folder / "common")
    shutil.copytree(FFI / "layer", folder / "layer")
    text = (FFI / "layer" / header).read_text()
    assert text.count(old) == 1, f"expected {old!r} once in {header}, found it {text.count(old)} times"
    (folder / "layer" / header).write_text(text.replace(old, new))
    return compile_library(SOURCE, folder)


# ------------------------------------------------------------------ expert units


def spans_of(library, visits, units, blocks):
    out = (ctypes.c_int * 2)()
    spans = []
    for block in range(blocks):
        library.unit_range(visits, units, block, blocks, out)
        spans.append(tuple(out))
    return spans


def check_spans(library, visits, units, blocks):
    """Every unit once, in order; and what an SM pays, for its units and for the visits that begin in its part, differs
    from the even share by at most the cost of a visit and one unit."""
    spans, cost = spans_of(library, visits, units, blocks), library.visit_cost()
    assert spans[0][0] == 0 and spans[-1][1] == visits * units, "units at an end are left out"
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans)), "units between parts"
    assert all(begin <= end for begin, end in spans), "a part ends before it begins"
    for begin, end in spans:
        paid = end - begin + cost * (-(-end // units) - -(-begin // units))
        assert abs(paid * blocks - visits * (units + cost)) <= (cost + 1) * blocks, "a part that is not even"


@pytest.mark.parametrize("units", UNITS)
def test_spans_cover_every_unit_once(library, units):
    for blocks in (*SMS, 2, 3, 8, 78, 131, 1024):
        for visits in range(129) if blocks in SMS else (0, 1, 2, 48, 49, 127, 128):
            check_spans(library, visits, units, blocks)


def check_some_spans(library):
    for visits in (1, 49, 128):
        for blocks in SMS:
            check_spans(library, visits, 32, blocks)


AT = "int(uint32_t(visits * each * block) / uint32_t(blocks))"
BROKEN_SPANS = {
    "units of two SMs": ("block + 1, blocks)}", "block + 1, blocks) + (block + 1 < blocks)}", "units between parts"),
    "units of no SM": (AT, "int(uint32_t(visits * each) / uint32_t(blocks) * block)", "units at an end are left out"),
    "the share grows": (AT, "visits * each * block / blocks * block / blocks", "a part that is not even"),
}


@pytest.mark.parametrize("change", BROKEN_SPANS)
def test_checks_see_broken_spans(change, library, tmp_path):
    check_some_spans(library)
    old, new, message = BROKEN_SPANS[change]
    with pytest.raises(AssertionError, match=message):
        check_some_spans(broken(tmp_path, "partition.h", old, new))


# ------------------------------------------------------------------ expert visits


def visits_of(ids, experts):
    """The list by definition: experts ascending, up to 8 of an expert's pairs a visit, ascending."""
    visits = []
    for expert in range(experts):
        pairs = [pair for pair, e in enumerate(ids) if e == expert]
        visits += [(expert, pairs[i:i + VISIT_PAIRS]) for i in range(0, len(pairs), VISIT_PAIRS)]
    return visits


def listed(library, ids, top_k, experts):
    out = (ctypes.c_int * (10 * 2 * EXPERTS))()
    count = library.list_visits((ctypes.c_int * len(ids))(*ids), top_k, experts, out)
    assert count >= 0, "a place out of bounds"
    return [(out[10 * i], list(out[10 * i + 2:10 * i + 2 + out[10 * i + 1]])) for i in range(count)]


def check_visits(library, ids, top_k, experts):
    """Each pair of a valid row is in one visit of 1 to 8 pairs, ascending by (expert, pair); and the list is the one
    by definition."""
    visits = listed(library, ids, top_k, experts)
    assert all(1 <= len(pairs) <= VISIT_PAIRS for _, pairs in visits)
    places = [(expert, pair) for expert, pairs in visits for pair in pairs]
    assert all(a < b for a, b in itertools.pairwise(places))
    assert sorted(pair for _, pair in places) == [pair for pair, e in enumerate(ids) if e < experts]
    assert visits == visits_of(ids, experts)
    return visits


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


def choices_of(distinct, seed):
    """(ids, top_k): 1 to 16 rows of 1 to 8 choices that hit exactly so many experts, at least once each."""
    rng = random.Random(seed)
    top_k = rng.randint(-(-distinct // ROWS), min(8, distinct))
    valid = rng.randint(-(-distinct // top_k), ROWS)
    pool = rng.sample(range(EXPERTS), distinct)
    ids = []
    for row in range(valid):
        chosen = pool[row::valid]  # at most top_k
        chosen += rng.sample([e for e in pool if e not in chosen], top_k - len(chosen))
        rng.shuffle(chosen)
        ids += chosen
    return ids + [EXPERTS] * (top_k * (ROWS - valid)), top_k


@pytest.mark.parametrize("valid", [0, 1, 2, 7, 8, 9, 15, 16])
@pytest.mark.parametrize(("top_k", "experts"), [(8, 256), (4, 16), (1, 8)])
def test_list_of_visits(library, valid, top_k, experts):
    for crowd in {0, 1, top_k}:
        check_visits(library, choices(valid, top_k, experts, crowd, seed=valid), top_k, experts)


def test_visits_and_units_of_every_number_of_experts(library):
    """D = 1 to 128 hit experts, several row counts each: the list, and its units on any number of SMs."""
    for distinct in range(1, 129):
        for seed in range(4):
            ids, top_k = choices_of(distinct, seed)
            assert len(set(ids) - {EXPERTS}) == distinct
            visits = len(check_visits(library, ids, top_k, EXPERTS))
            for blocks in SMS:
                check_spans(library, visits, 32, blocks)


def test_visits_of_crowded_and_of_idle_experts(library):
    ids = choices(16, 8, 256, crowd=1, seed=3)
    ids = [7 if e == 255 else 255 if e == 7 else e for e in ids]  # an expert in the middle of the list
    visits = check_visits(library, ids, 8, 256)
    assert [len(pairs) for expert, pairs in visits if expert == 7] == [8, 8]
    assert {expert for expert, _ in visits} == set(ids) and len(set(ids)) < 256


def check_experts(library):
    for seed in range(16):
        check_visits(library, choices(16, 8, 256, 2, seed), 8, 256)
        check_visits(library, *choices_of(8 * seed + 1, seed), EXPERTS)


BROKEN_PARTITIONS = {
    "one visit an expert": (" + Popcount(masks.two[i] & below)", ""),
    "a row counts itself": ("(1u << row) - 1", "(2u << row) - 1"),
    "visits of idle experts": ("(Popcount(rows) + kVisitPairs - 1)", "(Popcount(rows) + kVisitPairs)"),
    "full counts": ("left < kVisitPairs ? left : kVisitPairs}", "kVisitPairs}"),
    "an expert counts itself": ("(1u << bits) - 1", "(2u << bits) - 1"),
}


@pytest.mark.parametrize("change", BROKEN_PARTITIONS)
def test_checks_see_a_broken_partition(change, library, tmp_path):
    check_experts(library)
    with pytest.raises(AssertionError):
        check_experts(broken(tmp_path, "partition.h", *BROKEN_PARTITIONS[change]))


# ------------------------------------------------------------------ attention units

BLOCK, CHUNK, GROUP = 16, 256, 1024  # positions
CHUNK_BLOCKS, GROUP_BLOCKS, STAGE_BLOCKS = CHUNK // BLOCK, GROUP // BLOCK, 8
MOST_CHUNKS = 128  # of a history that is not given out in groups
NO_LIMIT = 2**30

DEPTHS = {
    "alone": (0,),
    "chain": tuple(range(16)),
    "star": (0, *(1,) * 15),
    "roots": (0,) * 16,
    "mixed": (0, 1, 1, 0, 2, 2, 3, 2, 3, 1, 4, 5, 6, 3, 7, 7),
}


class Pass(NamedTuple):
    """Rows at `length` and beyond; the cache holds the positions below `stored`; window 0: none."""

    length: int
    stored: int
    window: int
    tree: str


class History(NamedTuple):
    """Half-open ranges of blocks: all of the history, and its units [units, 2]."""

    begin: int
    end: int
    units: np.ndarray
    group_units: int


def history_of(library, p: Pass, most=NO_LIMIT) -> History:
    counts, out = (ctypes.c_int * 2)(), (ctypes.c_int * (2 * (p.length // BLOCK + 2)))()
    library.history_of(p.length, p.stored, p.window, most, counts, out)
    ranges = np.array(out).reshape(-1, 2)
    return History(*map(int, ranges[0]), ranges[1:1 + counts[1]], counts[0])


def blocks_of(ranges) -> np.ndarray:
    return np.concatenate([np.arange(begin, end) for begin, end in ranges] or [np.zeros(0, int)])


def first_seen(p: Pass, position):
    return max(0, position - p.window + 1) if p.window else 0


def check_units(library, p: Pass, h: History):
    """Units follow each other and keep to a chunk or, in a long history, a group; stages keep to 8 blocks."""
    seen = first_seen(p, p.length) // BLOCK
    assert (h.begin, h.end) == (min(seen, p.stored // BLOCK), p.stored // BLOCK)
    np.testing.assert_array_equal(blocks_of(h.units), np.arange(h.begin, h.end))
    sizes = h.units[:, 1] - h.units[:, 0]
    assert (sizes > 0).all()
    first, last = h.units[:, 0], h.units[:, 1] - 1
    chunks = len(np.unique(np.arange(h.begin, h.end) // CHUNK_BLOCKS))
    assert (h.group_units > 0) == (chunks > MOST_CHUNKS)
    groups = slice(h.group_units)
    assert (first[groups] // GROUP_BLOCKS == last[groups] // GROUP_BLOCKS).all()
    assert ((last[groups] + 1) % GROUP_BLOCKS == 0).all()
    assert (first[h.group_units:] // CHUNK_BLOCKS == last[h.group_units:] // CHUNK_BLOCKS).all()
    # A ring of `window` slots, or a cache that ends with this pass.
    assert len(h.units) <= library.max_units(p.window or p.length + ROWS)

    out = (ctypes.c_int * (2 * GROUP_BLOCKS))()
    for begin, end in h.units.tolist():
        stages = [tuple(out[2 * i:2 * i + 2]) for i in range(library.stages_of(begin, end, out))]
        np.testing.assert_array_equal(blocks_of(stages), np.arange(begin, end))
        assert all(a // STAGE_BLOCKS == (b - 1) // STAGE_BLOCKS for a, b in stages)


def check_row(library, p: Pass, h: History, position, rng):
    """Visible positions are there once, ascending; their sums come by blocks, chunks, groups, total."""
    first = first_seen(p, position)
    assert library.first_seen(position, p.window) == first
    tails = library.tails_to(p.length, p.stored, p.window, position)
    assert 1 <= tails <= library.tail_blocks()
    blocks = np.concatenate([blocks_of(h.units), np.arange(h.end, h.end + tails)])
    held = (BLOCK * blocks[:, None] + np.arange(BLOCK)).ravel()
    np.testing.assert_array_equal(held[(held >= first) & (held <= position)], np.arange(first, position + 1))
    assert blocks[-1] == position // BLOCK, "no block beyond the row's own"

    # Whole groups from position 0, so that levels are axes; a block that the row does not see adds +0.
    values = np.zeros((-(-(position + 1) // GROUP) * GROUP_BLOCKS, 3), F32)
    seen = np.arange(first // BLOCK, position // BLOCK + 1)
    values[seen] = rng.standard_normal((len(seen), 3)) * np.exp2(rng.integers(-12, 12, (len(seen), 3)))
    got, pointer = np.zeros(3, F32), ctypes.POINTER(ctypes.c_float)
    library.row_sums(p.length, p.stored, p.window, position, values.ctypes.data_as(pointer),
                     got.ctypes.data_as(pointer))
    levels = values.reshape(-1, GROUP // CHUNK, CHUNK_BLOCKS, 3)
    assert_same_bits(got, in_order(in_order(in_order(levels, 2), 1), 0))


def check_pass(library, p: Pass, seed=0):
    rng, h = np.random.default_rng(seed), history_of(library, p)
    check_units(library, p, h)
    for depth in sorted(set(DEPTHS[p.tree])):
        check_row(library, p, h, p.length + depth, rng)
    return h


BORDERS = (0, BLOCK, CHUNK, GROUP, 2 * GROUP, 8 * GROUP)
WINDOWS = (0, 1, 8, 15, 16, 17, 100, 256, 300, 1000, 1024, 8192)
LONG = (MOST_CHUNKS * CHUNK, (MOST_CHUNKS + 1) * CHUNK, MOST_CHUNKS * CHUNK + GROUP, 65536, 131072)


def passes_at(border, windows, rng):
    """Lengths around a border, with none, some or 16 accepted rows that the cache lacks yet."""
    for offset in (-17, -16, -15, -1, 0, 1, 2, 15, 16, 17, int(rng.integers(18, 240))):
        length = border + offset
        for window in windows if length >= 0 else ():
            for accepted in {0, min(16, length), min(int(rng.integers(1, 16)), length)}:
                yield Pass(length, length - accepted, window, str(rng.choice([*DEPTHS])))


@pytest.mark.parametrize("border", BORDERS)
def test_attention_units_at_borders(library, border):
    rng = np.random.default_rng(border)
    for p in passes_at(border, WINDOWS, rng):
        check_pass(library, p, seed=p.length)


@pytest.mark.parametrize("border", LONG)
def test_attention_units_of_a_long_history(library, border):
    rng, kinds = np.random.default_rng(border), set()
    for p in passes_at(border, (0, MOST_CHUNKS * CHUNK + 40), rng):
        kinds.add(check_pass(library, p, seed=p.length).group_units > 0)
    assert True in kinds, "some of these histories are given out in groups"


def test_attention_units_of_random_passes(library):
    rng = np.random.default_rng(7)
    for seed in range(300):
        length = int(rng.integers(0, 2**int(rng.integers(1, 17))))
        window = int(rng.choice([0, rng.integers(1, 2 * length + 2)]))
        check_pass(library, Pass(length, length - int(rng.integers(0, min(16, length) + 1)), window,
                                 str(rng.choice([*DEPTHS]))), seed)


def test_tail_blocks_are_needed(library):
    """16 accepted rows that begin at the end of a block, and a chain of 16 behind them."""
    assert library.tails_to(31 + 16, 31, 0, 31 + 31) == library.tail_blocks() == 3


def test_units_stay_inside_the_frames(library):
    p = Pass(40000, 40000, 0, "alone")
    every = history_of(library, p).units
    np.testing.assert_array_equal(history_of(library, p, most=20).units, every[:20])


def check_attention(library):
    rng = np.random.default_rng(1)
    for border in (BLOCK, GROUP, LONG[1]):
        for p in passes_at(border, (0, 16, 300), rng):
            check_pass(library, p)
    for tree in DEPTHS:
        check_pass(library, Pass(47, 31, 0, tree))


BROKEN_UNITS = {
    "the window lets one more in": ("position - window + 1 : 0", "position - window : 0"),
    "a full window counts as open": ("position >= window ?", "position > window ?"),
    "units run over the end": ("end < blocks.end ? end : blocks.end", "end"),
    "units start at their border": ("begin < blocks.begin ? blocks.begin : begin", "begin"),
    "no block for the row itself": ("position / kBlockKeys - blocks.end + 1;", "position / kBlockKeys - blocks.end;"),
    "a tail too short": ("- 2) / kBlockKeys + 1;", "- 2) / kBlockKeys;"),
    "borders of tail blocks": ("blocks.end + item - units + 1", "blocks.end + item - units"),
    "groups too late": ("last_chunk - h.first_chunk >= kMostChunks", "last_chunk - h.first_chunk > kMostChunks"),
    "chunks behind groups": ("end / kGroupBlocks * (kGroupBlocks / kChunkBlocks)", "end / kGroupBlocks"),
    "stages across borders": ("(begin / kStageBlocks + 1) * kStageBlocks", "begin + kStageBlocks"),
    "groups as long as chunks": ("end % kGroupBlocks == 0", "end % kChunkBlocks == 0"),
    "chunks as long as groups": ("end % kChunkBlocks == 0", "end % kGroupBlocks == 0"),
    "groups are not ended": ("if (ends_group) Flush(group, total);", ""),
    "the total adds chunks": ("{ Flush(chunk, group), Flush(group, total); }",
                              "{ Flush(group, total), Flush(chunk, total); }"),
}


@pytest.mark.parametrize("change", BROKEN_UNITS)
def test_checks_see_broken_attention_units(change, library, tmp_path):
    check_attention(library)
    with pytest.raises(AssertionError):
        check_attention(broken(tmp_path, "attention_units.h", *BROKEN_UNITS[change]))
