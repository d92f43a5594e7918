"""Sizes and choices: ModelConfig (what the checkpoint is) and DecodeConfig (how it is run).

Axis letters, used as suffixes of array names (`x_td`, `w_efm`) in the whole package:

    t rows (tokens) in this call     d hidden width            n query heads
    j experts chosen per token       m width experts run at    k key/value heads
    e experts                        f expert inner width      c head width
    v vocabulary                     p cached positions        s slices (always 8, or 1)
"""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path

from musejax.numerics import CANON, Policy
from musejax.nvfp4 import ACTIVATIONS

NUM_SLICES = 8
"""Every split dimension is cut into this many slices, whatever the number of devices."""

SLICE_MULTIPLE = 16
"""Rows of one slice come in multiples of an MMA tile and an NVFP4 block, both 16."""

MAX_PREFILL_CHUNK = 4096
"""Rows of one prefill call: activations of a call grow with it, and attention scores with its square."""

ARCHITECTURES = ("MuseSparkForConditionalGeneration",)
MODEL_TYPES = ("muse_spark", "muse_spark_text")
FULL, SLIDING = "full_attention", "sliding_attention"

# Keys of `text_config` that do not change what the decoder computes.
_WITHOUT_EFFECT = frozenset({
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "initializer_range", "use_cache",
    "output_router_logits", "intermediate_size", "attention_dropout", "_name_or_path", "router_aux_loss_coef",
    "router_jitter_noise", "pad_token_id", "chunk_size_feed_forward", "is_encoder_decoder", "return_dict",
    "output_attentions", "output_hidden_states", "problem_type", "id2label", "label2id", "quantization_config",
})
# Keys whose only supported value is the one here; another value means another model.
_FIXED = {
    "attention_bias": False, "tie_word_embeddings": False, "num_shared_experts": 0, "hidden_act": "silu",
}


class ConfigError(ValueError):
    """The configuration is not one this package can run; the message says what was expected."""


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < 2**31


