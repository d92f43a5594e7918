"""`musejax bench step` without a GPU: refusals, line and JSON from canned figures, samples from stand-ins for the
program, its operands by tracing, and its way from step to step with stand-ins for the CUDA targets."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import bench_command
import bench_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_command import BenchCommand, Library
from bench_steps import BASELINE, TIMING, Runs

from musejax import ffi
from musejax.bench import layer, limits, step
from musejax.bench.launches import Launches, count_launches
from musejax.bench.phases import rank_layer
from musejax.bench.step_cases import StepCase
from musejax.cache import LayerCache
from musejax.config import MINI, RELEASED, DecodeConfig
from musejax.kernels.calls import Call, RowState
from musejax.kernels.forward import chain
from musejax.packing import packed_table
from musejax.speculation.packing import layout, packing_problems
from musejax.speculation.tree import chain_tree


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command with canned timings -> (exit code, stdout, stderr)."""
    monkeypatch.setattr(step, "prepare", lambda case, baseline: None)
    return BenchCommand(capsys, monkeypatch, step, "step", TIMING)


def refused(capsys, *argv):
    return bench_command.refused(capsys, "step", *argv)


# ------------------------------------------------------------------ the command


def test_line(run):
    code, out, err = run("--baseline")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert run.measured == [(StepCase(), 9, True, None)]
    line, baseline = out.split("; the layers only in plain JAX by XLA, ")
    assert line == (
        "NVIDIA H200; one rank of 8, exchanges looped back; one speculative step of the released sizes: drafter of 5 "
        "layers (FFN 24576), tree of 16, 62 layers (60 NVFP4, 2 bf16), head, accept, commit; rows 16; context 2048; "
        "D 49 asked, 48.8 met; step 10.000 ms (9.900 to 10.300): draft 0.625 ms (0.600 to 0.650), verify 9.125 ms "
        "(9.000 to 9.200), rest 0.250 ms; 40 launches, no loop; 18.00 GB of weights, 1800 GB/s, 40.0% of 4500; "
        "660 tokens/s at 6.6 accepted, assumed (1.0 of these random models); weights made in 31.2 s, compiled in "
        "12.5 s, first step 1.50 s; 68.5 GB in use, 67.5 of them weights and caches; result ba9876543210")
    assert baseline == ("2 layers measured and scaled to 62: D 48.5 met; 74.4 ms, 8.15 times verify; result "
                        "0123456789ab\n")


def test_options(run):
    code, out, _ = run("--layers", 8, "--context", 4096, "--distinct", 24, "--draft-inner", 8192, "--accepted", 2,
                       "--batches", 3, timing=replace(TIMING, baseline=None, launches=Launches(99, True)))
    assert code == 0 and run.measured == [(StepCase(24, 4096, 8, 8192, 2.0), 3, False, None)]
    assert "FFN 8192" in out and "8 layers (7 NVFP4, 1 bf16)" in out and "; 99 launches, a loop; " in out
    assert "; 200 tokens/s at 2 accepted, assumed" in out and "XLA" not in out


def test_json(run, tmp_path):
    file = tmp_path / "step.json"
    assert run("--json", file)[0] == 0
    result = json.loads(file.read_text())
    assert (result["device"], result["version"], result["batches"], result["failed"]) == ("NVIDIA H200", "1.2.3", 9, 0)
    assert result["roofline_gb_per_s"] == 4500 and result["seconds"] >= 0
    (result,) = result["cases"]
    assert result["case"] == dict(distinct=49, context=2048, layers=62, draft_inner=24576, accepted=6.6, devices=1,
                                  slices=1)
    assert result["looped"] is None and "exchange" not in result
    assert (result["launches"], result["loop"], result["rest"], result["share"]) == (40, False, 0.25, 0.4)
    assert result["step"] == [9.9, 10.0, 10.3] and result["tokens_per_s_assumed"] == pytest.approx(660)
    assert result["baseline"]["layers"] == 2 and result["baseline_ms_scaled"] == pytest.approx(74.4)
    assert result["admitted"] == 53 and result["failed"] == ""


