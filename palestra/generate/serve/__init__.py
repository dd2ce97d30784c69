"""The HTTP server: OpenAI's endpoints, tokens in and out, new weights, and how it is doing."""
