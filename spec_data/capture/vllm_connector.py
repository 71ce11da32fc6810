"""vLLM's connector of hidden states, for `generate --backend served`; it runs inside vLLM.

    vllm serve MODEL --speculative-config '{"method": "extract_hidden_states", ...}'
        --kv-transfer-config '{"kv_connector": "ServedStates", ...}'     (`launch_options`)

vLLM's own connector writes a file per request of anybody, and needs CUDA. This one hands over the
states of those requests alone that ask for them, from memory over HTTP (`state_server`), also from
a CPU. vLLM keeps the states of all requests in its cache while they run.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllms

from spec_data.capture.state_server import (
    ASKED,
    EVERY,
    HOST,
    HOSTS,
    IDS,
    KEY,
    MOST_BYTES,
    PORT,
    STATES,
    StateServer,
)

_DONE = SimpleNamespace(query=lambda: True)  # stands for the event of a finished copy


class ServedStates(vllms.ExampleHiddenStatesConnector):
    """States of finished requests, kept in the first worker until they are fetched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_lock = False  # there are no files
        self._given = self._kv_transfer_config.get_from_extra_config
        self._server: StateServer | None = None

    # -- the scheduler ----------------------------------------------------------------------------

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that asked for its states until they are copied."""
        if not ((request.kv_transfer_params or {}).get(ASKED) or self._given(EVERY, False)):
            self._request_filenames.pop(request.request_id, None)
            return False, None
        kept, answer = super().request_finished(request, block_ids)
        if answer is not None:
            answer = {KEY: request.request_id, PORT: self._given(PORT, 0)}
        return kept, answer

    # -- the worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            host, port = str(self._given(HOST, "127.0.0.1")), int(self._given(PORT, 0))
            most, hosts = int(self._given(MOST_BYTES, 4 << 30)), self._given(HOSTS, ())
            self._server = StateServer(host, port, most, hosts=hosts)

    def _submit_async_write(self, pending: Any) -> None:
        """Copy the states of a finished request; its blocks are free after that."""
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        if self._kv_cache.is_cuda:  # vLLM's streams; its thread then calls `_write_tensors`
            pending.filename = f"{self._storage_path}/{pending.req_id}"
            super()._submit_async_write(pending)
            return
        within = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + within).flatten()
        states = vllms.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        self._req_copy_events[pending.req_id] = _DONE
        self._keep(pending.req_id, {STATES: states, IDS: pending.token_ids})

    def _write_tensors(
        self, tensors: dict[str, torch.Tensor], event: Any, filename: str, _lock: int | None
    ) -> None:
        event.synchronize()
        self._keep(filename.rpartition("/")[2], tensors)

    def _keep(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        assert self._server is not None
        self._server.put(key, tensors)
