"""Safetensors headers and indexes: every fault is found, named and listed before a tensor is read."""

import json
import struct

import numpy as np
import pytest
from helpers import assert_same_bits
from safetensors.numpy import save_file

from musejax.checkpoint.errors import MAX_LISTED, CheckpointError
from musejax.checkpoint.shards import INDEX, open_shards

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
A, B, C = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float32), np.zeros((2, 2), np.float32)


@pytest.fixture
def folder(tmp_path):
    """Three tensors in two shards."""
    save_file({"a": A, "b": B}, tmp_path / FIRST)
    save_file({"c": C}, tmp_path / SECOND)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": FIRST, "c": SECOND}}))
    return tmp_path


def raw_file(path, header, data=b"", length=None):
    """A safetensors file with any header."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def set_index(folder, **changes):
    names = {"a": FIRST, "b": FIRST, "c": SECOND} | changes
    (folder / INDEX).write_text(json.dumps({"weight_map": {k: v for k, v in names.items() if v}}))


def test_values(folder):
    shards = open_shards(folder)
    assert [f.name for f in shards.files] == [FIRST, SECOND]
    assert_same_bits(shards.tensors["a"].map(), A)
    assert_same_bits(shards.tensors["c"].map(), C)
    assert shards.tensors["b"].nbytes == 16 and shards.tensors["b"].dtype == "F32"


def test_odd_header_length_and_empty_tensor(tmp_path):
    raw_file(tmp_path / "model.safetensors",
             json.dumps({"e": entry(shape=(0, 3), offsets=(0, 0)), "x": entry()}).encode() + b" " * 3,
             np.float32(2.5).tobytes())
    tensors = open_shards(tmp_path).tensors
    assert tensors["x"].map()[0] == 2.5 and tensors["e"].map().shape == (0, 3)


def cut(folder):
    save_file({"a": A, "b": np.zeros(4096, np.float32)}, folder / FIRST)
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[:-4096])


def append(folder):
    with open(folder / SECOND, "ab") as stream:
        stream.write(bytes(8))


FAULTS = {
    "missing shard": (lambda f: (f / SECOND).unlink(), rf"missing file \(1\):\s+{SECOND}"),
    "cut by 4096": (cut, rf"{FIRST}: expected [\d,]+ bytes \(from its header\), got [\d,]+: cut by 4,096 bytes"),
    "8 bytes appended": (append, rf"{SECOND}: expected [\d,]+ bytes .*: 8 bytes too long"),
    "index names an absent tensor": (lambda f: set_index(f, d=SECOND),
                                     rf"named by the index is absent \(1\):\s+d: expected in {SECOND}"),
    "tensor not in the index": (lambda f: set_index(f, b=None), rf"not in the index \(1\):\s+b: in {FIRST}"),
    "index names another file": (lambda f: set_index(f, b=SECOND), rf"b: expected in {SECOND}, found in {FIRST}"),
    "tensor in two shards": (lambda f: save_file({"a": A, "c": C}, f / SECOND),
                             rf"tensor twice \(1\):\s+a: in {FIRST} and in {SECOND}"),
    "tensor twice in a header": (
        lambda f: raw_file(f / SECOND, b'{"c": %b, "c": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        rf"c: two entries in the header of {SECOND}"),
    "tensor twice in the index": (lambda f: (f / INDEX).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "x"}}}}'),
                                  "a: two entries in model.safetensors.index.json"),
    "index is no JSON": (lambda f: (f / INDEX).write_text("{"), "unreadable index"),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), "expected a non-empty object 'weight_map'"),
    "index leads outside": (lambda f: set_index(f, a="../x.safetensors"), r"got '\.\./x\.safetensors'"),
    "another checkpoint beside": (lambda f: save_file({"a": A}, f / "model.safetensors"), "remove one of them"),
    "empty file": (lambda f: (f / SECOND).write_bytes(b""), "expected a safetensors file, got 0 bytes"),
    "a pickle": (lambda f: (f / SECOND).write_bytes(b"\x80\x02}q\x00X" * 99), "expected a safetensors file"),
    "header longer than the file": (lambda f: raw_file(f / SECOND, {}, length=1 << 40), "expected a safetensors file"),
    "header is no JSON": (lambda f: raw_file(f / SECOND, b"{]"), "unreadable header"),
    "header is a list": (lambda f: raw_file(f / SECOND, []), "expected a JSON object, got list"),
    "header nested deeply": (lambda f: raw_file(f / SECOND, b"[" * 90000), "unreadable header"),
    "unknown dtype": (lambda f: raw_file(f / SECOND, {"c": entry("F33")}, bytes(4)), "a known dtype, got 'F33'"),
    "negative size": (lambda f: raw_file(f / SECOND, {"c": entry(shape=(-1,))}, bytes(4)), "non-negative integers"),
    "huge size": (lambda f: raw_file(f / SECOND, {"c": entry(shape=(1 << 62,) * 999)}), "that fits a file"),
    "size is true": (lambda f: raw_file(f / SECOND, {"c": entry(shape=(True,))}, bytes(4)), "non-negative integers"),
    "offsets do not fit the shape": (lambda f: raw_file(f / SECOND, {"c": entry(shape=(2,))}, bytes(4)),
                                     "expected 8 bytes"),
    "offsets reversed": (lambda f: raw_file(f / SECOND, {"c": entry(offsets=(4, 0))}, bytes(4)), "expected 4 bytes"),
    "hole": (lambda f: raw_file(f / SECOND, {"c": entry(offsets=(4, 8))}, bytes(8)), "leaves a hole"),
    "overlap": (lambda f: raw_file(f / SECOND, {"c": entry(), "d": entry(offsets=(2, 6))}, bytes(6)), "overlaps"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(folder, no_reads, name):
    spoil, message = FAULTS[name]
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_shards(folder)
    assert str(caught.value).startswith(str(folder))


def test_faults_are_listed_together(folder):
    cut(folder)
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=r"(?s)cut by 4,096.*missing file"):
        open_shards(folder)


def test_long_lists_are_cut_short(folder):
    set_index(folder, **{f"x{i:03d}": FIRST for i in range(MAX_LISTED + 5)})
    with pytest.raises(CheckpointError, match=r"(?s)absent \(25\).*x019.*and 5 more") as caught:
        open_shards(folder)
    assert "x020" not in str(caught.value)


def test_without_index(tmp_path):
    with pytest.raises(CheckpointError, match="found neither"):
        open_shards(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match="a pickle, which is never read"):
        open_shards(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"(?s)missing file \(1\).*a pickle, which is never read"):
        open_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    save_file({"a": A}, tmp_path / "other.safetensors")
    assert list(open_shards(tmp_path).tensors) == ["a"]
    save_file({"b": B}, tmp_path / "second.safetensors")
    assert set(open_shards(tmp_path, any_files=True).tensors) == {"a", "b"}
    with pytest.raises(CheckpointError, match=f"expected {INDEX} beside 2"):
        open_shards(tmp_path)


def test_damaged_bytes_never_crash(tmp_path):
    """Any change to a header gives the same tensors or a CheckpointError."""
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    good = (tmp_path / "model.safetensors").read_bytes()
    rng = np.random.default_rng(3)
    for _ in range(500):
        data = bytearray(good)
        for at in rng.integers(0, len(good) - A.nbytes - B.nbytes, 1 + rng.integers(3)):
            data[at] = rng.integers(256)
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            for tensor in open_shards(tmp_path).tensors.values():
                assert tensor.offset + tensor.nbytes <= len(good)
        except CheckpointError:
            pass


def test_fingerprint_follows_the_files(folder):
    before = open_shards(folder).fingerprint
    assert open_shards(folder).fingerprint == before
    save_file({"c": C, "d": C}, folder / SECOND)
    set_index(folder, d=SECOND)
    assert open_shards(folder).fingerprint != before
