"""The linear recurrence behind returns, GAE and V-trace, solved for all times at once."""

import torch
from torch import Tensor


def reverse_scan(x: Tensor, decay: Tensor) -> Tensor:
    """Solve `y[t] = x[t] + decay[t] · y[t+1]` backwards over dimension 0, with `y[T] = 0`.

    Hillis-Steele doubling: after a round with shift k, `y[t]` covers the window `x[t : t+2k]` and `a[t]` is the product
    of the 2k decays before the next window, so log2(T) rounds of whole-tensor operations replace T small ones. Only
    products of decays over a window occur, never a division by a cumulative product: with |decay| ≤ 1 nothing
    overflows, and a decay of 0 (an episode's end) cuts exactly.
    """
    steps = x.shape[0]
    y, a, shift = x, decay[:-1], 1
    while shift < steps:
        # Rows past T - shift already reach the end of time; `a` is kept only for the rows that do not.
        y = torch.cat((torch.addcmul(y[:-shift], a, y[shift:]), y[-shift:]))
        a = a[:-shift] * a[shift:]
        shift *= 2
    return y
