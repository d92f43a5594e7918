#!/usr/bin/env python3
"""Trains the nano checkpoint on GSM8K train and writes it in the published layout.

    python scripts/train_nano.py --data gsm8k_train.jsonl --test gsm8k_test.jsonl --minutes 8 --out checkpoints/nano

With --minutes the whole run, evaluation and writing included, takes that long on whatever machine it is on: the
learning rate follows the clock. With --steps it takes so many steps, and the same seed gives the same parameters.
With --checkpoint-dir a broken run goes on where it was saved. Parts: nano/data.py (problems with redrawn numbers),
nano/text.py (tokenizer, text forms), nano/batches.py, nano/training.py, nano/evaluate.py, nano/card.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tokenizers
from nano import batches, data, text

from musejax.config import NANO, ModelConfig

if TYPE_CHECKING:
    from nano.training import Settings


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = p.add_argument
    add("--data", type=Path, required=True, help="gsm8k_train.jsonl")
    add("--test", type=Path, help="gsm8k_test.jsonl, for the accuracy in the card")
    add("--out", type=Path, required=True, help="checkpoint folder to write")
    length = p.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="time of the whole run")
    length.add_argument("--steps", type=int, help="number of steps")
    add("--reserve-seconds", type=float, default=60, help="of --minutes, kept for evaluation and writing")
    add("--config", type=Path, help="folder with a config.json of other sizes; default the NANO sizes")
    add("--tokens-per-step", type=int, default=32768, help="rows times their width")
    add("--widths", type=int, nargs="+", default=[256, 448], help="row lengths, ascending; each compiles once")
    add("--variants", type=int, default=4, help="of a problem with redrawable numbers, an epoch")
    add("--lr", type=float, default=3e-3)
    add("--weight-decay", type=float, default=0.3)
    add("--drop", type=float, default=0.15, help="share of inner weights left out in a step")
    add("--ema", type=float, default=0.998)
    add("--noise", type=float, default=0.05, help="share of replaced question tokens, in half of the rows")
    add("--question-weight", type=float, default=0.25)
    add("--seed", type=int, default=0)
    add("--held-out", type=int, default=200, help="training problems kept for validation")
    add("--eval-every", type=int, default=400, help="steps")
    add("--eval-problems", type=int, help="test problems scored; default all, 0 none")
    add("--new-tokens", type=int, default=320, help="of an answer in the evaluation")
    add("--problems", type=int, help="use only the first so many lines of --data")
    add("--workers", type=int, default=max(0, min(14, (os.cpu_count() or 1) - 2)), help="processes making data")
    add("--checkpoint-dir", type=Path, help="where the state of the run is kept")
    add("--save-every", type=int, default=500, help="steps")
    return p.parse_args(argv)


def command_line(args: argparse.Namespace) -> str:
    """The command that made the checkpoint: options that differ from the defaults, files by name only."""
    plain = vars(parse(["--data", "x", "--out", "x", "--steps", "1"]))
    words = ["python scripts/train_nano.py"]
    for name, value in vars(args).items():
        default = value == plain[name] and name not in ("data", "out", "steps")
        if value is None or default or name in ("workers", "checkpoint_dir", "save_every"):  # these do not matter
            continue
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *(v.name if isinstance(v, Path) else str(v) for v in values)]
    return " ".join(words)


class Clock:
    """How far training is: by steps, or by the time between `start` and the deadline.

    Args:
        done: fraction done before (a resumed run).
    """

    def __init__(self, steps: int | None, deadline: float, done: float):
        self.steps, self.deadline, self.done, self.start = steps, deadline, done, time.monotonic()

    def fraction(self, step: int) -> float:
        if self.steps:
            return step / self.steps
        return self.done + (1 - self.done) * (time.monotonic() - self.start) / max(self.deadline - self.start, 1e-9)


class Prepared(NamedTuple):
    """What is made of the data before training; a function of the data, the options and the seed.

    `held` are the held-out problems, then a redrawn variant of each; `held_batches` the same as token rows.
    """

    recipe: batches.Recipe
    backend: tokenizers.Tokenizer
    forms: text.Forms
    held: list[tuple[str, str]]
    held_batches: list[batches.Rows]
    test: list[tuple[str, str]]


def prepare(args: argparse.Namespace, config: ModelConfig) -> Prepared:
    pairs = data.load(args.data, args.problems)
    trained, held = ([pairs[i] for i in part] for part in data.split(len(pairs), args.held_out, args.seed))
    lexicon = data.find_lexicon([question for question, _ in trained])
    backend = text.train_tokenizer((part for pair in trained for part in pair), config.vocab_size)
    ids = [backend.token_to_id(name) for name in (text.BOS, text.END, text.PAD)]
    if ids != [config.bos_token_id, config.eos_token_id, config.pad_token_id]:
        raise SystemExit(f"config.json: expected bos, eos and pad ids {ids} (the last of the vocabulary), got "
                         f"{[config.bos_token_id, config.eos_token_id, config.pad_token_id]}")
    recipe = batches.Recipe(tuple(trained), lexicon, backend.to_str(), args.seed, tuple(args.widths),
                            args.tokens_per_step, args.variants, noise=args.noise)
    forms, width = text.Forms(backend), args.widths[-1]
    problems = data.Problems(held, lexicon)
    held = held + [problems.variants(i, np.random.default_rng([args.seed, 1 << 20, i]), 1)[0] for i in range(len(held))]
    rows = [row for row in (forms.plain_row(*pair, labelled=True) for pair in held) if len(row.ids) <= width + 1]
    count = args.tokens_per_step // width
    held_batches = [batches.pack(rows[at:at + count], count, width) for at in range(0, len(rows), count)]
    test = data.load(args.test)[:args.eval_problems] if args.test and args.eval_problems != 0 else []
    return Prepared(recipe, backend, forms, held, held_batches, test)


def shapes_of(tree):
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def compile_step(width: int, count: int, state: dict, config: ModelConfig, settings: Settings, say):
    """The training step for `count` rows of `width`; layers are recomputed if memory would not suffice otherwise."""
    import jax
    from nano import training

    batch, rate = shapes_of(batches.pack([], count, width)), jax.ShapeDtypeStruct((), np.float32)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    for remat in (False, True):
        program = partial(training.train_step, config=config, settings=settings, remat=remat)
        compiled = jax.jit(program, donate_argnums=0).lower(shapes_of(state), batch, rate).compile()
        need = compiled.memory_analysis().temp_size_in_bytes
        if need < 0.9 * limit:
            break
    say(f"step of {count} x {width} compiled, {need / 1e9:.2f} GB{', layers recomputed' if remat else ''}")
    return compiled


def compile_decoder(args: argparse.Namespace, config: ModelConfig, prepared: Prepared):
    """The batched decoder, wide enough for all problems in the longest form."""
    from nano.evaluate import Decoder

    from musejax.params import abstract_params

    forms = prepared.forms
    longest = max((len(forms.chat(question)) for question, _ in prepared.held + prepared.test), default=1)
    width = min(-(-longest // 32) * 32, config.max_position_embeddings // 2)
    count = min(440, max(len(prepared.held), len(prepared.test), 1))
    decoder = Decoder(config, count, width, args.new_tokens, forms.tokenizer.stop_ids, forms.tokenizer.size)
    return decoder.compile(abstract_params(config))


def main(argv: list[str] | None = None, on_step=lambda step: None) -> dict:
    """Runs the training; returns the facts of the card. `on_step` is called after every step."""
    began = time.monotonic()
    args = parse(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

    def say(line):
        print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    import jax
    from nano import card, training
    from nano.evaluate import score

    from musejax.params import table

    config = ModelConfig.from_folder(args.config) if args.config else NANO
    settings = training.Settings(lr=args.lr, weight_decay=args.weight_decay, ema=args.ema, drop=args.drop,
                                 question_weight=args.question_weight)
    prepared = prepare(args, config)
    recipe, forms = prepared.recipe, prepared.forms

    # The state, new or found.
    state = jax.jit(partial(training.init_state, config, settings, args.seed))()
    run = {"state": state, "best": jax.tree.map(np.asarray, state["ema"])}
    kept = ("steps", "tokens_per_step", "widths", "variants", "noise", "seed", "held_out", "problems")
    options = {name: getattr(args, name) for name in kept} | {"settings": vars(settings), "config": config.to_hf()}
    info = {"fraction": 0.0, "position": [0, 0], "history": [], "best_loss": float("inf"), "rows": 0, "tokens": 0,
            "seconds": 0.0, "options": json.loads(json.dumps(options))}
    found = training.load_state(args.checkpoint_dir, run) if args.checkpoint_dir else None
    if found:
        if found[1]["options"] != info["options"]:
            raise SystemExit(f"{args.checkpoint_dir.name}: expected the state of a run with these options, got "
                             "another: use the same options or another folder")
        run, info = found
    state, best, step = run["state"], run["best"], int(run["state"]["step"])
    stream = batches.Batches(recipe, tuple(info["position"]), args.workers)
    say(f"{len(recipe.pairs)} training problems, {args.held_out} held out, {len(prepared.test)} for the test; "
        f"{len(recipe.lexicon.names[0])} + {len(recipe.lexicon.names[1])} names, {len(recipe.lexicon.things)} things; "
        f"{jax.devices()[0].device_kind}, {args.workers} workers; at step {step}")

    # Programs are compiled side by side.
    pool = ThreadPoolExecutor(len(args.widths) + 2)
    programs = {width: pool.submit(compile_step, width, args.tokens_per_step // width, state, config, settings, say)
                for width in args.widths}
    evaluate = pool.submit(lambda: jax.jit(partial(training.answer_loss, config=config)).lower(
        shapes_of(state["ema"]), shapes_of(prepared.held_batches[0])).compile())
    programs, evaluate = {width: made.result() for width, made in programs.items()}, evaluate.result()
    decoder = pool.submit(compile_decoder, args, config, prepared)  # while training

    def held_loss(params) -> float:
        total, count = np.sum([np.asarray(evaluate(params, batch)) for batch in prepared.held_batches], axis=0)
        return float(total / count)

    # Training.
    clock = Clock(args.steps, began + 60 * (args.minutes or 0) - args.reserve_seconds, info["fraction"])
    earlier, recent, source, ahead = info["seconds"], [], iter(stream), []
    fraction = clock.fraction(step)
    while fraction < 1:
        while len(ahead) < 2:  # on their way to the device while the step before runs
            batch = next(source)
            ahead.append((jax.device_put(batch), batch.width, int(batch.length.sum()), stream.position))
        batch, width, tokens, position = ahead.pop(0)
        rate = settings.schedule(fraction)
        state, metrics = programs[width](state, batch, np.float32(rate))
        step += 1
        recent.append(metrics)
        if len(recent) > 2:
            recent[-3].block_until_ready()  # the host stays two steps ahead, so that the clock is true
        info.update(position=list(position), rows=info["rows"] + len(batch.length), tokens=info["tokens"] + tokens)
        fraction = clock.fraction(step)
        if step % args.eval_every == 0 or fraction >= 1:
            means = np.mean([np.asarray(m) for m in recent], axis=0)
            row = {"step": step, "tokens": info["tokens"], "train": float(means[0]), "val": held_loss(state["params"]),
                   "val_ema": held_loss(state["ema"]), "peak_load": float(means[3])}
            info["history"].append(row)
            if row["val_ema"] < info["best_loss"]:
                info["best_loss"], best = row["val_ema"], jax.tree.map(np.asarray, state["ema"])
            speed = info["tokens"] / (earlier + time.monotonic() - clock.start)
            say(f"step {step} ({min(fraction, 1):.0%}) loss {means[0]:.3f}, question {means[1]:.3f}, held out "
                f"{row['val']:.3f}, averaged {row['val_ema']:.3f}; rate {rate:.2f}, gradient {means[2]:.2f}, "
                f"load {means[3]:.2f}, {speed:,.0f} tokens/s")
            recent.clear()
        if args.checkpoint_dir and step % args.save_every == 0:
            info.update(fraction=fraction, seconds=earlier + time.monotonic() - clock.start)
            training.save_state(args.checkpoint_dir, {"state": state, "best": best}, info)
        on_step(step)
    jax.block_until_ready(state)
    seconds = earlier + time.monotonic() - clock.start
    stream.close()

    # Written before the evaluation, so that nothing can lose it, and again with its results.
    ship = jax.jit(partial(training.shipped, config=config))
    candidates = {"last": ship(state["ema"]), "best": ship(best)}
    templates = data.Problems(list(recipe.pairs), recipe.lexicon).templates
    facts = {
        "parameters": sum(p.size for p in table(config)), "config": config, "longest": args.widths[-1],
        "train_problems": len(recipe.pairs), "redrawable": sum(t is not None for t in templates), "steps": step,
        "rows_seen": info["rows"], "tokens_seen": info["tokens"], "speed": info["tokens"] / max(seconds, 1e-9),
        "train_seconds": seconds, "device": jax.devices()[0].device_kind, "command": command_line(args), "args": args,
        "history": info["history"], "accuracy": {}, "used": "last", "sample": None,
    }

    def write():
        facts["total_seconds"] = time.monotonic() - began
        page = card.make_card(facts)
        card.write_checkpoint(args.out, candidates[facts["used"]], config, prepared.backend, page)

    write()
    say("checkpoint written")
    decoder = decoder.result()
    trials = {name: score(decoder, params, forms, prepared.held, "labelled") for name, params in candidates.items()}
    say(f"held out, right of {len(prepared.held)}: " + ", ".join(f"{k} {v['correct']}" for k, v in trials.items()))
    facts["used"] = max(trials, key=lambda name: trials[name]["correct"])  # the last, if equal
    chosen = trials[facts["used"]]
    facts["accuracy"]["held-out train problems, half of them redrawn/labelled"] = chosen
    facts["sample"] = (prepared.held[0][0], chosen["texts"][0].strip())
    for form in ("labelled", "bare", "chat") if prepared.test else ():
        result = score(decoder, candidates[facts["used"]], forms, prepared.test, form)
        facts["accuracy"][f"GSM8K test/{form}"] = result
        say(f"test, {form}: {result['correct']} of {result['n']} right, {result['without_number']} without a number")
        write()
    write()
    say(f"done: {args.out.name}")
    return facts


if __name__ == "__main__":
    main(sys.argv[1:])
