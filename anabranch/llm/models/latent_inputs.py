"""latent_inputs(): what DeepSeek's attention reads, from what a layer projects, by one launch."""

from __future__ import annotations

import torch

from anabranch.device import has_overlap
from anabranch.shapes import FLOATS, Sizes, check_device, check_dtype

QueriesAndRows = tuple[torch.Tensor, torch.Tensor]


def latent_inputs(
    q: torch.Tensor,
    latent: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    *,
    epsilon: float,
    neighbours: bool,
) -> QueriesAndRows:
    """Queries with their last columns rotated, and rows: normalised, then their last rotated.

    q       [num_tokens, num_heads, nope + rotary]
    latent  [num_tokens, rank + rotary]
    cos     [num_tokens, columns], of which the first rotary / 2 are read
    sin     [num_tokens, columns]
    norm    [rank], the weight of a root-mean-square norm with `epsilon`

    A pair to rotate is two columns side by side if `neighbours`, and otherwise one of each half.
    The first columns of all pairs are written before the second.
    """
    sizes = Sizes()
    sizes.match("q", q, "num_tokens num_heads head_dim")
    sizes.match("latent", latent, "num_tokens width")
    sizes.match("cos", cos, "num_tokens columns")
    sizes.match("sin", sin, "num_tokens columns")
    sizes.match("norm", norm, "rank")
    rotary = sizes["width"] - sizes["rank"]
    if rotary < 2 or rotary % 2 or rotary > min(sizes["head_dim"], 2 * sizes["columns"]):
        raise ValueError(
            f"latent {tuple(latent.shape)} and norm {tuple(norm.shape)} leave {rotary} rotary "
            f"columns; they must be pairs within q {tuple(q.shape)} and cos {tuple(cos.shape)}"
        )
    check_dtype("q", q, FLOATS)
    check_dtype("latent", latent, (q.dtype,))
    for name, tensor in (("latent", latent), ("cos", cos), ("sin", sin), ("norm", norm)):
        check_dtype(name, tensor, FLOATS)
        check_device(name, tensor, q.device)
    if torch.compiler.is_compiling():
        return torch.ops.anabranch.latent_inputs(q, latent, cos, sin, norm, epsilon, neighbours)
    return _inputs(q, latent, cos, sin, norm, epsilon, neighbours)


def _last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _inputs(
    q: torch.Tensor,
    latent: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
    neighbours: bool,
) -> QueriesAndRows:
    from anabranch.kernels.layers.latent_inputs import latent_inputs as launch

    q, latent = _last_contiguous(q), _last_contiguous(latent)
    q_out, rows = q.new_empty(q.shape), latent.new_empty(latent.shape)
    if len(q):
        launch(
            q,
            latent,
            cos.contiguous(),
            sin.contiguous(),
            norm.contiguous(),
            q_out,
            rows,
            epsilon=epsilon,
            neighbours=neighbours,
            overlap=has_overlap(q.device),
        )
    return q_out, rows


_latent_inputs_op = torch.library.custom_op("anabranch::latent_inputs", _inputs, mutates_args=())


@_latent_inputs_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(q: torch.Tensor, latent: torch.Tensor, *_: object) -> QueriesAndRows:
    return q.new_empty(q.shape), latent.new_empty(latent.shape)
