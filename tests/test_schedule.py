"""The schedule of dense units: every unit once, no deadlock, balance; the validator against a simulation on mutated
schedules; and the form that the kernel reads, on the emulator too."""

import functools
import itertools
import random
import sys
from collections import Counter, deque
from types import SimpleNamespace

import emulated
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import SMALL, model_of, random_cache

from musejax import ffi
from musejax.config import MINI, NANO, RELEASED
from musejax.kernels import schedule as ks
from musejax.kernels.schedule import GEMMS, ROUTER_COST, TURN, Schedule, ScheduleError, Shape, Unit, spans, validate

SMS = (1, 2, 7, 16, 114, 132, 148, 160)
CONFIGS = {"released": RELEASED, "mini": MINI, "nano": NANO}
SLICES = (1, 2, 4, 8)
CHUNKED = Shape(2048, 16, 8, 64, 512, 512, 64)
"""Small, with GEMMs of two chunks: 48 qkvg units a slice, 16 out, 2 router, 8 pooler, 16 unpooler."""


def case_of(shape, slices, sms) -> tuple[Schedule, dict[str, int], int]:
    """What `validate` takes."""
    return ks.dense_schedule(shape, slices, sms), ks.unit_counts(shape, slices), sms


# ------------------------------------------------------------------ a run of the schedule, event by event

WAITS_FOR = {"out": "attention", "router": "out", "pooler": "out", "unpooler": "experts", "qkvg": "unpooler"}
TURNS = 2


def simulate(schedule, counts, sms) -> str:
    """Runs every SM in its own order, a unit when its input is there -> what goes wrong, empty if nothing does."""
    if len(schedule.sms) != sms:
        return "sms"
    queues = [deque((turn, *unit) for turn in range(TURNS) for unit in units) for units in schedule.sms]
    left = {(turn, gemm): count for turn in range(TURNS) for gemm, count in counts.items()}
    ran = set()

    def there(turn, what) -> bool:
        if what == "attention":
            return turn == 0 or left[turn - 1, "qkvg"] == 0
        if what == "experts":
            return left[turn, "router"] == 0 and left[turn, "pooler"] == 0
        return left[turn, what] == 0

    progress = True
    while progress:
        progress = False
        for queue in queues:
            while queue:
                turn, gemm, number = queue[0]
                if gemm not in counts or not 0 <= number < counts[gemm]:
                    return "unknown"
                if not there(turn, WAITS_FOR[gemm]):
                    break
                if queue.popleft() in ran:
                    return "twice"
                ran.add((turn, gemm, number))
                left[turn, gemm] -= 1
                progress = True
    if any(queues):
        return "stuck"
    return "missing" if any(left.values()) else ""


def miscounts(schedule, counts, sms) -> set[str]:
    """Faults that show without running anything."""
    expected = Counter(Unit(gemm, n) for gemm, count in counts.items() for n in range(count))
    given = Counter(unit for units in schedule.sms for unit in units)
    faults = {"sms"} if len(schedule.sms) != sms else set()
    faults |= {"missing"} if expected - given else set()
    return faults | {"twice" if unit in expected else "unknown" for unit in given - expected}


def check_cycle(error, schedule):
    """What is reported is a cycle: each part holds up the next."""
    assert error.cycle and str(error).count("after all of") == len(error.cycle)
    for part, following in itertools.pairwise([*error.cycle, error.cycle[0]]):
        units = schedule.sms[part.sm]
        assert units.index(part.unit) <= units.index(part.holds)
        wanted = {"experts": ("router", "pooler")}.get(WAITS_FOR[part.unit.gemm], (WAITS_FOR[part.unit.gemm],))
        assert part.gemm in wanted and part.holds.gemm == following.gemm


def verdict(schedule, counts, sms) -> str:
    """The validator's fault, empty if there is none; it has to be the simulation's verdict too."""
    ends = simulate(schedule, counts, sms)
    try:
        validate(schedule, counts, sms)
    except ScheduleError as error:
        assert ends, f"rejected, but runs to its end: {error}"
        counted = miscounts(schedule, counts, sms)
        assert error.fault in counted if counted else (error.fault, ends) == ("deadlock", "stuck"), (error, counted)
        if error.fault == "deadlock":
            check_cycle(error, schedule)
        return error.fault
    assert not ends, f"accepted, but in a run: {ends}"
    return ""


