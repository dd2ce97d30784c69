"""A weight transfer engine of vLLM 0.32 that reads new weights from the shared memory of a Palestra run."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from .memory import tensors


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Where the versions are."""

    folder: str


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """Which version to load."""

    version: int


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Loads a version as vLLM loads a checkpoint, layer by layer."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        self.folder = init_info.folder

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class also waits for a GPU

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        model: Any = self.model
        model.load_weights(tensors(self.folder, update_info.version))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...
