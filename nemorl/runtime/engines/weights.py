"""How vLLM's workers take over new weights:

`WeightExtension`, which vLLM mixes into its worker class.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nemorl.runtime.engines.weight_buckets import Payload

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For the environment of an engine's own process where there is no GPU. An update takes memory for
a layer and gives it back, layer after layer; in pages of 4 KiB that takes the kernel longer than
all the rest.
"""


class WeightExtension:
    """Three verbs for `collective_rpc`, for an engine made with
    `worker_extension_cls="nemorl.runtime.engines.weights.WeightExtension"`.

    Between `nemorl_begin` and a `nemorl_finish` that succeeds the engine's weights are no model's:
    it must not generate. An update may be given up at any point and begun anew. It is vLLM's
    layerwise reload, in which a layer is processed (repacked, quantised, split) as soon as it is
    complete.
    """

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _nemorl_tied: list[Any]

    def nemorl_begin(self) -> None:
        """Make every layer wait for new weights.

        What an update that was given up has left behind is forgotten.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import (
            get_layerwise_info,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        if not hasattr(self, "_nemorl_tied"):  # to be seen only while no update is under way
            self._nemorl_tied = _tied_layers(model)
        self._nemorl_updating = False
        with set_current_vllm_config(self.vllm_config):
            for layer in model.modules():
                info = get_layerwise_info(layer)
                info.loaded_weights.clear()
                info.load_numel = 0
            for part in self._nemorl_parts():
                initialize_layerwise_reload(part)
        for layer in model.modules():
            if isinstance(layer, VocabParallelEmbedding) and layer.weight.is_meta:
                # Without the rows of padding, which nobody sends: else vLLM would wait for them
                # until the end, and keep all that came so long.
                layer.weight.weight_loader_numel = (
                    layer.num_org_embeddings_per_partition * layer.weight.shape[1]
                )
        self._nemorl_updating = True

    def nemorl_load(self, payload: Payload) -> None:
        """Load a part of the weights; its memory may be used for something else once this has
        returned, unless it says that it lasts.
        """
        from vllm.config import set_current_vllm_config

        if not getattr(self, "_nemorl_updating", False):
            raise RuntimeError(
                "weights came although no update is under way, or after one of its parts could not"
                " be loaded: begin it anew"
            )
        self._nemorl_updating = False
        with set_current_vllm_config(self.vllm_config):
            if (
                payload.transfer is not None
            ):  # vLLM's own transfer engines fetch the weights themselves
                kind, info = payload.transfer
                engine = self.weight_transfer_engine
                if kind == "init":
                    engine.init_transfer_engine(engine.parse_init_info(info))
                else:
                    engine.update_weights(info)
            else:
                weights = payload.tensors()
                self.model_runner.get_model().load_weights(weights)
                if not payload.lasts:
                    _keep_pending(
                        self.model_runner.get_model(),
                        {tensor.untyped_storage().data_ptr() for _, tensor in weights},
                    )
        self._nemorl_updating = True

    def nemorl_finish(self) -> None:
        """Raises RuntimeError that lists the layers for which not all weights have come; then the
        update is still under way.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not getattr(self, "_nemorl_updating", False):
            raise RuntimeError(
                "there is no update to finish, or one of its parts could not be loaded: begin it"
                " anew"
            )
        if incomplete := [
            text
            for part in self._nemorl_parts()
            for text in _incomplete_layers(self.model_runner.get_model(), part)
        ]:
            raise RuntimeError(
                "every weight of the engine must be sent, but these have not come whole:"
                f" {', '.join(incomplete)}"
            )
        self._nemorl_updating = False
        with set_current_vllm_config(self.vllm_config):
            for part in self._nemorl_parts():
                finalize_layerwise_reload(part, self.vllm_config.model_config)
            for layer in self._nemorl_tied:
                # The parameter is the embedding's, and new; but on CPUs the layer computes with a
                # repacked copy, which is still that of the old one.
                layer.quant_method.process_weights_after_loading(layer)

    def _nemorl_parts(self) -> list[nn.Module]:
        """The parts of the model to reload: all but tied layers, which own nothing that could be
        sent.
        """
        return [
            part
            for part in self.model_runner.get_model().children()
            if part not in self._nemorl_tied
        ]


def _tied_layers(model: nn.Module) -> list[Any]:
    """Layers all of whose parameters belong to an earlier one, as those of an output layer that is
    tied to the embedding.
    """
    seen: set[int] = set()
    tied: list[Any] = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own and own <= seen:
            tied.append(layer)
        seen |= own
    return tied


def _incomplete_layers(model: nn.Module, part: nn.Module) -> list[str]:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    names, found = {layer: name for name, layer in model.named_modules()}, []
    for layer in part.modules():
        info = get_layerwise_info(layer)
        if (
            info.can_load()
            and any(True for _ in layer.parameters(recurse=False))
            and not is_deferred_attention_layer(layer)
        ):
            found.append(f"{names[layer]} ({info.load_numel} of {info.load_numel_total} numbers)")
    return found


def _keep_pending(model: nn.Module, borrowed: set[int]) -> None:
    """Copy what vLLM keeps of these storages until the rest of a layer comes."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            for name, value in call.arguments.items():
                if (
                    isinstance(value, Tensor)
                    and value.device.type != "meta"
                    and value.untyped_storage().data_ptr() in borrowed
                ):
                    call.arguments[name] = value.clone()
