"""A layer of experts: the feed-forward part of a mixture-of-experts model."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld._types import ExpertGate, is_dtensor


@readable_errors
def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    gate: ExpertGate = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Sends every token to its experts and adds up their results:

        y[t] = sum(weight[t, j] * F.linear(act, down[e], down_bias[e]) for j in range(k))
        act = gate(F.linear(x[t], gate_up[e], gate_up_bias[e]))     with e = index[t, j]

    The model's router gives `index` and `weight`: the top k experts of each token and their
    weights. The tokens are sorted by expert on the device, without a synchronisation with the host,
    so a CUDA graph can hold the call; one product computes each layer of all experts together.

    Args:
        x: `(T, H)`, the tokens, float32, float16 or bfloat16 (float64 on CPU).
        gate_up: `(E, 2I, H)`, dtype of `x`. Its product with a token has two halves, g and u.
        down: `(E, H, I)`, dtype of `x`.
        index: `(T, k)`, int64 or int32. An id of at least E or below 0 adds nothing and has no
            gradient: expert parallelism gives such ids to experts of other ranks.
        weight: `(T, k)`, the router's weights, in the dtype of `x` or in float32.
        gate_up_bias: `(E, 2I)`, dtype of `x`.
        down_bias: `(E, H)`, dtype of `x`.
        gate: `"swiglu"` silu(g) * u, `"geglu"` or `"geglu_tanh"` gelu(g) * u, or `"reglu"`
            relu(g) * u. g is the first half, as in the checkpoints of these models (in
            `gated_linear`, gelu and relu act on the second one). Without a gate, `gate_up` is
            `(E, I, H)`, its bias `(E, I)`: `"relu"`, `"relu_squared"`, `"silu"`, `"gelu"`,
            `"gelu_tanh"`.
        limit: above 0: before the gate, g is clamped to at most this and u to plus and minus this.
            None for no clamp. limit and interleaved need a gate with two halves.
        alpha: only with swiglu, which becomes g * sigmoid(alpha * g) * (u + 1), as in gpt-oss.
        interleaved: True: g has the even columns, u the odd ones. False: the first and the last I.
        transposed: True: `gate_up` is `(E, H, 2I)` and `down` is `(E, I, H)`.

    Returns:
        `(T, H)` contiguous, dtype of `x`. The sum over j is in fp32, in the order of j; the results
        of both products, and act, are rounded to that dtype. A call has the same bits in every run.

    Raises:
        RuntimeError: a wrong shape, dtype, device, gate or option; on a GPU, over 8192 experts.

    Limits: differentiable once. Keeps `x` and the first products `(T * k, 2I)` for its gradient.

    Source: N. Shazeer et al., "Outrageously Large Neural Networks", 2017.

    Example::

        x, router = torch.randn(10, 32), nn.Linear(32, 8)
        weight, index = router(x).softmax(-1).topk(2)
        gate_up, down = torch.randn(8, 2 * 24, 32) / 8, torch.randn(8, 32, 24) / 8
        y = torchweld.experts(x, gate_up, down, index, weight)
        assert y.shape == (10, 32)
    """
    tensors = (x, gate_up, down, index, weight, gate_up_bias, down_bias)
    options = {
        "gate": gate, "limit": limit, "alpha": alpha, "interleaved": interleaved,
        "transposed": transposed,
    }  # fmt: skip
    if is_dtensor(gate_up):
        from torchweld.distributed.expert_shards import experts_of_shards

        y = experts_of_shards(*tensors, **options)
        if y is not None:
            return y
    return ops.experts(*tensors, **options)