# ------------------------------------------------------------------ the schedule that we run


def from_spans(x) -> Schedule:
    """The inverse of `spans`."""
    return Schedule(tuple(tuple(Unit(gemm, n) for gemm in TURN for n in range(*sm[GEMMS.index(gemm)])) for sm in x))


def groups_of(count, chunks, sms) -> list[range]:
    """SMs that share units among themselves: those of a chunk, unless one of them had more units than if all SMs shared
    all units."""
    each = sms // chunks
    if each and -(-count // chunks // each) <= -(-count // sms):
        return [range(chunk * each, (chunk + 1) * each) for chunk in range(chunks)]
    return [range(sms)]


def check_balance(x, counts, chunks, sms):
    """Contiguous parts in order; each chunk's on SMs of its own where that costs nothing; even; router and pooler
    together as level as their sizes allow."""
    sizes = dict(zip(GEMMS, (x[:, :, 1] - x[:, :, 0]).T, strict=True))
    router = ROUTER_COST * sizes["router"]
    for i, gemm in enumerate(GEMMS):
        numbers = [n for begin, end in x[:, i].tolist() for n in range(begin, end)]
        assert numbers == list(range(counts[gemm]))
        if gemm != "pooler":
            assert sizes[gemm].max() <= -(-counts[gemm] // sms), f"{gemm}: more than an even share"
        groups = groups_of(counts[gemm], chunks[gemm], sms)
        for group in groups:
            inside, share = sizes[gemm][group], counts[gemm] // len(groups)
            assert inside.sum() == share, f"{gemm}: a chunk on SMs of another"
            if gemm != "pooler":
                assert inside.max() - inside.min() <= 1, f"{gemm}: uneven"
                continue
            most = next(m for m in itertools.count() if np.maximum(m - router[group], 0).sum() >= share)
            assert (router[group] + inside)[inside > 0].max() <= most, "an SM has more than a level share"
    if counts["router"] <= sms:  # evenly in space
        gaps = np.diff(np.flatnonzero(sizes["router"]))
        assert counts["router"] == 1 or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_our_schedule(name, sms):
    for slices in SLICES:
        schedule, counts, _ = case_of(Shape.of(CONFIGS[name]), slices, sms)
        assert verdict(schedule, counts, sms) == ""
        x = spans(schedule)
        assert x.shape == (sms, 5, 2) and x.dtype == np.int32
        assert from_spans(x) == schedule
        check_balance(x, counts, ks.chunk_counts(Shape.of(CONFIGS[name])), sms)


def test_released_sizes_on_132_sms():
    """Of qkvg, out, router and pooler 128 SMs have all units, 16 a chunk; no pooler unit beside a router unit."""
    shape = Shape.of(RELEASED)
    schedule, counts, _ = case_of(shape, 1, 132)
    assert counts == {"qkvg": 1152, "out": 512, "router": 16, "pooler": 256, "unpooler": 256}
    assert ks.chunk_counts(shape) == {"qkvg": 8, "out": 8, "router": 8, "pooler": 8, "unpooler": 4}
    x = spans(schedule)
    sizes = dict(zip(GEMMS, (x[:, :, 1] - x[:, :, 0]).T.tolist(), strict=True))
    assert sizes["qkvg"] == [9] * 128 + [0] * 4 and sizes["out"] == [4] * 128 + [0] * 4
    assert Counter(sizes["unpooler"]) == {2: 124, 1: 8}
    pairs = list(zip(sizes["router"], sizes["pooler"], strict=True))
    assert Counter(pairs[:128]) == {(0, 2): 80, (0, 3): 32, (1, 0): 16} and set(pairs[128:]) == {(0, 0)}


def even(counts, chunks, sms):
    """Parts of all SMs, chunks or not."""
    return np.array([[[counts[gemm] * (i + j) // sms for j in (0, 1)] for gemm in GEMMS] for i in range(sms)])


def even_in_chunks(counts, chunks, sms):
    """The router counts for nothing."""
    x = np.zeros((sms, len(GEMMS), 2), int)
    for i, gemm in enumerate(GEMMS):
        groups = groups_of(counts[gemm], chunks[gemm], sms)
        share = counts[gemm] // len(groups)
        x[:, i] = counts[gemm]
        for g, group in enumerate(groups):
            x[group, i] = [[g * share + share * (n + j) // len(group) for j in (0, 1)] for n in range(len(group))]
    return x


def uneven_in_chunks(counts, chunks, sms):
    """A unit of qkvg from the first SM of a chunk to the second."""
    x = even_in_chunks(counts, chunks, sms)
    x[0, 0, 1] -= 1
    x[1, 0, 0] -= 1
    return x


@pytest.mark.parametrize(("parts", "text"), [(even, "qkvg: a chunk on SMs of another"),
                                             (even_in_chunks, "an SM has more than a level share"),
                                             (uneven_in_chunks, "qkvg: more than an even share")])
def test_balance_is_checked(parts, text):
    counts, chunks = ks.unit_counts(Shape.of(RELEASED), 1), ks.chunk_counts(Shape.of(RELEASED))
    with pytest.raises(AssertionError, match=text):
        check_balance(parts(counts, chunks, 132), counts, chunks, 132)


def test_a_share_that_is_uneven_inside_a_chunk_is_seen():
    """The last SM without units, although others have two."""
    parts, counts, chunks = [[0, 2], [2, 4], [4, 6], [6, 6]], dict.fromkeys(GEMMS, 6), dict.fromkeys(GEMMS, 1)
    with pytest.raises(AssertionError, match="qkvg: uneven"):
        check_balance(np.repeat(np.array(parts)[:, None], len(GEMMS), axis=1), counts, chunks, 4)


@pytest.mark.parametrize(("config", "slices"), [(MINI, 8), (NANO, 1), (NANO, 2), (NANO, 4), (NANO, 8), (RELEASED, 1),
                                                (RELEASED, 2), (RELEASED, 4), (RELEASED, 8)])
def test_counts_are_those_of_the_kernel(config, slices):
    counts = ks.unit_counts(Shape.of(config), slices)
    assert [counts[gemm] for gemm in GEMMS] == emulated.dense_units(config, slices)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"expected 1, 2, 4 or 8 slices, got 3 \(argument slices\)"):
        ks.dense_schedule(CHUNKED, 3, 132)
    with pytest.raises(ValueError, match=r"expected at least one SM, got 0 \(argument sms\)"):
        ks.dense_schedule(CHUNKED, 1, 0)


# ------------------------------------------------------------------ mutated schedules
#
# Each takes the SMs' lists of units, changes them, and returns whether it could.


def place(rng, sms):
    """(SM, index) of a random unit."""
    sm = rng.choice([i for i, units in enumerate(sms) if units])
    return sm, rng.randrange(len(sms[sm]))


def insert(rng, sms, unit):
    sm = rng.randrange(len(sms))
    sms[sm].insert(rng.randint(0, len(sms[sm])), unit)
    return True


def phases(units):
    """Of an SM's units, what waits for what; router and pooler run beside each other."""
    return [{"out": 0, "router": 1, "pooler": 1, "unpooler": 2, "qkvg": 3}[unit.gemm] for unit in units]


def drop(rng, sms, counts):
    sm, i = place(rng, sms)
    del sms[sm][i]
    return True


def double(rng, sms, counts):
    sm, i = place(rng, sms)
    return insert(rng, sms, sms[sm][i])


def replace_by_another(rng, sms, counts):
    (sm, i), (other, j) = place(rng, sms), place(rng, sms)
    sms[sm][i] = sms[other][j]
    return (sm, i) != (other, j)


def out_of_range(rng, sms, counts):
    sm, i = place(rng, sms)
    gemm, count = sms[sm][i].gemm, counts[sms[sm][i].gemm]
    sms[sm][i] = Unit(gemm, rng.choice([-1, count, count + rng.randrange(1000), -1 - rng.randrange(count)]))
    return True


def unknown_gemm(rng, sms, counts):
    sm, i = place(rng, sms)
    sms[sm][i] = sms[sm][i]._replace(gemm=rng.choice(["", "down", "Qkvg", "experts"]))
    return True


def other_number_of_sms(rng, sms, counts):
    """An SM too few, its units run by another; or one too many, with units of another."""
    if len(sms) > 1 and rng.random() < 0.5:
        units = sms.pop()
        sms[-1] = sorted(sms[-1] + units, key=lambda unit: TURN.index(unit.gemm))
    else:
        sms.append([sms[-1].pop()] if sms[-1] and rng.random() < 0.5 else [])
    return True


def swap_gemms(rng, sms, counts):
    """Two entries of different GEMMs on an SM."""
    sm, i = place(rng, sms)
    others = [j for j, unit in enumerate(sms[sm]) if unit.gemm != sms[sm][i].gemm]
    if not others:
        return False
    j = rng.choice(others)
    sms[sm][i], sms[sm][j] = sms[sm][j], sms[sm][i]
    return True


def swap_neighbours(rng, sms, counts):
    sm, i = place(rng, sms)
    if i + 1 == len(sms[sm]):
        return False
    sms[sm][i], sms[sm][i + 1] = sms[sm][i + 1], sms[sm][i]
    return True


def move(rng, sms, counts):
    """A unit to any place of any SM."""
    sm, i = place(rng, sms)
    return insert(rng, sms, sms[sm].pop(i))


def wait_in_a_circle(rng, sms, counts):
    """Two SMs, each with its last unit before its first."""
    able = [i for i, units in enumerate(sms) if units and phases(units)[0] < phases(units)[-1]]
    if len(able) < 2:
        return False
    for sm in rng.sample(able, 2):
        sms[sm].insert(0, sms[sm].pop())
    return True


def rotate(rng, sms, counts):
    """An SM begins its turn elsewhere, as if a layer began with its heads."""
    sm, i = place(rng, sms)
    sms[sm] = sms[sm][i:] + sms[sm][:i]
    return i > 0


def reverse(rng, sms, counts):
    sm, _ = place(rng, sms)
    sms[sm].reverse()
    return len(sms[sm]) > 1


def shuffle_gemm(rng, sms, counts):
    """The units of one GEMM change places among themselves."""
    gemm = rng.choice(GEMMS)
    places = [(sm, i) for sm, units in enumerate(sms) for i, unit in enumerate(units) if unit.gemm == gemm]
    units = [sms[sm][i] for sm, i in places]
    rng.shuffle(units)
    for (sm, i), unit in zip(places, units, strict=True):
        sms[sm][i] = unit
    return len(places) > 1


def swap_sms(rng, sms, counts):
    a, b = rng.randrange(len(sms)), rng.randrange(len(sms))
    sms[a], sms[b] = sms[b], sms[a]
    return a != b


ALWAYS = (drop, double, replace_by_another, out_of_range, unknown_gemm, other_number_of_sms, wait_in_a_circle)
"""Mutations that no schedule survives."""
NEVER = (shuffle_gemm, swap_sms)
MUTATIONS = (*ALWAYS, swap_gemms, swap_neighbours, move, rotate, reverse, *NEVER)

BASES = [(Shape.of(NANO), 1, 2), (Shape.of(NANO), 1, 7), (Shape.of(NANO), 2, 16), (Shape.of(MINI), 8, 7),
         (Shape.of(MINI), 8, 132), (CHUNKED, 1, 1), (CHUNKED, 1, 16), (CHUNKED, 1, 114), (CHUNKED, 2, 7)]
LARGE = (Shape.of(RELEASED), 1, 132)


@functools.cache
def base(*case):
    return case_of(*case)


def mutated(count, seed):
    """Yields (mutation, schedule, counts, SMs), the mutations in turn."""
    rng = random.Random(seed)
    mutations = itertools.cycle(MUTATIONS)
    for i in range(count):
        mutation, done = next(mutations), False
        while not done:
            schedule, counts, sms = base(*(LARGE if i % 25 == 0 else rng.choice(BASES)))
            lists = [list(units) for units in schedule.sms]
            done = mutation(rng, lists, counts)
        yield mutation, Schedule(tuple(map(tuple, lists))), counts, sms


def canonical(schedule) -> bool:
    """Whether every SM runs whole runs of units in the kernel's order, by definition."""
    def run(numbers):
        return numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True

    return all(list(units) == sorted(units, key=lambda u: (TURN.index(u.gemm), u.number)) and
               all(run([u.number for u in units if u.gemm == gemm]) for gemm in GEMMS) for units in schedule.sms)


def check_form(schedule) -> bool:
    """A valid schedule has spans that say the same, or the kernel cannot run it; -> whether it can."""
    try:
        assert from_spans(spans(schedule)) == schedule
    except ScheduleError as error:
        assert error.fault == "form" and not canonical(schedule), error
        return False
    assert canonical(schedule)
    return True


def test_ten_thousand_mutated_schedules():
    faults, forms = {mutation: Counter() for mutation in MUTATIONS}, Counter()
    for mutation, schedule, counts, sms in mutated(10_000, seed=1):
        fault = verdict(schedule, counts, sms)
        faults[mutation][fault or "harmless"] += 1
        if not fault:
            forms[check_form(schedule)] += 1
    for mutation, found in faults.items():
        print(f"{mutation.__name__}: " + ", ".join(f"{count} {fault}" for fault, count in sorted(found.items())))
    print(f"of those that run, the kernel can run {forms[True]} and cannot run {forms[False]}")
    total = sum(faults.values(), Counter())
    assert sum(total.values()) == 10_000
    assert all(faults[mutation]["harmless"] == 0 for mutation in ALWAYS)
    assert all(set(faults[mutation]) == {"harmless"} for mutation in NEVER)
    assert all(total[fault] > 200 for fault in ("sms", "unknown", "twice", "missing", "deadlock")), total
    assert forms[True] > 100 and forms[False] > 100


@pytest.mark.parametrize(("gemm", "needs"), [("unpooler", ("pooler",)), ("unpooler", ("router",)), ("qkvg", ()),
                                             ("router", ()), ("out", ("qkvg",))])
def test_the_comparison_sees_a_wrong_rule(gemm, needs, monkeypatch):
    monkeypatch.setitem(ks.NEEDS, gemm, needs)
    with pytest.raises(AssertionError):
        for _, schedule, counts, sms in mutated(4_000, seed=2):
            verdict(schedule, counts, sms)


# ------------------------------------------------------------------ what errors say

TINY = Shape.of(NANO)  # 24 qkvg units, one of each other GEMM


def changed(change):
    """The lists of two SMs with TINY's units, after `change`."""
    lists = [list(units) for units in case_of(TINY, 1, 2)[0].sms]
    change(lists)
    return Schedule(tuple(map(tuple, lists)))


@pytest.mark.parametrize(("change", "text"), [
    (lambda sms: sms.append([]), "expected units for SMs 0 to 1, got units for 3 SMs"),
    (lambda sms: sms[0].insert(1, Unit("qkvg", 24)), "SM 0 runs qkvg 24, expected one of qkvg 0 to 23, out 0 to 0, "),
    (lambda sms: sms[0].append(Unit("down", 0)), "SM 0 runs down 0, expected one of"),
    (lambda sms: sms[0].append(sms[1][0]), "SM 1 runs out 0, which SM 0 runs already"),
    (lambda sms: sms[1].remove(Unit("qkvg", 17)), "no SM runs qkvg 17"),
    (lambda sms: sms[1].insert(0, sms[1].pop()), "SMs wait for each other forever: "),
])
def test_the_first_fault_is_named(change, text):
    with pytest.raises(ScheduleError) as error:
        validate(changed(change), ks.unit_counts(TINY, 1), 2)
    assert str(error.value).startswith(f"schedule: {text}")


def test_a_deadlock_names_its_members():
    lists = [[Unit("out", 0), Unit("unpooler", 0), Unit("router", 0)], [Unit("pooler", 0), Unit("qkvg", 0)]]
    with pytest.raises(ScheduleError) as error:
        validate(Schedule(tuple(map(tuple, lists))), dict.fromkeys(GEMMS, 1), 2)
    assert error.value.cycle == (ks.Wait(0, Unit("unpooler", 0), "router", Unit("router", 0)),)
    assert str(error.value) == ("schedule: SMs wait for each other forever: SM 0 runs unpooler 0 after all of "
                                "router and before its router 0")


@pytest.mark.parametrize(("units", "text"), [
    ([("out", 0), ("out", 2)], "SM 0 runs out 2 after out 0, expected 1: the kernel takes a begin and an end"),
    ([("out", 1), ("out", 0)], "SM 0 runs out 0 after out 1, expected 2"),
    ([("pooler", 0), ("router", 0)], "expected the GEMMs of SM 0 once each in the order out, router, pooler, unpooler, "
                                     "qkvg, got pooler, router"),
    ([("out", 0), ("router", 0), ("out", 1)], "expected the GEMMs of SM 0 once each"),
    ([("down", 0)], "expected the GEMMs of SM 0 once each"),
])
def test_the_kernel_cannot_run_every_order(units, text):
    with pytest.raises(ScheduleError) as error:
        spans(Schedule((tuple(Unit(*unit) for unit in units),)))
    assert str(error.value).startswith(f"schedule: {text}") and error.value.fault == "form"


# ------------------------------------------------------------------ on its way to the kernel


def test_the_cuda_library_gets_schedules(monkeypatch):
    """Every model on every kind of GPU here; two GPUs are alike."""
    given = {}
    sizes = [(*Shape.of(config), config.num_experts_per_tok, slices) for config, slices in ((MINI, 8), (RELEASED, 1))]
    module = SimpleNamespace(
        version=ffi.library().version, abi=lambda: ffi.ABI, targets=dict, layer_instances=lambda: sizes,
        multiprocessors=lambda: [132, 148, 132], set_schedule=lambda i, sms, x: given.setdefault((i, sms), x))
    monkeypatch.setattr(ffi, "_loaded", {})
    monkeypatch.setitem(sys.modules, "musejax._cuda", module)
    ffi.library("cuda")
    assert list(given) == [(0, 132), (1, 132), (0, 148), (1, 148)]
    for (i, sms), x in given.items():
        config, slices = ((MINI, 8), (RELEASED, 1))[i]
        assert all(type(n) is int for n in x)
        assert from_spans(np.reshape(x, (sms, 5, 2))) == ks.dense_schedule(Shape.of(config), slices, sms)


def emulate(schedule, **how):
    return emulated.run(model_of(SMALL), random_cache(SMALL, 40, 1100), np.arange(5), blocks=3, schedule=schedule,
                        **how)


@pytest.fixture
def emulated_spans():
    """Of SMALL on three SMs."""
    schedule, counts, _ = case_of(Shape.of(SMALL), 8, 3)
    validate(schedule, counts, 3)
    return spans(schedule)


@pytest.mark.slow
def test_the_kernel_runs_any_valid_schedule(emulated_spans):
    """All units of a GEMM on one SM or another, in the same bits."""
    ends = emulated_spans[-1, :, 1]
    x = np.zeros_like(emulated_spans)
    x[[0, 1, 2, 0, 2], range(5), 1] = ends
    validate(from_spans(x), ks.unit_counts(Shape.of(SMALL), 8), 3)
    want, got = emulate(emulated_spans), emulate(x)
    for name in ("stream", "ids", "taps"):
        assert_same_bits(getattr(want, name), getattr(got, name))


@pytest.mark.slow
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_unit_that_nobody_runs_is_waited_for(emulated_spans, gemm):
    """The kernel's own report of what `validate` would have refused."""
    x = emulated_spans.copy()
    x[1, GEMMS.index(gemm), 1] -= 1
    with pytest.raises(ScheduleError, match=f"no SM runs {gemm}"):
        validate(from_spans(x), ks.unit_counts(Shape.of(SMALL), 8), 3)
    with pytest.raises(emulated.WaitError, match=r"layer 0 phase"):
        emulate(x, budget_ms=5.0)
