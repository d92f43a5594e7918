"""`musejax bench layer`: microseconds a decoder layer of the released sizes, one rank of 8 on one GPU.

Weights are random and differ from layer to layer; all layers run in one launch of the layer kernel, whose exchanges
with the seven other ranks are looped back to its own buffers. The rows' experts are drawn afresh for each launch: the
residual stream is new, and each layer's selection bias admits only so many experts that the rows hit about D of them.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from musejax import ffi
from musejax.bench import limits
from musejax.bench.cases import Case, Timing, admitted_experts
from musejax.bench.limits import BenchError
from musejax.config import NUM_SLICES, RELEASED, ConfigError, DecodeConfig
from musejax.kernels.attributes import layer_attributes
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.calls import Call, RowState
from musejax.kernels.forward import chain, ordinals, over_devices
from musejax.numerics import round_bf16
from musejax.sharding import make_mesh, replicated


def layout(config, nvfp4: bool = True) -> dict:
    return ffi.library("cpu").layout(
        hidden=config.hidden_size, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, moe_hidden=config.moe_hidden_size, moe_inner=config.moe_intermediate_size,
        experts=config.num_local_experts, vocab=config.vocab_size, nvfp4=nvfp4)


def _nvfp4_experts(key, config, at) -> jax.Array:
    """uint8 [e, n]: any codes, block scales near 1."""
    experts = jax.random.bits(key, (config.num_local_experts, at["experts.bytes"]), jnp.uint8)
    for name, k, tiles in (("gate_up", config.moe_hidden_size, 2 * config.moe_intermediate_size // NUM_SLICES // 16),
                           ("down", config.moe_intermediate_size, config.moe_hidden_size // NUM_SLICES // 16)):
        begin, codes, size = at[f"experts.{name}"], k // 64 * 512, k // 64 * (512 + 64)
        part = experts[:, begin:begin + tiles * size].reshape(-1, tiles, size)
        scales = part[..., codes:].reshape(-1, tiles, k // 64 * 32, 2)
        fields = scales % 32 + 72  # E5M3 fields of 2^-1 to 2^2
        low, high = fields[..., 0], fields[..., 1]
        halves = jnp.stack([low << 4 | high >> 4, high << 4 | low >> 4], axis=-1).reshape(-1, tiles, k // 64 * 64)
        part = part.at[..., codes:].set(halves)
        experts = experts.at[:, begin:begin + tiles * size].set(part.reshape(-1, tiles * size))
    return experts


def _bf16_experts(key, config, at) -> jax.Array:
    """uint8 [e, n]: bfloat16 of either sign, from 2^-8 to below 2^-4. Expert by expert, for the generator needs many
    times the memory of what it makes."""
    def expert(key):
        word = jax.random.bits(key, (at["experts.bytes"] // 2,), jnp.uint16)
        exponent = 119 + (word >> 7) % 4
        return jax.lax.bitcast_convert_type(word & 0x807F | exponent << 7, jnp.uint8).reshape(-1)

    return jax.lax.map(expert, jax.random.split(key, config.num_local_experts))


@partial(jax.jit, static_argnames=("config", "admitted", "nvfp4"))
def random_layer(key, config, admitted: int, nvfp4: bool = True) -> dict:
    """One slice of a layer, with NVFP4 or bfloat16 experts: dense uint8 [1, n], experts uint8 [1, e, n], small float32
    [n]."""
    at = layout(config, nvfp4)
    keys = jax.random.split(key, 6)
    dense = jax.lax.bitcast_convert_type(
        (jax.random.normal(keys[0], (at["dense.bytes"] // 2,), jnp.float32) / 90).astype(jnp.bfloat16), jnp.uint8)
    router = jax.lax.bitcast_convert_type(
        jax.random.normal(keys[1], ((at["dense.unpooler"] - at["dense.router"]) // 4,), jnp.float32) / 90, jnp.uint8)
    dense = dense.reshape(-1).at[at["dense.router"]:at["dense.unpooler"]].set(router.reshape(-1))
    experts = (_nvfp4_experts if nvfp4 else _bf16_experts)(keys[2], config, at)
    # As published: values of bfloat16, which the kernels read as float32.
    small = round_bf16(jax.random.normal(keys[3], (at["small.count"],), jnp.float32) / 16)
    if nvfp4:
        small = small.at[at["small.gate_up_global"]:].set(1 / 64)
    # A rank whose own slices come back as those of the others has their gains, too.
    for name, width in (("post_expert_norm", config.moe_hidden_size), ("post_ffn_norm", config.hidden_size)):
        begin = at[f"small.{name}"]
        part = small[begin:begin + width // NUM_SLICES]
        small = small.at[begin:begin + width].set(jnp.tile(part, NUM_SLICES))
    order = jax.random.permutation(keys[4], config.num_local_experts)
    bias = jnp.where(order < admitted, 0.0, -100.0)
    small = small.at[at["small.router_bias"]:at["small.router_bias"] + config.num_local_experts].set(bias)
    return {"dense": dense[None], "experts": experts[None], "small": small}


@partial(jax.jit, static_argnames=("shape",))
def random_bf16(key, shape):
    return jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)


def run_looped(call: Call, numbers, params, stream, cos_sin, rows: RowState, kept, taps=(), devices=()) -> tuple:
    """Layers of one rank (or one a device) in one launch, the other ranks sending it its own slices.

    Args:
        numbers: the layers' numbers in the model.
        params: of each layer, as `random_layer` makes them.
        kept: of each layer keys, values, and those of the rows in flight; updated in place.
        taps: layers after which the stream is wanted.
        devices: ordinals, if there are several.

    Returns:
        (stream, ids int32 [layers, t, k], taps float32 [len(taps), t, d], kept)
    """
    c, count = call.config, stream.shape[0]
    heads = c.num_attention_heads // NUM_SLICES * params[0]["dense"].shape[0]
    parts = jnp.zeros((heads, count, c.head_dim), jnp.bfloat16)
    operands = []
    for i, p in enumerate(params):
        operands += [p["dense"], p["experts"], p["small"], *kept[4 * i:4 * i + 4]]
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    results = (like(stream), like(parts), like(parts),
               jax.ShapeDtypeStruct((len(numbers), count, c.num_experts_per_tok), jnp.int32),
               jax.ShapeDtypeStruct((len(taps), *stream.shape), jnp.float32), *map(like, kept))
    alias = {0: 0, 1: 1, 2: 2} | {7 + 7 * g + 3 + i: 5 + 4 * g + i for g in range(len(numbers)) for i in range(4)}
    out = jax.ffi.ffi_call("musejax_layers_looped", results, input_output_aliases=alias)(
        stream, parts, parts, cos_sin, *rows, *operands, model=call.model, first=True, last=True,
        **layer_attributes(c, numbers, taps, devices))
    return out[0], out[3], out[4], list(out[5:])


def in_slices(layer: dict, slices: int) -> dict:
    """A layer of one slice -> of several equal ones."""
    return {name: x if name == "small" else jnp.repeat(x, slices, axis=0) for name, x in layer.items()}


def connect(command: str, devices: int, sizes: tuple[int, ...], slots: int):
    """The mesh of the first so many GPUs, which may write each other's memory from now on.

    Args:
        sizes, slots: as `ffi.connect` takes them.

    Raises:
        BenchError: the GPUs are too few or cannot write each other's memory.
    """
    try:
        mesh = make_mesh(devices, "cuda")
    except ConfigError as error:
        raise BenchError(f"{command}: {error}: ask for fewer, or run it where JAX sees as many GPUs") from error
    try:
        ffi.connect(sizes, slots, ordinals(mesh))
    except ffi.LibraryError as error:
        raise BenchError(f"{command}: {error}") from error
    return mesh


class LoopedLayers:
    """`case.layers` layers of one rank on the default device, ready to run; or of several ranks, a GPU each.

    Attributes:
        tapped: float32 [layers, rows, d], the streams after each layer of the last launch, if they were asked for.
    """

    def __init__(self, case: Case, seed: int = 0, taps: bool = False):
        """Raises BenchError if the CUDA library has no instance for the released sizes, or the GPUs are too few or
        cannot write each other's memory."""
        self.case = case
        self.config = type(RELEASED)(nvfp4_layers=tuple(range(RELEASED.num_hidden_layers)))
        c = self.config
        sizes = next((sizes for sizes in ffi.layer_instances()
                      if sizes[0] == c.hidden_size and sizes[-1] == case.slices), None)
        if sizes is None:
            raise BenchError("bench layer: expected a library compiled for the released sizes, "
                             f"{case.slices} slices a device, got one without; build with MUSEJAX_CUDA=ON")
        self.numbers = case.numbers
        slots = max(case.slots(c, i) for i in self.numbers)
        self.mesh = connect("bench layer", case.devices, sizes, slots) if case.devices > 1 else None
        self.taps = tuple(case.numbers) if taps else ()
        self.tapped = None
        self.decode = DecodeConfig(activations=case.activations)
        keys = jax.random.split(jax.random.key(seed), case.layers + 1)
        admitted = admitted_experts(case, c)
        self.params = [in_slices(random_layer(k, c, admitted), case.slices) for k in keys[1:]]
        heads = c.num_key_value_heads // NUM_SLICES
        self.kept = []
        for n, i in enumerate(self.numbers):
            shape = (heads, case.slots(c, i), c.head_dim)
            kept = [random_bf16(jax.random.fold_in(keys[0], 4 * n + j), s)
                    for j, s in enumerate((shape, shape, (heads, MAX_ROWS, c.head_dim), (heads, MAX_ROWS, c.head_dim)))]
            self.kept += [jnp.tile(x, (case.slices, 1, 1)) for x in kept]
        if self.mesh is not None:
            self.params, self.kept = jax.device_put((self.params, self.kept), replicated(self.mesh))
        self.call = jax.jit(over_devices(self.mesh, self._launch, P(), P()), donate_argnums=(1,))

    @property
    def expert_bytes(self) -> int:
        """Of one expert of a layer, of all slices of a rank."""
        return self.params[0]["experts"].shape[2] * self.case.slices

    @property
    def dense_bytes(self) -> int:
        """Of a layer's other GEMMs."""
        return self.params[0]["dense"].size

    def _launch(self, stream, kept, params):
        case, call = self.case, Call(self.config, self.decode, "cuda")
        rows = RowState(chain(case.rows), jnp.array([case.context, case.rows, 0], jnp.int32),
                        jnp.zeros(MAX_ROWS, jnp.int32))
        cos_sin = call.angles(case.context + jnp.arange(case.rows, dtype=jnp.int32))
        return run_looped(call, self.numbers, params, stream, cos_sin, rows, kept, self.taps, ordinals(self.mesh))

    def stream(self, seed: int):
        """A residual stream, float32 [rows, d]."""
        stream = jax.random.normal(jax.random.key(seed), (self.case.rows, self.config.hidden_size), jnp.float32)
        return stream if self.mesh is None else jax.device_put(stream, replicated(self.mesh))

    def launch(self, stream):
        """One launch -> (stream, ids [layers, rows, k]); the caches are kept."""
        stream, ids, self.tapped, self.kept = self.call(stream, self.kept, self.params)
        return stream, ids


