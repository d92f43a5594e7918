"""Published checkpoint -> converted folder: streamed, resumable, and never half there.

The work happens in `DST.converting`, one part (a layer) after another; each finished part is recorded there. The
folder gets its final name when everything is in it. A conversion of the same source that starts again keeps the
finished parts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from musejax.checkpoint.container import (
    FORMAT_NUMBER,
    STATE,
    UNFINISHED,
    file_sizes,
    is_converted,
    parts_of,
    read_state,
    save_part,
    table_digest,
    work_folder,
    write_json,
    write_manifest,
)
from musejax.checkpoint.errors import CheckpointError
from musejax.checkpoint.load import pack_part, require_checkpoint, sources_of_parts
from musejax.checkpoint.progress import bar, say
from musejax.checkpoint.published import Published, open_published, require_sound_scales, warn_of_rounding
from musejax.packing import packing_problems

SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
              "special_tokens_map.json", "chat_template.jinja", "README.md")
"""Copied from the source when it has them."""

HEADROOM = 64 << 20
"""Bytes of disk asked for beyond the tensors: Orbax metadata and side files."""


def convert(src: str | Path, dst: str | Path, *, overlay: Sequence[str | Path] | str | Path = (),
            progress: bool = True, overwrite: bool = False) -> Path:
    """Converts a published checkpoint into a folder that `load_params` restores on 1, 2, 4 or 8 devices.

    Weights are stored in the packed form. Sizes that divide into 8 slices and do not pack keep the table form.

    Memory: three to four layers (one mapped from the source, one packed, one or two in write buffers), whatever the
    number of layers. Nothing is put on an accelerator.

    Args:
        src: Hugging Face folder.
        dst: folder to make; its parent is made too.
        overlay: folders whose tensors replace those of the same name.
        progress: whether to show a progress bar and messages on stderr.
        overwrite: replace `dst` if it is a converted checkpoint.

    Returns:
        The absolute path of `dst`.

    Raises:
        CheckpointError: sizes that do not divide into 8 slices, faults in the source, `dst` in the way, no disk space,
            another conversion to `dst` at work. `dst` is then as it was.
        ConfigError: the source's config cannot run.
        musejax.ffi.LibraryError: the compiled library, which defines the packed form, does not load.
    """
    src, dst = Path(src), Path(dst).resolve()
    require_checkpoint(src)
    if is_converted(src):
        raise CheckpointError(f"{src}: expected a published checkpoint (safetensors), got a converted one")
    _check_destination(dst, overwrite)
    published = open_published(src, overlay=overlay)
    if undivided := published.config.slice_problems():
        raise CheckpointError(f"{src}: the sizes cannot be cut into 8 slices, so there is nothing to convert to:\n  "
                              + "\n  ".join(undivided)
                              + "\nLoad the published folder directly; it runs on one device.")
    problems = packing_problems(published.config)
    packed = not problems
    if problems:
        say("these sizes have no packed form, so the table form is written:\n  " + "\n  ".join(problems), progress)
    with _working_in(work_folder(dst)) as work:
        _convert_parts(published, packed, work, progress)
        for name in SIDE_FILES:
            if (src / name).is_file():
                shutil.copyfile(src / name, work / name)
        write_manifest(work, published.config, packed, _describe(published))
        _move_into_place(work, dst)
    return dst


def _check_destination(dst: Path, overwrite: bool) -> None:
    if dst.name.endswith(UNFINISHED):
        raise CheckpointError(f"{dst}: expected a name that does not end in {UNFINISHED}; it is kept for unfinished "
                              "conversions")
    if not os.path.lexists(dst) or (dst.is_dir() and not any(dst.iterdir())):
        return
    if not is_converted(dst):
        raise CheckpointError(f"{dst}: already exists and is not a converted checkpoint: choose another name or remove "
                              "it")
    if not overwrite:
        raise CheckpointError(f"{dst}: is already a converted checkpoint: choose another name, remove it, or ask for "
                              "overwriting")


@contextmanager
def _working_in(work: Path) -> Iterator[Path]:
    """Makes the unfinished folder and holds a lock on it, which the system drops when the process dies."""
    work.mkdir(parents=True, exist_ok=True)
    handle = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{work}: another process is converting into this folder; wait for it") from None
        yield work
    finally:
        if work.is_dir() and not any(work.iterdir()):
            work.rmdir()
        os.close(handle)


def _describe(published: Published) -> dict:
    """What is being converted; equal descriptions give equal bytes."""
    digest = hashlib.sha256("".join(s.fingerprint for s in published.shards).encode()).hexdigest()
    base, *overlays = [str(s.folder.resolve()) for s in published.shards]
    return {"folder": base, "overlays": overlays, "fingerprint": digest,
            "files": [f.name for s in published.shards for f in s.files]}


def _convert_parts(published: Published, packed: bool, work: Path, progress: bool) -> None:
    """Writes the parts that are not there yet."""
    config = published.config
    parts = parts_of(config, packed)
    identity = {"format_number": FORMAT_NUMBER, "table": table_digest(config, packed), "config": config.to_hf(),
                "fingerprint": _describe(published)["fingerprint"]}
    state = read_state(work)
    strange = [] if state else [f.name for f in work.iterdir() if f.name not in (STATE, STATE + ".tmp")]
    if strange:
        record = f"a {STATE} that is no record" if (work / STATE).exists() else f"no {STATE}"
        raise CheckpointError(f"{work}: expected a folder left by a conversion, found {strange[0]} and {record}: "
                              "move it away or choose another destination")
    same = state.get("identity") == identity
    finished = {name: files for name, files in state.get("parts", {}).items()
                if same and name in parts and file_sizes(work, [name]) == files}
    if finished:
        say(f"resuming: {len(finished)} of {len(parts)} parts are complete", progress)
    elif state:
        say("starting anew: the unfinished conversion was of another source" if not same else
            "starting anew: no part was complete", progress)
    _remove_all_but(work, {STATE, *finished})
    todo = {name: rows for name, rows in parts.items() if name not in finished}
    _check_space(work, sum(row.nbytes for rows in todo.values() for row in rows))
    warn_of_rounding(published.sources)

    sources = sources_of_parts(published)
    write_json(work / STATE, {"identity": identity, "parts": finished})
    total = sum(row.nbytes for rows in parts.values() for row in rows)
    kept = sum(row.nbytes for name in finished for row in parts[name])
    with bar(total, f"convert {published.folder.name}", progress, kept) as done:
        for name, rows in todo.items():
            require_sound_scales(sources[name])
            values = pack_part(config, sources[name]) if packed else {s.param.path[-1]: s.view() for s in sources[name]}
            save_part(work / name, {row.path[-1]: (row, values[row.path[-1]]) for row in rows})
            del values
            finished[name] = file_sizes(work, [name])
            write_json(work / STATE, {"identity": identity, "parts": finished})
            done(sum(row.nbytes for row in rows))


def _check_space(work: Path, needed: int) -> None:
    free = shutil.disk_usage(work).free
    if free < needed + HEADROOM:
        raise CheckpointError(f"{work.parent}: expected {needed + HEADROOM:,} bytes of free disk space, got {free:,}; "
                              "free some, or choose a destination on another disk")


def _remove_all_but(work: Path, names: set[str]) -> None:
    for path in work.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _move_into_place(work: Path, dst: Path) -> None:
    """Gives the complete folder its name, in place of a checkpoint already there.

    The old one is removed before the renaming: killed after it, its remains would stay in the new one for good. Killed
    in between, the conversion goes on with every part complete.
    """
    if is_converted(dst):
        os.replace(dst, work / "replaced")
        shutil.rmtree(work / "replaced", ignore_errors=True)
    os.replace(work, dst)
    (dst / STATE).unlink()  # kept until here, so that a conversion killed just before the renaming can go on