@pytest.mark.parametrize("where", ["step", "baseline"])
def test_wrong_results_fail_the_command(run, tmp_path, where):
    text = "results: expected finite numbers, got others"
    change = dict(failed=text) if where == "step" else dict(baseline=replace(BASELINE, failed=text))
    code, out, _ = run("--json", tmp_path / "step.json", timing=replace(TIMING, **change))
    assert code == 1 and out.endswith(f"; FAILED: {text}\n")
    assert json.loads((tmp_path / "step.json").read_text())["failed"] == 1


def test_wrong_arguments(capsys, tmp_path):
    assert "distinct: expected 8 to 128 (rows 16, 8 choices each), got 129" in refused(capsys, "--distinct", 129)
    assert "distinct: expected 8 to 128 (rows 16, 8 choices each), got 7" in refused(capsys, "--distinct", 7)
    assert "context: expected 16 to 1048560 (accepted rows, and what the model takes), got 15" in refused(
        capsys, "--context", 15)
    assert "layers: expected 1 to 62 (what the model has), got 63" in refused(capsys, "--layers", 63)
    assert "layers: expected 1 to 62 (what the model has), got 0" in refused(capsys, "--layers", 0)
    for wrong in ("0.5", "17", "nan"):
        assert f"accepted: expected 1 to 16 (tokens of a step), got {wrong}" in refused(capsys, "--accepted", wrong)
    for wrong in (0, 512, 24577):
        assert f"draft_inner: expected a multiple of 1024, in which sums over K are made, got {wrong}" in refused(
            capsys, "--draft-inner", wrong)
    assert "expected an integer of at least 1, got '0'" in refused(capsys, "--batches", 0)
    assert "unrecognized arguments: --rows" in refused(capsys, "--rows", 8)
    missing = tmp_path / "none" / "step.json"
    assert f"--json {missing}: expected a file in a folder that exists" in refused(capsys, "--json", missing)


def test_without_a_cuda_build(capsys, monkeypatch):
    monkeypatch.setattr(ffi, "_loaded", {})
    monkeypatch.setitem(sys.modules, "musejax._cuda", None)
    assert "expected the library musejax._cuda" in refused(capsys)


def test_without_a_gpu(capsys, monkeypatch):
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    monkeypatch.setattr(ffi, "library", lambda platform: Library())
    assert "error: bench step: expected a GPU that JAX can use, got none" in refused(capsys)


def test_without_a_roofline(run, monkeypatch):
    failed = limits.Row("hbm", "hbm", "", 0, 0, 0, 0, "", "waited 2 s", "failed")
    monkeypatch.setattr(Library, "limits", lambda self, device, groups: [vars(failed)])
    code, out, err = run()
    assert (code, out) == (2, "") and "bench step: expected the figure hbm.steady, got waited 2 s" in err


def test_a_library_without_what_a_step_needs(monkeypatch):
    class Small:
        def targets(self):
            return dict.fromkeys(step.TARGETS[1:])

    released = (8192, 128, 16, 64, 4096, 4096, 256, 8, 1)
    monkeypatch.setattr(ffi, "library", lambda platform: Small())
    monkeypatch.setattr(ffi, "layer_instances", lambda: [released])
    with pytest.raises(limits.BenchError, match="got one without musejax_draft_looped; build"):
        step.check_library(StepCase())
    Small.targets = lambda self: dict.fromkeys(step.TARGETS)
    assert step.check_library(StepCase()) == released
    monkeypatch.setattr(ffi, "layer_instances", lambda: [(*released[:-1], 2)])
    with pytest.raises(limits.BenchError, match="got one without these sizes"):
        step.check_library(StepCase())


# ------------------------------------------------------------------ launches

HLO = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "<string>"

%add (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%a.1, %b.1)
}

%command_buffer (p.0: f32[16,8]) -> (f32[1,16,4], s32[16]) {
  %p.0 = f32[16,8]{1,0} parameter(0)
  %head.1 = (f32[1,16,4]{2,1,0}, /*index=1*/s32[16]{0}) custom-call(%p.0), custom_call_target="musejax_head", \
operand_layout_constraints={f32[16,8]{1,0}}, api_version=API_VERSION_TYPED_FFI, backend_config={"note": "x = copy(y)"}
  %part.1 = s32[16]{0} get-tuple-element(%head.1), index=1
  %copy.1 = s32[16]{0} copy(%part.1)
  ROOT %tuple.1 = (f32[1,16,4]{2,1,0}, s32[16]{0}) tuple(%head.1, %copy.1)
}

