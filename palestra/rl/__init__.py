"""Pure maths of reinforcement learning on tensors, shared by control and by language models; no I/O.

Time is dimension 0. A rollout of N environments is `(T, N)`; a packed batch of sequences is `(T, 1)` with an end at
the last token of each sequence (end-of-text is `terminated`, the length limit is `truncated`).
"""
