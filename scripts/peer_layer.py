#!/usr/bin/env python3
"""Times a decoder layer as the transformers library has it, compiled by PyTorch: the outside peer of `musejax bench
layer`. One line a case.

    python scripts/peer_layer.py [--rows 16] [--context 2048] [--distinct 49] [--layers 8] [--limit GB/S] [--json FILE]
    python scripts/peer_layer.py --device cpu --tiny      small sizes, a rehearsal without a GPU

Needs PyTorch 2.11 and transformers 5.24.0 or newer; of musejax only what a case is. MuseSparkTextDecoderLayer,
StaticCache, the masks and the angles are the library's, unchanged; only its config is ours. Several ways to run the
same layers take turns, batch by batch, and the line is that of the fastest:

    reduce-overhead  torch.compile in the mode that records CUDA graphs by itself
    captured         torch.compile, and a CUDA graph of it captured here
    max-autotune     the same with PyTorch's trials of matrix products

What is as in `bench layer`: rows, context, layers (numbers 2, 3, ... of the model, a full one after every three sliding
ones), random weights that differ from layer to layer, several layers in one program, so that L2 keeps nothing of them,
a new residual stream for each launch and so another routing, D set by how many experts the selection bias admits, 9
batches of 5 launches after one that is not counted, the 10th, 50th and 90th percentile of their microseconds a layer,
and what is counted as weights: the matrices, each expert hit once, without gains and gates.

What is not: the bytes. There is no tensor parallelism in this layer that a config could ask for, so it gets the sizes
of one rank of 8, and a config cannot say all of them. Heads are an eighth: 16 for queries, 2 for keys and values. The
experts are an eighth in one of two ways:

    --split pooled   moe_hidden_size / 8: pooler, unpooler and experts have an eighth of their bytes (default)
    --split inner    moe_intermediate_size / 8: the experts have, pooler and unpooler are whole, as if replicated

    MB a layer, D 49    ours, NVFP4    pooled    inner
    attention                  54.5      54.5     54.5
    pooler, unpooler           16.8      16.8    134.2
    router                      1.0       8.4      8.4    whole in the peer
    experts                   173.4     616.6    616.6    bfloat16 in the peer
    all                       245.8     696.3    813.7

So beside the microseconds the line has the bytes that the peer has to read, and the rate is that of its own bytes; keys
and values are as many as ours. Work differs too. Where `pooled` cuts K of an expert's first GEMM, ours cuts rows; so
SwiGLU has its whole width in the peer, and the norms around the experts an eighth of theirs. o_proj and the unpooler
have an eighth of K as well. The residual stream is bfloat16. Nothing is exchanged and partial sums are not added up, so
the results are no model's. In the peer's favour masks and angles are made once, outside of what is timed. In its
disfavour a sliding layer that is full copies its cache in every launch; that is the library's own. The length goes back
to the context in every launch, so each reads as many keys.

D is counted in launches of the same streams without torch.compile. Results are compared without it, too: each layer
from the stream that the compiled one had, with as many experts admitted as a row chooses; else single roundings flip
experts, and after some layers nothing is alike. Exit codes: 0; 1 results are wrong or no way ran; 2 wrong input, or
PyTorch, transformers or a GPU are missing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from musejax.bench.limits import BenchError
from musejax.bench.peer import RELEASED, SPLITS, TINY, Case, Timing, WayTiming, as_line, to_json

NEEDS = {"torch": (2, 11), "transformers": (5, 24)}
MODEL = "transformers.models.muse_spark.modeling_muse_spark"
INSTALL = "pip install 'torch>=2.11' 'transformers>=5.24.0'"
WORKSPACE = 4e9  # bytes of a GPU's memory left to what is no weight
DIFFERENCE = 0.1  # of a layer's results, see Timing; roundings make 0.01, another history, mask or rotation above 0.2

# ------------------------------------------------------------------ what is run


class Mode(NamedTuple):
    """How layers are compiled: the mode of torch.compile, and whether a CUDA graph is captured here."""

    compile: str
    captured: bool


MODES = {"reduce-overhead": Mode("reduce-overhead", False), "captured": Mode("default", True),
         "max-autotune": Mode("max-autotune-no-cudagraphs", True)}


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ the library


def import_peer() -> tuple:
    """(torch, transformers, its module of the model).

    Raises:
        BenchError: one of them is missing or too old.
    """
    found = []
    for name, least in NEEDS.items():
        wanted = f"expected {name} {'.'.join(map(str, least))} or newer"
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            raise BenchError(f"{wanted}, found none that can be imported ({error}); install it: {INSTALL}") from error
        version = found[-1].__version__
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < least:
            raise BenchError(f"{wanted}, found {version}; install it: {INSTALL}")
    try:
        found.append(importlib.import_module(MODEL))
    except ImportError as error:
        raise BenchError(f"expected {MODEL}, found transformers {version} where it cannot be imported ({error}); "
                        f"install another: {INSTALL}") from error
    return tuple(found)


def open_device(torch, name: str):
    """torch.device, and what it is called.

    Raises:
        BenchError: there is none.
    """
    if name == "cpu":
        return torch.device("cpu"), f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        raise BenchError("expected an NVIDIA GPU that torch sees, found none; "
                         "--device cpu --tiny rehearses without one")
    return torch.device("cuda"), torch.cuda.get_device_name()


class TimeUp(BaseException):
    """A time limit is over. No Exception: compilers catch those and go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the main thread after so long."""
    def stop(signum, frame):
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_memory(case: Case, free: int) -> None:
    """Raises BenchError if the layers do not fit so many bytes."""
    size = case.rank.layer_bytes
    if case.layers * size > (room := max(free - WORKSPACE, 0)):
        raise BenchError(f"layers: expected at most {int(room // size)}, for one has {size / 1e9:.2f} GB and "
                        f"{room / 1e9:.1f} GB are free beside {WORKSPACE / 1e9:.0f} for all else, got {case.layers}")


class PeerLayers:
    """Layers of the library with random weights, and their config.

    Attributes:
        layers: MuseSparkTextDecoderLayer each, parameters bfloat16, router and residual gates float32.
    """

    def __init__(self, case: Case, device, attention: str, experts: str, seed: int = 0):
        """Raises BenchError if the layers do not fit the GPU's memory."""
        self.torch, self.transformers, self.model = import_peer()
        torch, sizes = self.torch, case.rank
        self.device, self.sizes = device, sizes
        if device.type == "cuda":
            check_memory(case, torch.cuda.mem_get_info()[0])
        self.config = self.model.MuseSparkTextConfig(
            hidden_size=sizes.hidden, num_hidden_layers=case.layers, num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_dim, sliding_window=sizes.window,
            moe_hidden_size=sizes.moe_hidden, moe_intermediate_size=sizes.moe_inner, num_local_experts=sizes.experts,
            num_experts_per_tok=sizes.top_k, output_multiplier=(256 / sizes.hidden) ** 0.5,
            layer_types=["full_attention" if full else "sliding_attention" for full in case.full],
            layer_rope_theta=[0 if full else 500000.0 for full in case.full],
            attn_implementation=attention, experts_implementation=experts)
        self.random = torch.Generator(device).manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device:
                self.layers = [self.model.MuseSparkTextDecoderLayer(self.config, i).eval().requires_grad_(False)
                               for i in range(case.layers)]
                self.angles = self.model.MuseSparkTextRotaryEmbedding(self.config)
        finally:
            torch.set_default_dtype(before)
        for layer in self.layers:
            for p in layer.parameters():
                # Of matrices the last axis is K; all else are gains and gates.
                p.normal_(0, p.shape[-1] ** -0.5 if p.ndim > 1 else 1 / 16, generator=self.random)

    def admit(self, count: int) -> None:
        """The selection bias of each layer lets so many experts be chosen, others in each."""
        for layer in self.layers:
            order = self.torch.randperm(self.sizes.experts, generator=self.random, device=self.device)
            layer.mlp.gate.e_score_correction_bias.copy_(self.torch.where(order < count, 0.0, -100.0))

    @property
    def matrix_bytes(self) -> int:
        """Of a layer, as its parameters have them."""
        return sum(p.numel() * p.element_size() for p in self.layers[0].parameters() if p.ndim > 1)


