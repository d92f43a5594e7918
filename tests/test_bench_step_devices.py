"""`musejax bench step --devices` without a GPU: refusals, line and JSON from canned figures, turns of stand-ins, the
program by tracing, and on two fake devices of the CPU."""

import json
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import bench_command
import bench_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_command import BenchCommand
from bench_steps import TIMING, Runs
from helpers import assert_same_bits
from jax import lax

from musejax import ffi
from musejax.bench import layer, limits, step
from musejax.bench.launches import Launches, count_launches
from musejax.bench.step_cases import StepCase
from musejax.config import NUM_SLICES
from musejax.sharding import AXIS, make_mesh

TWO = StepCase(layers=2, devices=2)
SIZES = (8192, 128, 16, 64, 4096, 4096, 256, 8)
LOOPED = replace(TIMING, baseline=None, step=(7.9, 8.0, 8.1), draft=(0.9, 1.0, 1.1), verify=(6.6, 6.75, 6.9),
                 launches=Launches(36, False))
EXCHANGED = replace(TIMING, baseline=None, looped=LOOPED)


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command with canned timings -> (exit code, stdout, stderr)."""
    monkeypatch.setattr(step, "prepare", lambda case, baseline: f"mesh of {case.devices}")
    return BenchCommand(capsys, monkeypatch, step, "step", EXCHANGED)


def refused(capsys, *argv):
    return bench_command.refused(capsys, "step", *argv)


# ------------------------------------------------------------------ the command


def test_line(run):
    code, out, err = run("--devices", 2, "--layers", 20)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert run.measured == [(StepCase(layers=20, devices=2), 9, False, "mesh of 2")]
    assert out.startswith(
        "NVIDIA H200; GPUs 2; exchanged by kernels while they run: layers, 1 of 8 slices each, the other 6 looped "
        "back, and drafter, 4 of 8 each, none looped back; by all-gathers of XLA: embedding rows, maxima and sums of "
        "the LM head, 4 of 8 each, none looped back; one speculative step of the released sizes: ")
    assert "; 18.00 GB of weights on each, 1800 GB/s, 40.0% of 4500; " in out
    assert out.endswith(
        "; result ba9876543210; the same work on one GPU, all exchanges looped back, in turns: step 8.000 ms (7.900 to "
        "8.100): draft 1.000 ms (0.900 to 1.100), verify 6.750 ms (6.600 to 6.900), rest 0.250 ms; 36 launches; the "
        "exchange adds 25.0%; result ba9876543210\n")


@pytest.mark.parametrize("devices, slices, said", [
    (2, 4, "layers, 4 of 8 slices each, none looped back, and drafter, 4 of 8 each, none looped back; "),
    (8, 1, "layers, 1 of 8 slices each, none looped back, and drafter, 1 of 8 each, none looped back; "),
    (4, 1, "layers, 1 of 8 slices each, the other 4 looped back, and drafter, 2 of 8 each, none looped back; "),
    (1, 2, "; GPUs 1, 2 of 8 slices, the others looped back; "),
    (1, 8, "; GPUs 1, 8 of 8 slices; "),
])
def test_ranks_are_told(run, devices, slices, said):
    assert said in run("--devices", devices, "--slices", slices)[1]


def test_json(run, tmp_path):
    file = tmp_path / "step.json"
    assert run("--devices", 2, "--json", file)[0] == 0
    (result,) = json.loads(file.read_text())["cases"]
    assert (result["case"]["devices"], result["case"]["slices"], result["exchange"]) == (2, 1, 0.25)
    assert (result["looped"]["step"], result["looped"]["digest"]) == ([7.9, 8.0, 8.1], "ba9876543210")
    assert (result["launches"], result["looped"]["launches"], result["looped"]["rest"]) == (40, 36, 0.25)


def test_other_bits_without_exchange_fail_the_command(run, tmp_path):
    text = "the steps beside those without exchange: expected the same bits, got others"
    for wrong in (replace(EXCHANGED, failed=text), replace(EXCHANGED, looped=replace(LOOPED, failed=text))):
        code, out, _ = run("--devices", 2, "--json", tmp_path / "step.json", timing=wrong)
        assert code == 1 and out.endswith(f"; FAILED: {text}\n")
        assert json.loads((tmp_path / "step.json").read_text())["failed"] == 1


def test_wrong_arguments(capsys):
    assert "bench step: devices: expected 1 to 8 (one a rank), got 9" in refused(capsys, "--devices", 9)
    assert "bench step: devices: expected 1, 2, 4 or 8, got 3" in refused(capsys, "--devices", 3)
    assert "slices: expected 1 to 8 (all there are), got 0" in refused(capsys, "--slices", 0)
    assert "slices: expected 1, 2, 4 or 8, at most 8 on all devices together, got 4 on each of 4" in refused(
        capsys, "--devices", 4, "--slices", 4)


# ------------------------------------------------------------------ before anything is run


class Gpu:
    """One that the CPU's devices stand for; `room`: bytes that JAX may take of it."""

    platform, process_index, room = "gpu", 0, 10**12

    def memory_stats(self):
        return {"bytes_limit": self.room, "bytes_in_use": 10**9}


