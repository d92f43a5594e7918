"""Conversion and restore: same bits on any device count, nothing half there, little memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_bits
from orbax.checkpoint.experimental import v1 as ocp
from safetensors.numpy import save_file

import musejax
from musejax.checkpoint import CheckpointError, conversion, convert, inspect, is_converted, load_params
from musejax.checkpoint.container import FORMAT_NUMBER, MANIFEST, STATE, parts_of, read_state
from musejax.config import MINI
from musejax.packing import packed_table
from musejax.params import TEXT, leaf_of, slice_tensor, table
from musejax.sharding import make_mesh, param_sharding

PARTS = ("globals", "layer_000", "layer_001", "layer_002")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    """The small checkpoint, converted; not to be changed."""
    return convert(source, tmp_path_factory.mktemp("converted") / "small", progress=False)


@pytest.fixture
def copy(converted, tmp_path) -> Path:
    return shutil.copytree(converted, tmp_path / "copy")


def assert_restores(path, published, mesh=None, tensors=None):
    config, params = load_params(path, mesh=mesh)
    assert config == published.config
    for param in table(config):
        leaf = leaf_of(params, param)
        assert_same_bits(leaf, slice_tensor(param, (tensors or published.tensors)[param.hf_key]))
        if mesh:
            assert leaf.sharding == param_sharding(param, mesh)


def child(code: str, *args, **options) -> subprocess.Popen:
    """Another Python that runs `code`; it sees the package under test."""
    env = os.environ | {"PYTHONPATH": str(Path(musejax.__path__[0]).parent), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([sys.executable, "-P", "-c", code, *map(str, args)], env=env, text=True, **options)


# ------------------------------------------------------------------ the way there and back


@pytest.mark.parametrize("devices", [None, 1, 2, 4, 8])
def test_restore(published, converted, devices):
    assert_restores(converted, published, devices and make_mesh(devices))


def test_folder(published, source, converted):
    names = {f.name for f in converted.iterdir()}
    assert names == {MANIFEST, "config.json", *PARTS}
    assert is_converted(converted) and not is_converted(source)
    manifest = json.loads((converted / MANIFEST).read_text())
    assert manifest["format_number"] == FORMAT_NUMBER == 2 and manifest["packed"] is True
    assert manifest["table"]["bytes"] == inspect(source).nbytes
    summary = inspect(converted)
    assert (summary.form, summary.groups) == ("converted", inspect(source).groups)
    assert summary.packed_bytes == sum(row.nbytes for row in packed_table(published.config))
    assert not list(converted.parent.glob("*.converting"))


def test_chunks_are_slices(published, converted):
    """One chunk a slice (and expert), so that a device reads whole chunks and only its own."""
    for part, rows in parts_of(published.config, packed=True).items():
        stored = ocp.metadata(str(converted / part)).metadata
        for row in rows:
            chunk = stored[row.path[-1]].storage_metadata.chunk_shape
            lead = {"whole": (), "experts": (1, 1), "slices": (1,)}[row.layout]
            assert tuple(chunk) == lead + row.shape[len(lead):], row.name


def test_mini_of_the_shared_data(shared, tmp_path):
    source = shared / "data/hf_mini"
    path = convert(source, tmp_path / "out", progress=False)
    (_, a), (_, b) = load_params(path, mesh=make_mesh(8)), load_params(source)
    for param in table(MINI):
        assert_same_bits(leaf_of(a, param), leaf_of(b, param))
    assert (path / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()


def test_overlay(published, source, tmp_path, converted):
    key = TEXT + "layers.2.self_attn.k_proj.weight"
    new = np.roll(published.tensors[key], 1)
    (tmp_path / "overlay").mkdir()
    save_file({key: new}, tmp_path / "overlay/x.safetensors")
    path = convert(source, tmp_path / "out", overlay=[tmp_path / "overlay"], progress=False)
    assert_restores(path, published, tensors=published.tensors | {key: new})
    with pytest.raises(CheckpointError, match="convert the published one with the overlay"):
        load_params(converted, overlay=[tmp_path / "overlay"])


def test_unaligned_source(published, tmp_path):
    """A header of odd length: tensors may begin at any byte."""
    folder = published.write(tmp_path / "src", shards=1)
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    (folder / "model.safetensors").write_bytes((length + 1).to_bytes(8, "little") + data[8:8 + length] + b" "
                                               + data[8 + length:])
    assert_restores(convert(folder, tmp_path / "out", progress=False), published)


def test_progress_bar(source, tmp_path, capfd):
    convert(source, tmp_path / "out")
    assert "convert small: 100%" in capfd.readouterr().err
    load_params(tmp_path / "out", progress=True)
    assert "load out: 100%" in capfd.readouterr().err


# ------------------------------------------------------------------ interruptions

SLOWLY = """
import sys, time
from musejax.checkpoint import conversion
save = conversion.save_part
def slow(folder, values):
    if folder.name == "layer_001":
        print("ready", flush=True)
        time.sleep(60)
    save(folder, values)
