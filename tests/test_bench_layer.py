"""`musejax bench layer` without a GPU: refusals, lines and JSON from canned figures, samples from stand-ins for layers,
and the baseline against the reference layer."""

import json
import sys
from dataclasses import replace
from functools import partial

import bench_command
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_command import BenchCommand, Library
from rank_layers import RESIDUAL_BOUND, check_released, reference_layer, row_errors

from musejax import ffi
from musejax.bench import cases, layer, limits, reference
from musejax.bench.cases import Case, Timing
from musejax.bench.phases import rank_layer
from musejax.cache import LayerCache
from musejax.config import MINI, NUM_SLICES, RELEASED, DecodeConfig
from musejax.kernels.calls import Call, RowState
from musejax.kernels.forward import chain
from musejax.model.attention import Rows
from musejax.model.layer import decoder_layer

BASELINE = Timing(2, (480.0, 500.0, 520.0), 48.5, (20.0, 28.5), 240e6, 170e6, 262144, "0123456789ab")
TIMING = Timing(8, (99.0, 100.0, 103.5), 48.75, (18.25, 0.0, 30.5), 225e6, 180e6, 262144, "ba9876543210",
                baseline=BASELINE)


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command with canned timings -> (exit code, stdout, stderr)."""
    return BenchCommand(capsys, monkeypatch, layer, "layer", TIMING)


def refused(capsys, *argv):
    return bench_command.refused(capsys, "layer", *argv)


# ------------------------------------------------------------------ the command


def test_line(run):
    code, out, err = run("--baseline")
    assert (code, err, out.count("\n")) == (0, "", 1)
    kernel, baseline = out.split("; the same rank in plain JAX by XLA, ")
    assert kernel == (
        "NVIDIA H200; one rank of 8, exchanges looped back; released sizes, NVFP4, bf16; rows 16; context 2048; "
        "8 layers in one launch; D 49 asked, 48.8 met (rows x experts: 1 x 18.2, 3 x 30.5); "
        "100.0 us a layer (99.0 to 103.5), W 60.0 E 40.0 H 0; 225.0 MB of weights, 0.26 MB of keys and values; "
        "2250 GB/s of weights, 50.0% of 4500; result ba9876543210")
    assert baseline == (
        "2 sliding layers in one program, all rows times each expert hit: D 48.5 met; "
        "500.0 us a layer (480.0 to 520.0), 5.00 times the kernel's; "
        "240.0 MB of weights, 480 GB/s; result 0123456789ab\n")


def test_line_with_phases(run):
    phases = replace(TIMING, baseline=None, us=(148.0, 150.0, 160.0))
    code, out, _ = run("--phases", timing=replace(TIMING, baseline=None, phases=phases))
    assert code == 0 and run.measured[0][2:] == (False, True)
    assert out.endswith("; result ba9876543210; the same phases one launch each in a CUDA graph, with the copies in "
                        "between: 150.0 us a layer (148.0 to 160.0), 1.50 times the kernel's; result ba9876543210\n")


def test_every_combination_in_turn(run):
    code, out, _ = run("--rows", 16, 8, "--distinct", 8, 49, "--context", 0, 1024, "--layers", 2, "--activations",
                       "nvfp4_per_token", "--batches", 3)
    assert code == 0 and out.count("\n") == 8
    assert [(c.rows, c.context, c.distinct) for c, *_ in run.measured] == [
        (r, x, d) for r in (16, 8) for x in (0, 1024) for d in (8, 49)]
    assert {(c.layers, c.activations, *rest) for c, *rest in run.measured} == {(2, "nvfp4_per_token", 3, False, False)}


def test_ranks_are_told(run):
    """How many devices and slices, and whether others are looped back."""
    for more, said in (((), "; one rank of 8, exchanges looped back; "),
                       (("--devices", 2), "; GPUs 2, 1 of 8 slices each, the others looped back; "),
                       (("--devices", 2, "--slices", 4), "; GPUs 2, 4 of 8 slices each; "),
                       (("--slices", 8), "; GPUs 1, 8 of 8 slices each; ")):
        assert said in run(*more)[1]


def test_fewer_rows_hit_fewer_experts(run):
    run("--rows", 1, 2, 16)
    assert [(c.rows, c.distinct) for c, *_ in run.measured] == [(1, 8), (2, 16), (16, 49)]


def test_json(run, tmp_path):
    file = tmp_path / "layer.json"
    assert run("--context", 1024, 2048, "--json", file)[0] == 0
    result = json.loads(file.read_text())
    assert (result["device"], result["version"], result["batches"], result["failed"]) == ("NVIDIA H200", "1.2.3", 9, 0)
    assert result["roofline_gb_per_s"] == 4500 and result["seconds"] >= 0
    first, second = result["cases"]
    assert first["case"] == dict(distinct=49, rows=16, context=1024, layers=8, activations="bf16", devices=1, slices=1)
    assert second["case"]["context"] == 2048
    assert (first["us"], first["distinct"], first["share"]) == ([99.0, 100.0, 103.5], 48.75, 0.5)
    assert first["histogram"] == [18.25, 0.0, 30.5] and first["baseline"]["digest"] == "0123456789ab"
    assert (first["layers"], first["baseline"]["layers"]) == (8, 2)


@pytest.mark.parametrize("where", ["kernel", "phases", "baseline"])
def test_wrong_results_fail_the_command(run, tmp_path, where):
    text = "results: expected finite numbers, got others"
    change = dict(failed=text) if where == "kernel" else {where: replace(BASELINE, failed=text)}
    code, out, _ = run("--json", tmp_path / "layer.json", timing=replace(TIMING, **change))
    assert code == 1 and out.endswith(f"; FAILED: {text}\n")
    assert json.loads((tmp_path / "layer.json").read_text())["failed"] == 1


def test_wrong_arguments(capsys, tmp_path):
    assert "rows: expected 1 to 16 (what a pass takes), got 0" in refused(capsys, "--rows", 0)
    assert "rows: expected 1 to 16 (what a pass takes), got 17" in refused(capsys, "--rows", 1, 17)
    assert "distinct: expected 8 to 128 (rows 16, 8 choices each), got 129" in refused(capsys, "--distinct", 129)
    assert "distinct: expected 8 to 128 (rows 16, 8 choices each), got 7" in refused(capsys, "--distinct", 7)
    assert "distinct: expected 8 to 8 (rows 1, 8 choices each), got 9" in refused(
        capsys, "--rows", 16, 1, "--distinct", 9)
    assert "context: expected 0 to 1048560 (what the model takes), got -1" in refused(capsys, "--context", -1)
    assert "layers: expected 1 to 60" in refused(capsys, "--layers", 61)
    assert "devices: expected 1 to 8 (one a rank), got 9" in refused(capsys, "--devices", 9)
    assert "devices: expected 1, 2, 4 or 8, got 3" in refused(capsys, "--devices", 3)
    assert "slices: expected 1, 2, 4 or 8, at most 8 on all devices together, got 3 on each of 1" in refused(
        capsys, "--slices", 3)
    assert "got 4 on each of 4" in refused(capsys, "--devices", 4, "--slices", 4)
    assert "expected an integer of at least 1, got '0'" in refused(capsys, "--batches", 0)
    assert "invalid choice: 'fp8'" in refused(capsys, "--activations", "fp8")
    missing = tmp_path / "none" / "layer.json"
    assert f"--json {missing}: expected a file in a folder that exists" in refused(capsys, "--json", missing)


def test_without_a_cuda_build(capsys, monkeypatch):
    monkeypatch.setattr(ffi, "_loaded", {})
    monkeypatch.setitem(sys.modules, "musejax._cuda", None)
    err = refused(capsys)
    assert "expected the library musejax._cuda" in err and "MUSEJAX_CUDA=ON pip install ." in err


def test_without_a_gpu(capsys, monkeypatch):
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    monkeypatch.setattr(ffi, "library", lambda platform: Library())
    assert "error: bench layer: expected a GPU that JAX can use, got none" in refused(capsys)


def test_without_a_roofline(run, monkeypatch):
    failed = limits.Row("hbm", "hbm", "", 0, 0, 0, 0, "", "waited 2 s", "failed")
    monkeypatch.setattr(Library, "limits", lambda self, device, groups: [vars(failed)])
    code, out, err = run()
    assert (code, out) == (2, "") and "expected the figure hbm.steady, got waited 2 s" in err


# ------------------------------------------------------------------ which experts are hit


def test_expected_distinct():
    """Against draws: the mean of 2,000 comes within 0.3 (5 standard errors of a deviation below 3)."""
    rng = np.random.default_rng(0)
    for admitted, rows in ((51, 16), (256, 16), (20, 3)):
        draws = [np.unique(np.concatenate([rng.permutation(admitted)[:8] for _ in range(rows)])).size
                 for _ in range(2000)]
        assert abs(cases.expected_distinct(admitted, rows, 8) - np.mean(draws)) < 0.3
    assert cases.expected_distinct(8, 5, 8) == 8 and cases.expected_distinct(100, 1, 8) == pytest.approx(8)


def test_admitted_experts():
    assert cases.admitted_experts(Case(distinct=8), RELEASED) == 8
    assert cases.admitted_experts(Case(distinct=102), RELEASED) == 256
    for case in (Case(distinct=49), Case(distinct=24, rows=7), Case(distinct=80)):
        admitted = cases.admitted_experts(case, RELEASED)
        off = [abs(cases.expected_distinct(a, case.rows, 8) - case.distinct) for a in range(8, 257)]
        assert off[admitted - 8] == min(off) < 0.5


# ------------------------------------------------------------------ samples


class Layers:
    """Stand-in for `LoopedLayers`: two layers that add 1; `broken` says from which launch on a bit is wrong."""

    config = RELEASED
    dense_bytes, expert_bytes = 1000, 10

    def __init__(self, broken=10**9, value=1.0):
        self.case, self.launches, self.broken, self.value = Case(layers=2, rows=2, distinct=8), 0, broken, value

    def launch(self, stream):
        out = np.asarray(stream) + np.float32(self.value)
        self.launches += 1
        if self.launches > self.broken:
            out.view(np.uint32)[1, 7] ^= 1
        ids = np.stack([[range(8), range(8)], [range(8), range(4, 12)]]).astype(np.int32)
        return jnp.asarray(out), jnp.asarray(ids)


def samples(layers, batches=3):
    run = layer.Samples(layers)
    for n in range(batches + 1):
        run.batch([jnp.full((2, 16), n + i, jnp.float32) for i in range(2)], counted=n > 0)
    run.check_repeat()
    return run


def test_samples():
    run = samples(Layers())
    timing = run.timing()
    assert len(run.times) == 3 and run.layers.launches == 2 * 4 + 1
    assert timing.failed == "" and timing.distinct == 10  # 8 and 12
    assert timing.histogram == ((0 + 8) / 2, (8 + 4) / 2)
    assert (timing.weight_bytes, timing.expert_bytes) == (1000 + 10 * 10, 10 * 10)
    assert timing.key_bytes == 2048 * 2 * 2 * 64 * 2  # keys and values, bytes, width, heads of a rank
    assert timing.digest == samples(Layers()).timing().digest != samples(Layers(value=2.0)).timing().digest


def test_a_flipped_bit_in_the_repeat_is_seen():
    assert samples(Layers(broken=8)).timing().failed == (
        "the first launch repeated: expected the same bits, got 1 of 32 others")


def test_phases_that_part_from_the_kernel_are_seen():
    kernel, same, other = samples(Layers()), samples(Layers()), samples(Layers(broken=2))
    same.check_same(kernel)
    other.check_same(kernel)
    assert same.timing().failed == ""
    assert other.timing().failed == (
        "the first launch beside the layer kernel's: expected the same bits, got 1 of 32 others")
    later = samples(Layers(broken=5))
    later.check_same(kernel)
    assert later.timing().failed == "the launches beside the layer kernel's: expected the same bits, got others"


def test_results_that_are_not_finite_are_seen():
    assert "expected finite numbers" in samples(Layers(value=np.inf)).timing().failed


def test_a_wait_that_did_not_end_is_seen(monkeypatch):
    class Late:
        def layer_error(self):
            return "layers: a wait did not end within 2000 ms: rank 0, SM 7"

        def reset_after_error(self):
            return 0

    monkeypatch.setattr(ffi, "_loaded", {"cuda": Late()})
    with pytest.raises(ffi.WaitError, match="rank 0, SM 7"):
        samples(Layers())


# ------------------------------------------------------------------ the baseline


def whole_layer(p: dict) -> dict:
    """Parameters of a whole layer whose 8 slices are all this one."""
    out = dict(p)
    for name, w in p.items():
        if name.endswith("_proj") or name in ("pooler", "unpooler", "post_expert_norm"):
            out[name] = jnp.concatenate([w] * NUM_SLICES)
        elif name == "router" or name in reference.EXPERT_LEAVES:
            out[name] = jnp.stack([w] * NUM_SLICES)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("activations, number", [("bf16", 2), ("bf16", 1), ("nvfp4_static", 2), ("nvfp4_per_token", 2)])
def test_baseline_is_the_reference_layer_with_equal_slices(activations, number):
    """Sliding (2) and full (1) layer, 5 rows after 11 positions, of which a window of 8 sees some."""
    config = replace(MINI, nvfp4_layers=tuple(range(6)), num_local_experts=64, num_experts_per_tok=4)
    rows, admitted, length = 5, 20, 11
    decode = DecodeConfig(activations=activations)
    stream = jax.random.normal(jax.random.key(3), (rows, config.hidden_size), jnp.float32)
    p = reference.random_slice(jax.random.key(number), config, admitted)
    p["router_bias"] += jax.random.normal(jax.random.key(5), p["router_bias"].shape) / 500  # no ties
    slots = config.window(number) or 32
    # A slice of MINI has one k/v head; the whole layer has it 8 times.
    kept = LayerCache(*(jax.random.normal(jax.random.key(7 + j), (1, slots, config.head_dim)) for j in range(2)))
    at = Rows(length + jnp.arange(rows, dtype=jnp.int32), jnp.int32(rows), jnp.tri(rows, dtype=bool))
    run = jax.jit(partial(reference.rank_layer, layer=number, slots=admitted, config=config, decode=decode))
    got, ids, flight = run(p, stream, stored=kept, length=jnp.int32(length), rows=at)
    whole = LayerCache(*(jnp.tile(x, (NUM_SLICES, 1, 1)) for x in kept))
    want = jax.jit(partial(decoder_layer, layer=number, config=config, decode=decode))(
        whole_layer(p), stream, stored=whole, length=jnp.int32(length), rows=at)
    assert np.array_equal(ids, want.routing.ids)
    assert 4 < np.unique(ids).size <= admitted
    # Both sum in an order that XLA chooses: the bound is that of a residual after a layer between implementations.
    bound = 2**-6 * np.sqrt(np.mean(np.square(want.stream), axis=-1, keepdims=True))
    assert (np.abs(got - want.stream) <= bound).all()
    assert flight.keys.shape == (1, rows, config.head_dim)
    assert (np.abs(flight.keys - want.cache.keys) <= 2**-6).all()  # of unit RMS a head
    p["down_global"] = p["down_global"].at[ids[0, 0]].multiply(-1)  # one expert's sign
    wrong, *_ = run(p, stream, stored=kept, length=jnp.int32(length), rows=at)
    assert (np.abs(wrong - want.stream) > bound).any()


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 1], ids=["sliding", "full"])
def test_looped_phases_beside_the_reference_layer(number):
    """The comparison of tests/gpu/test_reference.py, by the CPU's phases; and it sees a wrong weight."""
    config = replace(MINI, nvfp4_layers=tuple(range(6)), num_local_experts=64, num_experts_per_tok=4)
    rows, admitted, context = 16, 20, 40
    packed = layer.random_layer(jax.random.key(number), config, admitted)
    stream = jax.random.normal(jax.random.key(3), (rows, config.hidden_size), jnp.float32)
    kept = [layer.random_bf16(jax.random.key(7 + j), (1, n, config.head_dim))
            for j, n in enumerate((config.window(number) or 64,) * 2 + (16,) * 2)]
    want = reference_layer(config, number, packed, stream, LayerCache(*kept[:2]), context, admitted)
    call = Call(config, DecodeConfig())
    state = RowState(chain(rows), jnp.array([context, rows, 0], jnp.int32), jnp.zeros(16, jnp.int32))
    cos_sin = call.angles(context + jnp.arange(rows, dtype=jnp.int32))
    got, ids, *_ = jax.jit(partial(rank_layer, call, number))(packed, stream, cos_sin, state, LayerCache(*kept[:2]),
                                                              LayerCache(*kept[2:]))
    errors = row_errors(np.asarray(got), np.asarray(ids), *want)[:, 0]
    # With K of 128 one bf16 flip early in a layer moves many columns of its row, each by a unit or more.
    assert np.median(errors) <= RESIDUAL_BOUND and errors.max() <= 8 * RESIDUAL_BOUND, errors
    wrong = dict(packed, dense=packed["dense"].at[0, 1001].set(packed["dense"][0, 1001] ^ 0x40))
    wrong = reference_layer(config, number, wrong, stream, LayerCache(*kept[:2]), context, admitted)
    with pytest.raises(AssertionError):  # other experts, or values too far
        errors = row_errors(np.asarray(got), np.asarray(ids), *wrong)[:, 0]
        assert np.median(errors) <= RESIDUAL_BOUND


