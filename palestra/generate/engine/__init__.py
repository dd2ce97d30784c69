"""The engine: requests, the batch, the KV cache, sampling, and the model at work on CPU and GPU."""