class Samples:
    """What `batch` measured of some layers."""

    def __init__(self, layers):
        self.layers = layers
        self.times, self.hits, self.digest, self.failed, self.first = [], [], hashlib.sha256(), "", None

    def batch(self, streams, counted: bool) -> None:
        """Launches back to back, one a stream; their time over all layers is one sample."""
        begin = time.perf_counter()
        out = jax.block_until_ready([self.layers.launch(stream) for stream in streams])
        elapsed = time.perf_counter() - begin
        ffi.raise_wait_error()
        if not counted:
            return
        self.times.append(elapsed / len(streams) / self.layers.case.layers * 1e6)
        for stream, ids in out:
            self.hits.extend(np.asarray(ids))
            self.digest.update(np.asarray(stream).tobytes())
            if not np.isfinite(np.asarray(stream)).all():
                self.failed = "results: expected finite numbers, got others"
        self.first = self.first or (streams[0], np.asarray(out[0][0]))

    def check_repeat(self) -> None:
        """The first launch once more: the same bits are expected."""
        stream, want = self.first
        got = np.asarray(self.layers.launch(stream)[0])
        ffi.raise_wait_error()
        self._check_bits("the first launch repeated", got, want)

    def check_same(self, kernel: Samples) -> None:
        """All launches beside the kernel's: the same bits are expected."""
        if self.digest.digest() != kernel.digest.digest():
            self.failed = "the launches beside the layer kernel's: expected the same bits, got others"
        self._check_bits("the first launch beside the layer kernel's", self.first[1], kernel.first[1])

    def _check_bits(self, what: str, got, want) -> None:
        if wrong := np.flatnonzero(want.view(np.uint32).reshape(-1) != got.view(np.uint32).reshape(-1)).size:
            self.failed = f"{what}: expected the same bits, got {wrong} of {want.size} others"

    def timing(self) -> Timing:
        case, c = self.layers.case, self.layers.config
        counts = [np.bincount(ids.reshape(-1), minlength=c.num_local_experts) for ids in self.hits]
        distinct = float(np.mean([np.count_nonzero(row) for row in counts]))
        histogram = tuple(float(np.mean([np.count_nonzero(row == r) for row in counts]))
                          for r in range(1, case.rows + 1))
        keys = [min(case.context, c.window(i) or case.context) for i in case.numbers]
        experts = distinct * self.layers.expert_bytes
        return Timing(layers=case.layers, us=tuple(map(float, np.percentile(self.times, (10, 50, 90)))),
                      distinct=distinct, histogram=histogram, weight_bytes=self.layers.dense_bytes + experts,
                      expert_bytes=experts,
                      key_bytes=(int(np.mean(keys)) * 2 * 2 * c.head_dim * c.num_key_value_heads // NUM_SLICES
                                 * case.slices),
                      digest=self.digest.hexdigest()[:12], failed=self.failed)


