"""scripts/peer_layer.py: everything around PyTorch without it, with stand-ins; and where it and transformers are
installed, the layers themselves in small sizes on a CPU."""

import importlib
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from musejax.bench import cases
from musejax.bench.layer import layout
from musejax.config import NUM_SLICES, RELEASED


@pytest.fixture
def timing(script):
    ways = (script.WayTiming("captured", (495.0, 500.0, 510.5), 61.0),
            script.WayTiming("reduce-overhead", (540.0, 550.0, 560.0), 70.0, skipped_graphs=2),
            script.WayTiming("max-autotune", compile_s=150.0, why_not="not compiled within 150 s"))
    return script.Timing(ways, 48.75, 700e6, 620e6, 0.0131)


@pytest.fixture
def peer_modules(script, monkeypatch):
    """What can be imported: {name: module}; a name that is missing cannot."""
    present = {}
    real = importlib.import_module

    def import_module(name, *more):
        if not name.startswith(("torch", "transformers")):
            return real(name, *more)
        if name not in present:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return present[name]

    monkeypatch.setattr(script.importlib, "import_module", import_module)
    return present


def run(script, monkeypatch, capsys, *argv):
    """-> (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["peer_layer.py", *map(str, argv)])
    try:
        code = script.main()
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


# ------------------------------------------------------------------ sizes and bytes


def test_what_a_config_says_by_a_rule(script):
    """The peer's config gets the factor of the router by a rule, and no rotation where a layer sees all."""
    assert (256 / script.RELEASED.hidden) ** 0.5 == pytest.approx(RELEASED.output_multiplier, rel=1e-12)
    assert script.Case(layers=60).full == [not RELEASED.layer_rope_theta[i] for i in cases.Case(layers=60).numbers]


def test_bytes_by_hand(script):
    """The numbers of the specification: what one layer reads, whole, in bfloat16 but for the router."""
    attention = 8192 * (8192 + 1024 + 1024 + 8192) + 8192 * 8192
    pool, router, expert = 8192 * 4096 + 4096 * 8192, 256 * 8192, 3 * 4096 * 4096
    assert (attention, pool, router, expert) == (218_103_808, 67_108_864, 2_097_152, 50_331_648)
    whole, pooled, inner = script.RELEASED, script.RELEASED.rank("pooled"), script.RELEASED.rank("inner")
    assert whole.dense_bytes == 2 * attention + 2 * pool + 4 * router == 578_813_952
    assert whole.layer_bytes == whole.dense_bytes + 256 * 2 * expert
    for rank in (pooled, inner):
        assert rank.attention_bytes * 8 == 2 * attention
        assert rank.expert_bytes * 8 == 2 * expert
        assert rank.router_bytes == 4 * router  # whole
    assert pooled.pool_bytes * 8 == 2 * pool
    assert inner.pool_bytes == 2 * pool  # whole
    # The specification's table of one of 8 GPUs, D 49, BF16 layer: 696.3 MB with the router replicated.
    assert round((pooled.dense_bytes + 49 * pooled.expert_bytes) / 1e5) == 6963


def test_the_table_of_the_docstring(script):
    """Its first column from the layout of our packed layer, the others from the peer's sizes, in MB."""
    rows = {name: [float(x) for x in figures.split()[:3]] for name, figures in
            re.findall(r"^    (attention|pooler, unpooler|router|experts|all) +((?:[\d.]+ +){2}[\d.]+)", script.__doc__,
                       re.MULTILINE)}
    at = layout(RELEASED)
    router = at["dense.unpooler"] - at["dense.router"]
    pool = 2 * 2 * RELEASED.hidden_size * RELEASED.moe_hidden_size // NUM_SLICES
    ours = {"attention": at["dense.bytes"] - router - pool, "pooler, unpooler": pool, "router": router,
            "experts": 49 * at["experts.bytes"], "all": at["dense.bytes"] + 49 * at["experts.bytes"]}
    ranks = [script.RELEASED.rank(split) for split in script.SPLITS]
    peers = {"attention": [r.attention_bytes for r in ranks], "pooler, unpooler": [r.pool_bytes for r in ranks],
             "router": [r.router_bytes for r in ranks], "experts": [49 * r.expert_bytes for r in ranks],
             "all": [r.dense_bytes + 49 * r.expert_bytes for r in ranks]}
    assert rows == {name: [round(x / 1e6, 1) for x in (ours[name], *peers[name])] for name in ours}


