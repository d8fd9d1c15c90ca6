# SPDX-License-Identifier: Apache-2.0
"""Training of the character model: gradients, quantisation in the loop, Adam, text."""

import ast
from dataclasses import replace

import numpy as np
import pytest

from golden.characters import CHARACTERS, encode
from golden.decoder import Decoder, load
from golden.formats import Format
from golden.models import Gqa
from golden.quantise import dequantise, quantise
from golden.reference import decoder as reference
from golden.training import __main__ as command
from golden.training.adam import Adam, rate
from golden.training.network import initial, loss_and_gradients
from golden.training.quantised import in_the_loop, mxfp4
from golden.training.text import Corpus, Windows, corpus, docstrings, paragraphs

GQA = CHARACTERS.attention
assert isinstance(GQA, Gqa)
SMALL = replace(
    CHARACTERS,
    hidden=32,
    vocab=11,
    attention=replace(GQA, heads=4, head_dim=8, window=3),
    moe=replace(CHARACTERS.moe, experts=4, intermediate=32),
    rope=replace(CHARACTERS.rope, dim=8),
)


def random_parameters(rng, dtype=np.float64):
    """Large enough that clamps, sinks and all experts take part."""
    made = initial(SMALL, rng, dtype)
    return {n: (v + 0.3 * rng.standard_normal(v.shape)).astype(dtype) for n, v in made.items()}


def seeded(seed):
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def test_loss_is_that_of_the_reference():
    rng = seeded(1)
    parameters = random_parameters(rng)
    ids = rng.integers(0, SMALL.vocab, (3, 9))
    loss, _, _ = loss_and_gradients(parameters, SMALL, ids)
    decoder = Decoder(SMALL, parameters)
    bits = [reference.bits(reference.logits(decoder, row[:-1]), row[1:]) for row in ids]
    assert loss / np.log(2) == pytest.approx(np.mean(bits), rel=1e-12)


def test_gradients_are_finite_differences():
    rng = seeded(2)
    parameters = random_parameters(rng)
    ids = rng.integers(0, SMALL.vocab, (2, 8))
    _, _, grads = loss_and_gradients(parameters, SMALL, ids, 0.1)
    assert grads.keys() == parameters.keys()
    for name, value in parameters.items():
        direction = rng.standard_normal(value.shape)
        step = 1e-6 * direction
        ends = [
            sum(loss_and_gradients(parameters | {name: moved}, SMALL, ids, 0.1)[:2])
            for moved in (value + step, value - step)
        ]
        slope = (ends[0] - ends[1]) / 2e-6
        assert abs(slope) > 1e-5, name
        assert (grads[name] * direction).sum() == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_quantisation_in_the_loop_is_that_of_the_format():
    rng = seeded(3)
    weights = rng.standard_normal((64, 64)) * np.exp2(rng.integers(-30, 30, (64, 1)))
    ties = np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7], 8) * np.exp2(rng.integers(-9, 9))
    values = np.vstack([weights, ties, -ties, np.zeros(64)]).astype(np.float32)
    wanted = dequantise(*quantise(values, Format.MXFP4), Format.MXFP4)
    np.testing.assert_array_equal(mxfp4(values), wanted)
    np.testing.assert_array_equal(mxfp4(values.astype(np.float64)), wanted)
    with pytest.raises(ValueError, match="weights must have whole blocks"):
        mxfp4(values[:, :40])


def test_only_the_experts_are_quantised():
    parameters = random_parameters(seeded(4), np.float32)
    changed = {n for n, v in in_the_loop(parameters).items() if (v != parameters[n]).any()}
    assert changed == {f"layers.{i}.{n}" for i in range(2) for n in ("gate_up", "down")}


