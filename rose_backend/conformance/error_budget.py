"""The bound on rounding errors: at most twice plain torch's own in the same type, plus one unit in the last place."""

from __future__ import annotations

import torch


def assert_within_budget(
    actual: torch.Tensor,
    exact: torch.Tensor,
    *same_dtype_references: torch.Tensor,
) -> None:
    """Fail when ``actual`` is further from ``exact`` than the budget allows, or not finite.

    Args:
        exact: float64, computed from the same (already rounded) inputs.
        same_dtype_references: plain torch in ``actual``'s dtype; their largest error sets the budget. Of few numbers
            one sum may happen to be exact: then several, in other orders.
    """
    assert actual.shape == exact.shape, f"shape {list(actual.shape)}, expected {list(exact.shape)}"
    assert torch.isfinite(actual).all(), "the result has values that are not finite"
    if actual.numel() == 0:
        return
    error = (actual.double() - exact).abs().max().item()
    reference_error = max((each.double() - exact).abs().max().item() for each in same_dtype_references)
    floor = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    budget = 2 * reference_error + floor
    assert error <= budget, (
        f"error {error:.3e} is over the budget {budget:.3e} (torch: {reference_error:.3e})"
    )
