"""Greedy decoding of many prompts at once with the product's cache: vmap over sequences, one program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from nano.data import value_of
from nano.text import Forms, answer_of
from nano.training import DECODE

from musejax import cache as kv
from musejax.config import ModelConfig
from musejax.model.forward import append, raw_logits


class Decoder:
    """Decodes batches of `count` prompts of at most `width` tokens, `new` tokens each, stopping at `stops`."""

    def __init__(self, config: ModelConfig, count: int, width: int, new: int, stops: tuple[int, ...], num_tokens: int):
        self.config, self.count, self.width, self.new, self.stops = config, count, width, new, stops
        self._num_tokens, self._decode = num_tokens, DECODE.for_model(config)
        self._length = min(width + new, config.max_position_embeddings)
        self._compiled = None

    def _program(self, params, tokens_bt, valid_b):
        """tokens int32 [b, width], valid int32 [b] -> int32 [b, new], 0 after the stop."""
        config, decode = self.config, self._decode

        def next_of(stream_d):
            raw = raw_logits(params, stream_d[None], config, decode)[0]
            return jnp.argmax(raw[:self._num_tokens]).astype(jnp.int32)

        def first(tokens, valid):
            cache = kv.init_cache(config, decode.policy, self._length)
            stream, cache = append(params, cache, tokens, valid, config=config, decode=decode)
            return next_of(stream[valid - 1]), cache

        def following(token, cache):
            stream, cache = append(params, cache, token[None], 1, config=config, decode=decode)
            return next_of(stream[0]), cache

        def is_stop(token_b):
            return jnp.isin(token_b, jnp.array(self.stops))

        def go_on(carry):
            k, _, _, done, _ = carry
            return (k < self.new) & ~done.all()

        def body(carry):
            k, token, cache, done, out = carry
            token, cache = jax.vmap(following)(token, cache)
            out = out.at[:, k].set(jnp.where(done, 0, token))
            return k + 1, token, cache, done | is_stop(token), out

        token, cache = jax.vmap(first)(tokens_bt, valid_b)
        out = jnp.zeros((tokens_bt.shape[0], self.new), jnp.int32).at[:, 0].set(token)
        return lax.while_loop(go_on, body, (jnp.int32(1), token, cache, is_stop(token), out))[-1]

    def compile(self, params_like) -> Decoder:
        tokens, valid = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((self.count, self.width), (self.count,)))
        self._compiled = jax.jit(self._program).lower(params_like, tokens, valid).compile()
        return self

    def __call__(self, params, prompts: list[list[int]]) -> list[list[int]]:
        """Generated ids of each prompt, without the stop. A prompt too long for `width` gets none."""
        out = []
        for at in range(0, len(prompts), self.count):
            some = prompts[at:at + self.count]
            tokens, valid = np.zeros((self.count, self.width), np.int32), np.ones(self.count, np.int32)
            for row, prompt in enumerate(some):
                if len(prompt) <= self.width:
                    tokens[row, :len(prompt)], valid[row] = prompt, len(prompt)
            made = np.asarray(self._compiled(params, tokens, valid))
            for prompt, ids in zip(some, made.tolist(), strict=False):
                end = next((k for k, i in enumerate(ids) if i in self.stops), len(ids))
                out.append(ids[:end] if len(prompt) <= self.width else [])
        return out


def score(decoder: Decoder, params, forms: Forms, pairs: list[tuple[str, str]], form: str) -> dict:
    """Accuracy on (question, answer) pairs in a prompt form (`bare`, `labelled` or `chat`).

    Returns:
        n, correct, without_number (no ``#### N``), and `texts`, the generated texts.
    """
    prompts = [getattr(forms, form)(question) for question, _ in pairs]
    texts = [forms.tokenizer.decode(ids) for ids in decoder(params, prompts)]
    correct = without = 0
    for text, (_, answer) in zip(texts, pairs, strict=True):
        number = answer_of(text)
        without += number is None
        try:
            correct += number is not None and value_of(number) == value_of(answer.rpartition("#### ")[2])
        except ValueError:  # "#### twelve or so"
            pass
    return {"n": len(pairs), "correct": correct, "without_number": without, "texts": texts}
