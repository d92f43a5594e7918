#!/usr/bin/env python3
"""Trains the drafter of the nano checkpoint on nano's own greedy answers, and writes it in the public layout.

    python scripts/train_nano_drafter.py --data gsm8k_train.jsonl --test gsm8k_test.jsonl --minutes 8.5 --out drafter

With --minutes the whole run, answers and evaluation included, takes that long: generation ends at its share, and the
learning rate follows the clock. The best drafter so far (averaged weights, held-out tree length) is in --out from the
first evaluation on, so a broken run loses a minute at most. --quick overfits one answer on a CPU. Parts:
nano_drafter/responses.py (prompts, answers, taps), nano_drafter/training.py, nano_drafter/card.py; problems from nano/.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers
from nano import batches, data, text

from musejax.config import ConfigError, ModelConfig
from musejax.paths import nano_path
from musejax.speculation.config import NANO_DRAFTER, DraftConfig

QUICK = dict(steps=40, problems=4, held_out=1, eval_problems=0, sequences=1, decode_batch=1, prompt_width=160,
             new_tokens=32, batch=1, anchors=8, eval_sequences=1, eval_every=20, variants=1, workers=0, lr=3e-3,
             ema=0.8)


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = p.add_argument
    add("--data", type=Path, required=True, help="gsm8k_train.jsonl")
    add("--test", type=Path, help="gsm8k_test.jsonl, for the figures in the card")
    add("--out", type=Path, required=True, help="drafter folder to write")
    add("--target", type=Path, default=None, help="checkpoint folder; default the shipped nano")
    add("--config", type=Path, help="folder with a drafter's config.json; default the NANO_DRAFTER sizes")
    add("--minutes", type=float, help="time of the whole run")
    add("--steps", type=int, help="number of steps, instead of --minutes")
    add("--quick", action="store_true", help="overfit one answer: other defaults, evaluation on the trained text")
    add("--reserve-seconds", type=float, default=35, help="of --minutes, kept for the last evaluation and writing")
    add("--generate-share", type=float, default=0.35, help="of --minutes, by when the last answers are generated")
    add("--sequences", type=int, default=49152, help="prompts to answer")
    add("--decode-batch", type=int, default=1024, help="prompts answered at a time")
    add("--prompt-width", type=int, default=192, help="longer prompts are left out")
    add("--new-tokens", type=int, default=288, help="of an answer")
    add("--batch", type=int, default=128, help="texts of a step")
    add("--anchors", type=int, default=16, help="blocks of a text in a step")
    add("--lr", type=float, default=2e-3)
    add("--ema", type=float, default=0.998)
    add("--gamma", type=float, help="decay of the loss along a block; default the published value")
    add("--seed", type=int, default=0)
    add("--variants", type=int, default=4, help="of a problem with redrawable numbers, an epoch")
    add("--held-out", type=int, default=200, help="training problems kept for evaluation; nano's own with its seed 0")
    add("--eval-problems", type=int, default=200, help="test problems evaluated")
    add("--eval-sequences", type=int, default=96, help="held-out texts of an evaluation during training")
    add("--eval-every", type=float, default=60, help="seconds with --minutes, steps with --steps")
    add("--problems", type=int, help="use only the first so many lines of --data")
    add("--workers", type=int, default=max(0, min(14, (os.cpu_count() or 1) - 2)), help="processes making prompts")
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        p.set_defaults(**QUICK)
    return p.parse_args(argv)


def check(args: argparse.Namespace) -> tuple[ModelConfig, DraftConfig]:
    """The sizes of both models.

    Raises:
        SystemExit: everything that is wrong with the arguments, in one text, before anything is started.
    """
    problems = []
    if args.minutes is not None and args.steps is not None and not args.quick:
        problems.append("--minutes, --steps: expected one of them, got both")
    if args.minutes is None and args.steps is None:
        problems.append("--minutes: expected the time of the run (or --steps, or --quick), got none")
    for name in ("minutes", "steps", "sequences", "decode_batch", "prompt_width", "new_tokens", "batch", "anchors",
                 "lr", "variants", "held_out", "eval_sequences", "eval_every", "problems", "gamma"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e9:
            problems.append(f"--{name.replace('_', '-')}: expected a number above 0, got {value}")
    for name, low, high in (("ema", 0, 1), ("generate_share", 0.01, 0.9), ("eval_problems", 0, 1e6),
                            ("workers", 0, 256), ("reserve_seconds", 0, 1e6), ("seed", 0, 2**31)):
        if not low <= getattr(args, name) <= high:
            problems.append(f"--{name.replace('_', '-')}: expected {low} to {high}, got {getattr(args, name)}")
    for name in ("data", "test"):
        if getattr(args, name) is not None and not getattr(args, name).is_file():
            problems.append(f"--{name}: expected a GSM8K file, found no such file: {getattr(args, name)}")
    if args.out.exists() and not args.out.is_dir():
        problems.append(f"--out: expected a folder, got a file: {args.out}")
    if args.minutes and 60 * args.minutes * (1 - args.generate_share) <= args.reserve_seconds:
        problems.append("--minutes: expected more than --generate-share and --reserve-seconds take together")
    target = drafter = None
    try:
        args.target = args.target or nano_path()
        target = ModelConfig.from_folder(args.target)
        drafter = DraftConfig.from_folder(args.config) if args.config else NANO_DRAFTER
        drafter.check_against(target)
        width = args.prompt_width + args.new_tokens
        if width > min(target.max_position_embeddings, drafter.max_position_embeddings):
            problems.append(f"--prompt-width, --new-tokens: expected at most the context together, got {width}")
        if args.anchors > width:
            problems.append(f"--anchors: expected at most the {width} places of a text, got {args.anchors}")
        if not (args.target / "tokenizer.json").is_file():
            problems.append(f"--target: expected tokenizer.json in it, found none: {args.target}")
    except (ConfigError, FileNotFoundError) as err:
        problems.append(str(err))
    if problems:
        raise SystemExit("train_nano_drafter.py:\n" + "\n".join(problems))
    return target, drafter


def command_line(args: argparse.Namespace) -> str:
    """The command that made the drafter: options that differ from the defaults, files by name only."""
    plain = vars(parse(["--data", "x", "--out", "x"] + ["--quick"] * args.quick))
    words = ["python scripts/train_nano_drafter.py"]
    for name, value in vars(args).items():
        if name == "quick":
            words += ["--quick"] * value
        elif name in ("data", "out") or (value not in (None, plain[name]) and name not in ("workers", "target")):
            words += [f"--{name.replace('_', '-')}", value.name if isinstance(value, Path) else str(value)]
    return " ".join(words)


def shapes_of(tree):
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def compile_step(state, store, borrowed, batch: int, say, **static):
    """The training step; blocks are recomputed in the backward pass if memory would not suffice otherwise."""
    import jax
    from nano_drafter import training

    like = *map(shapes_of, (state, store, borrowed)), jax.ShapeDtypeStruct((batch,), np.int32)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    held = sum(x.nbytes for x in jax.tree.leaves(store))
    for remat in (False, True):
        program = jax.jit(partial(training.train_step, remat=remat, **static), donate_argnums=0)
        compiled = program.lower(*like, jax.ShapeDtypeStruct((), np.float32)).compile()
        need = compiled.memory_analysis().temp_size_in_bytes
        if need + held < 0.85 * limit:
            break
    say(f"training step compiled, {need / 1e9:.2f} GB{', blocks recomputed' if remat else ''}")
    return compiled


class Evaluation:
    """Pooled lengths of chain and tree on stored texts, with weights as shipped, `chunk` at a time in one program."""

    def __init__(self, borrowed, drafter: DraftConfig, new: int, num_tokens: int, chunk: int):
        import jax

        from musejax.numerics import CANON_F32_PROBS, round_bf16
        from musejax.speculation.train import emitted_lengths

        def run(params, borrowed, texts):
            shipped = jax.tree.map(round_bf16, params)
            return emitted_lengths(shipped, borrowed, texts, config=drafter, policy=CANON_F32_PROBS, new=new,
                                   num_tokens=num_tokens)

        self._borrowed, self._chunk, self._run = borrowed, chunk, jax.jit(run)

    def compile(self, params, store) -> Evaluation:
        import jax

        part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self._chunk, *x.shape[1:]), x.dtype), store)
        self._run = self._run.lower(*map(shapes_of, (params, self._borrowed)), part).compile()
        return self

    def __call__(self, params, store, rows) -> dict:
        """texts, tokens, chain, tree (tokens a pass) over these rows of a store."""
        import jax

        from musejax.speculation.train import pooled_length

        rows, counts = np.asarray(rows), []
        for at in range(0, len(rows), self._chunk):
            some = np.resize(rows[at:at + self._chunk], self._chunk)  # the last chunk repeats some
            part = jax.tree.map(lambda x, some=some: x[some], store)
            made = np.stack(self._run(params, self._borrowed, part))[:, :len(rows) - at]
            counts.append(made)
        counts = np.concatenate(counts, axis=1)
        prompt, length = np.asarray(store.prompt)[rows], np.asarray(store.length)[rows]
        (chain, chain_passes), (tree, tree_passes) = (pooled_length(c, prompt, length) for c in counts)
        return {"texts": len(rows), "tokens": tree, "chain": chain / max(chain_passes, 1),
                "tree": tree / max(tree_passes, 1)}


def main(argv: list[str] | None = None, on_step=lambda step: None) -> dict:
    """Runs the training; returns the facts of the card. `on_step` is called after every step."""
    began = time.monotonic()
    args = parse(argv)
    config, drafter = check(args)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

    def say(line):
        print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    pairs = data.load(args.data, args.problems)
    if not 0 < args.held_out < len(pairs):
        raise SystemExit(f"--held-out: expected 1 to {len(pairs) - 1} of {len(pairs)} problems, got {args.held_out}")
    trained, held = ([pairs[i] for i in part] for part in data.split(len(pairs), args.held_out, 0))
    test = data.load(args.test)[:args.eval_problems] if args.test and args.eval_problems else []
    backend = tokenizers.Tokenizer.from_file(str(args.target / "tokenizer.json"))

    import jax
    import jax.numpy as jnp
    from nano_drafter import responses, training
    from nano_drafter.card import write_drafter

    from musejax.checkpoint import load_params
    from musejax.numerics import CANON, storage_dtype
    from musejax.speculation.draft import borrow
    from musejax.speculation.params import num_parameters
    from musejax.speculation.train import Metrics

    recipe = responses.recipe_of(trained, backend, args.seed, args.decode_batch, args.variants)
    stream = batches.Batches(recipe, workers=args.workers)  # its processes start now
    try:
        settings = training.Settings(lr=args.lr, ema=args.ema, anchors=args.anchors, gamma=args.gamma)
        forms = text.Forms(tokenizers.Tokenizer.from_str(backend.to_str()))
        target = load_params(args.target)[1]
        dtype = storage_dtype(CANON, jax.default_backend())
        target = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, target)
        borrowed, width, stops = borrow({}, target), args.prompt_width + args.new_tokens, forms.tokenizer.stop_ids
        num_tokens = forms.tokenizer.size
        say(f"{len(trained)} training problems, {len(held)} held out, {len(test)} for the test; drafter of "
            f"{num_parameters(drafter):,} parameters; {jax.devices()[0].device_kind}, {args.workers} workers")

        # Programs are compiled side by side.
        chunk = min(128, args.decode_batch)
        store = responses.Store(target, args.sequences, chunk, width, drafter, config)
        sets = {} if args.quick else {"held-out train problems": held, "GSM8K test": test}
        prompts = responses.fixed_prompts(forms, sets)
        exam = responses.Store(target, max(sum(map(len, prompts.values())), 1), chunk, width, drafter, config)
        state = jax.jit(partial(training.init_state, drafter, settings, args.seed))()
        pool = ThreadPoolExecutor(5)
        decoder = pool.submit(lambda: responses.Responses(config, args.decode_batch, args.prompt_width, args.new_tokens,
                                                          stops, num_tokens).compile(shapes_of(target)))
        filled = [pool.submit(x.compile) for x in ((store, exam) if prompts else (store,))]
        program = pool.submit(compile_step, state, store.data, borrowed, args.batch, say, config=drafter,
                              settings=settings, seed=args.seed, num_tokens=num_tokens)
        evaluate = Evaluation(borrowed, drafter, args.new_tokens, num_tokens, min(32, args.eval_sequences))
        evaluate = pool.submit(evaluate.compile, state["ema"], exam.data)
        decoder = decoder.result()
        for one in filled:
            one.result()
        say("decoder compiled")

        # Texts: held-out and test first, then as many as the time allows.
        places = responses.answer_sets(decoder, target, exam, prompts)
        say(f"{exam.count} texts for evaluation")
        started = time.monotonic()
        until = began + 60 * args.minutes * args.generate_share if args.minutes else float("inf")
        response_tokens = responses.answer_many(decoder, target, store, stream, until)
        generate_seconds = time.monotonic() - started
        say(f"{store.count} texts for training, {response_tokens:,} response tokens in {generate_seconds:.0f} s")
    finally:
        stream.close()
    program, evaluate = program.result(), evaluate.result()

    def exam_of(params, everything=False) -> dict:
        """Figures by set; during training of some held-out texts only, in --quick of the trained one."""
        if args.quick:
            return {"trained text": evaluate(params, store.data, [0])}
        if everything:
            return {name: evaluate(params, exam.data, rows) for name, rows in places.items()}
        rows = np.concatenate([rows for name, rows in places.items() if name.startswith("held-out")])
        rows = rows[::max(len(rows) // args.eval_sequences, 1)][:args.eval_sequences]
        return {"some held-out train problems": evaluate(params, exam.data, rows)}

    facts = {"config": drafter, "args": args, "settings": settings, "figures": {}, "history": [], "used_step": 0,
             "sequences": store.count, "problems": len(trained), "response_tokens": response_tokens,
             "generate_seconds": generate_seconds, "device": jax.devices()[0].device_kind,
             "command": command_line(args)}
    best, best_length, recent, step = None, 0.0, [], 0

    def assess() -> None:
        """Evaluates the averaged weights, and writes them if they are the best so far."""
        nonlocal best, best_length
        figures = exam_of(state["ema"])
        ((name, length),) = figures.items()
        *means, norm = np.mean([np.asarray(figures) for figures in recent], axis=0)
        row = dict(zip(Metrics._fields, map(float, means), strict=True))
        facts["history"].append(row | {"step": step, "chain": length["chain"], "tree": length["tree"]})
        say(f"step {step} ({min(fraction, 1):.0%}) " + ", ".join(f"{k} {v:.3f}" for k, v in row.items())
            + f", gradient {norm:.2f}; {name}: chain {length['chain']:.3f}, tree {length['tree']:.3f}")
        recent.clear()
        if best is None or length["tree"] >= best_length:
            best, best_length = jax.tree.map(jnp.copy, state["ema"]), length["tree"]
            facts.update(figures=figures, used_step=step, steps=step, train_seconds=time.monotonic() - start,
                         total_seconds=time.monotonic() - began)
            write_drafter(args.out, best, facts)

    # Training.
    rng, order = np.random.default_rng(args.seed), np.zeros(0, np.int32)
    start, deadline = time.monotonic(), began + 60 * (args.minutes or 0) - args.reserve_seconds
    fraction, assessed = 0.0, start
    while fraction < 1:
        while len(order) < args.batch:
            order = np.concatenate([order, rng.permutation(store.count).astype(np.int32)])
        rows, order = order[:args.batch], order[args.batch:]
        rate = np.float32(settings.schedule(fraction))
        state, figures = program(state, store.data, borrowed, rows, rate)
        recent.append(figures)
        step += 1
        if len(recent) > 2:
            recent[-3].block_until_ready()  # the host stays two steps ahead, so that the clock is true
        now = time.monotonic()
        fraction = step / args.steps if args.steps else (now - start) / max(deadline - start, 1e-9)
        due = now - assessed >= args.eval_every if args.minutes else step % args.eval_every == 0
        if due or fraction >= 1 or (step == 1 and args.quick):
            assess()
            assessed = time.monotonic()
        on_step(step)
    seconds = time.monotonic() - start

    # Figures of the best, on everything.
    facts.update(figures=exam_of(best, everything=True), steps=step, train_seconds=seconds,
                 total_seconds=time.monotonic() - began)
    write_drafter(args.out, best, facts)
    for name, r in facts["figures"].items():
        say(f"{name}: {r['texts']} texts, {r['tokens']} tokens, chain {r['chain']:.3f}, tree {r['tree']:.3f}")
    say(f"done: {args.out.name}, {step} steps, weights of step {facts['used_step']}")
    return facts


if __name__ == "__main__":
    main(sys.argv[1:])
