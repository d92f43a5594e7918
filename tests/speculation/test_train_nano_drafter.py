"""The training script on a tiny target: it overfits one answer and writes a drafter that loads."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import train_nano_drafter

from musejax.config import ModelConfig
from musejax.speculation.config import DraftConfig
from musejax.speculation.params import load_drafter

TARGET = ModelConfig(
    vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    moe_hidden_size=16, moe_intermediate_size=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=16,
    max_position_embeddings=512, output_multiplier=2.0, bos_token_id=505, eos_token_id=510, pad_token_id=511)
DRAFTER = DraftConfig(
    vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    intermediate_size=64, sliding_window=64, rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=512,
    block_size=8, mask_token_id=511, target_layer_ids=(0, 1), num_target_layers=2, conv_kernel_size=2,
    conv_group_size=8, selector_rank=8, selector_top_k=4, output_multiplier=2.0, final_logit_softcapping=20.0)


@pytest.fixture(scope="module")
def command(shared, tmp_path_factory):
    """Options of a tiny run."""
    import jax
    from nano import card, data, text
    from nano.training import shipped

    from musejax.params import init_params

    root, train = tmp_path_factory.mktemp("tiny"), shared / "data" / "gsm8k_train.jsonl"
    backend = text.train_tokenizer((part for pair in data.load(train, 60) for part in pair), 512)
    params = jax.jit(lambda: shipped(init_params(TARGET, jax.random.key(3), "float32"), TARGET))()
    card.write_checkpoint(root / "target", params, TARGET, backend, "")
    (root / "sizes").mkdir()
    (root / "sizes" / "config.json").write_text(json.dumps(DRAFTER.to_hf()))
    return ["--quick", "--data", str(train), "--target", str(root / "target"), "--config", str(root / "sizes"),
            *"--prompt-width 400 --new-tokens 24 --steps 60 --lr 0.01 --eval-every 20".split()]


@pytest.mark.slow
def test_one_answer_is_learned_by_heart(command, tmp_path):
    facts = train_nano_drafter.main([*command, "--out", str(tmp_path / "drafter")])
    history = facts["history"]
    assert [h["step"] for h in history] == [1, 20, 40, 60]
    assert history[-1]["tree"] > history[0]["tree"] + 1 and history[-1]["accept"] > history[0]["accept"] + 2
    assert history[-1]["base"] < history[0]["base"] / 2
    assert facts["figures"]["trained text"]["tree"] == max(h["tree"] for h in history)
    folder = tmp_path / "drafter"
    assert {f.name for f in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    config, params = load_drafter(folder, TARGET)
    assert config == DRAFTER and np.isfinite(np.asarray(params["fc"], np.float32)).all()
    page = (folder / "README.md").read_text()
    for wanted in ("license:", "| trained text | 1 |", "| 60 |", "--data gsm8k_train.jsonl", "--quick"):
        assert wanted in page
    assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work|usr)/", page)


def test_arguments_are_checked_first(tmp_path):
    with pytest.raises(SystemExit) as err:
        train_nano_drafter.main(["--data", str(tmp_path / "none"), "--out", "x", "--batch", "0", "--lr", "-1",
                                 "--prompt-width", "1000", "--target", str(tmp_path)])
    for text in ("--data: expected a GSM8K file", "--batch: expected", "--lr: expected", "--minutes: expected",
                 "config.json"):
        assert text in str(err.value)


def test_schedule():
    from nano_drafter.training import Settings

    schedule = Settings(warmup=0.1, floor=0.1).schedule
    assert schedule(0) == 0 and schedule(0.05) == 0.5 and schedule(0.1) == 1
    assert schedule(0.55) == pytest.approx(0.55) and schedule(1) == schedule(2) == pytest.approx(0.1)
