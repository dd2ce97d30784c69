"""The model in checkpoints: a Hugging Face folder that others can load, or adapters alone where only they change."""

from collections.abc import Callable
from pathlib import Path

import torch

from palestra.kinds.start import Start
from palestra.lm.hf import load_pretrained, save_weights
from palestra.lm.hf_config import is_classifier
from palestra.lm.lora import adapted, adapter_state
from palestra.lm.model import Transformer
from palestra.lm.peft import adapter_weights, save_peft
from palestra.lm.ranks import Ranks
from palestra.lm.sharding import whole
from palestra.lm.shards import Shards
from palestra.lm.value_head import ScalarModel


def scored_model(model: Transformer, start: Start) -> ScalarModel:
    """The model with a scalar head: that of the reward model it comes from, else one of zeros."""
    scored = ScalarModel(model)
    if is_classifier(start.config):
        assert start.folder is not None
        with Shards(start.folder) as shards, torch.no_grad():
            scored.value.weight.copy_(shards.tensor("score.weight"))
    return scored


class Keeper:
    """The model in checkpoints: a Hugging Face folder with FP32 weights, or adapters alone where only they change."""

    def __init__(self, model: Transformer | ScalarModel, start: Start, ranks: Ranks):
        self.model, self.start, self.ranks = model, start, ranks
        self.transformer = model.transformer if isinstance(model, ScalarModel) else model

    def writer(self) -> Callable[[Path], None]:
        """Gathers the weights, on every rank; what it gives writes them into a folder, on the first."""
        if adapted(self.transformer):
            assert self.start.folder is not None  # ModelSpec.problems
            base = str(self.start.folder.absolute())  # adapters are read from anywhere
            adapters = self.ranks.gather(adapter_state(self.transformer))
            tokenizer, eos = self.start.tokenizer, self.start.eos
            return lambda folder: save_peft(folder, self.transformer, base, adapters, tokenizer=tokenizer, eos=eos)
        weights = {name: whole(tensor) for name, tensor in self.transformer.state_dict().items()}
        score = whole(self.model.value.weight) if isinstance(self.model, ScalarModel) else None
        return lambda folder: save_weights(
            folder,
            self.start.shape,
            weights,
            tokenizer=self.start.tokenizer,
            eos=self.start.eos,
            base_config=self.start.config,
            score=score,
        )

    def load(self, folder: Path) -> None:
        """Take the weights that were written there."""
        if adapted(self.transformer):
            self.ranks.scatter(adapter_weights(folder, self.transformer), self.transformer)
            return
        saved = load_pretrained(folder)
        self.ranks.scatter(saved.model.state_dict(), self.transformer)
        if isinstance(self.model, ScalarModel):
            assert saved.score is not None
            self.ranks.scatter({"value.weight": saved.score}, self.model)
