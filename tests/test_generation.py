"""Loading and generating through the Python API, on checkpoints made here."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from safetensors.numpy import save_file
from tiny_tokenizer import write as write_tokenizer

import musejax
from musejax import decode as steps
from musejax import params as table
from musejax.checkpoint import convert
from musejax.config import MINI, ConfigError, DecodeConfig
from musejax.generation import StreamToken, plan_length
from musejax.numerics import EXACT

CONFIG = dataclasses.replace(MINI, num_hidden_layers=2, layer_types=(), layer_rope_theta=(), max_position_embeddings=96,
                             bos_token_id=0)


def write_checkpoint(folder, tokenizer=True):
    """A published-form folder with random weights."""
    folder.mkdir()
    params = table.init_params(CONFIG, jax.random.key(5))
    tensors = {}
    for p in table.table(CONFIG):
        x = np.asarray(table.unslice_tensor(p, table.leaf_of(params, p)))
        tensors[p.hf_key] = x.astype(np.float32 if p.dtype == np.float32 else ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    if tokenizer:
        write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "with_text")


@pytest.fixture(scope="module")
def model(folder):
    return musejax.load(folder, decode=DecodeConfig(policy=EXACT, prefill_chunk=8))


def test_public_names():
    assert "generate" in dir(musejax) and musejax.Sampling().greedy
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = musejax.nope


def test_generate_text_and_tokens_agree(model):
    by_text = musejax.generate(model, "hello", max_new_tokens=6, stop_ids=())
    ids = model.tokenizer.encode("hello", bos=True, parse_special=False)
    by_ids = musejax.generate(model, ids, max_new_tokens=6, stop_ids=())
    assert by_text.tokens == by_ids.tokens and len(by_text.tokens) == 6 == len(by_text.logprobs)
    assert by_text.prompt_tokens == len(ids) and by_text.finish_reason == "length"
    assert by_text.text == model.tokenizer.decode(by_text.tokens)
    assert all(t < model.tokenizer.size for t in by_text.tokens)
    assert [t.id for t in musejax.stream(model, ids, max_new_tokens=6, stop_ids=())] == by_text.tokens


def test_stop_id_ends_it(model):
    free = musejax.generate(model, [1, 2, 3], max_new_tokens=8, stop_ids=()).tokens
    stop = free[3]
    got = musejax.generate(model, [1, 2, 3], max_new_tokens=8, stop_ids=[stop])
    assert got.tokens == free[:free.index(stop) + 1] and got.finish_reason == "stop"


def test_context_is_filled_to_the_last_position(model):
    got = musejax.generate(model, [1] * 90, max_new_tokens=50, stop_ids=())
    assert len(got.tokens) == 6 and got.finish_reason == "length"


def test_checks_come_before_compiling(model):
    before = steps.jit_prefill_chunk._cache_size()
    long = [1] * 96
    for prompt, message in (("", "empty"), ([], "at least one token"), (long, "fewer than 96"), ([9999], "got 9999")):
        with pytest.raises(ConfigError, match=message):
            musejax.generate(model, prompt)
    with pytest.raises(ConfigError, match="max_new_tokens: expected at least 1"):
        plan_length(model, [1], 0)
    assert steps.jit_prefill_chunk._cache_size() == before


def test_text_needs_a_tokenizer(tmp_path):
    bare = musejax.load(write_checkpoint(tmp_path / "bare", tokenizer=False))
    assert bare.tokenizer is None and bare.num_tokens is None
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        musejax.generate(bare, "hello")
    token = next(iter(musejax.stream(bare, [1, 2])))
    assert isinstance(token, StreamToken) and token.logprob < 0


def test_converted_checkpoint_generates_the_same(folder, model, tmp_path):
    convert(folder, tmp_path / "converted", progress=False)
    again = musejax.load(tmp_path / "converted", decode=model.decode)
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True):
        assert_same_bits(a, b)
    tokens = [musejax.generate(m, "hello", max_new_tokens=5).tokens for m in (again, model)]
    assert tokens[0] == tokens[1]


def test_module_of_a_loaded_model(model):
    logits = model.module(np.asarray([1, 2, 3]))
    assert logits.shape == (3, CONFIG.vocab_size) and np.isfinite(logits).all()


def test_no_recompilation_over_512_tokens(tmp_path):
    """A long answer runs the programs of its first two tokens."""
    config = dataclasses.replace(CONFIG, max_position_embeddings=1024)
    folder = write_checkpoint(tmp_path / "long", tokenizer=False)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    model = musejax.load(folder)
    before = steps.jit_decode_step._cache_size()
    got = musejax.generate(model, [1, 2, 3], max_new_tokens=520, stop_ids=())
    assert len(got.tokens) == 520
    assert steps.jit_decode_step._cache_size() == before + 1