ENTRY %main.9 (x.1: f32[16,8]) -> (f32[16,8], s32[16]) {
  %x.1 = f32[16,8]{1,0} parameter(0), metadata={op_name="x"}
  %zero.1 = f32[] constant(0)
  %turned.1 = f32[8,16]{1,0} bitcast(%x.1)
  %fusion.1 = f32[16,8]{1,0} fusion(%turned.1), kind=kLoop, calls=%fused
  %looped.1 = f32[16,8]{1,0} custom-call(%fusion.1), custom_call_target="musejax_layers_looped"
  %call.1 = (f32[1,16,4]{2,1,0}, s32[16]{0}) call(%looped.1), to_apply=%command_buffer
  %ids.1 = s32[16]{0} get-tuple-element(%call.1), index=1
  %sort.1 = s32[16]{0} sort(%ids.1), dimensions={0}, to_apply=%add
  %start.1 = (s32[16]{0}, s32[16]{0}, u32[]) copy-start(%sort.1)
  %done.1 = s32[16]{0} copy-done(%start.1)
  ROOT %result.1 = (f32[16,8]{1,0}, s32[16]{0}) tuple(%looped.1, %done.1)
}
"""


def test_launches_are_counted():
    """A fusion, a sort, an FFI call, one of three kernels, and two copies."""
    assert count_launches(HLO) == Launches(8, False)


def test_one_instruction_more_is_one_launch_more():
    more = HLO.replace("  %sort.1 =", "  %extra.1 = s32[16]{0} copy(%ids.1)\n  %sort.1 =")
    assert count_launches(more).count == 9
    assert count_launches(HLO.replace("musejax_head", "musejax_head_sums")).count == 6
    quiet = HLO.replace("  %sort.1 =", "  %extra.1 = s32[16]{0} bitcast(%ids.1)\n  %sort.1 =")
    assert count_launches(quiet).count == 8


@pytest.mark.parametrize("old, new, message", [
    ("ENTRY ", "", "expected an HLO module with an entry computation"),
    ("%copy.1 = s32[16]{0} copy(%part.1)", "%copy.1 := copy %part.1", "expected an instruction, got %copy.1 := copy"),
    (", to_apply=%command_buffer", "", "expected to_apply= in an instruction call"),
])
def test_text_that_is_no_program_is_refused(old, new, message):
    with pytest.raises(limits.BenchError, match=re.escape(message)):
        count_launches(HLO.replace(old, new))


def test_programs_that_xla_compiled():
    """As this version prints them; a loop counts with one turn, and is told."""
    def text(f):
        return jax.jit(f).lower(jnp.arange(8.0)).compile().as_text()

    straight = count_launches(text(lambda x: jnp.sort(x) @ jnp.ones((8, 3))))
    assert straight.count >= 2 and not straight.loop
    assert count_launches(text(lambda x: jax.lax.while_loop(lambda y: y.sum() < 1e3, lambda y: y * 2, x))).loop


# ------------------------------------------------------------------ weights


@pytest.fixture
def no_cuda(monkeypatch):
    """The CPU library in place of the CUDA one: programs can be traced, not run."""
    library = ffi.library
    monkeypatch.setattr(ffi, "library", lambda platform="cpu": library("cpu"))


def shapes(tree):
    return jax.tree.map(lambda x: (x.dtype.name, x.shape), tree)


@pytest.fixture(scope="module")
def weights():
    """Shapes of the default case's."""
    return jax.eval_shape(lambda: step.random_weights(StepCase(), 0))


def test_drafter_slice_is_as_packed(weights):
    """Every array is one slice of what `pack_drafter` makes, or whole."""
    config, at = StepCase().drafter, layout(StepCase().drafter)
    assert packing_problems(config) == [] and config.conv_groups == 512
    config.check_against(RELEASED)
    got = shapes(weights["drafter"])
    assert got.pop("layers") == [dict(dense=("uint8", (1, at["dense.bytes"])),
                                      small=("float32", (at["small.count"],)))] * 5
    gain, codes = ("float32", (8192,)), ("bfloat16", (202048, 256))
    assert got == dict(fc=("uint8", (1, at["fc.bytes"])), selector=("uint8", (1, at["selector.bytes"])),
                       hidden_norm=gain, norm=gain, predecessor=codes, successor=codes)


