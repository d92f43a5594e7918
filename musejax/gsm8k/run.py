"""The rows of a run: each row's seed, answer and item; the check that answers repeat."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from musejax.gsm8k import steps
from musejax.gsm8k.data import Row, row_id
from musejax.gsm8k.extract import SCORERS
from musejax.gsm8k.profiles import SPLIT, Prompt, Prompter
from musejax.gsm8k.steps import Answer


@dataclass(frozen=True)
class Setup:
    """What all rows of a run share.

    Attributes:
        model: a loaded `musejax.Model`.
        sampling: the choice of tokens; its seed is the run's, from which rows get theirs.
        sample: number of the sample, for several runs with one seed.
        limit: most new tokens of a row.
        stop_ids: end tokens.
        drafter: None decodes one token a step.
    """

    model: Any
    prompter: Prompter
    sampling: Any
    sample: int
    limit: int
    stop_ids: tuple[int, ...]
    scorers: tuple[str, ...]
    drafter: Any = None


def row_seed(seed: int, row: int, sample: int = 0) -> int:
    """Seed of a row's sampling noise, below 2^32: a function of these three alone, whatever the order of rows."""
    return int.from_bytes(hashlib.sha256(f"{seed},{row},{sample}".encode()).digest()[:4], "little")


def answer(setup: Setup, row: Row, prompt: Prompt, *, after_step: Callable[[], None] | None = None,
           max_steps: int | None = None, drafter: Any = ...) -> Answer:
    """Runs one row.

    Args:
        after_step: called after each step; what it raises ends the row.
        max_steps: end after so many decode steps.
        drafter: instead of the setup's.

    Raises:
        ConfigError: the prompt leaves no room.
        StepError: the engine yields what cannot be.
    """
    drafter = setup.drafter if drafter is ... else drafter
    sampling = setup.sampling
    if not sampling.greedy:
        sampling = dataclasses.replace(sampling, seed=row_seed(sampling.seed, row.index, setup.sample))
    source = steps.request_steps(setup.model, prompt.ids, sampling, max_new_tokens=setup.limit, stop_ids=setup.stop_ids,
                                 drafter=drafter)
    # In chat a stop text may come up in the reasoning: there only the final text is cut.
    stop = () if prompt.opening is not None else setup.prompter.profile.stop
    return steps.collect(source, setup.prompter.tokenizer, stop_ids=setup.stop_ids, stop=stop, limit=setup.limit,
                         width=steps.verify_width(drafter), after_step=after_step, max_steps=max_steps)


def run_row(setup: Setup, row: Row, prompt: Prompt, after_step: Callable[[], None] | None = None) -> dict:
    """The item of one row. A row that fails gives an item too, with `error`; KeyboardInterrupt passes."""
    greedy = setup.sampling.greedy
    item = {"id": row_id(SPLIT, row.index), "prompt_tokens": len(prompt.ids),
            "seed": None if greedy else row_seed(setup.sampling.seed, row.index, setup.sample), "gold": row.gold}
    try:
        done = answer(setup, row, prompt, after_step=after_step)
    except Exception as err:
        return item | _failed(setup.scorers, f"{type(err).__name__}: {err}")
    text, reasoning = setup.prompter.split(done.text, prompt.opening)
    found = {name: SCORERS[name].extract(text) for name in setup.scorers}
    count, verified = len(done.tokens), len(done.steps)
    return item | {
        "completion_tokens": count, "verify_steps": verified, "accept_len": count / verified if verified else None,
        "finish_reason": done.finish_reason, "final_empty": not text.strip(), "text": text, "reasoning": reasoning,
        "extracted": found, "correct": {name: SCORERS[name].right(found[name], row.gold) for name in setup.scorers},
        "tokens_sha256": done.sha256,
        "step_tokens": [s.delivered for s in done.steps], "step_experts": [s.experts for s in done.steps],
        "prefill_ms": round(done.prefill.ms, 3), "decode_ms": round(sum(s.ms for s in done.steps), 3),
        "step_ms": [None if s.compiled else round(s.ms, 4) for s in done.steps],
        "error": None,
    }


def _failed(scorers: Sequence[str], message: str) -> dict:
    return {"completion_tokens": 0, "verify_steps": 0, "accept_len": None, "finish_reason": "error",
            "final_empty": True, "text": "", "reasoning": "", "extracted": dict.fromkeys(scorers),
            "correct": dict.fromkeys(scorers, False), "tokens_sha256": None, "step_tokens": [], "step_experts": [],
            "prefill_ms": None, "decode_ms": None, "step_ms": [], "error": message}


TIMES = ("prefill_ms", "decode_ms", "step_ms")
"""Entries of an item that differ from run to run; all others don't."""


# ------------------------------------------------------------------ determinism


def check_determinism(setup: Setup, rows: Sequence[tuple[Row, Prompt]],
                      after_step: Callable[[], None] | None = None) -> list[dict]:
    """Runs rows twice, and with a drafter a third time without it, and compares their tokens. Rows that fail are left
    out: the run itself reports them.

    Returns:
        One entry for each difference: `id`, `runs` (which two), `position` (of the first token that differs, counted
        from the first generated one), `tokens` (there, None past the end), `top` (the two largest logits there, as
        [token, logit]); empty if all agree.
    """
    found = []
    for row, prompt in rows:
        try:
            first = answer(setup, row, prompt, after_step=after_step).tokens
            others = {"second run": answer(setup, row, prompt, after_step=after_step).tokens}
            if setup.drafter is not None:
                plain = answer(setup, row, prompt, after_step=after_step, drafter=None)
                others["run without the drafter"] = plain.tokens
        except Exception:
            continue
        for name, tokens in others.items():
            if tokens != first:
                at = first_difference(first, tokens)
                found.append({"id": row_id(SPLIT, row.index), "runs": ["first run", name], "position": at,
                              "tokens": [t[at] if at < len(t) else None for t in (first, tokens)],
                              "top": top_two(setup.model, [*prompt.ids, *first[:at]])})
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first place where two lists differ; the length of the shorter if one begins the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def top_two(model, tokens: Sequence[int]) -> list[list]:
    """[token, logit after softcap] of the two likeliest tokens after these."""
    import jax.numpy as jnp
    import numpy as np

    from musejax import decode
    from musejax.kernels import forward as kernels
    from musejax.model import forward
    from musejax.sampling import mask_unused

    config = model.config
    stream, _ = decode.prefill(model.params, tokens, decode.cache_length(config, len(tokens)), config=config,
                               decode=model.decode, mesh=model.mesh)
    if decode.uses_kernels(model.decode):
        _, logits = kernels.logits(model.params, stream, config=config, decode=model.decode, mesh=model.mesh)
    else:
        logits = forward.softcap(forward.raw_logits(model.params, stream, config, model.decode), config)
    values = np.asarray(mask_unused(jnp.asarray(logits), model.num_tokens))[0]
    best = np.argsort(-values, kind="stable")[:2]
    return [[int(i), float(values[i])] for i in best]
