"""Masks in Triton's interpreter, which from 3.9 on takes no others than boolean ones.

It gives the result of a comparison the dtype of what was compared. Spread over a block, as in
`mask & (i < n)`, a scalar comparison then becomes integers and the mask with it, which is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder


def keep_masks_boolean() -> None:
    """Give comparisons the dtype that they have in the compiler."""
    compute = InterpreterBuilder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = compute(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
        return result

    InterpreterBuilder.binary_op = binary_op