@pytest.mark.parametrize(("rows", "distinct", "context", "layers"), [
    (16, 49, 2048, 8), (16, 8, 0, 1), (16, 102, 131072, 24), (1, 8, 1024, 3), (4, 20, 2047, 7)])
def test_keys_are_as_many_as_in_bench_layer(script, rows, distinct, context, layers):
    ours = cases.Case(distinct, rows, context, layers)
    peer = script.Case(distinct, rows, context, layers)
    keys = int(np.mean([min(context, RELEASED.window(i) or context) for i in ours.numbers]))
    assert peer.key_bytes == keys * 2 * 2 * 64 * 2  # keys and values, bfloat16, 2 heads of 64
    assert len(peer.full) == layers


# ------------------------------------------------------------------ what is printed


def test_line(script, timing):
    case = script.Case()
    line = script.as_line("NVIDIA H200; torch 2.11.0, transformers 5.24.0, sdpa, grouped_mm", case, timing, 4500.0)
    assert line == (
        "NVIDIA H200; torch 2.11.0, transformers 5.24.0, sdpa, grouped_mm; MuseSparkTextDecoderLayer; released sizes, "
        "one rank of 8 (split pooled), bfloat16, no exchanges; rows 16; context 2048; 8 layers in one program; "
        "D 49 asked, 48.8 met; captured 500.0 us a layer (495.0 to 510.5); 700.0 MB of weights, 620.0 of them "
        "experts', 1.05 MB of keys and values; 1400 GB/s of weights, 31.1% of 4500; "
        "beside it reduce-overhead 550.0 us a layer (540.0 to 560.0, 2 CUDA graphs declined); "
        "beside it max-autotune not compiled within 150 s; layers within 1.3e-02 of those without torch.compile")
    assert "% of" not in script.as_line("GPU", case, timing, None)
    assert script.as_line("GPU", case, replace(timing, failed="so"), None).endswith("; FAILED: so")
    assert script.as_line("GPU", replace(case, sizes=script.TINY), timing, None).endswith(
        "; A REHEARSAL, no figure of the model")


def test_line_without_any_way(script):
    ways = (script.WayTiming("captured", why_not="did not run: RuntimeError: no"),)
    timing = script.Timing(ways, 8.0, 1e6, 1e6, 0.0, "no way ran")
    assert timing.gb_per_s == 0
    line = script.as_line("GPU", script.Case(), timing, 4500.0)
    assert "captured did not run: RuntimeError: no;" in line and line.endswith("; FAILED: no way ran")


def test_json(script, timing):
    failed = replace(timing, failed="so")
    got = json.loads(json.dumps(script.to_json([(script.Case(), timing), (script.Case(split="inner"), failed)],
                                               torch="2.11.0")))
    assert (got["torch"], got["failed"], len(got["cases"])) == ("2.11.0", 1, 2)
    first, second = got["cases"]
    assert first["rank"]["moe_hidden"] == 512 and second["rank"]["moe_inner"] == 512
    assert first["gb_per_s"] == pytest.approx(1400) and first["ways"][0]["us"] == [495.0, 500.0, 510.5]
    assert first["case"]["distinct"] == 49 and first["admitted"] == 53


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(("argv", "says"), [
    (["--rows", 17], "rows: expected 1 to 16 (what a pass takes), got 17"),
    (["--distinct", 7], "distinct: expected 8 to 128 (rows 16, 8 choices each), got 7"),
    (["--rows", 2, "--distinct", 17], "distinct: expected 8 to 16 (rows 2, 8 choices each), got 17"),
    (["--layers", 61], "layers: expected 1 to 60 (what the model has from layer 2 on), got 61"),
    (["--context", -1], "context: expected 0 to 1048560 (what the model takes), got -1"),
    (["--batches", 0], "--batches: expected more than 0, got 0"),
    (["--compile-seconds", 0], "--compile-seconds: expected more than 0, got 0.0"),
    (["--limit", 0], "--limit: expected more than 0 GB/s, got 0.0"),
    (["--json", "no/such/folder/x.json"], "expected a file in a folder that exists, found no such folder"),
    (["--device", "cpu"], "--device cpu: expected --tiny with it"),
    (["--split", "rows"], "invalid choice: 'rows'"),
    (["--ways", "eager"], "invalid choice: 'eager'")])
