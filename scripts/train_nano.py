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


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
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
    add("--ema", type=float, default=0.998)
    add("--noise", type=float, default=0.05, help="share of replaced question tokens, in half of the rows")
    add("--question-weight", type=float, default=0.25)
    add("--seed", type=int, default=0)
    add("--held-out", type=int, default=200, help="training problems kept for validation")
    add("--eval-every", type=int, default=400, help="steps")
    add("--eval-problems", type=int, help="test problems scored; default all, 0 none")
    add("--new-tokens", type=int, default=320, help="of an answer in the evaluation")
    add("--problems", type=int, help="use only the first so many lines of --data")
    add("--workers", type=int, default=max(0, min(14, (os.cpu_count() or 1) - 2)), help="processes that make data")
    add("--checkpoint-dir", type=Path, help="where the state of the run is kept")
    add("--save-every", type=int, default=500, help="steps")
    return p.parse_args(argv)


def command_line(args: argparse.Namespace) -> str:
    """The command that made the checkpoint: options that differ from the defaults, files by name only."""
    plain = vars(parse(["--data", "x", "--out", "x", "--steps", "1"]))
    words = ["python scripts/train_nano.py"]
    for name, value in vars(args).items():
        if value is None or name in ("workers", "checkpoint_dir", "save_every") or (name not in ("data", "out", "steps") and value == plain[name]):
            continue
        text = value.name if isinstance(value, Path) else " ".join(map(str, value)) if isinstance(value, list) else value
        words.append(f"--{name.replace('_', '-')} {text}")
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


