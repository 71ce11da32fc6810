"""The hand-over of a running vLLM as a back end of `hs-connectors`, by which speculators trains.

    import spec_data.capture.hs_backend   # then --hidden-states-backend spec-data is a choice

vLLM and the trainer then need no disk in common. speculators' requests do not say that they want
states, so vLLM is started to hand over those of every request.
"""

import argparse
from typing import Any

from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from torch import Tensor

from spec_data.capture.state_server import EVERY, HOST, KEY, PORT, fetch_states, transfer_config


class ServedTransfer(HiddenStatesTransfer):
    """Fetches the states of a request from the connector at `host`; nothing is cached."""

    def __init__(self, host: str) -> None:
        self.host = host

    def get_cached(self, file_idx: int) -> dict[str, Tensor] | None:
        return None

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return `hidden_states` [T, n, H] and `token_ids` [T], once.

        Raises:
            OSError: they are not there.
        """
        return fetch_states(self.host, int(hs_transfer_params[PORT]), hs_transfer_params[KEY])


@HiddenStatesBackend.register("spec-data")
class ServedStatesBackend(HiddenStatesBackend):
    """What speculators' scripts ask of a back end."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--states-host", default="127.0.0.1", help="Machine of vLLM.")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--states-host", default="127.0.0.1", help="Address to listen on.")
        parser.add_argument("--states-port", type=int, default=8001, help="Port to listen on.")

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> ServedTransfer:
        return ServedTransfer(args.states_host)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        return transfer_config(args.states_port, **{HOST: args.states_host, EVERY: True})
