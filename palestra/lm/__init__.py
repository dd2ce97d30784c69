"""Language models: one transformer for training and generation, Hugging Face folders in and out, the trainers."""
