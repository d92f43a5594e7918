"""Runs on disk: torn lines, failed items, two processes, other configurations."""

import json

import pytest

from musejax.gsm8k import echo
from musejax.gsm8k.runfolder import RunError, RunFolder


def item(number, error=None):
    return {"id": f"test/{number:04d}", "error": error}


def lines(path):
    return [json.loads(line)["id"] for line in (path / "items.jsonl").read_text().splitlines()]


def read_config(path):
    folder = RunFolder(path, resume=True)
    try:
        return folder.config()
    finally:
        folder.close()


@pytest.fixture
def path(tmp_path):
    """A folder with items 0 and 1."""
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.start({"a": 1})
    folder.add(item(0))
    folder.add(item(1))
    folder.close()
    return tmp_path / "run"


def test_items_are_on_disk_when_they_are_added(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run", resume=False)
    folder.start({})
    folder.add(item(0))
    assert lines(folder.path) == ["test/0000"]
    folder.close()


def test_torn_line_is_dropped(path):
    with open(path / "items.jsonl", "a") as file:
        file.write('{"id": "test/0002", "er')
    folder = RunFolder(path, resume=True)
    assert list(folder.done) == ["test/0000", "test/0001"] and folder.config() == {"a": 1}
    folder.start({"a": 1})
    folder.add(item(2))
    folder.finish({})
    folder.close()
    assert lines(path) == ["test/0000", "test/0001", "test/0002"]


def test_failed_items_run_again_and_rows_end_in_order(path):
    folder = RunFolder(path, resume=True)
    folder.start({})
    folder.add(item(2, error="x"))
    folder.add(item(3))
    folder.close()
    folder = RunFolder(path, resume=True)
    assert list(folder.done) == ["test/0000", "test/0001", "test/0003"]
    folder.start({})
    folder.add(item(2))
    folder.finish({"partial": False})
    folder.close()
    assert lines(path) == [f"test/000{i}" for i in range(4)] and not list(path.glob("*.partial"))
    assert json.loads((path / "summary.json").read_text()) == {"partial": False}


def test_old_summary_goes_when_a_run_starts(path):
    (path / "summary.json").write_text("{}")
    folder = RunFolder(path, resume=True)
    folder.start({})
    folder.close()
    assert not (path / "summary.json").exists()


def test_refusals(path, tmp_path):
    with pytest.raises(RunError, match="expected an empty folder or --resume, found 2 items"):
        RunFolder(path, resume=False)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="expected a folder or a new name, found a file"):
        RunFolder(tmp_path / "file", resume=False)
    (path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json: expected JSON"):
        read_config(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(RunError, match="expected a JSON object, got list"):
        read_config(path)
    (path / "config.json").unlink()
    with pytest.raises(RunError, match="expected the configuration of the 2 items beside it"):
        RunFolder(path, resume=True)
    (path / "items.jsonl").write_text('{"id": "test/0000", "error": null}\nnonsense\n')
    with pytest.raises(RunError, match="line 2: expected an item of a run"):
        RunFolder(path, resume=True)


def test_one_process_at_a_time(path):
    folder = RunFolder(path, resume=True)
    with pytest.raises(RunError, match="no other run is writing to"):
        RunFolder(path, resume=True)
    folder.close()
    folder.close()
    RunFolder(path, resume=True).close()


def test_differences():
    old = {"arguments": {"limit": 3, "seed": 0, "out": "a"}, "prompt": {"stop": ["Q:"]}, "versions": {"jax": "1"}}
    same = {**old, "arguments": {"limit": 9, "seed": 0, "out": "b", "resume": True}}
    assert echo.differences(old, same) == []
    other = {**old, "arguments": {"seed": 1}, "versions": {"jax": "2", "cuda": None}}
    assert echo.differences(old, other) == ["arguments.seed: was 0, is 1", "versions.cuda: was '(not there)', is None",
                                            "versions.jax: was '1', is '2'"]


def test_identity_of_a_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a" * 10)
    first = echo.identity(tmp_path)
    assert first["name"] == tmp_path.name and first["index_sha256"] is None and first == echo.identity(tmp_path)
    (tmp_path / "README.md").write_text("not weights")
    assert echo.identity(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"a" * 9 + b"b")
    assert echo.identity(tmp_path)["sample_sha256"] != first["sample_sha256"]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert echo.identity(tmp_path)["index_sha256"] is not None