def test_wrong_input(script, monkeypatch, capsys, peer_modules, argv, says):
    code, out, err = run(script, monkeypatch, capsys, *argv)
    assert (code, out) == (2, "") and "peer_layer.py: error: " in err and says in err


def library(version, name="torch"):
    return {name: SimpleNamespace(__version__=version)}


@pytest.mark.parametrize(("present", "says"), [
    ({}, "expected torch 2.11 or newer, found none that can be imported (No module named 'torch')"),
    (library("2.10.1+cu128"), "expected torch 2.11 or newer, found 2.10.1+cu128"),
    (library("2.11.0+cu130"), "expected transformers 5.24 or newer, found none that can be imported"),
    (library("2.11.0+cu130") | library("5.17.0", "transformers"), "expected transformers 5.24 or newer, found 5.17.0"),
    (library("3.0.0a0") | library("5.24.0", "transformers"),
     "expected transformers.models.muse_spark.modeling_muse_spark, found transformers 5.24.0 where it cannot be")])
def test_libraries_that_are_missing_or_too_old(script, monkeypatch, capsys, peer_modules, present, says):
    peer_modules.update(present)
    code, out, err = run(script, monkeypatch, capsys)
    assert (code, out) == (2, "") and says in err and "pip install 'torch>=2.11' 'transformers>=5.24.0'" in err


def test_no_gpu(script, monkeypatch, capsys, peer_modules):
    peer_modules.update(library("2.11.0") | library("5.24.0", "transformers") | {script.MODEL: SimpleNamespace()})
    peer_modules["torch"].cuda = SimpleNamespace(is_available=lambda: False)
    code, out, err = run(script, monkeypatch, capsys)
    assert (code, out) == (2, "") and "expected an NVIDIA GPU that torch sees, found none" in err


def test_memory(script):
    case = script.Case(layers=8)
    size = case.rank.layer_bytes  # 3.3 GB
    script.check_memory(case, int(8 * size + script.WORKSPACE))
    with pytest.raises(script.BenchError, match=r"layers: expected at most 7, for one has 3.30 GB .*, got 8"):
        script.check_memory(case, int(8 * size + script.WORKSPACE) - 1)
    with pytest.raises(script.BenchError, match="at most 0"):
        script.check_memory(case, 0)


# ------------------------------------------------------------------ how it is timed, with stand-ins


def test_time_limit(script):
    with script.time_limit(5):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)  # nothing is left that rings
    with pytest.raises(script.TimeUp), script.time_limit(0.05):
        try:
            time.sleep(5)
        except Exception:  # as a compiler may
            pytest.fail("caught as an Exception")


class StandIn:
    """A pass without PyTorch; its streams are numbers.

    Attributes:
        order: what was launched, by way and stream.
        admitted: what `admit` was called with.
    """

    def __init__(self, difference=0.01):
        self.order, self.admitted, self.made, self.found = [], [], 0, difference
        self.peer = SimpleNamespace(layers=[None] * 8, admit=self.admitted.append, device=SimpleNamespace(type="cpu"),
                                    torch=SimpleNamespace(compile=self.compile, _dynamo=SimpleNamespace(
                                        utils=SimpleNamespace(counters={"inductor": {"cudagraph_skips": 0}}))))
        self.modes, self.ways = [], []

    def compile(self, run, mode, fullgraph, dynamic):
        assert fullgraph and not dynamic
        self.modes.append(mode)
        return lambda stream: self.order.append((mode, stream))

    def run(self, stream):
        raise AssertionError

    def stream(self):
        self.made += 1
        return self.made

    def distinct(self, streams):
        self.counted = list(streams)
        self.samples = [len(way.times) for way in self.ways]
        return 48.5

    def difference(self, launch):
        return self.found


