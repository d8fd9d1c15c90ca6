# SPDX-License-Identifier: Apache-2.0
"""The gates of the three models: bit-exact model, float64 reference, independent vectors."""

import numpy as np
import pytest

from golden.bounds.gate import shares_bound
from golden.fp32 import bits
from golden.kernels.gate import gate, gates
from golden.kernels.trace import Machine, Trace
from golden.models import DEEPSEEK_R1, GPT_OSS_120B, KIMI_K25, MODELS, GateSpec
from golden.reference.gate import sigmoid_gate, softmax_gate
from tests.test_reference import load

MACHINES = (Machine(2, 4), Machine(8, 16), Machine(32, 64))
VECTORS = {
    "dsv3_moe_s0": 0.9,
    "dsv3_moe_bias_flips": 0.9,
    "dsv3_moe_tie_pair": 0.9,
    "dsv3_router_256": 1.0,
    "kimi_moe_s0": 0.9,
    "kimi_router_384": 1.0,
}


def random_gate(rng: np.random.Generator, spec: GateSpec, tokens: int, spread: float):
    logits = (spread * rng.standard_normal((tokens, spec.experts))).astype(np.float32)
    bias = None
    if spec.bias == "choice":
        bias = (0.3 * rng.standard_normal(spec.experts)).astype(np.float32)
    return logits, bias


def test_specs_of_the_models() -> None:
    specs = [model.moe.gate_spec for model in (GPT_OSS_120B, DEEPSEEK_R1, KIMI_K25)]
    assert specs == [
        GateSpec(128, 4, "softmax"),
        GateSpec(256, 8, "sigmoid", "choice", 8, 4, 2.5),
        GateSpec(384, 8, "sigmoid", "choice", scale=2.827),
    ]


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    """The choices and shares of an independent implementation, from its own logits."""
    arrays, meta = load(name)
    config = meta["config"]
    logits = arrays["router_logits"]
    spec = GateSpec(
        logits.shape[1],
        config["topk"],
        "sigmoid",
        "choice",
        config["n_group"],
        config["topk_group"],
        config["scale"],
    )
    for machine in MACHINES:
        trace = Trace()
        bias = arrays[next(n for n in arrays if n.endswith("gate_e_score_correction_bias"))].astype(
            np.float32
        )
        ids, shares = gates(machine, trace, "gate", logits, spec, bias)
        np.testing.assert_array_equal(ids, arrays["idx_lowest"])
        np.testing.assert_allclose(shares, arrays["weights_lowest"], rtol=3e-6)
        reference, bound = shares_bound(logits, ids, spec)
        error = np.abs(shares - reference)
        assert (error <= bound).all() and error.max() > 0 and bound.max() < 4e-6
        assert trace.buffers["gate.ids"].codes.tolist() == ids.tolist()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
def test_gate_is_within_its_bound(model: str, spread: float) -> None:
    rng = np.random.default_rng(11)
    spec = MODELS[model].moe.gate_spec
    logits, bias = random_gate(rng, spec, 12, spread)
    for machine in MACHINES:
        ids, shares = gates(machine, Trace(), "gate", logits, spec, bias)
        reference, bound = shares_bound(logits, ids, spec)
        assert (np.abs(shares - reference) <= bound).all()
        if spec.scoring == "softmax":
            wanted, weights = softmax_gate(logits, spec.top_k)
        else:
            wanted, weights = sigmoid_gate(
                logits.astype(np.float64),
                bias,
                spec.top_k,
                groups=spec.groups,
                groups_kept=spec.groups_kept,
                scale=spec.scale,
            )
        same = (ids == wanted).all(axis=1)
        # Far logits saturate the sigmoid in FP32, which makes ties of what float64 tells apart.
        assert same.mean() > 0.8 or (spec.scoring == "sigmoid" and spread > 1)
        np.testing.assert_allclose(reference[same], weights[same], rtol=1e-12)


def test_a_fault_in_the_shares_is_out_of_bounds() -> None:
    rng = np.random.default_rng(12)
    spec = DEEPSEEK_R1.moe.gate_spec
    logits, bias = random_gate(rng, spec, 4, 1.0)
    ids, shares = gates(MACHINES[0], Trace(), "gate", logits, spec, bias)
    reference, bound = shares_bound(logits, ids, spec)
    assert (np.abs(shares * np.float32(1 + 2e-6) - reference) > bound).any()


def test_scores_of_zero_have_shares_of_zero() -> None:
    spec = GateSpec(8, 2, "sigmoid", "choice", scale=2.5)
    logits = np.full((2, 8), -200, np.float32)
    logits[1, 3] = 0
    _, shares = gates(MACHINES[0], Trace(), "gate", logits, spec, np.zeros(8, np.float32))
    assert shares.tolist() == [[0, 0], [2.5, 0]]


def test_nan_makes_all_shares_nan_and_saturated_scores_tie() -> None:
    spec = GateSpec(8, 3, "sigmoid", "choice")
    logits = np.full((2, 8), np.nan, np.float32)
    logits[0, [5, 6]] = 1
    logits[1] = [40, 30, 50, 40, -1, 60, 0, 0]
    ids, shares = gates(MACHINES[0], Trace(), "gate", logits, spec, np.zeros(8, np.float32))
    assert ids.tolist() == [[5, 6, 0], [0, 1, 2]]
    assert (bits(shares[0]) == 0x7FC00000).all() and np.isfinite(shares[1]).all()


def test_rows_are_independent() -> None:
    rng = np.random.default_rng(13)
    logits = rng.standard_normal((5, 32)).astype(np.float32)
    ids, shares = gates(MACHINES[1], Trace(), "gate", logits, GateSpec(32, 4, "softmax"))
    for row, its_ids, its_shares in zip(logits, ids, shares, strict=True):
        one_ids, one_shares = gate(MACHINES[1], Trace(), "gate", row, 4)
        assert one_ids.tolist() == its_ids.tolist()
        np.testing.assert_array_equal(bits(one_shares), bits(its_shares))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((8, 9, "softmax"), "top_k must be"),
        ((8, 0, "softmax"), "top_k must be"),
        ((8, 5, "sigmoid", "choice", 4, 2), "top_k must be 1 to the 4 experts"),
        ((8, 2, "relu"), "scoring must be softmax or sigmoid"),
        ((8, 2, "sigmoid", "both"), "bias must be"),
        ((8, 2, "sigmoid", "choice", 3), "groups must divide"),
        ((8, 2, "sigmoid", "choice", 8, 4), "groups must have two"),
        ((8, 2, "sigmoid", "choice", 2, 3), "groups_kept must be"),
        ((8, 2, "softmax", "logits", 1, 1, 2.0), "scale must be"),
        ((8, 2, "sigmoid", "choice", 1, 1, 0.0), "scale must be"),
        ((8, 2, "softmax", "choice"), "scoring must be sigmoid"),
    ],
)
def test_impossible_specs_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GateSpec(*arguments)


def test_bias_and_logits_must_fit_the_spec() -> None:
    logits, bias = np.zeros((1, 8), np.float32), np.zeros(8, np.float32)
    for spec, given in (
        (GateSpec(8, 2, "softmax"), bias),
        (GateSpec(8, 2, "sigmoid", "choice"), None),
    ):
        with pytest.raises(ValueError, match="bias must be"):
            gates(MACHINES[0], Trace(), "gate", logits, spec, given)
    for wrong in (np.zeros((1, 4), np.float32), np.zeros(8, np.float32)):
        with pytest.raises(ValueError, match="logits must be"):
            gates(MACHINES[0], Trace(), "gate", wrong, GateSpec(8, 2, "softmax"))
