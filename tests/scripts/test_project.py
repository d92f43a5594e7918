"""scripts/project.py: the model by hand, and what its lines say."""


import pytest


def test_the_model_by_hand(script):
    """Layers of 100 us, 50 of them experts', at 2 MB/us of 4 read: half of the memory's rate."""
    inputs = script.Inputs(layer=script.Range(100, 100, 100), experts=50, exchange=script.Range(1, 1, 1),
                           bf16_experts_mb=400, nvfp4_experts_mb=100, layer_mb=200, head_mb=20,
                           draft_mb=40, draft=script.Range(60, 60, 60), rest=script.Range(100, 100, 100), accepted=5)
    machine = script.Machine("twice", 2 * script.MEASURED_ON.memory, "made up")
    share = 200 / (100 * script.MEASURED_ON.memory)
    step = script.project(inputs, machine)
    verify = 60 * (50 + 25) + 2 * (50 + 100) + 20 / (machine.memory * share)
    draft = 60 - 40 / script.MEASURED_ON.memory + 40 / machine.memory
    assert step.verify.figure == pytest.approx(verify / 1e3)
    assert step.rate.figure == pytest.approx(5e6 / (verify + draft + 100))


def test_ranges_stay_in_order(script):
    for machine in script.MACHINES:
        for part in script.project(script.Inputs(), machine):
            assert part.low <= part.figure <= part.high


def test_more_exchange_and_slower_layers_cost(script):
    plain = script.project(script.Inputs(), script.MEASURED_ON)
    worse = {"draft": script.Range(2000, 2000, 2000), "exchange": script.Range(1.3, 1.3, 1.3),
             "layer": script.Range(160, 160, 160), "accepted": 5}
    for name, value in worse.items():
        assert script.project(script.Inputs(**{name: value}), script.MEASURED_ON).rate.figure < plain.rate.figure


def test_lines_state_every_input_and_the_label(script):
    lines = script.lines(script.Inputs())
    assert [line for line in lines if not line.startswith("input  ")] == lines[-2:]
    assert all(line.startswith("PROJECTION, not measured: 8 x ") for line in lines[-2:])
    for name in script.Inputs._fields:
        assert any(line.startswith(f"input  {name}: ") for line in lines)
