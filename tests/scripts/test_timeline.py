"""scripts/timeline.py on stamps made up here: every figure is known beforehand."""

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

NAMES = ["Credit", "X", "Listed", "DownSums", "UnpoolerSums"]
SMS, LAYERS = 6, 4
PERIOD = 100_000  # ns a layer
AT = (0, 10_000, 40_000, 90_000, 95_000)  # ns after the layer began


def flat(late=()):
    """As layer_stamps(): all warps in step, but for `late`: (SM, warp, layer, point, ns). Unused places hold junk."""
    out = np.full((SMS, 12, 64, 32), 123, np.uint64)
    for layer in range(LAYERS):
        out[:, 1:, layer, :len(AT)] = 7_000_000 + layer * PERIOD + np.array(AT)
    for sm, warp, layer, point, ns in late:
        out[sm, warp, layer, NAMES.index(point)] += np.uint64(ns)
    return out.ravel().tolist()


LATE = [(4, 3, layer, "X", 2_000) for layer in range(LAYERS)] + [
    (2, 7, 2, "Listed", 8_000), (5, 1, 1, "DownSums", 3_200), (1, 11, 2, "DownSums", 1_600)]


@pytest.fixture
def launches(script):
    return np.stack([script.unfold(flat(LATE), LAYERS, NAMES)] * 2)


def test_points_are_those_of_the_kernel(script, repo):
    names = script.point_names(script.SOURCE.read_text())
    assert script.SOURCE == repo / "ffi" / "layer" / "layer.cuh"
    assert {"Listed", "DownSums", "UnpoolerSums"} <= set(names) and len(set(names)) == len(names) <= script.MAX_POINTS
    assert names.index("Listed") < names.index("DownSums")
    with pytest.raises(script.TimelineError, match=r"expected 1 to 32 points .* got 0"):
        script.point_names("enum Phase : int { kHeadsIn };")


def test_parts_of_the_weight_stream(script):
    parts = script.point_names(script.SOURCE.read_text(), "Part")
    assert {"List", "Up", "Down"} <= set(parts) and parts[-1] == "Qkvg"
    took = dict(zip(parts, (2, 3, 20, 40, 20, 5, 10), strict=True))  # us
    waited = dict(zip(parts, (1, 2, 0, 9, 4, 5, 6), strict=True))
    out = np.full((SMS, 12, 64, 32), 123, np.uint64)
    for layer in range(LAYERS):
        at = 7_000_000 + layer * 100_000
        for name in (parts[-1], *parts[:-1]):
            at += took[name] * 1000
            out[:, 0, layer, 2 * parts.index(name)] = at
            out[:, 0, layer, 2 * parts.index(name) + 1] = waited[name] * 1000
    got = script.stream_parts(out.ravel().tolist(), LAYERS, parts)
    assert {p.name: p.took for p in got} == took
    assert {p.name: p.waited for p in got} == waited | {"List": 20}
    text = script.stream_as_text(got)
    assert "47.0 of 100.0 us a layer (47%)" in text and len(text.splitlines()) == 2 + len(parts)


def test_sizes_are_those_of_the_kernel(script, repo):
    context = (repo / "ffi" / "layer" / "context.cuh").read_text()
    assert f"kStamps = {script.MAX_POINTS};" in context and f"kMaxLayers = {script.MAX_LAYERS};" in context
    sizes = "".join(file.read_text() for file in (repo / "ffi" / "layer").glob("*.[hc]*"))
    assert f"kWarps = {script.WARPS}" in sizes


def test_without_stamps(script):
    with pytest.raises(script.TimelineError, match=r"expected stamps, got none: .*-DMUSEJAX_LAYER_STAMPS=ON"):
        script.unfold([], LAYERS, NAMES)


def test_stamps_out_of_order_are_seen(script):
    with pytest.raises(script.TimelineError, match="SM 3, warp 2, layer 1, point Listed: is the library built"):
        script.unfold(flat([(3, 2, 1, "Listed", 51_000)]), LAYERS, NAMES)
    missing = np.array(flat()).reshape(SMS, 12, 64, 32)
    missing[2, 4, 3, 0] = 0
    with pytest.raises(script.TimelineError, match="SM 2, warp 4, layer 2, point UnpoolerSums"):
        script.unfold(missing.ravel(), LAYERS, NAMES)


def test_unfold(script):
    stamps = script.unfold(flat(), LAYERS, NAMES)
    assert stamps.shape == (SMS, 11, LAYERS, 5)
    assert (stamps[3, 10, 2] == 7_000_000 + 2 * PERIOD + np.array(AT)).all()


