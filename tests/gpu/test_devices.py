"""Decoding on several GPUs, whose layer kernels exchange what they finish while they run: the bits of one GPU, and what
happens when a rank is late, never done, or in another epoch."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from kernel_inputs import random_cache, tokens_of

import musejax
from musejax import ffi
from musejax.bench import step
from musejax.bench.cases import Case
from musejax.bench.layer import LoopedLayers
from musejax.bench.step_cases import StepCase
from musejax.config import NUM_SLICES, DecodeConfig
from musejax.kernels import forward as kf
from musejax.kernels import schedule as ks
from musejax.kernels.cache import GAVE_UP
from musejax.nvfp4 import ACTIVATIONS
from musejax.paths import nano_drafter_path
from musejax.sharding import AXIS, make_mesh

TREES = {"chain": tuple(range(-1, 15)), "star": (-1,) + (0,) * 15,
         "random": tuple(int(np.random.default_rng(1).integers(-1, i)) for i in range(16))}
MAX_LENGTH = 740
BUDGET = 2 * 10**9  # ns
PLACE = r"rank \d, SM \d+, warp \d+, layer \d, phase .*, wanted \d+, saw \d+"


def need(gpu, devices: int) -> None:
    here = len(jax.devices(gpu.platform))
    if here < devices:
        pytest.skip(f"needs {devices} CUDA devices, here {'is' if here == 1 else 'are'} {here}")


@pytest.fixture
def mesh(gpu):
    """Two GPUs."""
    need(gpu, 2)
    return make_mesh(2, gpu.platform)


@pytest.fixture(params=[2, 4, 8])
def several(gpu, request):
    """All counts of GPUs that ranks can have."""
    need(gpu, request.param)
    return make_mesh(request.param, gpu.platform)


def place(x, specs, mesh):
    return jax.device_put(x, jax.tree.map(partial(NamedSharding, mesh), specs))


def jit(function):
    return jax.jit(function, static_argnames=("config", "decode", "mesh", "trace"))


run_pass = jit(kf.run_pass)


class Pass:
    """Passes of a random model on one GPU or, with a mesh, on several."""

    def __init__(self, twin, decode, length, gpu, mesh=None):
        self.config, self.decode, self.mesh, self.device = twin.config, decode, mesh, gpu
        with jax.default_device(jax.devices("cpu")[0]):
            cache = jax.device_get(random_cache(twin.config, length, MAX_LENGTH))
        host = jax.device_get(twin.cpu)
        if mesh is None:
            self.params, self.cache = jax.device_put((host, cache), gpu)
        else:
            self.params, self.cache = (place(x, specs(x), mesh) for x, specs in
                                       ((host, kf.param_specs), (cache, kf.cache_specs)))
        self.run = run_pass

    def on_devices(self, parents=TREES["random"], valid=16):
        with jax.default_device(self.device):
            return self.run(self.params, self.cache, jnp.asarray(tokens_of(self.config, len(parents)), jnp.int32),
                            jnp.asarray(parents, jnp.int32), valid, config=self.config, decode=self.decode,
                            mesh=self.mesh, trace=True)

    def __call__(self, parents=TREES["random"], valid=16):
        return jax.tree.map(np.asarray, self.on_devices(parents, valid))


def assert_same_pass(a, b):
    for name in ("streams", "expert_ids"):
        assert_same_bits(getattr(a, name), getattr(b, name))
    for x, y in zip(jax.tree.leaves(a.cache), jax.tree.leaves(b.cache), strict=True):
        assert_same_bits(x.view(np.uint16) if x.dtype == jnp.bfloat16 else x,
                         y.view(np.uint16) if y.dtype == jnp.bfloat16 else y)


@pytest.mark.parametrize("mode", ACTIVATIONS)
@pytest.mark.parametrize("name", ["nano", "mini"])
def test_one_gpu_is_several(gpu, several, request, name, mode):
    """Streams after every layer, experts, keys and values."""
    twin = request.getfixturevalue(name)
    for length in (0, 15, 64, 255, 700):
        one, other = (Pass(twin, DecodeConfig(activations=mode), length, gpu, m) for m in (None, several))
        for tree in TREES.values():
            assert_same_pass(one(tree), other(tree))
        assert_same_pass(one(valid=9), other(valid=9))
    ffi.raise_wait_error()


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 15])
def test_fewer_rows(gpu, several, nano, rows):
    one, other = (Pass(nano, DecodeConfig(), 255, gpu, m) for m in (None, several))
    assert_same_pass(one(TREES["chain"][:rows], rows), other(TREES["chain"][:rows], rows))
    ffi.raise_wait_error()


def test_a_difference_is_seen(gpu, mesh, nano):
    """A weight of the second GPU with another bit."""
    one, two = (Pass(nano, DecodeConfig(), 64, gpu, m) for m in (None, mesh))
    dense = two.params["layers"][2]["dense"]
    two.params["layers"][2]["dense"] = dense.at[7, 1001].set(dense[7, 1001] ^ 0x40)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_pass(one(), two())


def test_text_is_that_of_one_gpu(gpu, several):
    """Plain on one GPU, plain and speculative on several: tokens and log-probabilities."""
    prompt = "Question: What is 3 times 14?\nAnswer:"
    made = []
    for devices, drafter in ((1, None), (several.size, None), (several.size, nano_drafter_path())):
        model = musejax.load(devices=jax.devices(gpu.platform)[:devices], drafter=drafter)
        assert model.decode.implementation == "megakernel"
        made.append(musejax.generate(model, prompt, max_new_tokens=100))
    for other in made[1:]:
        assert other.tokens == made[0].tokens
        assert_same_bits(np.float32(other.logprobs), np.float32(made[0].logprobs))
    assert made[2].steps < made[1].steps
    ffi.raise_wait_error()


@pytest.mark.parametrize(("devices", "slices"), [(1, 2), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_layers_of_the_released_sizes(gpu, devices, slices):
    """Beside one rank of 8 whose exchanges are looped back: all slices have the same weights."""
    need(gpu, devices)
    layers = 4 if devices == NUM_SLICES else 2
    one, other = (LoopedLayers(Case(layers=layers, devices=d, slices=s)) for d, s in ((1, 1), (devices, slices)))
    for seed in range(3):
        for x, y in zip(one.launch(one.stream(seed)), other.launch(other.stream(seed)), strict=True):
            assert_same_bits(x, y)
    ffi.raise_wait_error()


@pytest.mark.parametrize(("devices", "slices"), [(2, 1), (2, 4), (4, 2), (8, 1)])
def test_a_step_of_the_released_sizes(gpu, devices, slices):
    """Beside the first GPU's part whose exchanges are looped back, and the other GPUs' results."""
    need(gpu, devices)
    case = StepCase(layers=2, devices=devices, slices=slices)
    timing = step.measure(case, batches=1, each=2, mesh=step.prepare(case))
    assert timing.failures == [] and timing.digest == timing.looped.digest


def late(run: Pass, steps: int):
    """`run`, whose second GPU counts to `steps` before its layers, each step a kernel or more."""
    plain = kf.embed

    def embed(call, params, tokens, many):
        stream = plain(call, params, tokens, many)
        count = jnp.where(lax.axis_index(AXIS) == 1, steps, 0)
        first = lax.bitcast_convert_type(stream[0, 0], jnp.int32) & 1  # of the stream: not before its gather
        counted = lax.while_loop(lambda i: i < count, lambda i: i + 1, first)
        return jnp.where(counted < 0, -stream, stream)  # it never is, which XLA does not know

    kf.embed, run.run = embed, jit(lambda *args, **more: kf.run_pass(*args, **more))  # traced anew
    try:
        return run()
    finally:
        kf.embed = plain


def test_a_rank_that_is_late(gpu, mesh, nano):
    """Waited for within the budget; beyond it reported by the rank that waited, and the next pass is right."""
    want, lib = Pass(nano, DecodeConfig(), 64, gpu)(), ffi.library("gpu")
    assert_same_pass(late(Pass(nano, DecodeConfig(), 64, gpu, mesh), 20_000), want)
    ffi.raise_wait_error()
    try:
        assert lib.set_spin_budget(2 * 10**6) == 0
        late(Pass(nano, DecodeConfig(), 64, gpu, mesh), 20_000)
        with pytest.raises(ffi.WaitError, match=PLACE):
            ffi.raise_wait_error()
    finally:
        assert lib.set_spin_budget(BUDGET) == 0
    assert_same_pass(Pass(nano, DecodeConfig(), 64, gpu, mesh)(), want)
    ffi.raise_wait_error()


def test_a_unit_that_nobody_runs(gpu, mesh, nano):
    """Reported, and the state that came of it is not taken for an answer; then all is well."""
    run, lib, shape = Pass(nano, DecodeConfig(), 64, gpu, mesh), ffi.library("gpu"), ks.Shape.of(nano.config)
    want, sms = run(), lib.multiprocessors()[0]
    number = lib.layer_instances().index((*shape, nano.config.num_experts_per_tok, NUM_SLICES // 2))
    right = ks.spans(ks.dense_schedule(shape, NUM_SLICES // 2, sms))
    wrong = np.array(right)
    out = wrong[:, ks.GEMMS.index("out")]
    out[out[:, 1] == out[:, 1].max()] -= (0, 1)
    try:
        assert lib.set_spin_budget(20 * 10**6) == 0
        lib.set_schedule(number, sms, wrong.ravel().tolist())
        run()
        with pytest.raises(ffi.WaitError, match=PLACE):
            ffi.raise_wait_error()
    finally:
        lib.set_schedule(number, sms, right.ravel().tolist())
        assert lib.set_spin_budget(BUDGET) == 0
    assert_same_pass(run(), want)
    ffi.raise_wait_error()


def test_a_stale_epoch(gpu, mesh, nano):
    """One GPU's epochs no longer fit the other's: reported within the budget, the cache that came of it is refused, and
    a new pass is right."""
    run, lib, shape = Pass(nano, DecodeConfig(), 64, gpu, mesh), ffi.library("gpu"), ks.Shape.of(nano.config)
    want, good = run(), run.cache
    ffi.raise_wait_error()
    number = lib.layer_instances().index((*shape, nano.config.num_experts_per_tok, NUM_SLICES // 2))
    second = mesh.devices.flat[1].local_hardware_id
    try:
        assert lib.set_spin_budget(20 * 10**6) == 0
        assert lib.shift_epochs(number, second, 1000) >= 1
        begin = time.perf_counter()
        run.cache = lost = run.on_devices().cache
        jax.block_until_ready(lost)
        assert time.perf_counter() - begin < 2, "within the budget, by far less than the usual one"
        with pytest.raises(ffi.WaitError, match=PLACE) as error:
            ffi.raise_wait_error()
        assert type(error.value) is ffi.WaitError
        assert [int(x.data) for x in lost.accepted.addressable_shards] == [GAVE_UP] * 2
        for _ in range(2):
            run.cache = run.on_devices().cache
            jax.block_until_ready(run.cache)
            with pytest.raises(ffi.StateError, match="the state of a pass that gave up"):
                ffi.raise_wait_error()
    finally:
        assert lib.set_spin_budget(BUDGET) == 0
    run.cache = good
    assert_same_pass(run(), want)
    ffi.raise_wait_error()


def test_epochs_that_agree(gpu, mesh, nano):
    """Both GPUs further by the same: that alone is no error."""
    run, lib, shape = Pass(nano, DecodeConfig(), 64, gpu, mesh), ffi.library("gpu"), ks.Shape.of(nano.config)
    want = run()
    number = lib.layer_instances().index((*shape, nano.config.num_experts_per_tok, NUM_SLICES // 2))
    for device in mesh.devices.flat:
        assert lib.shift_epochs(number, device.local_hardware_id, 1000) >= 1
    assert_same_pass(run(), want)
    ffi.raise_wait_error()


@pytest.mark.parametrize("marked", [0, 1])
def test_one_gpu_alone_knows_that_a_pass_gave_up(gpu, mesh, nano, marked):
    """It refuses; the other waits in vain, within its budget, and from then on refuses, too."""
    run, lib = Pass(nano, DecodeConfig(), 64, gpu, mesh), ffi.library("gpu")
    want, good = run(), run.cache
    marks = [jax.device_put(jnp.int32(GAVE_UP if i == marked else 0), d) for i, d in enumerate(mesh.devices.flat)]
    run.cache = good._replace(accepted=jax.make_array_from_single_device_arrays(
        (), NamedSharding(mesh, PartitionSpec()), marks))
    try:
        assert lib.set_spin_budget(20 * 10**6) == 0
        after = run.on_devices().cache
        jax.block_until_ready(after)
        with pytest.raises(ffi.WaitError):  # of the rank that was first
            ffi.raise_wait_error()
        assert [int(x.data) for x in after.accepted.addressable_shards] == [GAVE_UP] * 2
    finally:
        assert lib.set_spin_budget(BUDGET) == 0
    run.cache = good
    assert_same_pass(run(), want)
    ffi.raise_wait_error()


def test_a_rank_that_is_late_in_a_whole_run(gpu, mesh):
    """A state that one GPU alone holds for lost, in a `lax.while_loop` with collectives in it: it ends on both."""
    model = musejax.load(devices=jax.devices(gpu.platform)[:2], drafter=nano_drafter_path())
    prompt, lib = model.tokenizer.encode("Question:", bos=True, parse_special=False), ffi.library("gpu")

    def whole(state):
        return np.asarray(model.run_speculative(state, 20, ()).tokens).tolist()

    want = whole(model.start_speculative(prompt, 128))
    state = model.start_speculative(prompt, 128)
    ffi.raise_wait_error()
    marks = [jax.device_put(jnp.int32(n), d) for n, d in zip((int(state.cache.accepted), GAVE_UP), mesh.devices.flat,
                                                             strict=True)]
    mark = jax.make_array_from_single_device_arrays((), state.cache.accepted.sharding, marks)
    try:
        assert lib.set_spin_budget(20 * 10**6) == 0
        whole(state._replace(cache=state.cache._replace(accepted=mark)))
        with pytest.raises(ffi.WaitError):
            ffi.raise_wait_error()
    finally:
        assert lib.set_spin_budget(BUDGET) == 0
    assert whole(model.start_speculative(prompt, 128)) == want
    ffi.raise_wait_error()


@pytest.mark.parametrize("devices", [(0, 0), (0, 99), (0, 1, 2)])
def test_devices_that_cannot_be_connected(gpu, devices):
    sizes = next(sizes for sizes in ffi.layer_instances() if sizes[-1] == 4)
    with pytest.raises(ffi.LibraryError, match="connect: expected 2 to 2 different GPUs"):
        ffi.connect(sizes, 64, devices)


def test_sizes_that_cannot_be_connected(gpu):
    with pytest.raises(ffi.LibraryError, match=r"connect: expected sizes among .*, got \(1,\)"):
        ffi.connect((1,), 64, (0, 1))