def _is_number(value) -> bool:
    """A finite number that float32 can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3e38


def _entry(values: dict, key: str, kind: type, default):
    """values[key], or the default where it is absent or null.

    Raises:
        ConfigError: it is of another type.
    """
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        name = {list: "a list", dict: "an object", str: "a text"}[kind]
        raise ConfigError(f"{key}: expected {name}, got {value!r}")
    return value


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one Muse Spark text decoder; field names are those of `text_config`.

    The defaults are the released 816B-A42B model. Every instance has checked itself.

    `nvfp4_layers` is no such field and in no config.json: the loader finds by their tensors which layers have NVFP4
    experts, and the parameter table follows.

    Raises:
        ConfigError: a size is not positive, heads do not group, a list has the wrong length, ...
    """

    vocab_size: int = 202048
    hidden_size: int = 8192
    num_hidden_layers: int = 62
    num_attention_heads: int = 128
    num_key_value_heads: int = 16
    head_dim: int = 64
    moe_hidden_size: int = 4096
    moe_intermediate_size: int = 4096
    num_local_experts: int = 256
    num_experts_per_tok: int = 8
    sliding_window: int = 2048  # keys a query sees, the query's own included
    max_position_embeddings: int = 1048576
    rope_theta: float = 500000.0
    layer_types: tuple[str, ...] = ()  # empty: derived, counted from the last layer
    layer_rope_theta: tuple[float, ...] = ()  # 0 = no rotation (NoPE); empty: derived
    qk_scale_factor: float = 5.4730064863875
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    residual_gate_temperature: float = 0.3
    routed_scaling_factor: float = 1.0
    output_multiplier: float = 0.17677669529663687
    final_logit_softcapping: float = 20.0
    bos_token_id: int = 200000
    eos_token_id: int = 200001
    pad_token_id: int | None = 200018
    nvfp4_layers: tuple[int, ...] = ()

    # Not in any config.json: the same in every implementation (spec section 1.1).
    residual_gate_floor = 1e-3
    route_eps = 1e-15

    def __post_init__(self):
        n = self.num_hidden_layers
        self._check_sizes()
        full = [(n - 1 - i) % 4 == 0 for i in range(n)]  # every fourth, counted from the LAST layer
        types = tuple(self.layer_types or (FULL if f else SLIDING for f in full))
        thetas = tuple(self.layer_rope_theta or (0.0 if f else self.rope_theta for f in full))
        for i, theta in enumerate(thetas):
            if not (_is_number(theta) and (theta == 0 or theta > 1)):
                raise ConfigError(f"layer_rope_theta[{i}]: expected 0 (no rotation) or a base above 1, got {theta!r}")
        object.__setattr__(self, "layer_types", types)
        object.__setattr__(self, "layer_rope_theta", tuple(map(float, thetas)))
        for name in ("layer_types", "layer_rope_theta"):
            if len(getattr(self, name)) != n:
                raise ConfigError(f"{name}: expected {n} entries (num_hidden_layers), got {len(getattr(self, name))}")
        for i, kind in enumerate(types):
            if kind not in (FULL, SLIDING):
                raise ConfigError(f"layer_types[{i}]: expected '{FULL}' or '{SLIDING}', got {kind!r}")
        object.__setattr__(self, "nvfp4_layers", tuple(sorted(set(self.nvfp4_layers))))
        self._check_nvfp4()

    def _check_nvfp4(self):
        for i in self.nvfp4_layers:
            if not 0 <= i < self.num_hidden_layers:
                raise ConfigError(f"nvfp4_layers: expected layers 0 to {self.num_hidden_layers - 1}, got {i}")
        for name in ("moe_hidden_size", "moe_intermediate_size"):
            if self.nvfp4_layers and getattr(self, name) % SLICE_MULTIPLE:
                raise ConfigError(f"{name}: expected a multiple of {SLICE_MULTIPLE}, the NVFP4 block, got "
                                  f"{getattr(self, name)}; use BF16 experts")

    def _check_sizes(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_token_id"):
                if not (value is None and "None" in field.type) and not (_is_integer(value) and value >= 0):
                    raise ConfigError(f"{field.name}: expected a token id, got {value!r}")
            elif field.type == "int" and not (_is_integer(value) and value >= 1):
                raise ConfigError(f"{field.name}: expected a positive integer, got {value!r}")
            elif field.type == "float":
                if not (_is_number(value) and value > 0):
                    raise ConfigError(f"{field.name}: expected a positive number, got {value!r}")
                object.__setattr__(self, field.name, float(value))  # JSON writers print 500000.0 as 500000
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(f"num_attention_heads: expected a multiple of num_key_value_heads "
                              f"({self.num_key_value_heads}), got {self.num_attention_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number (rotary pairs), got {self.head_dim}")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ConfigError(f"num_experts_per_tok: expected at most num_local_experts "
                              f"({self.num_local_experts}), got {self.num_experts_per_tok}")

    # ------------------------------------------------------------------ derived sizes

    @property
    def q_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """Factor of q.k: the published q multiplier over sqrt(head_dim), folded together (spec 3.2)."""
        return self.qk_scale_factor / math.sqrt(self.head_dim)

    @property
    def score_bound(self) -> float:
        """Largest |score| there can be: normed q and k have length sqrt(head_dim)."""
        return self.qk_scale_factor * math.sqrt(self.head_dim)

    def window(self, layer: int) -> int | None:
        """Keys a query of this layer may see, itself included; None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def slice_problems(self) -> list[str]:
        """Why the sizes cannot be cut into 8 slices, one line per size; empty if they can."""
        tile = NUM_SLICES * SLICE_MULTIPLE
        needs = [("hidden_size", tile), ("moe_hidden_size", tile), ("moe_intermediate_size", tile)]
        needs += [(n, NUM_SLICES) for n in
                  ("num_attention_heads", "num_key_value_heads", "num_local_experts", "vocab_size")]
        return [f"{name}: expected a multiple of {unit}, got {getattr(self, name)}"
                for name, unit in needs if getattr(self, name) % unit]

    @property
    def num_slices(self) -> int:
        """8, or 1 for sizes that do not divide (those run on `reference` on one device only)."""
        return 1 if self.slice_problems() else NUM_SLICES

    # ------------------------------------------------------------------ published form

    @classmethod
    def from_hf(cls, config: dict) -> ModelConfig:
        """Reads the published nested `config.json` (or its `text_config` alone); towers are skipped.

        Raises:
            ConfigError: another architecture, or a setting this decoder does not implement.
        """
        if not isinstance(config, dict):
            raise ConfigError(f"expected an object, got {type(config).__name__}")
        for name in _entry(config, "architectures", list, []):
            if name not in ARCHITECTURES:
                raise ConfigError(f"architectures: expected {ARCHITECTURES[0]}, got {name}")
        kind = _entry(config, "model_type", str, None)
        if kind not in MODEL_TYPES:
            raise ConfigError(f"model_type: expected one of {', '.join(MODEL_TYPES)}, got {kind!r}")
        if kind == "muse_spark" and config.get("text_config") is None:
            raise ConfigError("text_config: expected an object in a muse_spark config, got none")
        text = dict(_entry(config, "text_config", dict, config))
        if text.get("model_type", "muse_spark_text") != "muse_spark_text":
            raise ConfigError(f"text_config.model_type: expected muse_spark_text, got {text['model_type']!r}")
        for key, only in _FIXED.items():
            value = text.pop(key, only)
            if value is not None and value != only:
                raise ConfigError(f"{key}: only {only!r} is implemented, got {value!r}")
        dense = [kind for kind in _entry(text, "mlp_layer_types", list, []) if kind != "sparse"]
        if dense:
            raise ConfigError(f"mlp_layer_types: only 'sparse' is implemented, got {dense[0]!r}")
        rope = _entry(text, "rope_parameters", dict, {})
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_parameters.rope_type: only 'default' is implemented, got {rope['rope_type']!r}")
        text.setdefault("rope_theta", rope.get("rope_theta"))
        for key in ("mlp_layer_types", "rope_parameters"):
            text.pop(key, None)
        if isinstance(text.get("eos_token_id"), list):
            text["eos_token_id"] = next(iter(text["eos_token_id"]), None)
        known = {f.name for f in fields(cls)} - {"nvfp4_layers"}
        unknown = sorted(k for k in text if k not in known and k not in _WITHOUT_EFFECT)
        if unknown:
            warnings.warn(f"config.json: ignoring unknown keys {', '.join(unknown)}", stacklevel=2)
        values = {k: text[k] for k in known if text.get(k) is not None}
        for key in ("layer_types", "layer_rope_theta"):
            values[key] = tuple(_entry(values, key, list, []))
        return cls(**values)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads `folder/config.json`.

        Raises:
            ConfigError: no such file, not JSON, or not a configuration `from_hf` accepts.
        """
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: expected the published config.json, found no such file") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as err:
            raise ConfigError(f"{path}: expected JSON, got {err}") from None
        try:
            return cls.from_hf(config)
        except ConfigError as err:
            raise ConfigError(f"{path}: {err}") from None

    def to_hf(self) -> dict:
        """The published nested form; `from_hf(to_hf())` gives the same config, but for `nvfp4_layers`."""
        n = self.num_hidden_layers
        text = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("rope_theta", "nvfp4_layers")}
        text.update({k: v for k, v in _FIXED.items() if k != "num_shared_experts"})
        text.update(
            model_type="muse_spark_text", dtype="bfloat16", attention_dropout=0.0,
            layer_types=list(self.layer_types), layer_rope_theta=list(self.layer_rope_theta),
            mlp_layer_types=["sparse"] * n,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
        )
        return {"architectures": list(ARCHITECTURES), "model_type": "muse_spark", "dtype": "bfloat16",
                "text_config": dict(sorted(text.items()))}