def test_adam():
    parameters = {"w": np.array([[1.0, -2.0]]), "w_bias": np.array([[3.0]])}
    adam = Adam(parameters, decay=0.1, clip=1.0)
    norm = adam.step(parameters, {"w": np.array([[3.0, 0.0]]), "w_bias": np.array([[4.0]])}, 0.5)
    assert norm == pytest.approx(5)
    # The first step is the sign of the gradient; matrices have been shrunk by rate * decay before.
    np.testing.assert_allclose(parameters["w"], [[0.95 - 0.5, -1.9]], rtol=1e-6)
    np.testing.assert_allclose(parameters["w_bias"], [[2.5]], rtol=1e-6)
    # Second moments keep the clipped gradients 0.6 and 0.8, then those of the second step.
    adam.step(parameters, {"w": np.zeros((1, 2)), "w_bias": np.array([[0.1]])}, 0.5)
    np.testing.assert_allclose(adam.second["w_bias"], 0.98 * 0.02 * 0.64 + 0.02 * 0.01)
    assert [rate(s, 100, 2.0, 10) for s in (0, 9, 10, 55, 100)] == pytest.approx([0.2, 2, 2, 1, 0])


def test_training_learns_a_pattern():
    rng = seeded(5)
    parameters = initial(SMALL, rng)
    adam = Adam(parameters, decay=0.0, clip=1.0)
    pattern = np.array([1, 4, 2, 8, 5, 7])
    losses = []
    for _ in range(60):
        ids = pattern[(rng.integers(0, 6, (4, 1)) + np.arange(13)) % 6]
        loss, _, grads = loss_and_gradients(in_the_loop(parameters), SMALL, ids, 0.01)
        adam.step(parameters, grads, 1e-2)
        losses.append(loss)
    print(losses[0], losses[-1])
    assert losses[0] > 1.5 and losses[-1] < 0.1


TEXT = """Some prose that is
wrapped and hyphen-
ated into one paragraph.

too low a letter to start a paragraph with.

A table  1 2 3 4 5 6 7 8 9 10 11 12 13 14 15.

Short one.

A paragraph without an end that has no full stop
"""


def test_paragraphs_are_prose():
    assert list(paragraphs(TEXT)) == [
        "Some prose that is wrapped and hyphen-ated into one paragraph."
    ]
    tree = ast.parse('"""One."""\nclass A:\n    """Two."""\n    def f(self):\n        pass\n')
    assert list(docstrings(tree)) == ["One.", "Two.", ""]


def test_windows():
    rng = seeded(6)
    lines = ["Alpha beta gamma.", "Delta epsilon.", "Zeta eta theta iota."]
    windows = Windows(lines, 12, rng)
    taken = windows.take(64)
    assert taken.shape == (64, 12)
    whole = "".join(map(chr, windows.ids))
    assert all("".join(map(chr, row)) in whole for row in taken)
    assert (taken[::2, 0] == 0).all() and (taken[1::2, 0] != 0).any()
    assert {tuple(row[1:6]) for row in taken[::2]} == {tuple(encode(line[:5])) for line in lines}
    with pytest.raises(ValueError, match="length must be at most"):
        Windows(lines, 100, rng)


def test_interrupted_training_goes_on(monkeypatch, tmp_path):
    lines = ["The quick brown fox jumps over the lazy dog, again and again. " * 4] * 4
    monkeypatch.setattr(command, "corpus", lambda rng: Corpus(lines, lines))
    monkeypatch.setattr(command, "EVERY", 2)
    monkeypatch.setattr(command, "BATCH", 1)
    monkeypatch.setattr(command, "CHECKED", 1)
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    command.main([str(whole), "--steps", "4"])
    step = Adam.step

    def failing(self, *arguments):
        if self.steps == 3:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(Adam, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        command.main([str(parts), "--steps", "4"])
    assert not parts.exists()
    monkeypatch.setattr(Adam, "step", step)
    command.main([str(parts), "--steps", "4"])
    one, other = load(whole), load(parts)
    assert one.meta == other.meta and one.held_out == other.held_out == [lines[0][:128]] * 4
    for name, value in one.values.items():
        np.testing.assert_array_equal(value, other.values[name])


@pytest.mark.slow
def test_corpus_is_repeatable_and_held_out_text_is_apart():
    first, again = (corpus(np.random.default_rng(1)) for _ in range(2))
    assert first == again
    assert sum(map(len, first.train)) > 300_000 and sum(map(len, first.held_out)) > 8_192
    assert not set(first.train) & set(first.held_out)
    encode("".join(first.train + first.held_out))
