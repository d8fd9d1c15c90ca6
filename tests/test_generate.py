# SPDX-License-Identifier: Apache-2.0
"""The character model in RTL: its text, what is refused, and that a wrong token is noticed."""

from dataclasses import replace

import numpy as np
import pytest

from golden.characters import CONTEXT, START, VOCABULARY, decode, encode
from golden.kernels.decoder import generate, hardware_weights
from golden.kernels.trace import Machine
from hw.config import preset
from sim.errors import InputError
from sim.kernels import KERNELS
from sim.kernels import generate as kernel
from sim.kernels.system import picked_lines
from sim.kernels.types import KernelRequest
from sim.programs.access import SRAM, Within, access
from sim.programs.memory import TileMemory
from sim.programs.resident import place_resident


@pytest.fixture
def no_loss(monkeypatch):
    """Leaves out the loss on held-out text, which `test_decoder` looks at."""
    monkeypatch.setattr(kernel, "losses", lambda *_: (1.5, 1.501, 128))


def request(config="tiny", stall="none", **settings):
    given = KERNELS["generate"].settings({name: str(value) for name, value in settings.items()})
    print(config, stall, given)
    return KernelRequest(preset(config), "gpt-oss", given, stall, check_order=config == "tiny")


def golden_text(config, prompt, tokens):
    tile = preset(config).tile
    weights = hardware_weights(kernel.model(), tile.lanes, max(8, tile.cols))
    ids = np.concatenate([[START], encode(prompt)])
    steps = generate(Machine(tile.rows, tile.lanes), weights, ids, tokens)
    return prompt + decode([step.best for _, step, _ in steps][len(prompt) :])


def check(made, config, prompt, tokens):
    assert made.compared > 0 and made.mismatched == 0, made.differences
    assert made.passed and made.text == golden_text(config, prompt, tokens)
    assert len(made.text) == len(prompt) + tokens
    assert made.extra["cycles_per_token"] * (len(prompt) + tokens) == made.cycles
    assert made.extra["bits_per_character_hardware"] == 1.501
    assert made.max_error == pytest.approx(0.001)
    assert made.max_error_bound == pytest.approx(0.0075)


def test_text_in_rtl(no_loss):
    """Weights from HBM; the last token that is fed in is the one that the tile chose."""
    given = request(prompt="I", tokens=2, weights="hbm")
    check(kernel.run(given), "tiny", "I", 2)


@pytest.mark.slow
@pytest.mark.parametrize("stall, tokens", [("none", 34), ("heavy", 3)])
def test_text_from_resident_weights(stall, tokens, no_loss):
    """Weights in KV SRAM; 34 tokens turn the ring of layer 0 over."""
    given = request("small", stall, prompt="The ", tokens=tokens)
    check(kernel.run(given), "small", "The ", tokens)


@pytest.mark.slow
def test_a_wrong_row_is_noticed(monkeypatch, no_loss):
    """The host takes the row from the tile's answer: with other rows the text goes wrong."""
    simulate = kernel.simulate

    def swapped(*arguments, rows):
        return simulate(*arguments, rows=np.roll(rows, 1, axis=0))

    monkeypatch.setattr(kernel, "simulate", swapped)
    result = kernel.run(request(prompt="I", tokens=2, weights="hbm"))
    assert result.mismatched > 90 and not result.passed
    assert all(line.startswith("run 2") for line in result.differences)


def test_lines_of_a_row():
    rows = np.arange(12, dtype=np.float32).reshape(2, 6)
    lines = picked_lines(rows)
    assert lines.shape == (2, 2, 16)
    np.testing.assert_array_equal(lines[1].view("<f4").ravel(), [6, 7, 8, 9, 10, 11, 0, 0])


@pytest.mark.parametrize(
    "config, settings, word",
    [
        ("tiny", {"prompt": "caf\u00e9"}, "printable ASCII"),
        ("tiny", {"prompt": "x" * 100, "tokens": 29}, f"context is {CONTEXT}"),
        ("mesh4", {}, "one tile"),
        ("tiny", {}, "weights=hbm"),
    ],
    ids=["character", "context", "mesh", "weights"],
)
def test_refused(config, settings, word, monkeypatch):
    monkeypatch.setattr(kernel, "simulate", None)
    with pytest.raises(InputError) as error:
        kernel.run(request(config, **settings))
    assert word in str(error.value)


def test_experts_lie_at_equal_distances():
    memory = TileMemory(preset("small").tile)
    tile = memory.config
    experts = hardware_weights(kernel.model(), tile.lanes, tile.cols).layers[0].experts
    image = place_resident(memory, experts)
    rows = {first // tile.cols for first, _, _ in memory.kv_images}
    assert image.gate_up.row == 0 and image.down.row == image.gate_up.rows
    assert rows == {e * image.rows + part for e in range(8) for part in (0, image.gate_up.rows)}
    assert image.gate_up_bias.rows == image.down_bias.rows == len(experts) == 8


def test_a_register_within_a_range():
    """Only commands that touch the range come before or after."""
    config = preset("tiny").tile
    operands = dict(score_addr=Within(3, 64, 64, 128), count=8, k=1, ids_addr=256, scores_addr=320)
    found = access(config, "topk", operands)
    assert found.reads == [(SRAM, 64, 128)]
    near = access(config, "topk", {**operands, "score_addr": 96, "ids_addr": 112})
    far = access(config, "topk", dict(score_addr=512, count=8, k=1, ids_addr=128, scores_addr=640))
    assert found.conflicts(near) and not found.conflicts(far)
    anywhere = replace(Within(3, 64, 0, 1 << 40))
    assert access(config, "topk", {**operands, "score_addr": anywhere}).conflicts(far)


def test_text_may_hold_any_character():
    assert set(kernel.prompt_ids(VOCABULARY[1:20], 1).tolist()) == set(range(20))