def test_bounds_of_the_released_sizes():
    """Noise as between two orders of float32 sums passes; three times as much, one column, or other experts do not."""
    rng = np.random.default_rng(0)
    want, noise = (rng.normal(size=(16, 8192)).astype(np.float32) for _ in range(2))
    ids = np.argsort(rng.normal(size=(16, 256)), -1)[:, :8]
    check_released(row_errors(want + 0.002 * noise, ids, want, ids[:, ::-1]))
    with pytest.raises(AssertionError, match=r"RMS 0\.006"):
        check_released(row_errors(want + 0.006 * noise, ids, want, ids))
    with pytest.raises(AssertionError, match=r"largest 0\.04"):
        check_released(row_errors(want + 0.04 * np.eye(16, 8192, dtype=np.float32), ids, want, ids))
    with pytest.raises(AssertionError, match=r"rows with other experts: \[3 7\]"):
        row_errors(want, np.where(np.isin(np.arange(16), (3, 7))[:, None], (ids + 1) % 256, ids), want, ids)


@pytest.mark.slow
def test_baseline_runs():
    """Two of five layers of MINI, as the benchmark runs them; a run leaves nothing behind for the next."""
    config = replace(MINI, nvfp4_layers=tuple(range(6)), num_local_experts=64, num_experts_per_tok=4)
    case = Case(distinct=12, rows=3, context=20, layers=5)
    layers = reference.ReferenceLayers(case, config)
    run = layer.Samples(layers)
    for n in range(2):
        run.batch([jax.random.normal(jax.random.key(n), (3, config.hidden_size))], counted=n > 0)
    run.check_repeat()
    timing = run.timing()
    assert timing.failed == "" and 4 < timing.distinct <= 12
    assert timing.layers == len(layers.params) == reference.MAX_LAYERS == 2 and run.hits[0].shape == (3, 4)
    assert [x.keys.shape for x in layers.kept] == [(1, 8, 64)] * 2