def test_table(script, launches):
    credit, x, listed, down, added = script.table(launches, NAMES)
    assert (credit.first, credit.last, credit.step) == (0, 0, 0)
    assert (x.name, x.first, x.median, x.last, x.step) == ("X", 10, 10, 12, 12)
    assert (x.latest, x.share) == ((4, 3), 1)
    assert (listed.last, listed.step) == (40, 28)  # late in one layer of three only: no median
    assert (down.median, down.last) == (90, 91.6)  # 93.2, 91.6, 90
    assert down.latest == (5, 1) and down.share == pytest.approx(1 / 3)
    assert (added.first, added.last) == (95, 95)
    assert added.roles == (95, 95)


def test_medians_of_roles(script):
    late = [(sm, warp, layer, "X", 4_000) for sm in range(SMS) for warp in (1, 2, 3) for layer in range(LAYERS)]
    assert script.table(script.unfold(flat(late), LAYERS, NAMES)[None], NAMES)[1].roles == (14, 10)


def test_regimes(script, launches):
    w, e = script.regimes(launches, NAMES)
    assert w.tolist() == [50, 58 - 3.2, 50 - 1.6] * 2
    assert e.tolist() == [53.2, 51.6 - 8, 50] * 2
    assert (w + e).reshape(2, 3).sum(axis=1) == pytest.approx(3 * PERIOD / 1e3)  # nothing is left out


def test_after_gemm2(script, launches):
    """Of MMA warps alone: SM 1's warp 11 is late by 1.6 us in layer 2, SM 5's warp 1 does not count."""
    idle = script.after_gemm2(launches, NAMES).reshape(2, SMS, LAYERS - 1)
    want = np.full(idle.shape, 5.0)
    want[:, 1, 1] = 3.4
    np.testing.assert_allclose(idle, want, rtol=1e-12)  # ns as us


def test_chain(script, launches):
    assert script.chain(launches[0], 2, NAMES) == [
        ("Credit", 0, 1, 0.0), ("X", 4, 3, 12.0), ("Listed", 2, 7, 48.0), ("DownSums", 1, 11, 91.6),
        ("UnpoolerSums", 0, 1, 95.0)]


def test_shares(script):
    launches = script.unfold(flat(), LAYERS, NAMES)[None]
    for parts in script.shares(launches, NAMES).values():
        assert parts == [("DownSums", 0.5), ("Listed", 0.3), ("X", 0.1), ("Credit", 0.05), ("UnpoolerSums", 0.05)]
    late = [(sm, 5, layer, "X", 4_000) for sm in range(SMS) for layer in range(LAYERS)]
    parts = script.shares(script.unfold(flat(late), LAYERS, NAMES)[None], NAMES)
    assert dict(parts["add"])["X"] == 0.1
    assert dict(parts["multiply"])["X"] == pytest.approx(0.1 + 0.04 / 8)  # one warp of eight
    assert sum(share for _, share in parts["multiply"]) == pytest.approx(1)


def test_clock_step(script, launches):
    assert script.clock_step(launches) == 200
    launches[0, 0, 0, 0, 1] += 32
    assert script.clock_step(launches) == 8


def test_trace(script, launches):
    events = json.loads(json.dumps(script.trace(launches[0], NAMES, [4, 0])))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} == {(sm, warp) for sm in (0, 4) for warp in (1, 4)}
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert tracks == ["add (warp 1)", "multiply (warp 4)"] * 2
    track = [e for e in slices if (e["pid"], e["tid"]) == (0, 4)]
    assert len(track) == LAYERS * len(NAMES) - 1
    assert [(e["name"], e["args"]["layer"], e["ts"], e["dur"]) for e in track[3:6]] == [
        ("UnpoolerSums", 0, 90, 5), ("Credit", 1, 95, 5), ("X", 1, 100, 10)]
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in pairwise(track))


def test_text(script, launches):
    text = script.as_text(launches, NAMES, 2)
    assert "X                10.0    10.0    12.0  +12.0      10.0     10.0  SM 4 warp 3 (100%)" in text
    assert "W 50.0 us (48.4 to 54.8); E 50.0 us (43.6 to 53.2)" in text
    assert "an SM: 5.0 us (3.4 to 5.0)" in text
    assert "layer 98.4 us" in text and "     48.0 Listed        SM 2 warp 7" in text


def test_picture(script, launches, tmp_path):
    pytest.importorskip("matplotlib")
    script.draw(launches[0], 2, NAMES, "layer 2", tmp_path / "layer.png")
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_refusals(repo):
    def refused(*argv):
        done = subprocess.run([sys.executable, repo / "scripts" / "timeline.py", *map(str, argv)], cwd="/",
                              capture_output=True, text=True)
        assert done.returncode == 2 and not done.stdout, done
        return done.stderr.splitlines()[-1]

    assert "--layers: expected 3 to 64, got 1" in refused("--layers", 1)
    assert "--layer: expected 1 to 7, got 8" in refused("--layer", 8)
    assert "distinct: expected 8 to 128" in refused("--distinct", 200)