def test_ways_take_turns(script):
    work, case = StandIn(), script.Case()
    work.ways = ways = [script.Way(name, work, 5) for name in script.MODES]
    assert work.modes == ["reduce-overhead", "default", "max-autotune-no-cudagraphs"]
    assert [way.why_not for way in ways] == ["", "", ""]
    work.order.clear()
    first = work.made + 1
    timing = script.time_ways(case, work, ways, batches=3, each=2)
    batches = [(mode, tuple(range(first + 2 * n, first + 2 * n + 2))) for n in range(4) for mode in work.modes]
    assert work.order == [(mode, stream) for mode, streams in batches for stream in streams]
    assert work.counted == list(range(first + 2, first + 8))  # those that are timed
    assert work.samples == [3, 3, 3]
    assert work.admitted == [case.admitted, 8]
    assert [t.us[1] for t in timing.ways] == sorted(t.us[1] for t in timing.ways) and timing.ways[0].us[0] > 0
    assert timing.failed == "" and timing.distinct == 48.5
    assert timing.weight_bytes == case.rank.dense_bytes + 48.5 * case.rank.expert_bytes
    assert timing.expert_bytes == 48.5 * case.rank.expert_bytes
    assert all(way.times == [] for way in ways)  # the next case's begin anew


def test_wrong_results_fail(script):
    for difference, failed in ((0.099, False), (0.101, True), (float("inf"), True)):
        work = StandIn(difference)
        timing = script.time_ways(script.Case(), work, [script.Way("captured", work, 5)], 1, 1)
        assert bool(timing.failed) == failed and timing.difference == difference


def test_a_way_that_does_not_run(script):
    work = StandIn()

    def slow(*arguments, **more):
        time.sleep(5)

    def broken(*arguments, **more):
        raise RuntimeError("first line\nsecond line")

    good = script.Way("captured", work, 5)
    work.peer.torch.compile = slow
    late = script.Way("max-autotune", work, 0.1)
    work.peer.torch.compile = broken
    bad = script.Way("reduce-overhead", work, 5)
    assert late.why_not == "not compiled within 0 s" and late.seconds < 2
    assert bad.why_not == "did not run: RuntimeError: first line"
    timing = script.time_ways(script.Case(), work, [late, bad, good], 1, 1)
    assert [t.name for t in timing.ways] == ["captured", "max-autotune", "reduce-overhead"] and timing.failed == ""
    timing = script.time_ways(script.Case(), work, [late, bad], 1, 1)
    assert timing.failed == "no way ran" and timing.gb_per_s == 0


class Buffer:
    """A stream that can be overwritten."""

    def __init__(self, value):
        self.value = value

    def copy_(self, other):
        self.value = other.value


class CudaStandIn(StandIn):
    """On a GPU whose kernels add 100 to a stream; a graph captures what is called within it, to be replayed."""

    def __init__(self):
        super().__init__()
        self.capturing, self.steps = None, 0
        stream = SimpleNamespace(wait_stream=lambda other: None)
        self.peer.device.type = "cuda"
        self.peer.torch.compiler = SimpleNamespace(cudagraph_mark_step_begin=self.step)
        self.peer.torch.cuda = SimpleNamespace(
            Stream=lambda: stream, current_stream=lambda: stream, stream=lambda s: nullcontext(),
            CUDAGraph=lambda: SimpleNamespace(calls=[]), graph=self.capture, synchronize=lambda: None)

    def step(self):
        self.steps += 1

    @contextmanager
    def capture(self, graph):
        self.capturing = graph
        graph.replay = lambda: [call() for call in graph.calls]
        yield
        self.capturing = None

    def compile(self, run, mode, fullgraph, dynamic):
        def call(stream):
            out = Buffer(None)

            def kernel():
                out.value = stream.value + 100

            if self.capturing:
                self.capturing.calls.append(kernel)
            else:
                kernel()
            self.order.append((mode, stream.value))
            return out

        return call

    def stream(self):
        return Buffer(super().stream())


@pytest.mark.parametrize("name", ["captured", "max-autotune"])
def test_a_captured_graph_is_replayed_with_each_stream(script, name):
    work = CudaStandIn()
    way = script.Way(name, work, 5)
    assert way.why_not == ""
    work.order.clear()
    assert [way.launch(Buffer(x)).value for x in (7, 8, 7)] == [107, 108, 107]
    assert work.order == [] and work.steps == 0  # replayed, not called


