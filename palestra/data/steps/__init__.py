"""Data steps: from downloads to tokens, each a function of a source that writes into a folder `out` and resumes there.

Plain functions, so that they run without a pipeline too; `palestra.pipeline.data` makes steps of them.
"""

STEPS = {
    "download": "palestra.data.steps.download:download",
    "transform": "palestra.data.steps.transform:transform",
    "html_to_markdown": "palestra.data.steps.html:html_to_markdown",
    "filter": "palestra.data.steps.filters:filter_documents",
    "train_classifier": "palestra.data.steps.classify:train_classifier",
    "classify": "palestra.data.steps.classify:classify",
    "dedup_exact": "palestra.data.steps.dedup:dedup_exact",
    "dedup_fuzzy": "palestra.data.steps.dedup:dedup_fuzzy",
    "decontaminate": "palestra.data.steps.decontaminate:decontaminate",
    "consolidate": "palestra.data.steps.transform:consolidate",
    "train_tokenizer": "palestra.data.steps.tokenize:train_tokenizer",
    "tokenize": "palestra.data.steps.tokenize:tokenize",
}
"""The function of each step, by its name in pipelines. All resume what a killed attempt left."""
