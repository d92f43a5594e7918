"""A small byte-level BPE tokenizer and a chat template in the style of the release, for tests."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|begin_of_text|>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|end_of_text|>")
SENTENCES = ["Tom has 3 apples and buys 4 more.", "What is 2+2? The answer is 4.", "système, naïve, 苹果 🍎🍏",
             "a <|b|> c"] * 4

TEMPLATE = """\
{{ bos_token }}<|start|>system<|message|>You help.
{%- if date %} Today is {{ strftime_now('%d %b %Y') }}.{% endif %}
{%- if reasoning_effort %} Effort: {{ reasoning_effort }}.{% endif %}<|eot|>
{%- for message in messages -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|eot|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def build(specials=SPECIALS, vocab_size: int = 300) -> Tokenizer:
    """Byte tokens, a few merges (some of them cut characters apart), then the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return tokenizer


def write(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """tokenizer.json, tokenizer_config.json and, unless None, chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin_of_text|>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