def test_target_slice_is_as_packed(weights):
    rows = {row.path: row for row in packed_table(StepCase().config)}
    for i in (0, 1, 60, 61):
        for name, x in weights["layers"][i].items():
            row = rows["layers", i, name]
            assert (x.dtype, x.shape) == (row.dtype, (1, *row.shape[1:]) if row.split else row.shape)
    for name in ("embed", "lm_head", "final_norm"):
        row, x = rows[name,], weights[name]
        assert (x.dtype, x.shape) == (row.dtype, (1, *row.shape[1:]) if row.split else row.shape)


def test_bytes_read(weights):
    """Matrices without their padding to tiles, by the sizes of the model."""
    d, head = 8192, 25264 * 8192 * 2
    one = (4 * 64 * 2 + 8 * 128 + 2 * 128) * d + 1024 * d + 3 * 3072 * d  # kernel projections, qkv, out, FFN
    want = 2 * (5 * one + 5 * d * 1024 + 32 * d) + head
    assert step.draft_bytes(weights) == want
    dense = layer.layout(RELEASED)["dense.bytes"]
    nvfp4, bf16 = 3 * 512 * 4096 * 9 // 16, 3 * 512 * 4096 * 2
    distinct = np.full(62, 49.0)
    assert step.verify_bytes(weights, distinct) == 62 * dense + 49 * (60 * nvfp4 + 2 * bf16) + head
    distinct[0] = 50
    assert step.verify_bytes(weights, distinct) == 62 * dense + 49 * (60 * nvfp4 + 2 * bf16) + head + bf16


def test_each_kind_of_layer_is_compiled_once(monkeypatch):
    """62 layers, two kinds: what is static must not depend on the layer."""
    kinds = Counter()
    monkeypatch.setattr(step, "random_layer", lambda key, *static: kinds.update([static]))
    jax.eval_shape(lambda: step.random_weights(StepCase(), 0))
    assert sorted(kinds.values()) == [2, 60]


def test_bf16_experts_are_a_layer():
    """Of small sizes, through the CPU's phases: finite, different experts, none that the bias keeps out."""
    config = replace(MINI, num_local_experts=64, num_experts_per_tok=4)
    p = layer.random_layer(jax.random.key(1), config, 20, False)
    words = np.asarray(p["experts"]).view(np.uint16)
    assert {int(x) for x in np.unique(words >> 7 & 0xFF)} == {119, 120, 121, 122}
    assert len({expert.tobytes() for expert in words[0]}) == 64 and 0.49 < (words >> 15).mean() < 0.51
    call, rows = Call(config, DecodeConfig()), 16
    kept = [layer.random_bf16(jax.random.key(j), (1, n, config.head_dim)) for j, n in enumerate((8, 8, 16, 16))]
    state = RowState(chain(rows), jnp.array([40, rows, 0], jnp.int32), jnp.zeros(16, jnp.int32))
    stream = jax.random.normal(jax.random.key(3), (rows, config.hidden_size), jnp.float32)
    got, ids, *_ = jax.jit(partial(rank_layer, call, 2))(
        p, stream, call.angles(40 + jnp.arange(rows, dtype=jnp.int32)), state, LayerCache(*kept[:2]),
        LayerCache(*kept[2:]))
    assert np.isfinite(got).all() and not np.array_equal(got, stream)
    assert 4 < np.unique(ids).size <= 20


# ------------------------------------------------------------------ the program


