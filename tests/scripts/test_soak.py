"""scripts/soak.py on fake CPU devices: equal hashes pass, one that differs fails."""

import re
import sys

import pytest


@pytest.fixture
def run(script, monkeypatch, capsys):
    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["soak.py", "--tokens", "8", "--seconds", "0.1", *argv])
        return script.main(), capsys.readouterr().out

    return call


def test_one_and_two_devices(run):
    code, out = run("--devices", "1", "2")
    assert code == 0 and out.startswith("PASS  ")
    first, second = re.findall(r"steps on [12] device\(s\), hash (\w{12})", out)
    assert first == second


def test_steps_beside_a_reference(run):
    code, out = run("--devices", "2", "--reference", "1", "--steps", "24", "--seconds", "600")
    steps = re.findall(r"(\d+) steps on ([12]) device\(s\)", out)
    assert code == 0 and steps == [("24", "2"), ("8", "1")]


def test_a_reference_that_differs_fails(script, run, monkeypatch):
    again = script.Decoder.again

    def other(self):
        same = again(self)
        if self.devices == 1:
            self.digest = "0" * 12
        return same

    monkeypatch.setattr(script.Decoder, "again", other)
    code, out = run("--devices", "2", "--reference", "1", "--steps", "8")
    assert code == 1 and out.startswith("FAIL  ")


def test_a_run_that_differs_fails(script, run, monkeypatch):
    again = script.Decoder.again

    def flipped(self):
        if self.steps == 8:  # after the run that compiles
            self.state = self.state._replace(token=self.state.token ^ 1)
        return again(self)

    monkeypatch.setattr(script.Decoder, "again", flipped)
    code, out = run("--devices", "1")
    assert code == 1 and out.startswith("FAIL  ")
