"""The loss of a sharded vocabulary over 2 and 4 processes: the answers of one process.

The cases are in sharded_losses.py.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sharded_losses
from torchweld.distributed.vocabulary_rows import Statistics, Terms, completed_factor


@pytest.mark.parametrize("mesh", ["2", "4"])
@pytest.mark.parametrize("case", sharded_losses.cases("2"))
def test_sharded_vocabulary_equals_one_process(check_case, mesh, case):
    check_case("sharded_losses", mesh, case)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize(
    ("far", "softcap"), [(0.0, None), (0.0, 4.0), (-60.0, None), (-400.0, None), (-torch.inf, None)]
)
def test_exponentials_of_any_scale(far, softcap, eps):
    """y and factor as Hopper's kernels store them: y = 2^(l - k), k near the local target's l."""
    rows, classes, temperature, z_loss = 12, 20, 0.8, 0.05
    torch.manual_seed(0)
    logits = torch.randn(rows, 2 * classes, dtype=torch.float64) * 3
    target = torch.randint(0, classes if far == -torch.inf else 2 * classes, (rows,))
    capped = logits if softcap is None else softcap * (logits / softcap).tanh()
    capped[:, classes:] += far
    z = (capped / temperature).requires_grad_()
    lse = z.logsumexp(-1)
    loss = lse - z.gather(1, target[:, None])[:, 0]
    ignored = torch.arange(rows) < 2
    # y has the terms of lse and z_t; backward adds that of mean(z).
    z_target = lse - loss
    found = lse - (1 - eps) * z_target + z_loss * lse.square()
    (want,) = torch.autograd.grad(found[~ignored].sum(), z)
    slope = torch.ones_like(z) if softcap is None else 1 - (capped / softcap).square()
    want = want * slope / temperature
    for shard in range(2):
        part = slice(shard * classes, (shard + 1) * classes)
        inside = (target // classes == shard) & ~ignored
        local = torch.where(inside, target % classes, 0)
        of_shard = z.detach()[:, part]
        at_target = of_shard.gather(1, local[:, None])[:, 0]
        local_lse = of_shard.logsumexp(-1)
        k = (at_target * math.log2(math.e)).round() + 60
        k = torch.where(k.isfinite(), k, 0)
        e = torch.exp2(of_shard * math.log2(math.e) - k[:, None])
        y = (e * slope[:, part]).masked_fill(ignored[:, None], 0)
        factor = (1 / (e.sum(-1) * temperature)).masked_fill(ignored, 0)
        y.scatter_(1, local[:, None], 7.0)  # overwritten by the kernel, to be written again
        targets = SimpleNamespace(
            local=local.masked_fill(ignored, -100), inside=inside, ignored=ignored
        )
        found = Statistics(local_lse - at_target, local_lse, loss.detach(), lse.detach())
        options = {"shift": 0, "softcap": softcap, "temperature": temperature}
        whole = completed_factor(y, factor, targets, found, Terms(z_loss, eps), options)
        assert torch.equal(whole == 0, ignored) or not eps
        got = torch.where(whole[:, None] == 0, 0, whole[:, None] * y)
        assert y.isfinite().all()
        torch.testing.assert_close(got, want[:, part], rtol=1e-9, atol=1e-12)