@pytest.fixture
def gpu(monkeypatch):
    """One GPU, and a library for the released sizes; tells what was connected."""
    here, connected, targets = Gpu(), [], dict.fromkeys(step.TARGETS + step.EXCHANGING)
    library, cuda = ffi.library, SimpleNamespace(targets=lambda: targets)
    monkeypatch.setattr(ffi, "library", lambda platform="cpu": cuda if platform == "cuda" else library(platform))
    monkeypatch.setattr(ffi, "layer_instances", lambda: [(*SIZES, n) for n in (1, 2, 4, 8)])
    monkeypatch.setattr(ffi, "connect", lambda *arguments: connected.append(arguments))
    monkeypatch.setattr(ffi, "connect_draft", lambda model, *arguments: connected.append(arguments))
    monkeypatch.setattr(jax, "devices", lambda platform=None: [here])
    monkeypatch.setattr(jax, "local_devices", lambda *arguments, **more: [here])
    here.connected = connected
    return here


@pytest.fixture
def two_gpus(gpu, monkeypatch):
    mesh = SimpleNamespace(devices=np.array([gpu, gpu]), size=2)
    monkeypatch.setattr(layer, "make_mesh", lambda devices, platform: mesh)
    for module in (layer, step):
        monkeypatch.setattr(module, "ordinals", lambda mesh: (0, 1))
    return mesh


def test_too_few_gpus(gpu, capsys, monkeypatch):
    """Told before the memory's rate is measured."""
    monkeypatch.setattr(limits, "open_library", lambda: (None, "NVIDIA H200"))
    assert ("error: bench step: devices: expected at most 1 (those JAX sees here), got 2: ask for fewer, or run it "
            "where JAX sees as many GPUs") in refused(capsys, "--devices", 2)


def test_gpus_are_connected(two_gpus, gpu):
    """For layers and for the drafter, whose rings hold 2,048 positions."""
    assert step.prepare(StepCase(layers=4, devices=2, context=4096)) is two_gpus
    assert gpu.connected == [((*SIZES, 1), 4096 + 32, (0, 1)), (5, 2048, (0, 1))]
    assert step.prepare(StepCase(layers=4)) is None


@pytest.mark.parametrize("name", ["connect", "connect_draft"])
def test_gpus_without_peer_access(two_gpus, monkeypatch, name):
    def connect(*arguments):
        raise ffi.LibraryError("connect: expected GPUs with peer access, got 0 and 1")

    monkeypatch.setattr(ffi, name, connect)
    with pytest.raises(limits.BenchError, match="bench step: connect: expected GPUs with peer access, got 0 and 1"):
        step.prepare(TWO)