class Pass:
    """All layers, for rows after a context, with their static cache."""

    def __init__(self, peer: PeerLayers, rows: int, context: int):
        torch, sizes = peer.torch, peer.sizes
        self.peer, self.rows, self.context = peer, rows, context
        self.cache = peer.transformers.StaticCache(config=peer.config, max_cache_len=max(context + rows, 1))
        self.cache.early_initialization(batch_size=1, num_heads=sizes.kv_heads, head_dim=sizes.head_dim,
                                        dtype=torch.bfloat16, device=peer.device)
        for slots in self.cache.layers:
            for kept in (slots.keys, slots.values):
                kept.normal_(generator=peer.random)
        self.set_length()
        masking = importlib.import_module("transformers.masking_utils")
        stream = self.stream()
        self.positions = context + torch.arange(rows, device=peer.device)[None]
        make = {"full_attention": masking.create_causal_mask,
                "sliding_attention": masking.create_sliding_window_causal_mask}
        self.masks = {kind: make[kind](config=peer.config, inputs_embeds=stream, attention_mask=None, cache=self.cache,
                                       position_ids=self.positions) for kind in set(peer.config.layer_types)}
        self.rotation = peer.angles(stream, self.positions)
        for kept in (self.positions, *self.rotation, *self.masks.values()):
            if kept is not None:  # a mask may be implied
                torch._dynamo.mark_static_address(kept)  # else a recorded graph copies it in every launch
        self.first = [(slots.keys.clone(), slots.values.clone()) for slots in self.cache.layers]

    def stream(self):
        """A residual stream, bfloat16 [1, rows, d]."""
        torch = self.peer.torch
        return torch.randn(1, self.rows, self.peer.sizes.hidden, generator=self.peer.random, device=self.peer.device,
                           dtype=torch.float32).to(torch.bfloat16)

    def set_length(self) -> None:
        """The cache holds the context and no more."""
        for slots in self.cache.layers:
            slots.cumulative_length.fill_(self.context)
            if slots.is_sliding:
                slots.cumulative_length_int = self.context

    def restore(self) -> None:
        """The cache as it was at first."""
        for slots, (keys, values) in zip(self.cache.layers, self.first, strict=True):
            slots.keys.copy_(keys)
            slots.values.copy_(values)

    def layer(self, i: int, stream):
        """Layer i: bfloat16 [1, rows, d] -> the same. Writes the rows' keys and values."""
        config = self.peer.config
        return self.peer.layers[i](stream, position_embeddings=self.rotation if config.layer_rope_theta[i] else None,
                                   attention_mask=self.masks[config.layer_types[i]], position_ids=self.positions,
                                   cache=self.cache)

    def run(self, stream) -> list:
        """One launch -> the streams after each layer; they have to be written anyway."""
        self.set_length()
        out = []
        for i in range(len(self.peer.layers)):
            stream = self.layer(i, stream)
            out.append(stream)
        return out

    def distinct(self, streams) -> float:
        """Experts that the streams hit a layer, on average."""
        hits = []
        hooks = [layer.mlp.gate.register_forward_hook(lambda module, inputs, out: hits.append(out[2].unique().numel()))
                 for layer in self.peer.layers]
        try:
            for stream in streams:
                self.run(stream)
        finally:
            for hook in hooks:
                hook.remove()
        return float(np.mean(hits))

    def difference(self, launch: Callable) -> float:
        """Of a compiled launch from the layers without torch.compile, see Timing; inf if not finite."""
        self.restore()
        stream = self.stream()
        got = [x.clone() for x in launch(stream)]
        self.restore()
        self.set_length()
        worst = 0.0
        for i, (given, found) in enumerate(zip([stream, *got[:-1]], got, strict=True)):
            want = self.layer(i, given).float()
            rows = (found.float() - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
            value = float(rows.median())
            worst = max(worst, value if np.isfinite(value) else float("inf"))
        return worst


class Way:
    """A pass, compiled in one way."""

    def __init__(self, name: str, work: Pass, seconds: float):
        """Compiles and runs it twice, within a time limit. A way that does not run says why in `why_not`."""
        self.name, self.work, self.torch, self.why_not = name, work, work.peer.torch, ""
        self.times, self.skipped = [], 0
        self.cuda = work.peer.device.type == "cuda"
        mode, begin = MODES[name], time.perf_counter()
        counters = self.torch._dynamo.utils.counters["inductor"]
        before = counters["cudagraph_skips"]
        try:
            with time_limit(seconds):
                self.launch = self.compiled(mode)
                for _ in range(2):
                    self.launch(work.stream())
                self.wait()
        except TimeUp:
            self.why_not = f"not compiled within {seconds:.0f} s"
        except Exception as error:
            traceback.print_exc()
            text = (str(error).strip() or "no message").splitlines()[0]
            self.why_not = f"did not run: {type(error).__name__}: {text[:200]}"
        self.skipped = counters["cudagraph_skips"] - before
        self.seconds = time.perf_counter() - begin
        progress(f"{name}: {self.why_not or f'compiled in {self.seconds:.0f} s'}")

    def compiled(self, mode: Mode) -> Callable:
        """As `Pass.run`; what it returns may be overwritten by the next launch."""
        torch, work = self.torch, self.work
        call = torch.compile(work.run, mode=mode.compile, fullgraph=True, dynamic=False)
        if not self.cuda:
            return call
        if not mode.captured:
            def recorded(stream):
                torch.compiler.cudagraph_mark_step_begin()
                return call(stream)

            recorded(work.stream())  # compiles; the next call records
            return recorded
        static = work.stream()
        call(static)  # compiles
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                call(static)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(static)

        def replayed(stream):
            static.copy_(stream)
            graph.replay()
            return out

        return replayed

    def wait(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def batch(self, streams, counted: bool) -> None:
        """Launches back to back, one a stream; their time over all layers is one sample."""
        self.wait()
        begin = time.perf_counter()
        for stream in streams:
            self.launch(stream)
        self.wait()
        if counted:
            layers = len(self.work.peer.layers)
            self.times.append((time.perf_counter() - begin) / len(streams) / layers * 1e6)

    def timing(self) -> WayTiming:
        if self.why_not:
            return WayTiming(self.name, compile_s=self.seconds, why_not=self.why_not)
        return WayTiming(self.name, tuple(map(float, np.percentile(self.times, (10, 50, 90)))), self.seconds,
                         self.skipped)


def time_ways(case: Case, work: Pass, ways: list[Way], batches: int, each: int) -> Timing:
    """Runs the ways in turns, each batch with the same new streams."""
    work.peer.admit(case.admitted)
    running = [way for way in ways if not way.why_not]
    used = []
    for n in range(batches + 1):
        streams = [work.stream() for _ in range(each)]
        used += streams * (n > 0)
        for way in running:
            way.batch(streams, counted=n > 0)
    distinct = work.distinct(used)
    work.peer.admit(case.sizes.top_k)
    failed, worst = "" if running else "no way ran", 0.0
    for way in running:
        worst = max(worst, value := work.difference(way.launch))
        if value > DIFFERENCE:
            failed = (f"{way.name}: expected layers within {DIFFERENCE} of those without torch.compile, got "
                      f"{value:.2f}")
    timings = sorted((way.timing() for way in ways), key=lambda t: (bool(t.why_not), t.us[1]))
    for way in ways:
        way.times.clear()
    experts = distinct * case.rank.expert_bytes
    return Timing(tuple(timings), distinct, case.rank.dense_bytes + experts, experts, worst, failed)


def measure(cases: Sequence[Case], device, names: Sequence[str], attention: str, experts: str, batches: int = 9,
            each: int = 5, compile_s: float = 150, seed: int = 0) -> Iterator[tuple[Case, Timing]]:
    """Every case with its timing, as they come. Layers are made once a split, and compiled once for rows and context.

    Raises:
        BenchError: PyTorch or transformers are missing, or the layers do not fit.
    """
    torch, _, _ = import_peer()
    peer = work = ways = made = None
    with torch.no_grad():
        for case in sorted(cases, key=lambda c: (SPLITS.index(c.split), c.rows, c.context)):
            if made is None or made.split != case.split:
                peer = work = ways = None  # before others take their memory
                torch._dynamo.reset()
                gc.collect()
                torch.cuda.empty_cache()
                begin = time.perf_counter()
                peer = PeerLayers(case, device, attention, experts, seed)
                progress(f"{case.layers} layers of {case.rank.layer_bytes / 1e6:.0f} MB made in "
                         f"{time.perf_counter() - begin:.0f} s")
            if ways is None or (made.rows, made.context) != (case.rows, case.context):
                ways = None
                torch._dynamo.reset()
                peer.admit(case.admitted)
                work = Pass(peer, case.rows, case.context)
                ways = [Way(name, work, compile_s) for name in names]
            made = case
            yield case, time_ways(case, work, ways, batches, each)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--distinct", metavar="D", type=int, nargs="+", help="experts that the rows hit, 8 or more; met on "
                   "average (default: 49, or what fewer rows can hit)")
    p.add_argument("--rows", metavar="N", type=int, nargs="+", default=[16], help="1 to 16 (default 16)")
    p.add_argument("--context", metavar="N", type=int, nargs="+", default=[2048],
                   help="positions before these rows (default 2048)")
    p.add_argument("--layers", metavar="N", type=int, default=8, help="in one program (default 8)")
    p.add_argument("--split", nargs="+", choices=SPLITS, default=["pooled"], help="what is an eighth of the experts")
    p.add_argument("--ways", nargs="+", choices=MODES, help="(default: all on a GPU; captured on a CPU, which captures "
                   "nothing)")
    p.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="of the library's (default sdpa)")
    p.add_argument("--experts", choices=("grouped_mm", "batched_mm"), default="grouped_mm",
                   help="of the library's (default grouped_mm, as is the library's)")
    p.add_argument("--batches", metavar="N", type=int, default=9, help="of 5 launches (default 9)")
    p.add_argument("--compile-seconds", metavar="S", type=float, default=150,
                   help="a way that takes longer is left out (default 150)")
    p.add_argument("--limit", metavar="GB/S", type=float, help="rate of the memory that `musejax bench limits` found, "
                   "for the share of it")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="small sizes instead of the released ones: a rehearsal")
    p.add_argument("--json", metavar="FILE", type=Path, help="also write the result to a file")
    args = p.parse_args()
    sizes, started = TINY if args.tiny else RELEASED, time.perf_counter()
    for name in ("batches", "compile_seconds"):
        if getattr(args, name) <= 0:
            p.error(f"--{name.replace('_', '-')}: expected more than 0, got {getattr(args, name)}")
    if args.limit is not None and args.limit <= 0:
        p.error(f"--limit: expected more than 0 GB/s, got {args.limit}")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        p.error(f"--json {args.json}: expected a file in a folder that exists, found no such folder")
    if args.device == "cpu" and not args.tiny:
        p.error("--device cpu: expected --tiny with it, for layers of the released sizes are no CPU's, got none")
    results = []
    try:
        cases = [Case(d, rows, context, args.layers, split, sizes) for split in args.split for rows in args.rows
                 for context in args.context for d in args.distinct or [min(49, rows * sizes.top_k)]]
        torch, transformers, _ = import_peer()
        device, name = open_device(torch, args.device)
        machine = (f"{name}; torch {torch.__version__}, transformers {transformers.__version__}, {args.attention}, "
                   f"{args.experts}")
        names = args.ways or (list(MODES) if args.device == "cuda" else ["captured"])
        for case, timing in measure(cases, device, names, args.attention, args.experts, args.batches,
                                    compile_s=args.compile_seconds):
            results.append((case, timing))
            print(as_line(machine, case, timing, args.limit), flush=True)
    except BenchError as error:
        p.error(str(error))
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(
            results, device=name, torch=torch.__version__, transformers=transformers.__version__,
            attention=args.attention, experts=args.experts, batches=args.batches, limit_gb_per_s=args.limit,
            seconds=time.perf_counter() - started), indent=1) + "\n")
    return int(any(timing.failed for _, timing in results))


if __name__ == "__main__":
    sys.exit(main())
