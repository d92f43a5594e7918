"""The page (README.md) of a trained drafter, from the facts of its run."""

from __future__ import annotations

import os
from pathlib import Path

from nano.card import paragraph

from musejax.speculation.params import num_parameters, save_drafter


def write_drafter(out: Path, params: dict, facts: dict) -> None:
    """model.safetensors, config.json and README.md, each in one atomic step."""
    save_drafter(out, params, facts["config"])
    draft = out / "README.md.partial"
    draft.write_text(make_card(facts), encoding="utf-8")
    os.replace(draft, out / "README.md")


def make_card(facts: dict) -> str:
    """The page from the facts, as `train_nano_drafter.main` collects them."""
    f, config, args, settings = facts, facts["config"], facts["args"], facts["settings"]
    rows = [f"| {name} | {r['texts']} | {r['tokens']} | {r['chain']:.2f} | {r['tree']:.2f} |"
            for name, r in f["figures"].items()] or ["| not measured | | | | |"]
    curve = [f"| {h['step']} | {h['base']:.3f} | {h['selector']:.3f} | {h['recall']:.1%} | {h['top1']:.1%} | "
             f"{h['accept']:.2f} | {h['chain']:.2f} | {h['tree']:.2f} |" for h in f["history"]]
    return "\n".join([
        "---", "license: apache-2.0", "language: en", "library_name: musejax", "datasets: openai/gsm8k", "---",
        "# Drafter for Muse Spark nano",
        "",
        paragraph(f"""
            A DFlash 2 drafter for the toy model `nano`: in one pass it drafts {config.depth} tokens from the features
            that nano left while reading the text so far, for nano to verify. It changes how fast nano writes, never
            what. It was trained on nano's own greedy answers to GSM8K training problems, and guesses well on such."""),
        "",
        "| | |",
        "| --- | --- |",
        f"| parameters | {num_parameters(config):,} (embedding and LM head are nano's) |",
        f"| layers, hidden width | {config.num_hidden_layers}, {config.hidden_size} |",
        f"| taps | after nano's layers {', '.join(map(str, config.target_layer_ids))} |",
        f"| block | {config.block_size}: the newest token and {config.depth} drafted |",
        f"| window | {config.sliding_window} |",
        f"| candidates, selector rank | {config.candidates}, {config.selector_rank} |",
        "| format | bfloat16, public DFlash 2 layout |",
        "",
        "## Tokens a verification yields",
        "",
        paragraph("""
            Emitted tokens over verification passes, all texts pooled, the confirmed token of the target included;
            greedy, batch 1, a chain of drafted tokens or the 16-node tree built best first. Computed from nano's
            greedy texts, which speculative decoding reproduces. The held-out problems were used for neither nano's nor
            the drafter's training, but chose the step that is shipped; the test set chose nothing."""),
        "",
        "| prompts | texts | tokens | chain | tree of 16 |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        "## Training",
        "",
        paragraph(f"""
            {f['sequences']:,} prompts from {f['problems']:,} GSM8K training problems (MIT licence), most with redrawn
            numbers and names, as bare or labelled question or chat; nano's greedy answers of at most {args.new_tokens}
            tokens, {f['response_tokens'] / 1e6:.1f} million tokens, made in {f['generate_seconds']:.0f} s.
            {f['steps']:,} steps of {args.batch} texts with up to {settings.anchors} blocks each,
            {f['train_seconds']:.0f} s of training on {f['device']}, {f['total_seconds']:.0f} s in all. AdamW, peak
            learning rate {settings.lr:g}, warm-up, cosine to {settings.floor:g} of it; averaged weights (decay
            {settings.ema:g}), those of step {f['used_step']:,}."""),
        "",
        "```", f["command"], "```",
        "",
        paragraph("""
            Training losses (nats), share of true tokens among the candidates and on their first place, and mean
            teacher-forced accept length since the row above; then chain and tree on some of the held-out texts."""),
        "",
        "| step | base | selector | recall | top 1 | accept | held-out chain | held-out tree |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *curve,
        "",
    ])