RELEASED = ModelConfig()

MINI = ModelConfig(
    vocab_size=512, hidden_size=128, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
    moe_hidden_size=128, moe_intermediate_size=128, num_local_experts=16, num_experts_per_tok=2, sliding_window=8,
    max_position_embeddings=4096, qk_scale_factor=2.5, output_multiplier=0.5, final_logit_softcapping=3.0,
    bos_token_id=500, eos_token_id=501, pad_token_id=502,
)
"""Smallest sizes that obey every rule of the released model: 8 slices, both layer types."""

NANO = ModelConfig(
    vocab_size=2048, hidden_size=128, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
    moe_hidden_size=128, moe_intermediate_size=128, num_local_experts=16, num_experts_per_tok=4, sliding_window=64,
    max_position_embeddings=1024, output_multiplier=math.sqrt(2.0),
    bos_token_id=2041, eos_token_id=2046, pad_token_id=2047,
)
"""The sizes of the shipped model `checkpoints/nano`: 8,603,104 parameters."""

PRESETS = {"released": RELEASED, "mini": MINI, "nano": NANO}


IMPLEMENTATIONS = ("auto", "reference", "megakernel")
PREFILLS = ("auto", "exact", "reference")
EXACT_PREFILL_MAX = 4096
"""Longest prompt, in tokens, that `prefill="auto"` runs bit-exactly."""


