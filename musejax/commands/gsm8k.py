"""`musejax gsm8k`: scores on GSM8K, acceptance length, and the published speed figure.

Cheap checks come first: folder, data, rows, prompts; only then weights are loaded and code is compiled.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from musejax.commands import UsageError, check_overlays, checkpoint_folder, note
from musejax.commands.generate import drafter_path, select_platform, speculation_of
from musejax.commands.interrupts import INTERRUPTED, Deferred
from musejax.gsm8k import data as problems
from musejax.gsm8k import echo, report
from musejax.gsm8k.profiles import PROFILES, SPLIT, Profile, Prompt, Prompter, check_apart, shots_of
from musejax.gsm8k.runfolder import RunFolder

DONE, CHECK_FAILED, ITEMS_FAILED = 0, 1, 3


@dataclass
class Plan:
    """A checked run.

    Attributes:
        rows: (row, its prompt) of all that were asked for.
        config: content of `config.json`.
        notes: for the user, before it starts.
        warnings: for the report.
    """

    path: Path
    decode: object  # DecodeConfig and Sampling: their modules import JAX
    sampling: object
    profile: Profile
    prompter: Prompter
    rows: list[tuple[problems.Row, Prompt]]
    limit: int
    stop_ids: tuple[int, ...]
    scorers: tuple[str, ...]
    drafter: object
    config: dict
    notes: list[str]
    warnings: list[str]


def run(args: Namespace) -> int:
    """Checks, loads, runs, prints the report; exit code as `--help` says.

    Raises:
        UsageError, DataError, ProfileError, RunError, ConfigError, CheckpointError, TokenizerError: what was expected
            and found; nothing was run.
    """
    _check_combinations(args)
    if args.speed and args.out is not None:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    folder = RunFolder(args.out, args.resume) if args.out is not None and not args.speed else None
    try:
        with Deferred(args.quiet) as interrupt:  # before JAX is imported
            plan = prepare(args, folder)
            if folder is not None:
                if args.resume and (old := folder.config()) is not None:
                    echo.check_same(old, plan.config, folder.path)
                folder.start(plan.config)
            for text in [] if args.quiet else plan.notes:
                note(text)
            interrupt.check()
            setup = _setup(args, plan, load_model(args, plan))
            interrupt.check()
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(errors="replace")  # the report has a sign that not every encoding knows
            if args.speed:
                return _speed(args, plan, setup, interrupt)
            return _score(args, plan, setup, folder, interrupt)
    finally:
        if folder is not None:
            folder.close()


def _check_combinations(args: Namespace) -> None:
    if args.no_spec and args.drafter is not None:
        raise UsageError("--no-spec: expected no --drafter beside it")
    if args.resume and args.out is None:
        raise UsageError("--resume: expected --out RUNDIR beside it, got none")
    if args.speed:
        for name, given in (("--resume", args.resume), ("--check-determinism", args.check_determinism is not None),
                            ("--temperature", args.temperature != 0), ("--limit", args.limit is not None),
                            ("--scorers", args.scorers is not None)):
            if given:
                raise UsageError(f"--speed: expected no {name} beside it, since one greedy request is timed")
        if args.rows is not None and args.rows[1] - args.rows[0] != 1:
            raise UsageError(f"--speed: expected one row, such as --rows 0, got {args.rows[0]}:{args.rows[1]}")


# ------------------------------------------------------------------ checks before anything is loaded


def prepare(args: Namespace, folder: RunFolder | None = None) -> Plan:
    """Everything that can be checked without weights.

    Raises:
        UsageError, DataError, ProfileError, RunError, ConfigError, CheckpointError, TokenizerError: what was expected
            and found.
    """
    path = checkpoint_folder(args.checkpoint)
    check_overlays(args.overlay)
    profile = _profile(args, path)
    where = problems.locate(args.data)
    data, shots = problems.load(SPLIT, where), shots_of(profile, where)
    chosen = _rows(args, profile, data)
    check_apart(chosen, shots)

    select_platform(args)
    from musejax.chat import ChatTemplate
    from musejax.checkpoint.load import require_checkpoint
    from musejax.config import DecodeConfig, ModelConfig
    from musejax.gsm8k import steps
    from musejax.numerics import POLICIES
    from musejax.sampling import Sampling
    from musejax.sharding import make_mesh
    from musejax.tokenizer import Tokenizer, read_generation_config

    require_checkpoint(path)
    model = ModelConfig.from_folder(path)
    drafter = _drafter(args, model)
    tokenizer = Tokenizer.from_folder(path)
    if tokenizer.size > model.vocab_size:
        raise UsageError(f"tokenizer.json: expected at most {model.vocab_size} tokens (vocab_size), got "
                         f"{tokenizer.size}; take it and config.json from the same checkpoint")
    stop_ids = read_generation_config(path).stop_ids or tokenizer.stop_ids
    if profile.chat:
        stop_ids = tuple(dict.fromkeys((*stop_ids, *tokenizer.stop_ids)))
    old = folder.config() if folder is not None and args.resume else None
    date = args.date or (echo.date_of(old) if profile.chat else None)
    prompter = Prompter(profile, shots, tokenizer, ChatTemplate.find(path), date)
    limit = args.max_new_tokens or profile.limit
    rows = [(row, prompter.prompt(row)) for row in chosen]
    notes = _check_room(rows, model.max_position_embeddings, limit)

    choices = {"combine": args.combine, "prefill_chunk": args.prefill_chunk, "activations": args.activations,
               "implementation": args.implementation, "prefill": args.prefill}
    decode = DecodeConfig(policy=POLICIES[args.policy], **{k: v for k, v in choices.items() if v is not None})
    if args.combine is not None:
        decode.check(model)  # what was asked for; `for_model` would quietly take another order
    mesh = make_mesh(args.devices)
    decode = decode.for_model(model, mesh.devices.flat[0].platform, mesh.size)
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    scorers = profile.scorers if args.scorers is None else args.scorers
    files = [d for d in (data, shots.data) if d is not None]
    config = {
        "arguments": {k: v for k, v in vars(args).items() if k not in ("command", "version")} | {
            "profile": profile.name, "max_new_tokens": limit, "scorers": scorers, "date": prompter.date},
        "prompt": {"profile": profile.name, "shots": list(shots.ids), "stop": list(profile.stop),
                   "stop_ids": list(stop_ids), "effort": profile.effort, "date": prompter.date,
                   "row_0_sha256": prompter.digest(data.rows[0])},
        "data": {d.path.name: d.sha256 for d in files},
        "checkpoint": echo.identity(path) | {"experts": echo.quantisation(path)},
        "overlay": [echo.identity(Path(o)) for o in args.overlay],
        "drafter": None if drafter is None else echo.identity(drafter_path(args)),
        "verify": {"width": steps.verify_width(drafter), "tree": None if drafter is None else _tree(args)},
        "decode": {"policy": decode.policy.name, "combine": decode.combine, "implementation": decode.implementation,
                   "activations": decode.activations, "prefill": decode.prefill, "prefill_chunk": decode.prefill_chunk},
        "devices": echo.devices(mesh),
        "versions": echo.versions(decode.implementation, mesh.devices.flat[0].platform),
        "seeds": {"seed": args.seed, "sample": args.sample},
    }
    warnings = [f"{d.path.name}: expected the published problems with SHA-256 {problems.EXPECTED[d.split]}, got "
                f"{d.sha256}" for d in files if not d.expected]
    return Plan(path, decode, sampling, profile, prompter, rows, limit, stop_ids, scorers, drafter,
                json.loads(json.dumps(config)), notes, warnings)


def _drafter(args: Namespace, model):
    """The `DraftConfig` of --drafter, or None.

    Raises:
        ConfigError: it is missing, or does not fit the model.
        FileNotFoundError: nano's drafter is not installed.
    """
    if args.drafter is None:
        return None
    from musejax.speculation.config import DraftConfig

    drafter = DraftConfig.from_folder(drafter_path(args))
    drafter.check_against(model)
    return drafter


def _tree(args: Namespace) -> dict:
    """The shape of the trees of guesses."""
    from musejax.kernels.cache import MAX_ROWS

    tree = speculation_of(args)
    return {"nodes": MAX_ROWS, "width": tree.width, "spine": tree.spine, "tau": tree.tau}


def _profile(args: Namespace, path: Path) -> Profile:
    if args.profile is not None:
        return PROFILES[args.profile]
    from musejax.paths import nano_path

    try:
        nano = path.resolve() == nano_path().resolve()
    except FileNotFoundError:
        nano = False
    return PROFILES["plain" if nano else "bench" if args.speed else "boxed-chat"]


def _rows(args: Namespace, profile: Profile, data: problems.Data) -> list[problems.Row]:
    """The rows asked for.

    Raises:
        UsageError: some do not exist.
    """
    count = len(data.rows)
    default = 1 if args.speed else profile.rows or count
    first, end = args.rows or (0, args.limit or default)
    if end > count or not count:
        option = f"--rows {first}:{end}" if args.rows else f"--limit {args.limit}" if args.limit else str(data.path)
        raise UsageError(f"{option}: expected rows of 0 to {count}, since {data.path.name} has {count}")
    return list(data.rows[first:end])


def _check_room(rows: Sequence, context: int, limit: int) -> list[str]:
    """Notes on prompts that leave no or too little room in the context.

    Raises:
        UsageError: none has any.
    """
    rooms = [context - len(prompt.ids) for _, prompt in rows]
    if max(rooms) < 1:
        raise UsageError(f"prompts: expected fewer than {context} tokens (max_position_embeddings), got "
                         f"{context - max(rooms)} or more; take a profile with shorter prompts, such as plain")
    none, short = sum(r < 1 for r in rooms), sum(1 <= r < limit for r in rooms)
    notes = []
    if none:
        notes.append(f"{none} of {len(rows)} prompts do not fit into the context of {context} tokens; their rows will "
                     "fail")
    if short:
        notes.append(f"the context has room for fewer than {limit} new tokens after {short} of {len(rows)} prompts "
                     f"(the least is {min(r for r in rooms if r >= 1)})")
    return notes


# ------------------------------------------------------------------ running


def load_model(args: Namespace, plan: Plan):
    """The loaded `musejax.Model`."""
    from musejax.loading import load

    return load(plan.path, devices=args.devices, overlay=tuple(args.overlay), decode=plan.decode,
                progress=not args.quiet, drafter=drafter_path(args), speculation=speculation_of(args))


def _setup(args: Namespace, plan: Plan, model):
    from musejax.gsm8k.run import Setup

    return Setup(model=model, prompter=plan.prompter, sampling=plan.sampling, sample=args.sample, limit=plan.limit,
                 stop_ids=plan.stop_ids, scorers=plan.scorers, drafter=plan.drafter)


def _score(args: Namespace, plan: Plan, setup, folder: RunFolder | None, interrupt: Deferred) -> int:
    """Runs the rows that are not done; prints the report."""
    from musejax.gsm8k.run import check_determinism, run_row

    names = {problems.row_id(SPLIT, row.index): (row, prompt) for row, prompt in plan.rows}
    kept = {} if folder is None else folder.done
    items = {name: kept[name] for name in names if name in kept}
    progress = report.Progress(list(items.values()), len(names) - len(items), next(iter(plan.scorers), None),
                               quiet=args.quiet)
    checked, partial = None, False
    try:
        if args.check_determinism is not None:
            rows = plan.rows[:args.check_determinism]
            checked = {"rows": len(rows), "differences": check_determinism(setup, rows, interrupt.check)}
        for name, (row, prompt) in names.items():
            if name in items:
                continue
            interrupt.check()
            item = items[name] = run_row(setup, row, prompt, interrupt.check)
            if folder is not None:
                folder.add(item)
            progress.add(item)
            if item["error"] is not None and not args.quiet:
                note(f"{name} failed: {item['error']}")
    except KeyboardInterrupt:
        partial = len(items) < len(names) or (args.check_determinism is not None and checked is None)
    progress.finish()
    summary = _summary(args, plan, [items[name] for name in names if name in items], checked, partial)
    if folder is not None:
        folder.finish(summary)
    print(report.as_text(summary))
    if partial:
        return INTERRUPTED
    if checked is not None and checked["differences"]:
        return CHECK_FAILED
    return ITEMS_FAILED if summary["errors"] else DONE


def _summary(args: Namespace, plan: Plan, items: list[dict], checked: dict | None, partial: bool) -> dict:
    """What is printed, as plain data."""
    from musejax.gsm8k.score import summarise

    return {"profile": plan.profile.name, "planned": len(plan.rows), "partial": partial, **_choices(args, plan),
            **summarise(items, plan.scorers), "determinism": checked, "warnings": plan.warnings}


def _choices(args: Namespace, plan: Plan) -> dict:
    config = plan.config
    identity = config["checkpoint"]
    choice = "greedy"
    if args.temperature:
        choice = f"temperature {args.temperature:g}, top-p {args.top_p:g}, top-k {args.top_k}, sample {args.sample}"
    mesh = ", ".join(f"{axis}={size}" for axis, size in config["devices"]["mesh"].items())
    return {"seed": args.seed, "choice": choice, "verify_width": config["verify"]["width"],
            "checkpoint": f"{identity['name']} {identity['sample_sha256'][:12]} ({identity['experts']})",
            "mesh": f"{mesh} ({', '.join(config['devices']['names'])})",
            "engine": f"{'no-spec' if config['drafter'] is None else config['drafter']['name']}, "
                      f"{config['decode']['implementation']}, {config['decode']['policy']}, "
                      f"at most {plan.limit} new tokens"}


def _speed(args: Namespace, plan: Plan, setup, interrupt: Deferred) -> int:
    """Times one request; prints a line for each repeat and the median of their rates."""
    from musejax.gsm8k import speed

    row, prompt = plan.rows[0]
    choices = _choices(args, plan)
    print(f"GSM8K {SPLIT} row {row.index}, profile {plan.profile.name}, batch 1, greedy, prompt of {len(prompt.ids)} "
          f"tokens: {speed.TIMED} decode steps after {speed.SKIPPED}; host clock, each until its tokens are there")
    runs = []
    try:
        for figures in speed.measure(setup, row, prompt, args.repeat, interrupt.check):
            runs.append(figures)
            print(report.speed_line(figures), flush=True)
    except KeyboardInterrupt:
        if not interrupt.asked:
            raise
    for drafter in (True, False):
        whole = [f for f in runs if f["drafter"] is drafter and not f["incomplete"]]
        if whole:
            rate, step = (statistics.median(f[k] for f in whole) for k in ("tok_s", "step_ms_median"))
            print(f"{'drafter' if drafter else 'no-spec'}: profile {plan.profile.name}, median of {len(whole)} "
                  f"repeats: tok/s {rate:.1f}, step {step:.3f} ms")
    print("\n".join([report.settings(choices)] + [f"warning: {w}" for w in plan.warnings]))
    if args.out is not None:
        result = {"profile": plan.profile.name, "partial": interrupt.asked, **choices, "runs": runs,
                  "config": plan.config}
        text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
        Path(args.out, "speed.json").write_text(text, encoding="utf-8")
    if interrupt.asked:
        return INTERRUPTED
    return CHECK_FAILED if any(f["compilations"] for f in runs) else DONE
