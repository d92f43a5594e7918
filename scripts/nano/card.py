"""Writes the finished checkpoint folder: published tensor names, two shards, tokenizer files and the card."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from pathlib import Path

import numpy as np
import tokenizers
from nano.text import save_tokenizer
from safetensors.numpy import save_file

from musejax.config import ModelConfig
from musejax.params import leaf_of, table, unslice_tensor


def write_shards(folder: Path, params: dict, config: ModelConfig, count: int = 2) -> None:
    """`model-0000i-of-0000n.safetensors` of about equal size, in the table's order, and their index."""
    entries = table(config)
    total, weight_map, done = sum(p.nbytes for p in entries), {}, 0
    shards: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for param in entries:
        k = min(done * count // total, count - 1)
        shards[k][param.hf_key] = np.ascontiguousarray(unslice_tensor(param, np.asarray(leaf_of(params, param))))
        weight_map[param.hf_key] = f"model-{k + 1:05}-of-{count:05}.safetensors"
        done += param.nbytes
    for k, tensors in enumerate(shards):
        file = folder / f"model-{k + 1:05}-of-{count:05}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the library lets only the owner read
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(out: Path, params: dict, config: ModelConfig, backend: tokenizers.Tokenizer, card: str) -> None:
    """The whole folder, in one atomic step; an older one of the same name is replaced."""
    draft, old = out.with_name(out.name + ".partial"), out.with_name(out.name + ".old")
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir(parents=True)
    (draft / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    save_tokenizer(backend, draft, config.max_position_embeddings)
    write_shards(draft, params, config)
    (draft / "README.md").write_text(card, encoding="utf-8")
    if out.exists():
        os.replace(out, old)
    os.replace(draft, out)
    shutil.rmtree(old, ignore_errors=True)


FORMS = {"bare": "the question alone", "labelled": "`Question: ... Answer:`", "chat": "chat template"}


def accuracy_row(name: str, result: dict) -> str:
    """Set and form, problems, right, share with its standard error, without a number."""
    n, correct = result["n"], result["correct"]
    share = correct / max(n, 1)
    error = (share * (1 - share) / max(n - 1, 1)) ** 0.5
    where, _, form = name.partition("/")
    return f"| {where}, {FORMS[form]} | {n} | {correct} | {share:.1%} ± {error:.1%} | {result['without_number']} |"


def make_card(facts: dict) -> str:
    """The model card (README.md) from the facts of a run, as `train_nano.main` collects them."""
    f, args, config = facts, facts["args"], facts["config"]
    accuracy = [accuracy_row(name, result) for name, result in f["accuracy"].items()] or ["| not measured | | | | |"]
    curve = [f"| {h['step']} | {h['tokens'] / 1e6:.1f} | {h['train']:.3f} | {h['val']:.3f} | {h['val_ema']:.3f} |"
             for h in f["history"]]
    sample = [] if f["sample"] is None else [
        "A held-out problem and the model's answer, right or wrong:", "", "```text", f["sample"][0], "", f["sample"][1],
        "```", ""]
    peak = f["history"][-1]["peak_load"] if f["history"] else 0.0
    return "\n".join([
        "---", "license: apache-2.0", "language: en", "library_name: musejax", "datasets: openai/gsm8k", "---",
        "# Muse Spark nano",
        "",
        paragraph("""
            A Muse Spark decoder of very small sizes, trained from scratch to write out grade-school arithmetic
            problems. It is a toy: it shows every part of the architecture at work (window and full attention, routed
            experts, the message format) and gives speculative decoding and evaluation something real to measure. It
            is often wrong: see the accuracy below."""),
        "",
        "| | |",
        "| --- | --- |",
        f"| parameters | {f['parameters']:,} |",
        f"| layers, hidden width | {config.num_hidden_layers}, {config.hidden_size} |",
        f"| experts | {config.num_local_experts}, top {config.num_experts_per_tok} |",
        f"| vocabulary | {config.vocab_size} |",
        f"| context | {config.max_position_embeddings} (trained up to {f['longest']}) |",
        "| format | bfloat16 (router float32), published Muse Spark layout |",
        "",
        "## Use",
        "",
        paragraph("""
            Give the bare problem, or `Question: ...` and `Answer:` on a line of its own, or chat messages through
            `chat_template.jinja` (worked lines go to `self`, the result to `user`). Decode greedily. The last line of
            an answer is `####` and the number; `<<48/2=24>>` are the calculator annotations of the data. Stop at
            `<|end_of_text|>` or `<|eot|>`."""),
        "",
        *sample,
        "## Accuracy",
        "",
        paragraph(f"""
            Exact match of the number after `####`, zero-shot, greedy, at most {args.new_tokens} new tokens, on the
            weights as shipped."""),
        "",
        "| problems and prompt | n | right | accuracy | no number |",
        "| --- | --- | --- | --- | --- |",
        *accuracy,
        "",
        paragraph(f"""
            The held-out problems chose between the last and the best averaged weights (used: {f['used']}); the test
            set chose nothing."""),
        "",
        "## Data and licence",
        "",
        paragraph(f"""
            GSM8K train only (OpenAI grade-school-math, MIT licence): {f['train_problems']:,} problems, and
            {args.held_out} held out by seed. The calculator annotations make templates of {f['redrawable']:,} of the
            training problems: numbers of the question are redrawn and all results recomputed exactly; the others are
            used as they are. First names and countable things are swapped at random, and sums without an annotation
            got one. {f['rows_seen']:,} texts were seen, {f['tokens_seen'] / 1e6:.1f} million tokens; an epoch has
            {args.variants} variants of a redrawable problem and one of any other. The weights carry the licence of
            this repository (Apache-2.0)."""),
        "",
        "## Training",
        "",
        paragraph(f"""
            {f['steps']:,} steps of {args.tokens_per_step:,} token places, {f['train_seconds']:.0f} s of training on
            {f['device']} ({f['speed']:,.0f} tokens/s, padding not counted), {f['total_seconds']:.0f} s in all.
            AdamW, peak learning rate {args.lr:g}, warm-up, then linear to 0, weight decay {args.weight_decay:g},
            averaged weights (decay {args.ema:g}), a share of {args.drop:g} of the inner weights left out in each
            step; question tokens weigh {args.question_weight:g} in the loss. The router's selection bias follows the
            load of the experts (busiest at the end: {peak:.2f} times the mean)."""),
        "",
        "```", f["command"], "```",
        "",
        paragraph("""
            Loss per answer token (nats): the mean over the training steps since the row above, and on the held-out
            problems with the running and the averaged weights."""),
        "",
        "| step | million tokens | train | held out | held out, averaged |",
        "| --- | --- | --- | --- | --- |",
        *curve,
        "",
    ])


def paragraph(words: str) -> str:
    return textwrap.fill(" ".join(words.split()), 110, break_long_words=False, break_on_hyphens=False)