def test_an_older_library(two_gpus, monkeypatch):
    monkeypatch.setattr(step, "EXCHANGING", ("musejax_other",))
    with pytest.raises(limits.BenchError, match="got one without musejax_other; build"):
        step.prepare(TWO)
    assert step.prepare(StepCase(layers=2)) is None


def test_no_baseline_of_several_ranks(gpu):
    for case in (TWO, StepCase(slices=8)):
        with pytest.raises(limits.BenchError, match="expected devices 1 and slices 1, got"):
            step.prepare(case, baseline=True)


def test_layers_that_do_not_fit(two_gpus, gpu):
    """Of the released sizes a slice of a layer takes about 1 GB: what is refused names what is taken."""
    gpu.room = 35 * 10**9
    with pytest.raises(limits.BenchError) as error:
        step.prepare(StepCase(devices=2))
    text = str(error.value)
    found = re.search(r"at most (\d+) \(what fits into the 34.0 GB .*\), got 62, which need (\d+)", text)
    fit, need = map(int, found.groups())
    assert 10 < fit < 35 and 70 < need < 90 and "XLA_PYTHON_CLIENT_MEM_FRACTION" in text
    step.prepare(StepCase(devices=2, layers=fit))
    for more in (StepCase(devices=2, layers=fit + 1), StepCase(devices=2, layers=fit, slices=4)):
        with pytest.raises(limits.BenchError, match="what fits"):
            step.prepare(more)


# ------------------------------------------------------------------ weights


def test_weights_of_slices():
    """Embedding, drafter and LM head have all slices on the devices together, layers those asked for."""
    one, more = (jax.eval_shape(lambda case=case: step.random_weights(case, 0))
                 for case in (StepCase(layers=2), StepCase(layers=2, devices=2, slices=2)))
    for name, slices in (("embed", 4), ("lm_head", 4)):
        assert more[name].shape == (slices, *one[name].shape[1:])
    for x, y in zip(jax.tree.leaves(one["drafter"]), jax.tree.leaves(more["drafter"]), strict=True):
        assert y.shape == ((4, *x.shape[1:]) if x.dtype == jnp.uint8 else x.shape)
    for x, y in zip(jax.tree.leaves(one["layers"]), jax.tree.leaves(more["layers"]), strict=True):
        assert y.shape == ((2, *x.shape[1:]) if x.dtype == jnp.uint8 else x.shape)
    assert step.draft_bytes(more) == 4 * step.draft_bytes(one)
    head = one["lm_head"].size
    assert step.verify_bytes(more, [49, 49]) == 2 * (step.verify_bytes(one, [49, 49]) - head) + 4 * head


# ------------------------------------------------------------------ the program


def test_program(monkeypatch):
    """Lowered for CUDA: the targets that exchange, on the devices given, four all-gathers, and state in place."""
    library = ffi.library
    monkeypatch.setattr(ffi, "library", lambda platform="cpu": library("cpu"))
    monkeypatch.setattr(ffi, "connect_draft", lambda *arguments: None)
    monkeypatch.setattr(step, "ordinals", lambda mesh: () if mesh is None else (3, 5))
    runs = object.__new__(step.Runs)
    for mesh in (make_mesh(2), None):
        runs.mesh, program = mesh, step.Step(TWO, mesh)
        shapes = jax.eval_shape(lambda program=program: (program.start(0), step.random_weights(TWO, 0)))
        text = runs._jit(program.step, 0).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        called = dict(angles=3, draft_tree=1, embed_norm=1, layers_looped=1, head=1, head_sums=1, logprob=1)
        names = ("draft", "draft_commit") if mesh else ("draft_looped", "draft_commit_looped")
        assert Counter(re.findall(r"custom_call @musejax_(\w+)", text)) == called | dict.fromkeys(names, 1)
        assert text.count("stablehlo.all_gather") == (4 if mesh else 0)
        assert text.count("devices = dense<[3, 5]>") == (3 if mesh else 0)
        assert "stablehlo.while" not in text
        state = len(jax.tree.leaves(shapes[0]))
        assert {int(i) for i in re.findall(r"tf.aliasing_output = (\d+)", text)} == set(range(state))


