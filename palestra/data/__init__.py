"""Data: where rows and weights come from, tokenizers, the token store, mixtures and packing."""
