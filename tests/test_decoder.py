# SPDX-License-Identifier: Apache-2.0
"""The character model: its weight file, its two descriptions, the text that it writes."""

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from golden.characters import CHARACTERS, CONTEXT, START, VOCABULARY, decode, encode
from golden.decoder import load, parameter_shapes, quantised, rounded, save
from golden.formats import Format
from golden.kernels.decoder import empty_caches, generate, hardware_weights, step
from golden.kernels.decoder_rows import all_logits
from golden.kernels.trace import Machine
from golden.quantise import dequantise
from golden.training.network import initial
from sim.kernels import generate as kernel

FILE = Path(str(files("sim") / "data" / "characters.npz"))
SMALL, TINY = Machine(rows=8, lanes=16), Machine(rows=2, lanes=4)
MACHINES = [
    pytest.param(SMALL, id="small"),
    pytest.param(TINY, id="tiny", marks=pytest.mark.slow),
]
SHARE = 0.005  # how far the hardware's loss may be from that of float64


def weights_of(machine):
    return hardware_weights(kernel.model(), machine.lanes, max(8, machine.lanes))


def test_vocabulary():
    assert len(VOCABULARY) == CHARACTERS.vocab == 96 and VOCABULARY[START] == "\n"
    assert decode(encode("A\n~ ")) == "A\n~ "
    with pytest.raises(ValueError, match="printable ASCII, not 'é'"):
        encode("caf\u00e9")


def test_weight_file():
    assert FILE.stat().st_size < 1 << 20
    made = kernel.model()
    assert {n: v.shape for n, v in made.values.items()} == parameter_shapes(CHARACTERS)
    assert len(made.held_out) == 64 and max(map(len, made.held_out)) <= CONTEXT
    encode("".join(made.held_out))
    # The tile's experts are the file's codes: rounding once more changes nothing.
    again = rounded(CHARACTERS, made.values)
    for name, value in made.values.items():
        np.testing.assert_array_equal(again.values[name], value)
    experts = weights_of(SMALL).layers[1].experts
    gate_up = made.values["layers.1.gate_up"]
    for e, expert in enumerate(experts):
        placed = dequantise(expert.gate_up.codes, expert.gate_up.scales, Format.MXFP4)
        np.testing.assert_array_equal(placed, np.concatenate([gate_up[e, 0::2], gate_up[e, 1::2]]))


def test_file_keeps_rounded_weights(tmp_path):
    print("seed 7")
    parameters = initial(CHARACTERS, np.random.default_rng(7))
    save(tmp_path / "w.npz", parameters, ["Some text."], {"seed": 7})
    found, wanted = load(tmp_path / "w.npz"), rounded(CHARACTERS, parameters)
    assert found.held_out == ["Some text."] and found.meta == {"seed": 7}
    assert found.values.keys() == wanted.values.keys()
    for name, value in wanted.values.items():
        np.testing.assert_array_equal(found.values[name], value)
        step = 2.0**-2 if quantised(name) else 2.0**-8  # half a step, of the block's largest
        assert np.abs(value - parameters[name]).max() <= step * np.abs(parameters[name]).max()
    del parameters["final_norm"]
    save(tmp_path / "short.npz", parameters, [], {})
    with pytest.raises(ValueError, match="final_norm"):
        load(tmp_path / "short.npz")


@pytest.mark.parametrize("machine", MACHINES)
def test_hardware_is_near_the_reference(machine):
    made = kernel.model()
    exact, hardware, seen = kernel.losses(made, machine, weights_of(machine), 128)
    print(exact, hardware)
    assert seen == 128 and exact < 2
    assert 0 < abs(hardware - exact) < 2 * SHARE * exact  # a short text


@pytest.mark.slow
def test_loss_on_held_out_text():
    made = kernel.model()
    exact, hardware, seen = kernel.losses(made, SMALL, weights_of(SMALL), 2048)
    print(exact, hardware, made.meta)
    assert seen == 2048 and exact < 2.2
    assert 0 < abs(hardware - exact) < SHARE * exact


@pytest.mark.parametrize("machine", MACHINES)
def test_rows_at_once_are_one_after_the_other(machine):
    """Beyond the window."""
    weights = weights_of(machine)
    ids = np.concatenate([[START], encode(kernel.model().held_out[1][:35])])
    caches = empty_caches(weights)
    single = [step(machine, weights, caches, int(token)).logits for token in ids]
    np.testing.assert_array_equal(np.stack(single), all_logits(machine, weights, ids))


def test_generation_is_greedy_and_incremental():
    weights = weights_of(SMALL)
    prompt = np.concatenate([[START], encode("Return ")])
    fed, best, logits = [], [], []
    for token, done, caches in generate(SMALL, weights, prompt, 6):
        fed.append(token)
        best.append(done.best)
        logits.append(done.logits)
        assert {cache.length for cache in caches} == {len(fed)}
    assert len(fed) == len(prompt) + 5
    assert fed == [*prompt, *best[len(prompt) - 1 : -1]]
    np.testing.assert_array_equal(np.stack(logits), all_logits(SMALL, weights, np.array(fed)))
    assert best == [int(np.argmax(row)) for row in logits]
    text = decode(best[len(prompt) - 1 :])
    print(repr(text))
    assert re.fullmatch(r"[a-zA-Z ]+", text)