@pytest.mark.parametrize("layers", [1, 20, 62])
def test_program(no_cuda, layers):
    """Lowered for CUDA: each target as often as a step needs it, no loop, all state updated in place."""
    program = step.Step(StepCase(layers=layers))
    weights = jax.eval_shape(lambda: step.random_weights(program.case, 0))
    state = jax.eval_shape(lambda: program.start(0))
    after, result = jax.eval_shape(program.step, state, weights)
    assert shapes(after) == shapes(state)
    assert result.ids.shape == (layers, 16, 8) and result.stream.shape == (16, 8192)
    text = jax.jit(program.step, donate_argnums=(0,)).trace(state, weights).lower(
        lowering_platforms=("cuda",)).as_text()
    assert Counter(re.findall(r"custom_call @musejax_(\w+)", text)) == Counter(
        angles=3, draft_looped=1, draft_tree=1, embed_norm=1, layers_looped=1, head=1, head_sums=1, logprob=1,
        draft_commit_looped=1)
    assert "stablehlo.while" not in text
    donated = {int(i) for i in re.findall(r"tf.aliasing_output = (\d+)", text)}
    assert donated == set(range(len(jax.tree.leaves(state))))


def test_taps_of_fewer_layers():
    assert StepCase().tapped == (1, 16, 30, 44, 59)
    assert StepCase(layers=20).tapped == (1, 16, 19, 19, 19) and StepCase(layers=1).tapped == (0,) * 5


GUESSES = 3


@pytest.fixture
def small_step(monkeypatch):
    """(program, weights, state) of small sizes whose target confirms `program.guesses`, and a commit that records what
    it is given."""
    bench_steps.use_phases(monkeypatch)
    program = bench_steps.SmallStep(StepCase(layers=2))

    def commit(weights, rings, taps, start, path, count):
        program.commits.append((int(start), path.tolist(), int(count)))
        return rings

    program.guesses, program.commits, program.commit = [], [], commit
    return program, bench_steps.small_weights(program.case, 0), program.start(0)


def test_from_step_to_step(small_step):
    """Guesses that the target confirms are emitted, committed before the length, and in the cache a step later."""
    program, weights, first = small_step
    truth = []
    while len(truth) < GUESSES:  # what the target itself says, one token more each time
        program.guesses = [*truth, *[500] * (GUESSES - len(truth))]
        state, result = program.step(first, weights)
        truth = [int(x) for x in result.emitted[:len(truth) + 1]]
    program.guesses, program.commits = truth, []
    state, result = program.step(first, weights)
    assert int(result.count) == 4 and result.emitted[:3].tolist() == truth and int(result.nodes) == 4
    assert program.commits == [(36, [0, 1, 2, 3] + [0] * 12, 4)]
    assert (int(state.length), int(state.accepted), int(state.token)) == (40, 4, int(result.emitted[3]))
    assert np.isfinite(result.stream[:4]).all() and (result.logprobs[:4] < 0).all()
    later, _ = program.step(state, weights)
    for j in range(2):  # keys and values of the full layer
        stored, flight = (np.asarray(x[4 + j]) for x in (later.kept, [*state.kept[:4], *state.kept[6:8]]))
        np.testing.assert_array_equal(stored[:, 36:40], flight[:, :4])
        np.testing.assert_array_equal(stored[:, :36], np.asarray(first.kept[4 + j])[:, :36])


# ------------------------------------------------------------------ measuring


class Program:
    """Stand-in for `step.Step`, small enough to compile and run on the CPU."""

    def __init__(self, case, mesh):
        self.case = case

    def start(self, seed):
        key = jax.random.key(seed, impl=step.GENERATOR)
        rings = tuple(layer.random_bf16(key, (5, 1, 4, 2)) for _ in range(2))
        kept = [layer.random_bf16(key, (2, 8, 4)) for _ in range(8)]
        return step.State(kept, rings, jnp.int32(40), jnp.int32(1), jnp.int32(0), jnp.zeros(16, jnp.int32))

    def draft(self, weights, rings, length, token):
        return chain_tree(token, jnp.arange(15, dtype=jnp.int32))

    def verify(self, weights, kept, length, accepted, path, tree):
        row = jnp.zeros(16, jnp.int32)
        said = step.Verified(row, row * 0.5, weights["stream"] + tree.tokens[:, None], row, jnp.zeros((2, 16, 8), int))
        return said, [x + 1 for x in kept]

    def step(self, state, weights):
        tree = self.draft(weights, state.rings, state.length, state.token)
        said, kept = self.verify(weights, state.kept, state.length, state.accepted, state.path, tree)
        count = tree.depth[2]  # in the state and in the result
        result = step.Result(tree.tokens, count, tree.num_valid, said.logprobs, said.stream, said.ids)
        return state._replace(kept=kept, token=state.token + 1, accepted=count), result


