"""What a vLLM that is launched has in its PYTHONPATH, and nothing else of Palestra."""
