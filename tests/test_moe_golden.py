# SPDX-License-Identifier: Apache-2.0
"""Experts of DeepSeek and Kimi as bit-exact kernel: vectors, bounds, batches, what faults show."""

from dataclasses import replace

import numpy as np
import pytest

from golden.bounds import moe_bound
from golden.bounds.affine import Affine
from golden.bounds.moe import check_choice, gate_shares, silu
from golden.formats import Format
from golden.kernels.moe import Expert, Matrix, moe
from golden.kernels.trace import Trace
from golden.models import GateSpec
from golden.quantise import dequantise
from golden.reference.experts import GatedMlpWeights, gated_mlp, routed_experts, swiglu
from golden.reference.experts import silu as reference_silu
from golden.reference.gate import router_logits, sigmoid_gate
from tests.kernel_checks import MACHINES, SMALL, TINY, Arrays, load, near, rng_of, within

VECTOR_NAMES = (
    "dsv3_moe_s0",
    "dsv3_moe_bias_flips",
    "dsv3_moe_tie_pair",
    "dsv3_router_256",
    "kimi_moe_s0",
    "kimi_router_384",
)


class Block:
    """Router, experts and gate of a DeepSeek or Kimi vector, rounded to `fmt`."""

    def __init__(self, arrays: Arrays, config: dict, fmt: Format, lanes: int, prefix: str = "w_"):
        self.router = Matrix.of(arrays[f"{prefix}gate_weight"], Format.BF16)
        self.bias = arrays[f"{prefix}gate_e_score_correction_bias"].astype(np.float32)
        self.experts = [
            Expert.gated(*np.split(gate_up, 2), down, fmt, lanes)
            for gate_up, down in zip(
                arrays[f"{prefix}experts_gate_up_proj"],
                arrays[f"{prefix}experts_down_proj"],
                strict=True,
            )
        ]
        names = (f"{prefix}shared_experts_{part}_proj_weight" for part in ("gate", "up", "down"))
        self.shared = Expert.gated(*(arrays[name] for name in names), fmt, lanes)
        self.spec = GateSpec(
            len(self.experts),
            config["topk"],
            "sigmoid",
            "choice",
            config["n_group"],
            config["topk_group"],
            config["scale"],
        )

    def run(self, machine, x, act=Format.BF16, trace=None):
        trace = trace or Trace()
        found = moe(
            machine, trace, x, self.router, self.experts, self.spec, act, self.bias, self.shared
        )
        return found, trace.buffers["gate.ids"].codes.astype(np.int64)

    def bound(self, x, ids, act=Format.BF16):
        given = (x, self.router, self.experts, self.spec, ids, act, self.bias, self.shared)
        return moe_bound(*given)

    def reference(self, x: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens that `golden.reference` gives the same experts, its result for these)."""
        logits = router_logits(x, values(self.router))
        own, shares = sigmoid_gate(
            logits,
            self.bias,
            self.spec.top_k,
            groups=self.spec.groups,
            groups_kept=self.spec.groups_kept,
            scale=self.spec.scale,
        )
        same = np.all(own == ids, axis=1)
        assert same.mean() > 0.8  # near ties
        out = routed_experts(
            x[same],
            ids[same],
            shares[same],
            np.stack([np.concatenate(halves(e)) for e in self.experts]),
            np.stack([values(e.down) for e in self.experts]),
            swiglu,
        )
        return same, out + gated_mlp(
            x[same], GatedMlpWeights(*halves(self.shared), values(self.shared.down))
        )


def values(matrix: Matrix) -> np.ndarray:
    return dequantise(matrix.codes, matrix.scales, matrix.fmt)


def halves(e: Expert) -> tuple[np.ndarray, np.ndarray]:
    rows = values(e.gate_up)
    return rows[: e.intermediate], rows[len(rows) // 2 :][: e.intermediate]


@pytest.mark.parametrize("name", VECTOR_NAMES)
@pytest.mark.parametrize("fmt", [Format.MXFP4, Format.BF16])
def test_vectors(name: str, fmt: Format) -> None:
    arrays, meta = load(name)
    for machine in MACHINES:
        block = Block(arrays, meta["config"], fmt, machine.lanes)
        x = arrays["x"][0]
        found, ids = block.run(machine, x)
        reference, bound = block.bound(x, ids)
        within(found, reference, bound, 0.3)
        same, wanted = block.reference(x, ids)
        np.testing.assert_allclose(reference[same], wanted, rtol=1e-9, atol=1e-12)
        if fmt is Format.BF16:  # else the weights are others
            listed = np.all(ids == arrays["idx_lowest"], axis=1)
            assert listed.mean() > 0.8
            near(found[listed], arrays["out_lowest"][0][listed], 0.02)


def test_the_experts_of_a_layer() -> None:
    """The vector's layer has the MoE block of `dsv3_moe_s0`'s shape."""
    arrays, _ = load("dsv3_layer_moe")
    config = {"topk": 4, "n_group": 4, "topk_group": 2, "scale": 2.5}
    block = Block(arrays, config, Format.MXFP4, 4, "w_mlp_")
    x = arrays["x"][0]
    found, ids = block.run(TINY, x)
    within(found, *block.bound(x, ids), 0.3)


@pytest.mark.parametrize("act, most", [(Format.MXFP8_E4M3, 1.0), (Format.MXINT8, 0.3)])
@pytest.mark.parametrize("fmt", [Format.MXFP4, Format.MXFP8_E4M3])
def test_narrow_activations(act: Format, most: float, fmt: Format) -> None:
    arrays, meta = load("dsv3_moe_s0")
    block = Block(arrays, meta["config"], fmt, 4)
    x = arrays["x"][0]
    found, ids = block.run(TINY, x, act)
    within(found, *block.bound(x, ids, act), most)


@pytest.mark.parametrize("name", ["dsv3_moe_s0", "kimi_moe_s0"])
def test_a_token_has_the_same_result_in_any_batch(name: str) -> None:
    arrays, meta = load(name)
    block = Block(arrays, meta["config"], Format.MXFP4, 16)
    x = arrays["x"][0]
    together, _ = block.run(SMALL, x)
    alone = [block.run(SMALL, row[None])[0][0] for row in x]
    np.testing.assert_array_equal(together, np.stack(alone))
    back, _ = block.run(SMALL, x[::-1])
    np.testing.assert_array_equal(together, back[::-1])


def test_experts_are_visited_once_and_in_order() -> None:
    arrays, meta = load("dsv3_moe_s0")
    block = Block(arrays, meta["config"], Format.MXFP4, 16)
    trace = Trace()
    _, ids = block.run(SMALL, arrays["x"][0], trace=trace)
    visited = [name for name in trace.buffers if name.startswith("e") and name.endswith(".down")]
    assert visited == [f"e{e}.down" for e in sorted(set(ids.ravel().tolist()))]
    for e in np.unique(ids):
        assert len(trace.buffers[f"e{e}.down"].codes) == (ids == e).sum()


def test_faults_are_out_of_bounds() -> None:
    arrays, meta = load("dsv3_moe_s0")
    block, x = Block(arrays, meta["config"], Format.MXFP4, 16), arrays["x"][0]
    found, ids = block.run(SMALL, x)
    reference, bound = block.bound(x, ids)
    assert np.all(np.abs(found - reference) <= bound)
    swapped = [
        replace(e, gate_up=replace(e.gate_up, codes=np.roll(e.gate_up.codes, 32, 0)))
        for e in block.experts
    ]
    for change in (
        {"experts": swapped},
        {"experts": [replace(e, activation="clamped-swiglu") for e in block.experts]},
        {"shared": None},
        {"spec": replace(block.spec, scale=1.0)},
    ):
        other = Block(arrays, meta["config"], Format.MXFP4, 16)
        for name, value in change.items():
            setattr(other, name, value)
        wrong, _ = other.run(SMALL, x)
        assert np.any(np.abs(wrong - reference) > bound), list(change)


def test_choices_among_groups_are_checked() -> None:
    scores = Affine.exact([0.9, 0.1, 0.6, 0.5])  # the second group wins: 1.1 above 1.0
    check_choice(scores, np.array([2, 3]), 2, 1)
    with pytest.raises(ValueError, match="best groups"):
        check_choice(scores, np.array([0, 1]), 2, 1)
    with pytest.raises(ValueError, match="best experts"):
        check_choice(scores, np.array([3]), 2, 1)
    check_choice(scores.widened(0.06), np.array([0, 1]), 2, 1)
    check_choice(scores, np.array([0]), 2, 2)
    with pytest.raises(ValueError, match="best experts"):
        check_choice(scores, np.array([2]), 2, 2)


def test_shares_of_logits_with_errors() -> None:
    """The form's bound holds the shares of logits that are off by as much as is said."""
    rng, spec = rng_of(4), GateSpec(12, 4, "sigmoid", "choice", scale=2.827)
    logits, error = rng.standard_normal(12), 1e-3
    bias = np.where(np.arange(12) < 4, 5.0, 0.0).astype(np.float32)
    ids = np.arange(4)
    form = gate_shares(Affine.exact(logits).widened(error), ids, spec, bias)
    _, exact = sigmoid_gate(logits[None], bias, 4, scale=spec.scale)
    order = np.argsort(-(1 / (1 + np.exp(-logits[:4]))))
    np.testing.assert_allclose(form.value[order], exact[0], rtol=1e-12)
    worst = 0.0
    for signs in rng.choice([-1.0, 1.0], (64, 12)):
        moved = 1 / (1 + np.exp(-(logits + error * signs)))[:4]
        off = np.abs(moved / moved.sum() * spec.scale - form.value)
        assert np.all(off <= form.bound)
        worst = max(worst, float((off / form.bound).max()))
    assert worst > 0.2


def test_silu_within_its_form() -> None:
    rng = rng_of(5)
    gates = np.concatenate([rng.uniform(-12, 12, 200), [0.0, -2.4, -1.278]])
    for size in (0.0, 1e-4, 0.3):
        form = silu(Affine.exact(gates).widened(size))
        for part in np.linspace(-1, 1, 9):
            moved = reference_silu(gates + part * size)
            assert np.all(np.abs(moved - form.value) <= form.bound)
        assert np.all(form.radius <= 1.1 * size + 0.26 * size**2 + 1e-6 * (np.abs(gates) + 1))
