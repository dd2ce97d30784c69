"""The model `palestra` of lm-eval: `python -m palestra.lm_eval --model palestra --model_args pretrained=RUN …`."""

import sys

from palestra.errors import MissingExtra

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    missing = MissingExtra("python -m palestra.lm_eval", "lm-eval")
    if __name__ == "__main__":
        sys.exit(f"palestra: {missing}")
    raise missing from error

import torch

from palestra.evaluate.lm_eval import EngineLM
from palestra.kinds.models import named_dtype, open_model
from palestra.spec.shape import precision

NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Hugging Face's names of precisions, by ours."""


@register_model("palestra")
class PalestraLM(EngineLM):
    """A run, a checkpoint, a model folder, s3://… or a Hub id, evaluated by our engine."""

    def __init__(
        self,
        pretrained: str,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        add_bos_token: bool | None = None,
    ):
        """`--model_args`; `batch_size` is the completions in flight, likelihoods are batched by their tokens."""
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        chosen = named_dtype(precision(NAMES.get(dtype, dtype), where.type))
        loaded, tokenizer = open_model(pretrained, dtype=chosen, param_dtype=chosen, device=where)
        super().__init__(loaded.model, tokenizer, loaded.eos, add_bos_token)
        # 1 is what lm-eval passes where nothing is given; auto leaves it to us.
        given = str(batch_size) != "1" and not str(batch_size).startswith("auto")
        self.rows = int(batch_size) if given else max_batch_size or self.rows


if __name__ == "__main__":
    cli_evaluate()
