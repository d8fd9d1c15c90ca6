# SPDX-License-Identifier: Apache-2.0
"""How near attention on `small` comes to its roofline, from first command to last result."""

import pytest

from tests.test_kernels import simulate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "settings", "least"),
    [
        ("gpt-oss", {"context": 1024}, 0.95),
        ("gpt-oss", {"context": 4096}, 0.985),
        ("gpt-oss", {"context": 8192}, 0.99),
        ("deepseek-r1", {"context": 512, "heads": 16}, 0.95),
        ("gpt-oss", {"context": 1024, "queries": 128, "heads": 1}, 0.95),
    ],
    ids=("decode-1024", "decode-4096", "decode-8192", "latent-512", "prefill"),
)
def test_the_array_binds(model, settings, least):
    result = simulate("attention", "small", seed=1, model=model, **settings)
    assert result.roofline.startswith("array")
    assert result.fraction_of_roofline >= least