conversion.save_part = slow
conversion.convert(sys.argv[1], sys.argv[2], progress=False)
"""


def test_kill_and_resume(published, source, tmp_path, monkeypatch, capfd):
    dst = tmp_path / "out"
    process = child(SLOWLY, source, dst, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(CheckpointError, match="another process is converting"):
        convert(source, dst, progress=False)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not dst.exists()
    for path in (dst, tmp_path / "out.converting"):
        for use in (load_params, inspect):
            with pytest.raises(CheckpointError, match=r"was not finished \(2 parts complete in out\.converting\)"):
                use(path)

    (tmp_path / "out.converting" / "layer_001.orbax-checkpoint-tmp").mkdir()  # as if killed inside Orbax
    written, save = [], conversion.save_part
    monkeypatch.setattr(conversion, "save_part",
                        lambda folder, values: (written.append(folder.name), save(folder, values)))
    convert(source, dst)
    assert written == ["layer_001", "layer_002"]
    assert "resuming: 2 of 4 parts are complete" in capfd.readouterr().err
    assert_restores(dst, published, make_mesh(2))
    assert set(os.listdir(dst)) == {MANIFEST, "config.json", *PARTS}


def test_kill_at_any_moment(published, source, tmp_path):
    """SIGKILL after a random time: either nothing loads, or everything is there."""
    rng = np.random.default_rng(7)
    for i in range(3):
        dst = tmp_path / f"out{i}"
        process = child("import sys; from musejax.checkpoint import convert; print('go', flush=True);"
                        "convert(sys.argv[1], sys.argv[2], progress=False)", source, dst, stdout=subprocess.PIPE)
        assert process.stdout.readline() == "go\n"
        time.sleep(rng.uniform(0, 0.6))
        process.kill()
        process.wait()
        if not is_converted(dst):
            with pytest.raises(CheckpointError, match=r"not finished|found nothing"):
                load_params(dst)
            convert(source, dst, progress=False)
        assert_restores(dst, published)


def test_failure_in_the_middle(published, source, tmp_path, monkeypatch):
    """An exception keeps what was done; another source starts anew."""
    save = conversion.save_part

    def fail(folder, values):
        if folder.name == "layer_002":
            raise OSError("disk gone")
        save(folder, values)

    monkeypatch.setattr(conversion, "save_part", fail)
    with pytest.raises(OSError, match="disk gone"):
        convert(source, tmp_path / "out", progress=False)
    assert list(read_state(tmp_path / "out.converting")["parts"]) == ["globals", "layer_000", "layer_001"]

    monkeypatch.setattr(conversion, "save_part", save)
    other = dict(published.tensors) | {"lm_head.weight": np.roll(published.tensors["lm_head.weight"], 1)}
    convert(published.write(tmp_path / "other", other), tmp_path / "out", progress=False)
    assert_restores(tmp_path / "out", published, tensors=other)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_killed_while_replacing(published, source, copy, monkeypatch, calls):
    """Killed after any renaming or removal: the next conversion leaves nothing of the old one."""
    work, done = copy.with_name("copy.converting"), []

    def dying(act):
        def call(first, *args, **options):
            act(first, *args, **options)
            if {work, work / "replaced"} & {first, *args}:
                done.append(first)
                if len(done) == calls:
                    raise KeyboardInterrupt
        return call

    monkeypatch.setattr(os, "replace", dying(os.replace))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))
    with pytest.raises(KeyboardInterrupt):
        convert(source, copy, overwrite=True, progress=False)
    monkeypatch.undo()
    if calls < 3:
        with pytest.raises(CheckpointError, match="not finished"):
            load_params(copy)
        convert(source, copy, overwrite=True, progress=False)
    assert_restores(copy, published)
    assert {f.name for f in copy.iterdir()} - {STATE} == {MANIFEST, "config.json", *PARTS}


def test_record_that_is_none(published, source, tmp_path):
    """`parts` is no object: nothing is known of what lies there."""
    work = tmp_path / "out.converting"
    (work / "layer_000").mkdir(parents=True)
    (work / STATE).write_text('{"parts": 5}')
    with pytest.raises(CheckpointError, match="0 parts complete"):
        load_params(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"found layer_000 and a conversion\.json that is no record"):
        convert(source, tmp_path / "out", progress=False)
    (work / "layer_000").rmdir()
    convert(source, tmp_path / "out", progress=False)
    assert_restores(tmp_path / "out", published)


def test_killed_before_renaming(published, source, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "_move_into_place", lambda work, dst: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(source, tmp_path / "out", progress=False)
    with pytest.raises(CheckpointError, match="not finished"):
        load_params(tmp_path / "out.converting")
    monkeypatch.undo()
    convert(source, tmp_path / "out", progress=False)
    assert_restores(tmp_path / "out", published)


# ------------------------------------------------------------------ refusals, before any work


def test_destination_in_the_way(published, source, copy, tmp_path, no_reads):
    before = sorted(copy.rglob("*"))
    with pytest.raises(CheckpointError, match="is already a converted checkpoint"):
        convert(source, copy)
    for name in ("note.txt", "x.converting"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(CheckpointError, match=r"already exists and is not a converted|does not end in"):
            convert(source, tmp_path / name)
    with pytest.raises(CheckpointError, match="not a converted checkpoint"):
        convert(source, tmp_path, overwrite=True)
    assert sorted(copy.rglob("*")) == before


def test_working_folder_is_not_ours(source, tmp_path, no_reads):
    (tmp_path / "out.converting").mkdir()
    (tmp_path / "out.converting/thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"found thesis\.txt and no conversion\.json"):
        convert(source, tmp_path / "out")
    assert (tmp_path / "out.converting/thesis.txt").read_text() == "mine"


def test_overwrite_and_empty_destination(published, copy, tmp_path):
    other = dict(published.tensors) | {"lm_head.weight": np.roll(published.tensors["lm_head.weight"], 1)}
    folder = published.write(tmp_path / "src", other)
    convert(folder, copy, overwrite=True, progress=False)
    assert_restores(copy, published, tensors=other)
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty", progress=False)
    assert {f.name for f in tmp_path.iterdir()} == {"src", "copy", "empty"}
    assert {f.name for f in copy.iterdir()} == {MANIFEST, "config.json", *PARTS}


def test_source_faults(converted, tmp_path, no_reads):
    with pytest.raises(CheckpointError, match="got a converted one"):
        convert(converted, tmp_path / "out")
    with pytest.raises(CheckpointError, match="found nothing"):
        convert(tmp_path / "absent", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_no_disk_space(source, tmp_path, monkeypatch, no_reads):
    usage = shutil.disk_usage(tmp_path)._replace(free=70_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"free disk space, got 70,000,000"):
        convert(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ damage after conversion


def edit_manifest(path, **changes):
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | changes))


def largest_file(path):
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


DAMAGE = {
    "newer format": (lambda p: edit_manifest(p, format_number=FORMAT_NUMBER + 1), "number 2, got 3: upgrade musejax"),
    "older format": (lambda p: edit_manifest(p, format_number=1), "number 2, got 1: convert the source again"),
    "no form": (lambda p: edit_manifest(p, packed=None), "expected true or false under packed, got None"),
    "other format": (lambda p: edit_manifest(p, format="x"), "expected format 'musejax-checkpoint', got 'x'"),
    "no config": (lambda p: edit_manifest(p, config=None), "expected objects under config"),
    "other table": (lambda p: edit_manifest(p, table={"digest": ""}), "another packed layout"),
    "no JSON": (lambda p: (p / MANIFEST).write_text("{"), "expected the description of a converted checkpoint"),
    "file cut": (lambda p: os.truncate(largest_file(p), 5), r"(?s)wrong file length \(1\).*got 5"),
    "file gone": (lambda p: largest_file(p).unlink(), r"missing file \(1\)"),
    "layer gone": (lambda p: shutil.rmtree(p / "layer_001"), r"missing file \(\d+\)"),
    "description gone": (lambda p: (p / MANIFEST).unlink(), r"expected musejax\.json \(converted\)"),
    "unfinished, renamed": (lambda p: (p / MANIFEST).rename(p / STATE), "was not finished"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(copy, name):
    spoil, message = DAMAGE[name]
    spoil(copy)
    with pytest.raises(CheckpointError, match=message):
        load_params(copy)


def test_given_config(published, converted):
    assert load_params(converted, published.config)[0] == published.config
    with pytest.raises(CheckpointError, match="another config than the one given"):
        load_params(converted, MINI)


# ------------------------------------------------------------------ memory

# VmHWM belongs to this process image; ru_maxrss would begin at what the parent had when it forked.
MEASURE = """
import re, sys
from musejax.checkpoint import convert
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
convert(sys.argv[1], sys.argv[3], progress=False)  # loads what is loaded once
before = peak()
convert(sys.argv[2], sys.argv[4], progress=False)
print(peak() - before)
"""


def test_memory_of_conversion(source, published, tmp_path):
    """Peak growth stays far below the checkpoint's size: one layer at a time, mapped pages included. A layer is a
    twenty-fourth; how many a busy machine still has on their way to the disk varies, so the bound is half."""
    config = replace(MINI, num_hidden_layers=24, layer_types=(), layer_rope_theta=(), hidden_size=256,
                     moe_hidden_size=256, moe_intermediate_size=512, num_local_experts=16)
    big = type(published)(config, seed=1)
    total = sum(x.nbytes for x in big.tensors.values())
    folder = big.write(tmp_path / "big", shards=4)
    del big
    process = child(MEASURE, source, folder, tmp_path / "warm", tmp_path / "out", stdout=subprocess.PIPE)
    growth = int(process.communicate(timeout=120)[0])
    assert total > 300e6
    assert growth < total / 2, f"{growth:,} bytes for a checkpoint of {total:,}"
    print(f"{growth:,} bytes for a checkpoint of {total:,}")
