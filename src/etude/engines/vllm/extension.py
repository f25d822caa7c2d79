"""Extension of a vLLM worker, through vLLM's own plug-in points: a weight-transfer backend and one remote call.

vLLM imports this module in each worker, because ``--worker-extension-cls`` names a class of it; only a process with
vLLM can import it. The backend reads checkpoints and patches from files, ``host_copy.py`` does the rest. Importing the
module registers the backend (vLLM docs: training/weight_transfer).
"""
# mypy: disable-error-code="import-not-found,misc,untyped-decorator"
# vLLM is never installed beside étude: its classes exist only in its own environment.

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from etude.engines.vllm.host_copy import HostCopy, RuntimeWeights
from etude.engines.vllm.patches import read_patch
from etude.errors import DamagedError, UserError
from etude.weights.interop.checkpoint import read_checkpoint

BACKEND = "etude"
"""Name of the backend in ``--weight-transfer-config``."""


@dataclass
class Served(WeightTransferInitInfo):
    """The digest of the checkpoint that vLLM was started with, and whether its weights are frozen."""

    digest: str
    frozen: bool = False


@dataclass
class Update(WeightTransferUpdateInfo):
    """A new version: a patch of the current weights, or a whole checkpoint."""

    digest: str
    patch: str | None = None
    folder: str | None = None


class EtudeTransfer(WeightTransferEngine[Served, Update]):
    """vLLM weight-transfer backend that reads weights from files and verifies them before they are loaded."""

    init_info_cls = Served
    update_info_cls = Update
    supports_draft_weight_update = False

    _weights: RuntimeWeights | None = None
    _frozen = ""
    """The digest of frozen weights; empty if they can be updated."""

    def init_transfer_engine(self, init_info: Served) -> None:
        """Load the served checkpoint once more and, if parameters are accessible, learn their layout.

        Raises :class:`~etude.errors.DamagedError` if that changes a parameter: then vLLM loads differently while it
        runs than at its start (as it silently did: vllm-project/vllm#42821, #48312), and no update could be trusted.
        Frozen weights, below adapters, are only verified.
        """
        copy = _read_copy(self.model_config.model, init_info.digest)
        if init_info.frozen:
            self._frozen = copy.digest
            return
        is_open = self.device.type != "cpu" and self.parallel_config.world_size == 1
        runtime = dict(self.model.named_parameters()) if is_open else None
        before = {name: _bits(parameter) for name, parameter in self.model.named_parameters()}
        self._weights = RuntimeWeights(copy, self._load, runtime)
        for name, parameter in self.model.named_parameters():
            if not torch.equal(_bits(parameter), before[name]):
                self._weights = None
                raise DamagedError(f"loading the served checkpoint again changed {name!r}: this vLLM cannot be updated")

    def start_weight_update(self) -> None:
        """Do nothing: :meth:`_load` begins and ends a load, and a patch needs none."""

    def finish_weight_update(self) -> None:
        """Do nothing, for the same reason."""

    def receive_weights(self, update_info: Update) -> None:
        """Move to a new version. A wrong file raises and changes nothing."""
        if update_info.patch is not None:
            self.weights.follow(read_patch(Path(update_info.patch)))
        elif update_info.folder is not None:
            self.weights.replace(_read_copy(update_info.folder, update_info.digest))
        else:
            raise UserError("an update needs a patch or a folder")

    def shutdown(self) -> None:
        """Do nothing: no resource is held open."""

    @property
    def weights(self) -> RuntimeWeights:
        """The weights being served; raises before :meth:`init_transfer_engine`."""
        if self._weights is None:
            raise UserError("no checkpoint was named yet: call init_weight_transfer_engine first")
        return self._weights

    def digest(self) -> str:
        """The state digest of the weights, computed again unless they are frozen."""
        return self._frozen or self.weights.digest()

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a whole checkpoint as vLLM's own backends do: layer by layer, into the memory in use."""
        if self.device.type == "cpu":
            self._forget_kernels()
        expected = {name for name, _ in self.model.named_parameters()}
        tied = _tied_modules(self.model)  # a reload temporarily separates parameters, including tied ones
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        for module in tied:
            # Nothing was loaded into it, so vLLM keeps the old weights in its CPU kernels' layout.
            method = module.quant_method
            assert isinstance(method, QuantizeMethodBase), f"a tied {type(module).__name__} has no way to be set up"
            method.process_weights_after_loading(module)
        if loaded is not None and (missing := expected - set(loaded)):
            raise DamagedError(f"vLLM was given no weights for {min(missing)!r}: the checkpoint is of another model")

    def _forget_kernels(self) -> None:
        """Make vLLM set up its expert layers again, as at its start.

        If a kernel exists, 0.32 treats a load as a weight update and skips the hook in which its CPU experts pack their
        matrices: plain matrices would overwrite packed ones, and every expert would compute nonsense.
        """
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, FusedMoEMethodBase):
                method.moe_kernel = None


class EtudeWorker:
    """Methods that vLLM adds to its worker, to be called by ``/collective_rpc``."""

    weight_transfer_engine: EtudeTransfer

    def etude_digest(self) -> dict[str, str]:
        """The state digest of the weights in this worker."""
        return {"digest": self.weight_transfer_engine.digest()}


def _tied_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose weight is another one's, such as a head that shares the embedding's."""
    seen: set[int] = set()
    tied = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.numel():
            if id(weight) in seen:
                tied.append(module)
            seen.add(id(weight))
    return tied


def _bits(parameter: Tensor) -> Tensor:
    """[bytes] a copy on the host, compared as bytes because small float types have no arithmetic."""
    return parameter.detach().cpu().clone().contiguous().flatten().view(torch.uint8)


def _read_copy(folder: str, digest: str) -> HostCopy:
    return HostCopy(read_checkpoint(Path(folder)), digest)


WeightTransferEngineFactory.register_engine(BACKEND, EtudeTransfer)
