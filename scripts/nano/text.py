"""Tokenizer and text forms of the nano model: from a problem to (prompt, completion) and to token rows.

A problem is shown in one of three forms, chosen by seed:

* bare: the question, then a line feed and the answer (what a plain prompt gives);
* labelled: ``Question: ... Answer: ...`` as evaluation harnesses write it;
* chat: rendered by the shipped template, the worked lines to ``self``, the last line and ``#### N`` to ``user``.

Prompt and completion are encoded apart, as they are at inference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from nano.data import ANNOTATION
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from musejax.chat import EFFORTS, ChatTemplate
from musejax.tokenizer import BOS, END, EOM, EOT, MESSAGE, START, Tokenizer

PAD = "<|finetune_right_pad|>"
SPECIALS = (BOS, START, MESSAGE, EOM, EOT, END, PAD)  # the last ids of the vocabulary, in this order
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
CALLER_TEXTS = ("You are a helpful assistant.", "Show your work.", "Answer briefly.", "Think step by step.",
                "End with #### and the number.", "Be careful with the arithmetic.")


def train_tokenizer(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of at most `size` tokens with every digit a token of its own, special tokens last.

    The words of the chat format count as if every tenth text were a chat, so that they become few tokens.
    """
    texts = list(texts)
    frame = ChatTemplate.from_folder(TEMPLATE.parent).render([{"role": "user", "content": ""}])
    frame += " to=self<|message|><|eom|><|start|>assistant to=user<|message|>"
    pieces = [piece for piece in re.split(r"<\|\w+\|>", frame) if piece]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - len(SPECIALS), initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts + pieces * (len(texts) // 10), trainer)
    if backend.get_vocab_size() != size - len(SPECIALS):
        raise ValueError(f"tokenizer: expected text enough for {size - len(SPECIALS)} tokens, "
                         f"got {backend.get_vocab_size()}")
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, backend.token_to_id(BOS))])
    return backend


def save_tokenizer(backend: tokenizers.Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    def write(name, content):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    backend.save(str(folder / "tokenizer.json"))
    write("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": END, "pad_token": PAD,
        "model_max_length": max_length, "clean_up_tokenization_spaces": False})
    identifier = backend.token_to_id
    write("generation_config.json", {
        "bos_token_id": identifier(BOS), "eos_token_id": [identifier(END), identifier(EOT)],
        "pad_token_id": identifier(PAD), "do_sample": False, "temperature": 1.0, "top_k": 64, "top_p": 1.0})
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")


class Row(NamedTuple):
    """One training text: token ids, of which the first `prompt` are given."""

    ids: list[int]
    prompt: int


class Forms:
    """Turns problems into token rows.

    Attributes:
        noise: probability of a question token (digits aside) being replaced, in half of the rows.
    """

    def __init__(self, backend: tokenizers.Tokenizer, noise: float = 0.0):
        self.tokenizer = Tokenizer(backend)
        self.template = ChatTemplate.from_folder(TEMPLATE.parent)
        self.noise = noise
        fixed = {i for i in range(self.tokenizer.size) if any(c.isdigit() for c in self.tokenizer.decode([i]))}
        self._kept = np.isin(np.arange(self.tokenizer.size), [*fixed, *self.tokenizer.special_ids])
        self._replacements = np.flatnonzero(~self._kept)

    def bare(self, question: str) -> list[int]:
        return self.tokenizer.encode(question, bos=True, parse_special=False)

    def labelled(self, question: str) -> list[int]:
        return self.bare(f"Question: {question}\nAnswer:")

    def chat(self, question: str, system: str | None = None, **given) -> list[int]:
        """Token ids of the prompt, up to the opened turn of the assistant."""
        return self._encode(self.template.render(self._messages(question, system), **given))

    def _messages(self, question, system):
        return [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": question}]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, bos=False, parse_special=True)

    def chat_row(self, question: str, answer: str, system: str | None = None, **given) -> Row:
        messages = self._messages(question, system)
        prompt = self.template.render(messages, **given)
        body, _, final = answer.rpartition("\n#### ")
        closing = ANNOTATION.sub("", body.rpartition("\n")[2]).strip()
        reply = {"role": "assistant", "reasoning_content": body, "content": f"{closing}\n#### {final}"}
        whole = self.template.render([*messages, reply], add_generation_prompt=False, **given)
        if not whole.startswith(prompt):
            raise ValueError(f"chat template: expected the prompt to open the conversation, got {whole!r}")
        head = self._encode(prompt)
        return Row(head + self._encode(whole[len(prompt):]), len(head))

    def plain_row(self, question: str, answer: str, labelled: bool) -> Row:
        head = self.labelled(question) if labelled else self.bare(question)
        tail = self.tokenizer.encode((" " if labelled else "\n") + answer, bos=False, parse_special=False)
        return Row([*head, *tail, self.tokenizer.end_id], len(head))

    def row(self, question: str, answer: str, rng: np.random.Generator) -> Row:
        """The problem in a form drawn by `rng`: 25% bare, 35% labelled, 40% chat."""
        form = rng.random()
        if form < 0.6:
            made = self.plain_row(question, answer, labelled=form >= 0.25)
        else:
            given, kind = {}, rng.random()
            if kind < 0.1:
                given["reasoning_effort"] = EFFORTS[rng.integers(len(EFFORTS))]
            if kind < 0.06:
                given["date"] = f"20{rng.integers(24, 30)}-{rng.integers(1, 13):02}-{rng.integers(1, 29):02}"
            system = CALLER_TEXTS[rng.integers(len(CALLER_TEXTS))] if 0.08 < kind < 0.16 else None
            made = self.chat_row(question, answer, system, **given)
        if self.noise and rng.random() < 0.5:
            ids = np.array(made.ids)
            hit = (rng.random(len(ids)) < self.noise) & ~self._kept[ids]
            hit[made.prompt:] = False
            made = Row(np.where(hit, rng.choice(self._replacements, len(ids)), ids).tolist(), made.prompt)
        return made


def answer_of(text: str) -> str | None:
    """The number after the first ``#### `` of a generated text, without commas; None if there is none."""
    _, mark, rest = text.partition("#### ")
    number = rest.split("\n")[0].split("<|")[0].strip().replace(",", "").rstrip(".")
    return number if mark and number else None
