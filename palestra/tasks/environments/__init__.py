"""Environments that a language model acts in by text: games, Gymnasium, OpenEnv servers, your own."""
