"""Sizes of a DFlash drafter: `DraftConfig`, read from the drafter's own config.json (dflash2.md section 1.2).

Axis letters besides those of musejax/config.py, used in the whole package `speculation`:

    t rows of a block (the anchor first)   q drafted positions, t - 1     a candidates of a position
    l drafter layers                       r selector rank                g convolution groups
    o sides of a convolution (before, after its sublayer)   i its taps (own row, row before)   u tapped target layers

Sections named in this package are those of the DFlash 2 description, "dflash2.md".
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from musejax.config import SLIDING, ConfigError, ModelConfig, _is_integer, _is_number

DFLASH_1, DFLASH_2 = "DFlashDraftModel", "DFlash2DraftModel"
DEFAULT_CANDIDATES = 16
"""Candidates of a position where the drafter has no selector and its config.json therefore no number for them."""

CONV_TAPS = 2
"""Taps of the dynamic convolution: a row and the one before it."""

# Keys read from `dflash_config`, or from the top level where it lacks them.
_INNER = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "conv_kernel_size",
          "conv_group_size", "selector_rank", "selector_top_k", "output_multiplier", "final_logit_softcapping",
          "input_embedding_scale")
# Keys that do not change what the drafter computes.
_WITHOUT_EFFECT = frozenset({
    "architectures", "auto_map", "attention_dropout", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "initializer_range", "max_window_layers", "_name_or_path", "chunk_size_feed_forward", "is_encoder_decoder",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "id2label", "label2id",
})
# Keys whose only supported value is the one here; absent or null counts as it.
_FIXED = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
          "tie_word_embeddings": False, "rope_scaling": None}


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Tapped layers where config.json names none: round(1 + i (L - 4) / (count - 1)), halves to even.

    Raises:
        ConfigError: count is below 2, for which the formula says nothing, or the target has too few layers.
    """
    if count < 2:
        raise ConfigError("target_layer_ids: expected a list (its default needs at least 2 drafter layers), got none")
    if num_target_layers < 4:
        raise ConfigError(f"target_layer_ids: expected a list (its default needs at least 4 target layers, got "
                          f"{num_target_layers}), got none")
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and constants of one drafter; field names are those of config.json. Every instance has checked itself.

    Attributes:
        block_size: rows of a block, the anchor's included; `depth` = block_size - 1 positions are drafted.
        target_layer_ids: target layers whose output is tapped, 0-based, in the order in which taps are joined.
        sliding_window: a query sees keys at distances below it, on both sides.
        num_target_layers: of the target; None if the file does not say.
        conv_kernel_size, conv_group_size: of the dynamic convolutions; None in DFlash 1.
        selector_rank, selector_top_k: of the candidate selector; None in DFlash 1.
        final_logit_softcapping: None caps nothing.
        rope_half: rotation pairs channels (i, i + head_dim / 2); False pairs neighbours.

    Raises:
        ConfigError: every size or combination that cannot be run, in one text.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    rope_half: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        problems = self._size_problems() or self._combination_problems()
        if problems:
            raise ConfigError("\n".join(problems))

    def _size_problems(self) -> list[str]:
        out = []
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and "None" in field.type:
                continue
            if name.endswith("_token_id"):
                if not (_is_integer(value) and value >= 0):
                    out.append(f"{name}: expected a token id, got {value!r}")
            elif field.type.startswith("int") and not (_is_integer(value) and value >= 1):
                out.append(f"{name}: expected a positive integer, got {value!r}")
            elif field.type.startswith("float"):
                if _is_number(value) and value > 0:
                    object.__setattr__(self, name, float(value))
                else:
                    out.append(f"{name}: expected a positive number, got {value!r}")
        taps = self.target_layer_ids
        if not taps or not all(_is_integer(i) and i >= 0 for i in taps) or len(set(taps)) != len(taps):
            out.append(f"target_layer_ids: expected distinct layers from 0 on, got {list(taps)}")
        return out

    def _combination_problems(self) -> list[str]:
        out = []
        if self.num_attention_heads % self.num_key_value_heads:
            out.append(f"num_attention_heads: expected a multiple of num_key_value_heads ({self.num_key_value_heads}), "
                       f"got {self.num_attention_heads}")
        if self.head_dim % 2:
            out.append(f"head_dim: expected an even number (rotary pairs), got {self.head_dim}")
        if self.block_size < 2:
            out.append(f"block_size: expected at least 2 (the anchor and a drafted position), got {self.block_size}")
        if self.mask_token_id >= self.vocab_size:
            out.append(f"mask_token_id: expected an id below vocab_size ({self.vocab_size}), got {self.mask_token_id}")
        if self.rope_theta <= 1:
            out.append(f"rope_theta: expected a base above 1, got {self.rope_theta}")
        if self.num_target_layers is not None and max(self.target_layer_ids) >= self.num_target_layers:
            out.append(f"target_layer_ids: expected layers 0 to {self.num_target_layers - 1} (num_target_layers), got "
                       f"{list(self.target_layer_ids)}")
        for a, b in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            if (getattr(self, a) is None) != (getattr(self, b) is None):
                out.append(f"{a}, {b}: expected both or neither, got {getattr(self, a)} and {getattr(self, b)}")
        if self.conv_kernel_size is not None and self.selector_rank is None:
            out.append("selector_rank, selector_top_k: expected both beside convolution keys, got none")
        if self.conv_kernel_size not in (None, CONV_TAPS):
            out.append(f"conv_kernel_size: only {CONV_TAPS} is implemented, got {self.conv_kernel_size}")
        if self.conv_group_size is not None and self.hidden_size % self.conv_group_size:
            out.append(f"conv_group_size: expected a divisor of hidden_size ({self.hidden_size}), got "
                       f"{self.conv_group_size}")
        if self.candidates > self.vocab_size:
            out.append(f"selector_top_k: expected at most vocab_size ({self.vocab_size}), got {self.candidates}")
        return out

    # ------------------------------------------------------------------ derived sizes

    @property
    def has_conv(self) -> bool:
        return self.conv_kernel_size is not None

    @property
    def has_selector(self) -> bool:
        return self.selector_rank is not None

    @property
    def depth(self) -> int:
        """Positions drafted by one pass."""
        return self.block_size - 1

    @property
    def candidates(self) -> int:
        """Candidates of each drafted position."""
        return self.selector_top_k or min(DEFAULT_CANDIDATES, self.vocab_size)

    @property
    def q_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def taps_width(self) -> int:
        """Width of the joined taps, the input of `fc`."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def conv_groups(self) -> int:
        return self.hidden_size // self.conv_group_size if self.has_conv else 0

    def check_against(self, target: ModelConfig) -> None:
        """Raises ConfigError, naming every mismatch, if this drafter cannot draft for that target."""
        out = [f"{name}: expected {getattr(target, name)} as in the target, got {getattr(self, name)}"
               for name in ("vocab_size", "hidden_size") if getattr(self, name) != getattr(target, name)]
        layers = target.num_hidden_layers
        if self.num_target_layers not in (None, layers):
            out.append(f"num_target_layers: expected {layers} as in the target, got {self.num_target_layers}")
        if max(self.target_layer_ids) >= layers:
            out.append(f"target_layer_ids: expected layers 0 to {layers - 1} of the target, got "
                       f"{list(self.target_layer_ids)}")
        if out:
            raise ConfigError("the drafter does not fit the target:\n" + "\n".join(out))

    # ------------------------------------------------------------------ published form

    @classmethod
    def from_hf(cls, config: dict) -> DraftConfig:
        """Reads a published config.json by the rules of section 1.2; warns of keys it does not know.

        Raises:
            ConfigError: every missing or contradictory key and every setting that is not implemented, in one text.
        """
        return _Reader(config).read()

    @classmethod
    def from_folder(cls, folder: str | Path) -> DraftConfig:
        """Reads `folder/config.json`.

        Raises:
            ConfigError: no such file, not JSON, or not a configuration `from_hf` accepts.
        """
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{path}: expected the drafter's config.json, found no such file") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as err:
            raise ConfigError(f"{path}: expected JSON, got {err}") from None
        try:
            return cls.from_hf(config)
        except ConfigError as err:
            raise ConfigError(f"{path}: {err}") from None

    def to_hf(self) -> dict:
        """The published form; `from_hf(to_hf())` gives the same config."""
        inner = {name: getattr(self, name) for name in _INNER
                 if name != "num_target_layers" and getattr(self, name) is not None}
        inner["target_layer_ids"] = list(self.target_layer_ids)
        top = {f.name: getattr(self, f.name) for f in fields(self)
               if f.name not in (*_INNER, "rope_theta", "rope_half") and getattr(self, f.name) is not None}
        if self.num_target_layers is not None:
            top["num_target_layers"] = self.num_target_layers
        if not self.rope_half:
            top["rope_is_neox_style"] = False
        top.update({name: value for name, value in _FIXED.items() if value is not None and name != "mlp_bias"})
        top.update(
            architectures=[DFLASH_2 if self.has_conv or self.has_selector else DFLASH_1], dtype="bfloat16",
            is_causal=False, use_sliding_window=True, layer_types=[SLIDING] * self.num_hidden_layers,
            rope_parameters={"rope_theta": self.rope_theta, "rope_type": "default"}, dflash_config=inner)
        return dict(sorted(top.items()))


class _Reader:
    """Resolves one config.json; collects what is wrong with it."""

    def __init__(self, config: dict):
        if not isinstance(config, dict):
            raise ConfigError(f"expected an object, got {type(config).__name__}")
        self.top, self.problems, self.remarks = dict(config), [], []
        inner = self.top.pop("dflash_config", None)
        if inner is not None and not isinstance(inner, dict):
            self.problems.append(f"dflash_config: expected an object, got {inner!r}")
            inner = None
        self.inner = dict(inner or {})

    def read(self) -> DraftConfig:
        values = {name: self._inner(name) for name in _INNER}
        values |= {f.name: self.top.pop(f.name, None) for f in fields(DraftConfig)
                   if f.name not in (*values, "rope_theta", "rope_half")}
        values["rope_theta"], values["rope_half"] = self._rope()
        if isinstance(values["eos_token_id"], list):
            values["eos_token_id"] = next(iter(values["eos_token_id"]), None)
        self._fixed()
        self._attention(values["num_hidden_layers"])
        self._architecture(values)
        if values["target_layer_ids"] is None:
            self._default_taps(values)
        elif not isinstance(values["target_layer_ids"], list):
            self.problems.append(f"target_layer_ids: expected a list, got {values['target_layer_ids']!r}")
        optional = {f.name for f in fields(DraftConfig) if f.default is not MISSING}
        self.problems += [f"{name}: expected a value, found none" for name, value in values.items()
                          if value is None and name not in optional and name != "target_layer_ids"]
        unknown = sorted(set(self.top) - _WITHOUT_EFFECT) + sorted(f"dflash_config.{key}" for key in self.inner)
        if unknown:
            self.remarks.append(f"ignoring unknown keys {', '.join(unknown)}")
        for remark in self.remarks:
            warnings.warn(f"drafter config.json: {remark}", stacklevel=4)
        values = {name: value for name, value in values.items() if value is not None}
        if not self.problems:
            return DraftConfig(**values)
        raise ConfigError("\n".join(self.problems))

    def _inner(self, name: str):
        """dflash_config's value, else the top level's; both are taken out."""
        outer, inner = self.top.pop(name, None), self.inner.pop(name, None)
        if inner is not None and outer is not None and inner != outer:
            self.remarks.append(f"{name}: {inner!r} of dflash_config is used, not {outer!r} of the top level")
        return outer if inner is None else inner

    def _rope(self) -> tuple[float | None, bool]:
        rope = self.top.pop("rope_parameters", None) or {}
        if not isinstance(rope, dict):
            self.problems.append(f"rope_parameters: expected an object, got {rope!r}")
            rope = {}
        if rope.get("rope_type", "default") != "default":
            self.problems.append(f"rope_parameters.rope_type: only 'default' is implemented, got {rope['rope_type']!r}")
        flat, nested = self.top.pop("rope_theta", None), rope.get("rope_theta")
        if None not in (flat, nested) and flat != nested:
            self.problems.append(f"rope_theta: expected one base, got {flat!r} and {nested!r} in rope_parameters")
        styles = {name: self.top.pop(name) for name in ("rope_is_neox_style", "is_neox_style") if name in self.top}
        if len({bool(style) for style in styles.values()}) > 1:
            self.problems.append(f"rope style: expected one, got {styles}")
        return (flat if nested is None else nested), all(styles.values())

    def _fixed(self) -> None:
        for name, only in _FIXED.items():
            value = self.top.pop(name, None)
            if value is not None and value != only:
                self.problems.append(f"{name}: only {only!r} is implemented, got {value!r}")

    def _attention(self, layers) -> None:
        if "is_causal" not in self.top:
            self.problems.append("is_causal: expected false (a block sees itself in both directions), found no such "
                                 "key; readers disagree on what its absence means, so add it")
        elif (causal := self.top.pop("is_causal")) is not False:
            self.problems.append(f"is_causal: only false is implemented, got {causal!r}")
        uses, kinds = self.top.pop("use_sliding_window", None), self.top.pop("layer_types", None)
        if kinds is None:
            if uses is not True:
                self.problems.append("layer_types: expected a list of 'sliding_attention' (or use_sliding_window "
                                     "true), found none; full attention is not implemented")
            return
        if not isinstance(kinds, list):
            self.problems.append(f"layer_types: expected a list, got {kinds!r}")
            return
        if len(kinds) != layers:
            self.problems.append(f"layer_types: expected {layers} entries (num_hidden_layers), got {len(kinds)}")
        for kind in dict.fromkeys(map(str, kinds)):
            if kind != SLIDING:
                self.problems.append(f"layer_types: only '{SLIDING}' is implemented, got {kind!r}")
        if uses is False and SLIDING in kinds:
            self.problems.append(f"use_sliding_window: expected true beside layer_types of '{SLIDING}', got false")

    def _architecture(self, values: dict) -> None:
        names = self.top.get("architectures") or []
        conv, selector = values["conv_kernel_size"] is not None, values["selector_rank"] is not None
        for name in names if isinstance(names, list) else [names]:
            if name == DFLASH_2 and not (conv and selector):
                self.problems.append(f"architectures: {DFLASH_2} needs convolution and selector keys in dflash_config, "
                                     "found not both")
            elif name == DFLASH_1 and (conv or selector):
                self.remarks.append(f"architectures says {DFLASH_1}, but there are keys of {DFLASH_2}, which are used")
            elif name not in (DFLASH_1, DFLASH_2) and not (conv and selector):
                self.problems.append(f"architectures: expected {DFLASH_2} or {DFLASH_1}, got {name!r}")

    def _default_taps(self, values: dict) -> None:
        layers, count = values["num_target_layers"], values["num_hidden_layers"]
        if not _is_integer(layers) or not _is_integer(count):
            self.problems.append("target_layer_ids: expected a list, or num_target_layers and num_hidden_layers to "
                                 "derive it from, found none")
            return
        try:
            values["target_layer_ids"] = list(default_taps(layers, count))
        except ConfigError as err:
            self.problems.append(str(err))


NANO_DRAFTER = DraftConfig(
    vocab_size=2048, hidden_size=128, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
    intermediate_size=384, sliding_window=256, rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=1024,
    block_size=16, mask_token_id=2047, target_layer_ids=(1, 2, 3), num_target_layers=6, conv_kernel_size=CONV_TAPS,
    conv_group_size=16, selector_rank=128, selector_top_k=16, output_multiplier=math.sqrt(2.0),
    final_logit_softcapping=20.0, bos_token_id=2041, eos_token_id=2046, pad_token_id=2047,
)
"""Drafter for the shipped model `nano`: 2,686,080 parameters."""
