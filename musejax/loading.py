"""From a checkpoint folder to a model that runs: configuration, parameters on devices, tokenizer, template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from musejax import decode as steps
from musejax.chat import ChatTemplate
from musejax.checkpoint import load_params
from musejax.checkpoint.load import require_checkpoint
from musejax.config import DecodeConfig, ModelConfig
from musejax.decode import DecodeState
from musejax.model.module import MuseSpark
from musejax.numerics import storage_dtype
from musejax.packing import unpack_params
from musejax.paths import nano_path
from musejax.sampling import Sampling
from musejax.sharding import make_mesh, replicated
from musejax.speculation import draft_kernels
from musejax.speculation import step as speculative
from musejax.speculation.packing import pack_drafter, place
from musejax.speculation.params import load_drafter
from musejax.speculation.step import Emitted, Run, SpecParams, SpecState, Speculation
from musejax.tokenizer import GenerationDefaults, Tokenizer, read_generation_config


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint and how to run it.

    Attributes:
        params: pytree of arrays, placed on `mesh`; the first argument of every step. In packed form (packing.py) for
            `megakernel`; else in table form (params.py), bfloat16 weights as `numerics.storage_dtype` says.
        tokenizer, chat: None if the folder has none.
        defaults: stop ids and sampling defaults of the release.
        path: where it was loaded from.
        drafter: parameters of the drafter: packed (speculation/packing.py) and sliced over the mesh for the kernels,
            else as published, on every device; None without one.
        speculation: how its guesses are made; `speculation.drafter` is None without one.
    """

    config: ModelConfig
    decode: DecodeConfig
    params: dict
    mesh: Mesh
    tokenizer: Tokenizer | None
    chat: ChatTemplate | None
    defaults: GenerationDefaults
    path: Path
    drafter: dict | None = None
    speculation: Speculation = field(default_factory=Speculation)

    @property
    def num_tokens(self) -> int | None:
        """Ids below it can be produced; None if there is no tokenizer to say so."""
        return None if self.tokenizer is None else self.tokenizer.size

    @property
    def module(self) -> MuseSpark:
        """The same parameters as a Flax module in plain JAX; packed ones are unpacked, into a second copy."""
        params = unpack_params(self.params, self.config) if steps.uses_kernels(self.decode) else self.params
        return MuseSpark(self.config, params, self.decode)

    def start(self, tokens: Sequence[int], max_length: int, sampling: Sampling | None = None) -> DecodeState:
        """Prefills a prompt of token ids, with room for max_length positions; see `decode.start`.

        Raises:
            ConfigError: an empty prompt, an id outside the vocabulary, more tokens than max_length.
        """
        return steps.start(self.params, tokens, max_length, sampling, config=self.config, decode=self.decode,
                           num_tokens=self.num_tokens, mesh=self.mesh)

    def step(self, state: DecodeState) -> DecodeState:
        """One jitted `decode.decode_step`; the state passed in is used up. On a GPU call `ffi.raise_wait_error` when
        the token is on the host: after a WaitError this state is lost, and further steps of it are StateErrors."""
        return steps.jit_decode_step(self.params, state, config=self.config, decode=self.decode,
                                     num_tokens=self.num_tokens, mesh=self.mesh)


    def start_speculative(self, tokens: Sequence[int], max_length: int, sampling: Sampling | None = None) -> SpecState:
        """As `start`, for `step_speculative`; see `speculation.step.start`. Leave room for 16 positions at the end."""
        return speculative.start(SpecParams(self.params, self.drafter), tokens, max_length, sampling,
                                 config=self.config, decode=self.decode, speculation=self.speculation,
                                 num_tokens=self.num_tokens, mesh=self.mesh)

    def step_speculative(self, state: SpecState) -> tuple[SpecState, Emitted]:
        """One jitted `speculation.step.decode_step`, up to 16 tokens; the state passed in is used up. On a GPU call
        `ffi.raise_wait_error` when the tokens are on the host."""
        return speculative.jit_decode_step(SpecParams(self.params, self.drafter), state, config=self.config,
                                           decode=self.decode, speculation=self.speculation,
                                           num_tokens=self.num_tokens, mesh=self.mesh)


    def run_speculative(self, state: SpecState, limit: int, stop_ids: tuple[int, ...] = ()) -> Run:
        """Steps until a stop id or `limit` tokens, the state's own included, in one program; the state is used up."""
        room = -(-limit // 64) * 64  # few sizes, few compilations
        _, run = speculative.jit_run_steps(SpecParams(self.params, self.drafter), state, jnp.int32(limit), room=room,
                                           stop_ids=stop_ids, config=self.config, decode=self.decode,
                                           speculation=self.speculation, num_tokens=self.num_tokens, mesh=self.mesh)
        return run


def load(path: str | Path | None = None, *, devices: int | list | None = None, overlay: Sequence[str | Path] = (),
         decode: DecodeConfig | None = None, progress: bool = False, drafter: str | Path | None = None,
         speculation: Speculation | None = None) -> Model:
    """Loads a published (Hugging Face) or converted folder.

    Args:
        path: the folder; None takes the shipped nano model.
        devices: how many devices, or which; 1, 2, 4 or 8 of them.
        overlay: folders whose tensors replace those of the same name.
        decode: how to run it; the combine order falls back to `flat` where the expert count asks for it, and
            implementation `auto` becomes `megakernel` where that can run.
        drafter: folder of a DFlash drafter (`paths.nano_drafter_path()` for nano's); None decodes without guesses. With
            `megakernel` it runs through the kernels, split over the devices; in plain JAX, whole on each, where its
            sizes have no packed form.
        speculation: how guesses are made (its `drafter` comes from the folder); None for the defaults.

    Raises:
        ConfigError, CheckpointError, TokenizerError, LibraryError, FileNotFoundError: with what was expected and found.
    """
    path = Path(path) if path is not None else nano_path()
    mesh = make_mesh(devices)
    platform = mesh.devices.flat[0].platform
    require_checkpoint(path)
    decode = (decode or DecodeConfig()).for_model(ModelConfig.from_folder(path), platform, mesh.size)
    form = "packed" if steps.uses_kernels(decode) else "table"
    config, params = load_params(path, mesh=mesh, overlay=overlay, progress=progress, form=form)
    if form == "table":
        dtype = storage_dtype(decode.policy, platform)
        params = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, params)
    speculation, drafter_params = replace(speculation or Speculation(), drafter=None), None
    if drafter is not None:
        speculation, drafter_params = _load_drafter(drafter, config, decode, speculation, mesh)
    tokenizer, defaults = Tokenizer.find(path), read_generation_config(path)
    if not defaults.stop_ids and tokenizer is not None:
        defaults = replace(defaults, stop_ids=tokenizer.stop_ids)
    return Model(config=config, decode=decode, params=params, mesh=mesh, tokenizer=tokenizer,
                 chat=ChatTemplate.find(path), defaults=defaults, path=path,
                 drafter=drafter_params, speculation=speculation)


def _load_drafter(path, config: ModelConfig, decode: DecodeConfig, speculation: Speculation,
                  mesh: Mesh) -> tuple[Speculation, dict]:
    """The drafter's sizes within `speculation`, and its parameters in the form in which the step runs them: packed with
    `megakernel`, unless `draft_kernels.kernel_problems` has a reason against it; else as published, for plain JAX."""
    device = mesh.devices.flat[0]
    sizes, params = load_drafter(path, config, device=device)
    speculation = replace(speculation, drafter=sizes)
    if steps.uses_kernels(decode) and not draft_kernels.kernel_problems(sizes, speculation.policy, device.platform):
        return speculation, place(pack_drafter(params, sizes), mesh)
    dtype = storage_dtype(speculation.policy, device.platform)
    return speculation, jax.device_put(jax.tree.map(lambda x: x.astype(dtype), params), replicated(mesh))
