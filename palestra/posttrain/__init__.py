"""RL of language models with verifiable rewards, and distillation: the batch, the losses, the trainer."""