def test_graphs_that_the_compiler_records_get_each_stream(script):
    work = CudaStandIn()
    way = script.Way("reduce-overhead", work, 5)
    assert way.why_not == ""
    before = work.steps
    assert [way.launch(Buffer(x)).value for x in (7, 8)] == [107, 108]
    assert work.steps == before + 2


# ------------------------------------------------------------------ the library's layers, where it is installed


@pytest.fixture(scope="module")
def torch(script):
    try:
        return script.import_peer()[0]
    except script.BenchError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[("pooled", 16, 200), ("inner", 4, 48), ("pooled", 8, 60)], ids="{0[0]}-{0[1]}-{0[2]}".format)
def tiny_pass(script, torch, request):
    """Layers 2 to 5, the last one full, and rows that begin after, before and across the window's end."""
    split, rows, context = request.param
    with torch.no_grad():
        case = script.Case(8 * rows, rows, context, 4, split, script.TINY)
        yield script.Pass(script.PeerLayers(case, torch.device("cpu"), "sdpa", "grouped_mm"), rows, context)


def test_parameters_are_the_bytes_counted(script, torch):
    for split in script.SPLITS:
        case = script.Case(layers=1, split=split, sizes=script.TINY)
        peer = script.PeerLayers(case, torch.device("cpu"), "sdpa", "grouped_mm")
        assert peer.matrix_bytes == case.rank.layer_bytes
        assert (peer.config._attn_implementation, peer.config._experts_implementation) == ("sdpa", "grouped_mm")
        assert all(bool(p.any()) for p in peer.layers[0].parameters())


def test_layers_are_called_as_the_model_calls_them(script, torch, tiny_pass):
    """MuseSparkTextModel around the same layers, with the same cache: masks, angles and order are its own."""
    peer, model_class = tiny_pass.peer, script.import_peer()[2].MuseSparkTextModel
    peer.config.vocab_size = 8
    peer.config.pad_token_id = 0
    model = model_class(peer.config).eval()
    model.layers = torch.nn.ModuleList(peer.layers)
    stream = tiny_pass.stream()
    got = tiny_pass.run(stream)
    tiny_pass.restore()
    tiny_pass.set_length()
    want = model(inputs_embeds=stream, cache=tiny_pass.cache, use_cache=True).last_hidden_state
    assert torch.equal(model.norm(got[-1]), want)
    assert len(got) == 4 and want.shape == stream.shape


def test_differences_are_seen(script, torch, tiny_pass):
    """Same, another stream, another history of one layer."""
    tiny_pass.peer.admit(8)
    assert tiny_pass.difference(tiny_pass.run) == 0
    assert tiny_pass.difference(lambda stream: tiny_pass.run(tiny_pass.stream())) > 1

    def other_history(stream):
        tiny_pass.cache.layers[3].values.normal_()
        return tiny_pass.run(stream)

    assert tiny_pass.difference(other_history) > 2 * script.DIFFERENCE


def test_distinct_experts_are_as_asked(script, torch):
    with torch.no_grad():
        case = script.Case(49, 16, 20, 2, "pooled", script.TINY)
        peer = script.PeerLayers(case, torch.device("cpu"), "sdpa", "grouped_mm")
        work = script.Pass(peer, 16, 20)
        for admitted, low, high in ((case.admitted, 45, 53), (8, 8, 8)):
            peer.admit(admitted)
            assert low <= work.distinct([work.stream() for _ in range(4)]) <= high


@pytest.mark.slow
def test_the_whole_script_on_a_cpu(torch, repo, tmp_path):
    """In a process of its own, with the compiler."""
    done = subprocess.run(
        [sys.executable, repo / "scripts" / "peer_layer.py", "--device", "cpu", "--tiny", "--layers", "1", "--context",
         "80", "--distinct", "30", "49", "--batches", "2", "--json", tmp_path / "out.json"],
        capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("tiny sizes" in line and "A REHEARSAL" in line for line in lines)
    assert done.stderr.count("captured: compiled in ") == 1  # another D needs no other program
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["failed"] == 0 and result["torch"] == torch.__version__
    for case, asked in zip(result["cases"], (30, 49), strict=True):
        assert case["distinct"] == pytest.approx(asked, abs=4)
        assert 0 < case["difference"] < 0.1 and case["ways"][0]["us"][1] > 0