def main(argv: list[str] | None = None, on_step=lambda step: None) -> dict:
    """Runs the training; returns the facts of the card. `on_step` is called after every step."""
    began = time.monotonic()
    args = parse(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

    def say(text):
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    import jax
    import numpy as np

    from musejax.config import NANO, ModelConfig
    from musejax.params import abstract_params, table
    from nano import batches, card, data, text, training
    from nano.evaluate import Decoder, score

    config = ModelConfig.from_folder(args.config) if args.config else NANO
    settings = training.Settings(lr=args.lr, weight_decay=args.weight_decay, ema=args.ema, question_weight=args.question_weight)
    options = {k: getattr(args, k) for k in ("steps", "tokens_per_step", "widths", "variants", "noise", "seed", "held_out", "problems")}
    fingerprint = json.loads(json.dumps({**options, "settings": vars(settings), "config": config.to_hf()}))

    # Data: split, lexicon, tokenizer; workers start at once. All of it is a function of the data and the seed.
    pairs = data.load(args.data, args.problems)
    trained, held = data.split(len(pairs), args.held_out, args.seed)
    lexicon = data.find_lexicon([pairs[i][0] for i in trained])
    backend = text.train_tokenizer((part for i in trained for part in pairs[i]), config.vocab_size)
    specials = [backend.token_to_id(name) for name in (text.BOS, text.END, text.PAD)]
    if specials != [config.bos_token_id, config.eos_token_id, config.pad_token_id]:
        raise SystemExit(f"config.json: expected bos, eos and pad ids {specials} (the last of the vocabulary), got "
                         f"{[config.bos_token_id, config.eos_token_id, config.pad_token_id]}")
    recipe = batches.Recipe(tuple(pairs[i] for i in trained), lexicon, backend.to_str(), args.seed, tuple(args.widths),
                            args.tokens_per_step, args.variants, noise=args.noise)
    state = jax.jit(partial(training.init_state, config, settings, args.seed))()
    run = {"state": state, "best": jax.tree.map(np.asarray, state["ema"])}
    info = {"fraction": 0.0, "position": [0, 0], "history": [], "best_loss": float("inf"), "rows": 0, "tokens": 0, "seconds": 0.0,
            "fingerprint": fingerprint}
    found = training.load_state(args.checkpoint_dir, run) if args.checkpoint_dir else None
    if found:
        run, info = found
        if info["fingerprint"] != fingerprint:
            raise SystemExit(f"{args.checkpoint_dir}: expected the state of a run with these options, got another: "
                             "use the same options or another folder")
        say(f"resumed at step {int(run['state']['step'])}")
    state, best = run["state"], run["best"]
    stream = batches.Batches(recipe, tuple(info["position"]), args.workers)
    forms = text.Forms(backend)
    problems = data.Problems([pairs[i] for i in held], lexicon)
    originals = list(problems.pairs)
    redrawn = [problems.variants(i, np.random.default_rng([args.seed, 1 << 20, i]), 1)[0] for i in range(len(held))]
    held_rows = [forms.plain_row(*pair, labelled=True) for pair in originals + redrawn]
    held_rows = [row for row in held_rows if len(row.ids) <= args.widths[-1] + 1]
    per_batch = args.tokens_per_step // args.widths[-1]
    held_batches = [batches.pack(held_rows[at:at + per_batch], per_batch, args.widths[-1]) for at in range(0, len(held_rows), per_batch)]
    test = data.load(args.test)[:args.eval_problems] if args.test and args.eval_problems != 0 else []
    say(f"{len(trained)} training problems, {len(held)} held out, {len(test)} for the test; {backend.get_vocab_size()} tokens; "
        f"{len(lexicon.names[0])} + {len(lexicon.names[1])} names, {len(lexicon.things)} things; device {jax.devices()[0].device_kind}")

    # Programs are compiled side by side.
    def like(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)

    def compile_step(width):
        shapes = like(batches.pack([], args.tokens_per_step // width, width))
        for remat in (False, True):
            program = jax.jit(partial(training.train_step, config=config, settings=settings, remat=remat), donate_argnums=0)
            compiled = program.lower(like(state), shapes, jax.ShapeDtypeStruct((), np.float32)).compile()
            need, limit = compiled.memory_analysis().temp_size_in_bytes, (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
            if not limit or need < 0.9 * limit:
                break
        say(f"step of width {width} compiled, {need / 1e9:.2f} GB{', layers recomputed' if remat else ''}")
        return compiled

    def compile_decoder():
        asked = [forms.chat(q) for q, _ in originals + redrawn + test]
        width = min(-(-max(map(len, asked), default=1) // 32) * 32, config.max_position_embeddings // 2)
        count = min(440, max(len(originals) * 2, len(test), 1))
        decoder = Decoder(config, count, width, args.new_tokens, forms.tokenizer.stop_ids, forms.tokenizer.size)
        return decoder.compile(abstract_params(config))

    pool = ThreadPoolExecutor(len(args.widths) + 2)
    steps = {width: pool.submit(compile_step, width) for width in args.widths}
    evaluate = pool.submit(lambda: jax.jit(partial(training.answer_loss, config=config)).lower(
        like(state["ema"]), like(held_batches[0])).compile())
    steps, evaluate = {width: made.result() for width, made in steps.items()}, evaluate.result()
    decoder = pool.submit(compile_decoder)  # during training

    def held_loss(params) -> float:
        total, count = np.sum([np.asarray(evaluate(params, batch)) for batch in held_batches], axis=0)
        return float(total / count)

    # Training.
    clock = Clock(args.steps, began + 60 * (args.minutes or 0) - args.reserve_seconds, info["fraction"])
    earlier, recent, step = info["seconds"], [], int(state["step"])
    source, ahead = iter(stream), []

    def next_batch():
        """The next batch, on its way to the device, and the position after it."""
        batch = next(source)
        return jax.device_put(batch), batch.width, len(batch.length), int(batch.length.sum()), list(stream.position)

    fraction = clock.fraction(step)
    while fraction < 1:
        while len(ahead) < 2:
            ahead.append(next_batch())
        arrays, width, rows, tokens, position = ahead.pop(0)
        state, metrics = steps[width](state, arrays, np.float32(settings.schedule(fraction)))
        step += 1
        recent.append(metrics)
        if len(recent) > 2:
            recent[-3].block_until_ready()  # the host stays two steps ahead, so that the clock is true
        info.update(position=position, rows=info["rows"] + rows, tokens=info["tokens"] + tokens)
        rate, fraction = settings.schedule(fraction), clock.fraction(step)
        if step % args.eval_every == 0 or fraction >= 1:
            means = np.mean([np.asarray(m) for m in recent[-args.eval_every:]], axis=0)
            row = {"step": step, "tokens": info["tokens"], "train": float(means[0]), "val": held_loss(state["params"]),
                   "val_ema": held_loss(state["ema"]), "peak_load": float(means[3])}
            info["history"].append(row)
            if row["val_ema"] < info["best_loss"]:
                info["best_loss"], best = row["val_ema"], jax.tree.map(np.asarray, state["ema"])
            seconds = earlier + time.monotonic() - clock.start
            say(f"step {step} ({min(fraction, 1):.0%}) train {means[0]:.3f} question {means[1]:.3f} held out {row['val']:.3f} "
                f"averaged {row['val_ema']:.3f} rate {rate:.2f} grad {means[2]:.2f} load {means[3]:.2f} {info['tokens'] / seconds:,.0f} tokens/s")
            recent.clear()
        if args.checkpoint_dir and step % args.save_every == 0:
            info.update(fraction=fraction, seconds=earlier + time.monotonic() - clock.start)
            training.save_state(args.checkpoint_dir, {"state": state, "best": best}, info)
        on_step(step)
    jax.block_until_ready(state["params"])
    seconds = earlier + time.monotonic() - clock.start
    stream.close()

    # Written before the evaluation, so that nothing can lose it, and again with its results.
    ship = jax.jit(partial(training.shipped, config=config))
    shipped = {"last": ship(state["ema"]), "best": ship(best)}
    facts = {
        "parameters": sum(p.size for p in table(config)), "layers": config.num_hidden_layers, "hidden": config.hidden_size,
        "experts": f"{config.num_local_experts} (top {config.num_experts_per_tok})", "vocab": config.vocab_size,
        "context": config.max_position_embeddings, "longest": args.widths[-1], "train_problems": len(trained), "held_out": len(held),
        "redrawable": sum(t is not None for t in data.Problems(list(recipe.pairs), lexicon).templates), "rows_seen": info["rows"],
        "tokens_seen": info["tokens"], "variants": args.variants, "steps": step, "tokens_per_step": args.tokens_per_step,
        "train_seconds": seconds, "total_seconds": time.monotonic() - began, "device": jax.devices()[0].device_kind,
        "speed": info["tokens"] / seconds, "lr": args.lr, "weight_decay": args.weight_decay, "ema": args.ema,
        "question_weight": args.question_weight, "peak_load": info["history"][-1]["peak_load"], "command": command_line(args),
        "history": info["history"], "new_tokens": args.new_tokens, "accuracy": {}, "used": "last",
    }
    card.write_checkpoint(args.out, shipped["last"], config, backend, card.make_card(facts))
    say("checkpoint written")
    decoder = decoder.result()
    trials = {name: score(decoder, params, forms, originals + redrawn, "labelled") for name, params in shipped.items()}
    facts["used"] = max(trials, key=lambda name: trials[name]["correct"])  # the last, if equal
    say(f"held out, right of {len(held) * 2}: " + ", ".join(f"{name} {t['correct']}" for name, t in trials.items()))
    chosen, params = trials[facts["used"]], shipped[facts["used"]]
    facts["accuracy"]["held-out train problems, half of them redrawn/labelled"] = chosen
    facts["sample"] = (originals[0][0], chosen["texts"][0].strip())
    for form in ("labelled", "bare", "chat") if test else ():
        facts["accuracy"][f"GSM8K test/{form}"] = result = score(decoder, params, forms, test, form)
        say(f"test, {form}: {result['correct']} of {result['n']} right, {result['without_number']} without a number")
        facts["total_seconds"] = time.monotonic() - began
        card.write_checkpoint(args.out, shipped[facts["used"]], config, backend, card.make_card(facts))
    facts["total_seconds"] = time.monotonic() - began
    card.write_checkpoint(args.out, shipped[facts["used"]], config, backend, card.make_card(facts))
    say(f"done: {args.out.name}")
    return facts


if __name__ == "__main__":
    main(sys.argv[1:])