def measure(case: Case, batches: int = 9, each: int = 5, seed: int = 0, baseline: bool = False,
            phases: bool = False) -> Timing:
    """Runs `batches` batches of `each` launches back to back, every launch with another stream, after one batch that is
    not counted. With `phases` or `baseline` the same batches of `phases.PhasedLayers` or `reference.ReferenceLayers`
    come in between, one by one; the latter have fewer layers.

    Raises:
        BenchError: as `LoopedLayers`, or `phases` or `baseline` with several devices.
        WaitError: a wait inside a kernel did not end.
    """
    if (case.devices, case.slices) != (1, 1) and (phases or baseline):
        raise BenchError("bench layer: phases and baseline are of one rank of 8, expected devices 1 and slices 1, got "
                         f"{case.devices} and {case.slices}")
    kernel = Samples(LoopedLayers(case, seed))
    others = {}
    if phases:
        from musejax.bench.phases import PhasedLayers

        others["phases"] = Samples(PhasedLayers(kernel.layers))
    if baseline:
        from musejax.bench.reference import ReferenceLayers

        others["baseline"] = Samples(ReferenceLayers(case, kernel.layers.config, seed))
    for n in range(batches + 1):
        streams = jax.block_until_ready([kernel.layers.stream(1000 + n * each + i) for i in range(each)])
        for run in (kernel, *others.values()):
            run.batch(streams, n > 0)
    kernel.check_repeat()
    if phases:
        others["phases"].check_same(kernel)
    return replace(kernel.timing(), **{name: run.timing() for name, run in others.items()})


def open_library(command: str = "bench layer"):
    """As `limits.open_library`; errors name the command."""
    try:
        return limits.open_library()
    except BenchError as error:
        raise BenchError(f"{command}: {str(error).removeprefix('bench limits: ')}") from error


def roofline(module, command: str = "bench layer") -> float:
    """GB/s at which this GPU reads HBM steadily through a ring of bulk copies, measured now.

    Raises:
        BenchError: it cannot be measured.
    """
    rows = list(limits.measure(module, ["hbm"]))
    steady = next((row for row in rows if row.name == "hbm.steady" and row.status == "ok"), None)
    if steady is None:
        raise BenchError(f"{command}: expected the figure hbm.steady, got {'; '.join(row.note for row in rows)}")
    return steady.figure * 1e3
