"""What several ranks keep of a model: checkpoints and Hugging Face folders from the part of each, and back."""
