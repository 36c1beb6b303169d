"""The gated delta rule, token by token and in chunks.

With a state S (Dk x Dv) per value head, for each token:

    S   <- exp(log_decay) S
    u   =  beta (v - S^T k)
    S   <- S + k u^T
    out =  S^T q

`recurrent` is that, word for word. `chunked` computes the same in pieces of 64 tokens: inside a chunk the dependence of
each u on the earlier ones is a unit lower triangular system, whose inverse turns the chunk into matrix products (the WY
form), and from chunk to chunk the state obeys S' = M S + b with M and b known beforehand.

Shapes: B sequences, T tokens, H value heads. q, k: (B, T, H, Dk), v: (B, T, H, Dv), beta, log_decay: (B, T, H),
state: (B, H, Dk, Dv). Everything is float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def recurrent(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t, :, None, None].exp()
        u = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * u[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    # A padded token has beta = 0 and log_decay = 0: it leaves the state as it is.
    q, k, v = (split_chunks(x) for x in (q, k, v))  # (B, H, N, C, D)
    beta, log_decay = (split_chunks(x[..., None])[..., 0] for x in (beta, log_decay))  # (B, H, N, C)
    total = log_decay.cumsum(-1)
    # decay[i, j]: how much of what token j wrote is left at token i. The mask comes before exp, or the upper half overflows.
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()

    k_beta = k * beta[..., None]
    inverse = unit_lower_inverse((k_beta @ k.mT * decay).tril(-1))
    u = inverse @ (v * beta[..., None])  # what the chunk writes when it starts from a state of zeros ...
    w = inverse @ (k_beta * total[..., None].exp())  # ... and how it depends on the state: u - w S
    k_last = k * (total[..., -1:] - total)[..., None].exp()  # keys, decayed to the end of the chunk
    decay_last = total[..., -1].exp()[..., None, None]
    M = decay_last * torch.eye(k.shape[-1], device=k.device) - k_last.mT @ w
    states = scan(M, k_last.mT @ u, state)  # (B, H, N + 1, Dk, Dv)

    start = states[:, :, :-1]
    out = (q * total[..., None].exp()) @ start + (q @ k.mT * decay) @ (u - w @ start)
    return out.flatten(2, 3)[:, :, :T].transpose(1, 2), states[:, :, -1]


def split_chunks(x: Tensor) -> Tensor:
    """(B, T, H, D) -> (B, H, N, C, D), zeros after the last token."""
    B, T, H, D = x.shape
    N = -(-T // CHUNK)
    return F.pad(x.transpose(1, 2), (0, 0, 0, N * CHUNK - T)).reshape(B, H, N, CHUNK, D)


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 for a strictly lower triangular A, by doubling the size of the inverted diagonal blocks.

    [[P, 0], [A, Q]]^-1 = [[P^-1, 0], [-Q^-1 A P^-1, Q^-1]]. Powers of A never appear: they can be huge.
    """
    with torch.no_grad():
        X = torch.eye(CHUNK, device=A.device, dtype=A.dtype)
        size = 1
        while size < CHUNK:
            block = torch.arange(CHUNK, device=A.device) // size
            corner = (block[:, None] % 2 == 1) & (block[:, None] == block[None, :] + 1)
            off = A * corner
            X = X - (off if size == 1 else X @ off @ X)
            size *= 2
    # Value X, derivative that of the inverse: -X dA X.
    return X - X @ (A - A.detach()) @ X if A.requires_grad else X


class Scan(torch.autograd.Function):
    """states[n + 1] = M[n] states[n] + b[n]; the gradient of M is formed for all chunks at once."""

    @staticmethod
    def forward(ctx, M: Tensor, b: Tensor, state: Tensor) -> Tensor:
        states = [state]
        for n in range(M.shape[2]):
            states.append(b[:, :, n] + M[:, :, n] @ states[-1])
        out = torch.stack(states, 2)
        ctx.save_for_backward(M, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        M, states = ctx.saved_tensors
        carried = grad[:, :, -1]
        grad_b = [carried]
        for n in range(M.shape[2] - 1, -1, -1):
            carried = grad[:, :, n] + M[:, :, n].mT @ carried
            grad_b.append(carried)
        grad_state = grad_b.pop()
        stacked = torch.stack(grad_b[::-1], 2)
        return stacked @ states[:, :, :-1].mT, stacked, grad_state


scan = Scan.apply