@pytest.fixture
def small(monkeypatch):
    """`measure` on two fake devices, of programs of small sizes."""
    bench_steps.use_phases(monkeypatch)
    monkeypatch.setattr(step, "Step", bench_steps.SmallStep)
    monkeypatch.setattr(step, "random_weights", bench_steps.small_weights)
    return lambda: step.measure(TWO, batches=1, each=2, mesh=make_mesh(2))


def test_bits_without_exchange_are_those_with(small):
    timing = small()
    assert timing.failures == [] and timing.digest == timing.looped.digest
    assert timing.launches.count > timing.looped.launches.count  # all-gathers
    assert timing.needed == timing.looped.needed and timing.looped.looped is None


def test_an_exchange_that_goes_wrong_is_seen(small, monkeypatch):
    """On both devices alike."""
    plain = step.gather
    monkeypatch.setattr(step, "gather", lambda x: plain(x).at[NUM_SLICES - 1].set(0))
    assert small().failures == [
        "the first step beside the one without exchange: expected the same bits, got others in 3 of 6 arrays"]


def test_devices_that_part_are_seen(small, monkeypatch):
    plain = step.gather
    monkeypatch.setattr(step, "gather", lambda x: plain(x).at[NUM_SLICES - 1].multiply(
        (1 + lax.axis_index(AXIS)).astype(x.dtype)))
    monkeypatch.setattr(step.StepSamples, "check_same", lambda self, looped: None)
    assert small().failures == ["results on several GPUs: expected the same bits on each, got others on GPU 1"]


def test_copies():
    """Whole on each device, and apart again."""
    mesh, x = make_mesh(2), jnp.arange(6.0).reshape(2, 3)
    out = step.copies({"x": x}, mesh)["x"]
    assert out.shape == (2, 3) and out.is_fully_replicated
    for device, part in zip(mesh.devices.flat, step.each_copy(out), strict=True):
        assert part.devices() == {device}
        assert_same_bits(part, x)


# ------------------------------------------------------------------ measuring


@pytest.fixture
def measured(monkeypatch):
    def call(runs):
        monkeypatch.setattr(step, "Runs", lambda case, seed, mesh: runs)
        return step.measure(TWO, batches=2, each=2, mesh="a mesh")

    return call


def test_turns(measured):
    """Batch by batch, the same number of steps each."""
    order, runs = [], Runs(other=Runs())
    runs.order = runs.other.order = order
    timing = measured(runs)
    assert timing.failures == [] and timing.looped.digest == timing.digest
    assert runs.steps == runs.other.steps == 1 + 2 * 3 + 1
    assert order[:4] == ["step", "split"] * 2
    assert order[4:4 + 2 * 3 * 6] == (["step"] * 2 + ["draft"] * 4) * 2 * 3
    assert timing.exchange == timing.step[1] / timing.looped.step[1] - 1


@pytest.mark.parametrize("broken, text", [
    (1, "the first step beside the one without exchange: expected the same bits, got others in 1 of 7 arrays"),
    (3, "the steps beside those without exchange: expected the same bits, got others"),
])
def test_other_bits_without_exchange_are_seen(measured, broken, text):
    timing = measured(Runs(other=Runs(broken=broken)))
    assert timing.failed == text


def test_gathers_are_launches():
    hlo = """ENTRY %main.1 (x.1: f32[4,16]) -> f32[8,16] {
  %x.1 = f32[4,16]{1,0} parameter(0)
  %start.1 = (f32[4,16]{1,0}, f32[8,16]{1,0}) all-gather-start(%x.1), channel_id=1, dimensions={0}
  ROOT %done.1 = f32[8,16]{1,0} all-gather-done(%start.1)
}
"""
    assert count_launches(hlo) == Launches(1, False)
