"""Writes the finished checkpoint folder: published tensor names, two shards, tokenizer files and the card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from musejax.config import ModelConfig
from musejax.params import leaf_of, table, unslice_tensor
from nano.text import save_tokenizer


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
        save_file(tensors, folder / f"model-{k + 1:05}-of-{count:05}.safetensors", metadata={"format": "pt"})
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


FORM_NAMES = {"bare": "the question alone", "labelled": "`Question: ... Answer:`", "chat": "chat template"}


def accuracy_rows(results: dict[str, dict]) -> list[str]:
    """Table rows: set and form, problems, right, share with its standard error, without a number."""
    rows = []
    for name, r in results.items():
        share = r["correct"] / max(r["n"], 1)
        error = (share * (1 - share) / max(r["n"] - 1, 1)) ** 0.5
        where, _, form = name.partition("/")
        rows.append(f"| {where}, {FORM_NAMES[form]} | {r['n']} | {r['correct']} | {share:.1%} ± {error:.1%} | {r['without_number']} |")
    return rows


def make_card(facts: dict) -> str:
    """The model card (README.md) from the facts of a run; keys as used below."""
    f = facts
    sample = f"""
An answer of the model, the first held-out problem:

```text
{f['sample'][0]}
---
{f['sample'][1]}
```
""" if f.get("sample") else ""
    curve = "\n".join(f"| {h['step']} | {h['tokens'] / 1e6:.1f} | {h['train']:.3f} | {h['val']:.3f} | {h['val_ema']:.3f} |" for h in f["history"])
    accuracy = "\n".join(accuracy_rows(f["accuracy"])) or "| not measured | | | | |"
    return f"""---
license: apache-2.0
language: en
library_name: musejax
datasets: openai/gsm8k
---
# Muse Spark nano

A Muse Spark decoder of very small sizes, trained from scratch to write out grade-school arithmetic problems. It is a
toy: it shows every part of the architecture at work (window and full attention, routed experts, the message format)
and gives speculative decoding and evaluation something real to measure. Most of its answers to new problems are wrong.

| | |
| --- | --- |
| parameters | {f['parameters']:,} |
| layers, hidden, experts | {f['layers']}, {f['hidden']}, {f['experts']} |
| vocabulary, context | {f['vocab']}, {f['context']} (trained up to {f['longest']} tokens) |
| format | bfloat16 (router float32), published Muse Spark layout |

## Use

Give the bare problem, or `Question: ...` and `Answer:` on a line of its own, or chat messages through
`chat_template.jinja` (worked lines go to `self`, the result to `user`). Greedy decoding. Answers end in `#### N`;
`<<48/2=24>>` are the calculator annotations of the data. Stop at `<|end_of_text|>` or `<|eot|>`.
{sample}
## Accuracy

Exact match of the number after `####`, zero-shot, greedy, at most {f['new_tokens']} new tokens, on the weights as shipped.

| problems and prompt | n | right | accuracy | no number |
| --- | --- | --- | --- | --- |
{accuracy}

The held-out problems chose between the last and the best averaged weights (used: {f['used']}); the test set chose nothing.

## Data and licence

GSM8K train only (MIT licence, OpenAI grade-school-math): {f['train_problems']:,} problems, {f['held_out']} held out by seed. The calculator
annotations make templates of {f['redrawable']:,} of the training problems: numbers of the question are redrawn and all results
recomputed exactly; the others are used as they are. First names and countable things are swapped at random.
Sums without an annotation got one. {f['rows_seen']:,} rows were seen, {f['tokens_seen'] / 1e6:.1f} million tokens, {f['variants']} variants of
a redrawable problem an epoch. The weights carry the licence of this repository (Apache-2.0).

## Training

{f['steps']:,} steps of {f['tokens_per_step']:,} token places, {f['train_seconds']:.0f} s of training on {f['device']} ({f['speed']:,.0f} tokens/s, padding not
counted), {f['total_seconds']:.0f} s in all. AdamW, peak learning rate {f['lr']:g}, warm-up then linear to 0, weight decay {f['weight_decay']:g}, averaged weights
(decay {f['ema']:g}); question tokens weigh {f['question_weight']:g} in the loss. The selection bias of the router follows the load of the experts
(largest share at the end: {f['peak_load']:.2f} times the mean).

```
{f['command']}
```

Loss per answer token (nats) on the last training batches, and on held-out problems with the running and the averaged weights:

| step | million tokens | train | held out | held out, averaged |
| --- | --- | --- | --- | --- |
{curve}
"""
