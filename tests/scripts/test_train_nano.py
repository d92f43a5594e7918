"""The training script on a tiny model: whole runs, resuming, the written checkpoint."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_bits

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import train_nano

STEPS = 4


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def config():
    from musejax.config import ModelConfig

    return ModelConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        moe_hidden_size=16, moe_intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=512, bos_token_id=505, eos_token_id=510, pad_token_id=511)


@pytest.fixture(scope="module")
def params(config):
    """float32 master weights."""
    import jax

    from musejax.params import init_params

    return jax.jit(lambda: init_params(config, jax.random.key(1), "float32"))()


@pytest.fixture(scope="module")
def command(config, shared, tmp_path_factory):
    """Options of a tiny run; the folder of compiled programs is shared by all runs."""
    import jax

    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    cache = {"jax_compilation_cache_dir": str(folder / "compiled"), "jax_persistent_cache_min_compile_time_secs": 0.0,
             "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in cache}
    for name, value in cache.items():
        jax.config.update(name, value)
    data = shared / "data"
    yield ["--data", str(data / "gsm8k_train.jsonl"), "--test", str(data / "gsm8k_test.jsonl"), "--config", str(folder),
           *"--tokens-per-step 1024 --widths 256 --problems 120 --held-out 4 --eval-every 2 --eval-problems 2".split(),
           *f"--new-tokens 4 --workers 0 --steps {STEPS} --save-every 1".split()]
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """(folder, facts) of a run without a break."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_nano.main([*command, "--out", str(folder / "nano"), "--checkpoint-dir", str(folder / "state")])


def test_killed_and_resumed_equals_unbroken(command, whole, tmp_path):
    from safetensors import safe_open

    def die(step):
        if step == 2:
            raise Killed

    options = [*command, "--out", str(tmp_path / "nano"), "--checkpoint-dir", str(tmp_path / "state")]
    with pytest.raises(Killed):
        train_nano.main(options, on_step=die)
    assert not (tmp_path / "nano").exists()
    (tmp_path / "state" / "state.partial").write_bytes(b"cut short")  # killed while saving: the older state counts
    steps = []
    train_nano.main(options, on_step=steps.append)
    assert steps == [3, 4]
    file = "state/state.safetensors"
    with safe_open(whole[0] / file, "np") as a, safe_open(tmp_path / file, "np") as b:
        assert set(a.keys()) == set(b.keys())
        for name in a.keys():
            assert_same_bits(a.get_tensor(name), b.get_tensor(name))
    for file in sorted((whole[0] / "nano").iterdir()):
        if file.name != "README.md":  # it states times
            assert file.read_bytes() == (tmp_path / "nano" / file.name).read_bytes(), file.name


def test_other_options_do_not_resume(command, whole):
    with pytest.raises(SystemExit, match="options"):
        train_nano.main([*command, "--variants", "3", "--out", "unused", "--checkpoint-dir", str(whole[0] / "state")])


def test_written_checkpoint(config, whole):
    from safetensors import safe_open

    from musejax.chat import ChatTemplate
    from musejax.checkpoint import load_params
    from musejax.config import ModelConfig
    from musejax.params import leaf_of, table
    from musejax.tokenizer import Tokenizer, read_generation_config

    folder = whole[0] / "nano"
    assert {f.name for f in folder.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"}
    assert ModelConfig.from_folder(folder) == config
    loaded, params = load_params(folder)
    assert loaded == config
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(index) == sorted(p.hf_key for p in table(config)) and len(set(index.values())) == 2
    with safe_open(whole[0] / "state" / "state.safetensors", "np") as state:  # the averaged weights, rounded
        for param in table(config):
            path = "".join(f"[{key!r}]" for key in param.path)
            averages = [state.get_tensor(root + path).astype(param.dtype) for root in ("['state']['ema']", "['best']")]
            assert any(np.array_equal(np.asarray(leaf_of(params, param)), a) for a in averages), param.name
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.size == 512 and tokenizer.bos_id == 505
    assert read_generation_config(folder).stop_ids == (510, 509) == tokenizer.stop_ids
    assert ChatTemplate.from_folder(folder).render([{"role": "user", "content": "x"}]).endswith("<|start|>assistant")


def test_card(whole):
    folder, facts = whole
    card = (folder / "nano" / "README.md").read_text()
    for wanted in ("license:", "GSM8K test, chat template | 2 |", "MIT", f"| {STEPS} |",
                   "python scripts/train_nano.py --data gsm8k_train.jsonl"):
        assert wanted in card
    assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work|usr)/", card)
    assert [h["step"] for h in facts["history"]] == [2, 4]


