# SPDX-License-Identifier: Apache-2.0
"""Training of the character model in numpy: text, network with its backward pass, Adam.

`python -m golden.training` makes the weights in `sim/data/characters.npz`.
"""
