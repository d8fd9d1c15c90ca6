# SPDX-License-Identifier: Apache-2.0
"""`python -m golden.training FILE.npz`: trains the character model and writes its weights.

The same seed on the same machine with the same version of Python gives the same weights. State is
kept in FILE.state.npz every few hundred steps; a run that is started again goes on from there.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import numpy as np

from golden.characters import CHARACTERS, CONTEXT
from golden.decoder import save
from golden.training.adam import Adam, rate
from golden.training.network import initial, loss_and_gradients
from golden.training.quantised import in_the_loop
from golden.training.text import Windows, corpus

BATCH = 16
PEAK = 3e-3
WARM_UP = 200
DECAY = 0.05
CLIP = 1.0
BALANCE = 0.01
CHECKED = 64  # held-out windows whose loss is printed
KEPT = 64  # held-out beginnings of paragraphs in the file
EVERY = 250


def main(arguments: list[str] | None = None) -> None:
    """The command; `arguments` are those of the process if None."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    text = corpus(np.random.default_rng(given.seed))
    digest = hashlib.sha256("\n".join(text.train).encode()).hexdigest()[:16]
    characters = sum(map(len, text.train)) + len(text.train)
    held_out = [line[:CONTEXT] for line in text.held_out if len(line) >= CONTEXT][:KEPT]
    windows = Windows(text.train, CONTEXT + 1, np.random.default_rng(given.seed + 1))
    other = Windows(text.held_out, CONTEXT + 1, np.random.default_rng(given.seed + 2)).take(CHECKED)
    parameters = initial(CHARACTERS, np.random.default_rng(given.seed + 3))
    adam = Adam(parameters, DECAY, CLIP)
    print(
        f"{sum(v.size for v in parameters.values())} parameters, {characters} characters "
        f"(sha256 {digest}), {sum(map(len, text.held_out))} held out"
    )
    state = given.file.with_suffix(".state.npz")
    start = 0
    if state.exists():
        with np.load(state) as file:
            start = adam.steps = int(file["steps"])
            for name in parameters:
                parameters[name] = file[f"p.{name}"]
                adam.first[name], adam.second[name] = file[f"m.{name}"], file[f"v.{name}"]
        for _ in range(start):
            windows.take(BATCH)
        print(f"going on from step {start}")
    begun, recent = time.monotonic(), []
    for step in range(start, given.steps):
        loss, _, grads = loss_and_gradients(
            in_the_loop(parameters), CHARACTERS, windows.take(BATCH), BALANCE
        )
        adam.step(parameters, grads, rate(step, given.steps, PEAK, WARM_UP))
        recent.append(loss / np.log(2))
        if (step + 1) % EVERY == 0 or step + 1 == given.steps:
            held, _, _ = loss_and_gradients(in_the_loop(parameters), CHARACTERS, other)
            print(
                f"step {step + 1}: {np.mean(recent):.3f} bits, held out {held / np.log(2):.3f}, "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
            recent = []
            kept = {f"p.{n}": v for n, v in parameters.items()}
            kept |= {f"m.{n}": v for n, v in adam.first.items()}
            kept |= {f"v.{n}": v for n, v in adam.second.items()}
            np.savez(state, steps=step + 1, **kept)  # type: ignore[arg-type]
    meta = {
        "steps": given.steps,
        "seed": given.seed,
        "python": sys.version.split()[0],
        "characters": characters,
        "sha256": digest,
    }
    save(given.file, parameters, held_out, meta)
    print(f"written: {given.file}")


if __name__ == "__main__":
    main()