def test_schedule():
    from nano.training import Settings

    schedule = Settings(warmup=0.1).schedule
    assert schedule(0) == 0 and schedule(1) == 0 and schedule(1.5) == 0
    assert schedule(0.05) == 0.5 and schedule(0.1) == 1 and schedule(0.55) == pytest.approx(0.5)


def test_batches_do_not_depend_on_where_they_start(shared):
    from nano import batches, data, text

    pairs = tuple(data.load(shared / "data" / "gsm8k_train.jsonl", 60))
    backend = text.train_tokenizer((s for pair in pairs for s in pair), 512)
    lexicon = data.find_lexicon([question for question, _ in pairs])
    recipe = batches.Recipe(pairs, lexicon, backend.to_str(), 0, (256, 512), 4096, variants=1)
    stream = batches.Batches(recipe)
    source = iter(stream)
    made = [(next(source), stream.position) for _ in range(12)]
    assert made[-1][1][0] >= 1, "expected a second epoch"
    later = iter(batches.Batches(recipe, made[4][1]))
    for batch, _ in made[5:]:
        again = next(later)
        for expected, got in zip(batch, again, strict=True):
            assert_same_bits(expected, got)
    for batch, _ in made:
        assert (batch.length <= batch.width + 1).all() and (batch.prompt < batch.length).all() and batch.prompt.all()
        assert batch.tokens.shape == (4096 // batch.width, batch.width + 1)


def test_padding_does_not_count(config, params):
    import jax
    from nano.batches import pack
    from nano.text import Row
    from nano.training import losses

    rows = [Row([505, *range(20), 510], 8), Row([505, *range(30, 60), 510], 20)]
    run = jax.jit(lambda params, batch: losses(params, batch, config))
    one, two = ([np.asarray(x) for x in run(params, pack(rows, *shape))] for shape in ((2, 40), (3, 64)))
    assert one[1].tolist() == two[1].tolist() == [14 + 12, 7 + 19]
    np.testing.assert_allclose(one[0], two[0], rtol=1e-2)
    assert one[2].sum() == two[2].sum() == config.num_hidden_layers * config.num_experts_per_tok * (21 + 31)


def test_decoder_is_greedy(config, params):
    """Every token it emits has (within rounding) the largest logit of a pass over the text so far."""
    import jax
    from nano.evaluate import Decoder
    from nano.training import DECODE, shipped

    from musejax.model.forward import forward

    params = shipped(params, config)
    prompts = [[505, 3, 4, 5], [505, *range(40, 65)], list(range(50))]
    made = Decoder(config, 2, 32, 6, (999,), 500).compile(params)(params, prompts)
    assert made[2] == [] and len(made[0]) == len(made[1]) == 6  # the third does not fit
    run = jax.jit(lambda params, tokens: forward(params, tokens, config=config, decode=DECODE.for_model(config))[0])
    for prompt, ids in zip(prompts, made, strict=False):
        logits = np.asarray(run(params, np.array((prompt + ids + [0] * 32)[:32])))
        for k, token in enumerate(ids):
            row = logits[len(prompt) + k - 1, :500]
            assert row[token] > row.max() - 0.05


def test_thinned_leaves_out_a_share_and_keeps_the_rest():
    import jax
    from nano import training

    from musejax.config import MINI
    from musejax.params import init_params, leaf_of, table

    params = init_params(MINI, jax.random.key(0), np.float32)
    some = training.thinned(params, 3, 0.25, MINI)
    for p in table(MINI):
        before, after = np.asarray(leaf_of(params, p)), np.asarray(leaf_of(some, p))
        if p.group in ("attention", "experts", "pooling"):
            gone = after == 0
            assert abs(gone.mean() - 0.25) < 0.03, p.name  # 128 x 128 weights: a deviation of 0.0034
            assert np.allclose(after[~gone], before[~gone] / 0.75), p.name
        else:
            assert_same_bits(before, after)
    again, other = (training.thinned(params, step, 0.25, MINI)["layers"][0]["q_proj"] for step in (3, 4))
    assert_same_bits(again, some["layers"][0]["q_proj"])
    assert not np.array_equal(again, other)
