"""A plugin of vLLM 0.32: the weight transfer engine `palestra`. This folder is in its PYTHONPATH, Palestra is not."""


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "palestra" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("palestra", "palestra_vllm.engine", "SharedMemoryEngine")