@pytest.fixture
def small_runs(monkeypatch):
    """`step.Runs` of `Program`."""
    monkeypatch.setattr(step, "Step", Program)
    monkeypatch.setattr(step, "random_weights",
                        lambda case, seed, mesh=None: {"stream": jnp.ones((16, 4), jnp.float32)})
    return step.Runs(StepCase(layers=2))


def test_runs(small_runs):
    """Compiled before weights are there; steps go on from each other, and leave the parts alone as they were."""
    runs = small_runs
    assert runs.needed == 16 * 4 * 4 + 8 * 128 + 2 * 80 + 3 * 4 + 64
    assert runs.launches.count >= 1 and runs.compile_s > 0 and runs.weights_s > 0
    runs.split()
    first, second = runs.step(), runs.step()
    assert (int(first.emitted[0]), int(second.emitted[0]), int(runs.state.token)) == (1, 2, 3)
    assert int(first.count) == int(second.count) == int(runs.state.accepted) == 2, "donating a state leaves results"
    want = runs.start().kept[0] + 1 + 1
    assert all(np.array_equal(x, want) for x in runs.state.kept)
    runs.verify()  # after that of split
    assert all(np.array_equal(x, want) for x in runs.kept)
    assert int(runs.draft().tokens[0]) == 1


@pytest.fixture
def measured(monkeypatch):
    def call(runs, **how):
        monkeypatch.setattr(step, "Runs", lambda case, seed, mesh: runs)
        return step.measure(StepCase(layers=2), batches=2, each=2, **how)

    return call


def test_measure(measured):
    runs = Runs()
    timing = measured(runs)
    assert runs.order[:4] == ["step", "split", "step", "step"] and runs.order[4:8] == ["draft"] * 4
    assert runs.steps == 1 + 2 * 3 + 1 and runs.order.count("draft") == 2 * 2 * 3
    assert timing.failed == "" and timing.emitted == 2 and timing.distinct == 10  # 8 and 12
    assert timing.weight_bytes == (1 + 2 + 100 + 15) + (100 + 100 + (8 + 12) * 10)
    assert timing.step[0] <= timing.step[1] <= timing.step[2] and timing.launches == Launches(7, False)
    assert timing.digest == measured(Runs()).digest != measured(Runs(value=2.0)).digest


def test_a_flipped_bit_in_the_repeat_is_seen(measured):
    assert measured(Runs(broken=8)).failed == (
        "the first step repeated: expected the same bits, got others in 1 of 7 arrays")


def test_wrong_results_are_seen(measured):
    assert measured(Runs(value=np.inf)).failed == "results: expected finite numbers, got others"
    assert measured(Runs(nodes=9)).failed == "tree: expected 16 nodes, got 9"


def test_a_wait_that_did_not_end_is_seen(measured, monkeypatch):
    class Late:
        def layer_error(self):
            return "draft: a wait did not end within 2000 ms: rank 0, SM 7"

        def reset_after_error(self):
            return 0

    monkeypatch.setattr(ffi, "_loaded", {"cuda": Late()})
    with pytest.raises(ffi.WaitError, match="rank 0, SM 7"):
        measured(Runs())


def test_baseline_takes_turns(measured, monkeypatch):
    """Two layers; its samples are per layer."""
    from musejax.bench import reference

    class Layers:
        dense_bytes, expert_bytes, launches = 1000, 10, 0

        def __init__(self, case, config, seed):
            self.case, self.config = case, config

        def launch(self, stream):
            Layers.launches += 1
            return stream, jnp.zeros((2, 16, 8), jnp.int32)

    monkeypatch.setattr(reference, "ReferenceLayers", Layers)
    timing = measured(Runs(), baseline=True)
    assert Layers.launches == 2 * 3 and timing.baseline.layers == 2 and timing.failures == []
    assert timing.baseline_ms(StepCase()) == timing.baseline.us[1] * 62 / 1e3