@dataclass(frozen=True)
class DecodeConfig:
    """How a model is run. Hashable: a static argument of every jitted function.

    Attributes:
        implementation: of a decoder layer: `reference` is plain JAX; `megakernel` the compiled phases, with the same
            bits on any number of devices and rows; `auto` is for `for_model` to decide: megakernel where it can run.
        policy: rounding points, `numerics.CANON` or `numerics.EXACT`.
        combine: order in which expert outputs are added, `flat` or `ep(R)` (spec section 7.3).
        experts: `hit` reads only the experts that rows chose; `all` computes every expert for every
            row and can be differentiated.
        prefill: of `megakernel`: `exact` runs prompts through the same phases as decoding, 16 rows a call, with the
            bits of decoding them token by token; `reference` is plain JAX, faster and not bit-exact; `auto` is exact
            for prompts of up to EXACT_PREFILL_MAX tokens.
        prefill_chunk: rows per plain JAX prefill call, at most MAX_PREFILL_CHUNK and the context; one compilation per
            value.
        activations: what GEMMs of NVFP4 experts multiply weights with: `bf16`, or NVFP4 with the scales of the
            checkpoint (`nvfp4_static`) or of each row (`nvfp4_per_token`). BF16 experts ignore it.

    Raises:
        ConfigError: an unknown name, a chunk below 1, or NVFP4 activations in a policy that does not round.
    """

    implementation: str = "auto"
    policy: Policy = CANON
    combine: str = "ep(8)"
    experts: str = "hit"
    prefill: str = "auto"
    prefill_chunk: int = 64
    activations: str = "bf16"

    def __post_init__(self):
        for name, allowed in (("implementation", IMPLEMENTATIONS), ("experts", ("hit", "all")),
                              ("prefill", PREFILLS), ("activations", ACTIVATIONS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.policy, Policy):
            raise ConfigError(f"policy: expected a musejax.numerics.Policy, got {self.policy!r}")
        if not 1 <= self.prefill_chunk <= MAX_PREFILL_CHUNK:
            raise ConfigError(f"prefill_chunk: expected 1 to {MAX_PREFILL_CHUNK} rows, got {self.prefill_chunk}")
        if self.activations != "bf16" and not self.policy.rounds:
            raise ConfigError(f"activations: policy {self.policy.name} rounds nothing, expected bf16, got "
                              f"{self.activations}; use policy canon")
        combine_groups(self.combine)

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError if these choices cannot run on a model of these sizes."""
        groups = combine_groups(self.combine)
        if groups and config.num_local_experts % groups:
            raise ConfigError(f"combine: {self.combine} needs num_local_experts to be a multiple of {groups}, "
                              f"got {config.num_local_experts}; use flat")
        if self.policy.probs == "bfloat16" and config.score_bound >= 80:
            raise ConfigError(f"qk_scale_factor: scores reach {config.score_bound:.1f}, and softmax without a running "
                              "maximum needs less than 80; use policy exact (--policy exact, or in Python "
                              "policy=musejax.numerics.EXACT)")

    def kernel_problems(self, config: ModelConfig, platform: str, devices: int = 1) -> list[str]:
        """Why `megakernel` cannot run this model so on so many devices of a platform ("cpu", "gpu"), a line a reason;
        or empty."""
        from musejax.packing import packing_problems

        out = [] if platform == "cpu" else _instance_problems(config, platform, devices)
        if self.policy != CANON:
            out.append(f"policy: megakernel has the rounding points of canon, got {self.policy.name}")
        if self.experts != "hit":
            out.append(f"experts: megakernel reads the experts hit, got {self.experts}")
        return out + packing_problems(config)

    def for_model(self, config: ModelConfig, platform: str | None = None, devices: int = 1) -> DecodeConfig:
        """This choice, with `flat` combine where the expert count cannot be cut into the owner groups, and chunks no
        longer than the context. With a platform (and how many devices of it), `auto` implementation is decided too.

        Raises:
            ConfigError: see `check`, or `megakernel` asked for where it cannot run.
        """
        groups = combine_groups(self.combine)
        fits = not groups or config.num_local_experts % groups == 0
        result = replace(self, combine=self.combine if fits else "flat",
                         prefill_chunk=min(self.prefill_chunk, config.max_position_embeddings))
        result.check(config)
        if platform is None or self.implementation == "reference":
            return result
        problems = self.kernel_problems(config, platform, devices)
        if problems and self.implementation == "megakernel":
            raise ConfigError("; ".join(problems) + "; use implementation reference")
        return replace(result, implementation="reference" if problems else "megakernel")


def _instance_problems(config: ModelConfig, platform: str, devices: int) -> list[str]:
    """Why a GPU cannot run the layers: they are compiled for given sizes."""
    from musejax import ffi

    if platform not in ("gpu", "cuda"):
        return [f"implementation: megakernel runs on cpu and gpu, got {platform}"]
    try:
        instances = ffi.layer_instances()
    except ffi.LibraryError as error:
        return [f"implementation: {error}"]
    sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
             config.moe_hidden_size, config.moe_intermediate_size, config.num_local_experts,
             config.num_experts_per_tok, NUM_SLICES // devices)
    if sizes in instances:
        return []
    return ["implementation: on a GPU megakernel is compiled for given (hidden, heads, kv_heads, head_dim, moe_hidden, "
            f"moe_inner, experts, top_k, slices a device), expected one of {instances}, got {sizes}"]


def combine_groups(combine: str) -> int:
    """Owner groups of a combine order: 0 for `flat`, R for `ep(R)`.

    Raises:
        ConfigError: any other text.
    """
    match = re.fullmatch(r"flat|ep\(([1-9][0-9]*)\)", combine)
    if not match:
        raise ConfigError(f"combine: expected 'flat' or 'ep(R)' such as 'ep(8)', got {combine!r}")
    return int(match.group(1) or 0)
