"""Our hand-over through the registry of hs-connectors, asked by speculators' own client."""

import argparse

import pytest
import torch
from safetensors.torch import save_file

from spec_data.capture.state_server import IDS, STATES
from tests.engines.engine_tools import needs
from tests.spec_data.conversion.layouts import tiny_target
from tests.spec_data.conversion.stand_in_engine import StandIn

pytestmark = needs("hs_connectors")


def test_speculators_client_fetches_what_an_engine_hands_over(tmp_path):
    import openai
    from hs_connectors import HiddenStatesBackend
    from speculators.data_generation.offline import check_hidden_states
    from speculators.data_generation.vllm_client import generate_hidden_states

    import spec_data.capture.hs_backend  # noqa: F401, it registers

    backend = HiddenStatesBackend.registry["spec-data"]
    parser = argparse.ArgumentParser()
    backend.add_train_args(parser)
    transfer = backend.from_train_args(parser.parse_args([]), str(tmp_path))
    ids = list(range(5, 40))
    with StandIn(tiny_target(tmp_path / "target")) as engine:
        client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none")
        handle, where = generate_hidden_states(client, "tiny", {"input_ids": ids})
        table = transfer.get_generated(where)
        expected, _ = engine.run(torch.tensor(ids))
    check_hidden_states(table, ids)
    assert handle == "request-1" and torch.equal(table[STATES], expected)
    assert transfer.get_cached(0) is None and transfer.delete(handle) is None
    launch = argparse.ArgumentParser()
    backend.add_launch_args(launch)
    config = backend.build_kv_transfer_config(launch.parse_args(["--states-port", "9000"]))
    assert config["kv_connector_module_path"] == "spec_data.capture.vllm_connector"
    assert config["kv_connector_extra_config"]["states_port"] == 9000
    assert config["kv_connector_extra_config"]["every_request"] is True


@pytest.mark.parametrize("fp8", [False, True])
def test_files_of_other_connectors_are_read_and_deleted(tmp_path, fp8):
    """As the connectors of vLLM and of hs-connectors leave them on a shared disk."""
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8

    from spec_data.capture.backend import BackendOptions, open_backend

    target = tiny_target(tmp_path / "target")
    with StandIn(target) as engine:
        answer, number = engine.answer, iter(range(1000))

        def to_file(asked):
            reply = answer(asked)
            ids = torch.tensor(asked["prompt"])
            with engine.lock:
                states, _ = engine.run(ids)
            table = {STATES: states, IDS: ids}
            if fp8:
                table[STATES], table["hidden_states_scales"] = quantize_tensor_to_fp8(states)
            file = tmp_path / f"{next(number)}.safetensors"
            save_file(table, file)
            return reply | {"kv_transfer_params": {"hidden_states_path": str(file)}}

        engine.answer = to_file
        backend = open_backend(
            "served",
            BackendOptions(
                path=target, layers=(1, 4), device="cpu", server=engine.url, states_dir=tmp_path
            ),
        )
        documents = [torch.arange(5, 5 + n) for n in (20, 33)]
        assert backend.prove(documents, 64).noise < (0.1 if fp8 else 1e-4)
        assert max(backend.describe()["state_proof"].values()) < (0.1 if fp8 else 1e-4)
        backend.close()
    assert not list(tmp_path.glob("*.safetensors"))