def program(rows=16, **sizes):
    """Two layers of the released sizes but for `sizes`, traced; no weight is made."""
    config = replace(RELEASED, nvfp4_layers=tuple(range(RELEASED.num_hidden_layers)), **sizes)
    case = Case(distinct=min(49, 8 * rows), rows=rows, layers=2)
    p = jax.eval_shape(partial(reference.random_slice, config=config, admitted=53), jax.random.key(0))
    keys = jax.ShapeDtypeStruct((config.num_key_value_heads // NUM_SLICES, 2048, config.head_dim), jnp.bfloat16)
    stream = jax.ShapeDtypeStruct((rows, config.hidden_size), jnp.float32)
    run = partial(reference.rank_layers, case=case, config=config)
    return jax.jit(run).trace(stream, [LayerCache(keys, keys)] * 2, [p, p])


def check_program():
    """Twice as many experts, of which as many are hit, cost nothing but a wider router; no loop, no captured weight,
    and nothing that grows with the rows."""
    traced, wider, fewer = program(), program(num_local_experts=512), program(rows=2)
    texts = [t.lower().as_text() for t in (traced, wider, fewer)]
    assert sum(np.asarray(x).nbytes for t in (traced, wider, fewer) for x in t.jaxpr.consts) < 2**12
    assert len({text.count("\n") for text in texts}) == 1 and max(map(len, texts)) < 400_000
    assert all("stablehlo.while" not in text for text in texts)
    few, many = traced.lower().compile(), wider.lower().compile()
    assert "while(" not in few.as_text()
    more = many.memory_analysis().temp_size_in_bytes - few.memory_analysis().temp_size_in_bytes
    assert more < 2**20, f"512 experts need {more} bytes more than 256"
    flops = [x.cost_analysis()["flops"] for x in (few, many)]
    assert flops[1] < 1.01 * flops[0], f"flops of 256 and 512 experts: {flops}"


@pytest.mark.slow
def test_baseline_reads_and_multiplies_the_experts_hit_alone(monkeypatch):
    check_program()
    monkeypatch.setattr(reference, "admitted_experts", lambda case, config: config.num_local_experts)
    with pytest.raises(AssertionError, match="512 experts need"):
        check_program()


def test_baseline_reads_the_kernels_bytes():
    """Of dense GEMMs and of an expert, so that the two rates compare."""
    p = jax.eval_shape(lambda key: reference.random_slice(key, RELEASED, 51), jax.random.key(0))
    layers = object.__new__(reference.ReferenceLayers)
    layers.params, layers.config = [jax.tree.map(Sized, p)], RELEASED
    at = layer.layout(RELEASED)
    assert layers.dense_bytes == at["dense.bytes"]
    assert layers.expert_bytes == at["experts.bytes"]


class Sized:
    """A shape that knows its bytes."""

    def __init__(self, x):
        self.ndim, self.nbytes = x.ndim, x.size * x.dtype.itemsize


def test_the_cases_layers_are_sliding_and_full():
    kinds = [RELEASED.window(i) is None for i in Case().numbers]
    assert kinds == [False, False, False, True] * 2
    assert Case(context=5000).slots(RELEASED, 5) >= 5000 + 16 and Case(context=5000).slots(RELEASED, 2) == 2048
