"""What hostile clients and servers cost: threads, memory, edited answers; and what states cost.

    python scripts/bench/servers.py            # of this tree
    cd OTHER && PYTHONPATH=. python /here/scripts/bench/servers.py   # of another one, also an older

Every figure is that of a process of its own.
"""

import argparse
import importlib.util
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load, save

from spec_data import RemoteTarget, Target, TargetServer
from spec_data.capture.state_server import StateServer, fetch_states
from spec_data.shards.errors import SpecDataError

LAYERS, VOCABULARY = (0, 1, 2), torch.arange(1, 64, 3)
IDS = torch.arange(24).view(2, 12) % 60
MASK = torch.ones_like(IDS)
MASK[:, 9:] = 0
LARGE = 1 << 30


def target() -> Target:
    """A tiny random target."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes, **heads)
    return Target(transformers.LlamaForCausalLM(config).eval(), LAYERS)


def of_status(name: str) -> int:
    """A number of /proc/self/status: threads, or kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def alone(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a measure finds in a process of its own."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(reading)
        with os.fdopen(writing, "w") as stream:
            json.dump(measure(), stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        found = stream.read()
    os.waitpid(child, 0)
    return json.loads(found)


@contextmanager
def serving() -> Iterator[TargetServer]:
    """A server of a tiny target."""
    with TargetServer(target(), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def head_of(server: Any, path: str, size: int) -> bytes:
    """The head of a request that may ask."""
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port_of(server)}"]
    lines += [
        f"Content-Length: {size}",
        "Spec-Protocol: 2",
        f"Authorization: Bearer {getattr(server, 'token', None)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def port_of(server: Any) -> int:
    """The port of a server of any release."""
    return int(getattr(server, "port", 0) or server.server_address[1])


def idle() -> dict[str, Any]:
    """Threads while 400 clients say nothing, and whether a batch is still answered."""
    with serving() as server:
        port, before = port_of(server), of_status("Threads")
        socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(400)]
        time.sleep(2.0)
        during = of_status("Threads")
        start = time.perf_counter()
        RemoteTarget(server.url, LAYERS).generate_batch(IDS, MASK, MASK)
        seconds = time.perf_counter() - start
        for sock in socks:
            sock.close()
    return {"threads": [before, during], "batch_seconds": round(seconds, 2)}


def large_body() -> dict[str, Any]:
    """MB that a request of 1 GiB adds to the largest size of the server."""
    with serving() as server:
        port, before = port_of(server), of_status("VmHWM")
        with socket.create_connection(("127.0.0.1", port)) as sock, suppress(OSError):
            sock.sendall(head_of(server, "/batch/final-hidden", LARGE))
            for _ in range(LARGE >> 20):
                sock.sendall(bytes(1 << 20))
            sock.settimeout(60)
            sock.recv(100)
        return {"MB": (of_status("VmHWM") - before) // 1000}


class Between:
    """A server between a client and a `TargetServer`, whose answers to POST it changes."""

    def __init__(self, server: Any) -> None:
        self.port, self.edit = port_of(server), lambda sent: [sent]
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        """Answer one request after the other."""
        while True:
            sock, _ = self.listening.accept()
            with sock, suppress(OSError):
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += sock.recv(1 << 16)
                lines = asked.lower().split(b"\r\n")
                size = sum(int(x[15:]) for x in lines if x.startswith(b"content-length:"))
                while len(asked) < asked.index(b"\r\n\r\n") + 4 + size:
                    asked += sock.recv(1 << 16)
                with socket.create_connection(("127.0.0.1", self.port)) as there:
                    there.sendall(asked)
                    found = b""
                    while piece := there.recv(1 << 16):
                        found += piece
                for piece in self.edit(found) if asked.startswith(b"POST") else [found]:
                    sock.sendall(piece)


def asked_of(url: str, server: Any, supervision: str = "final-hidden") -> Any:
    """A batch of a server at `url`."""
    given: dict[str, Any] = {"supervision": supervision}
    if supervision == "target-probs":
        given["draft_vocabulary"] = VOCABULARY
    if token := getattr(server, "token", None):  # of releases that have one
        given["token"] = token
    return RemoteTarget(url, LAYERS, **given).generate_batch(IDS, MASK, MASK, [[5, 4], [9]])


def large_answer() -> dict[str, Any]:
    """MB that an answer of 1 GiB adds to the largest size of the client."""
    entry = {"hidden.L0": {"dtype": "F32", "shape": [LARGE // 4], "data_offsets": [0, LARGE]}}
    text = json.dumps(entry).encode()
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {8 + len(text) + LARGE}", "Spec-Protocol: 2"]
    start = "\r\n".join([*lines, "", ""]).encode() + len(text).to_bytes(8, "little") + text

    def pieces(_sent: bytes) -> Iterator[bytes]:
        yield start
        for _ in range(LARGE >> 20):
            yield bytes(1 << 20)

    with serving() as server:
        between = Between(server)
        between.edit = pieces
        before = of_status("VmHWM")
        with suppress(SpecDataError, TypeError):  # the latter: of older releases
            asked_of(between.url, server)
        return {"MB": (of_status("VmHWM") - before) // 1000}


def edited() -> dict[str, Any]:
    """How many edited answers become a batch; each is whole, with the checksum of what it says."""
    file = Path(__file__).parents[2] / "tests" / "faults" / "answers.py"
    spec = importlib.util.spec_from_file_location("answers", file)
    assert spec is not None and spec.loader is not None
    answers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answers)
    found = Counter[str]()
    with serving() as server:
        between = Between(server)
        for supervision in ("final-hidden", "logits", "target-probs"):
            own = asked_of(between.url, server, supervision)
            for edit in answers.edits(own.plain() | own.hidden).values():

                def forge(sent: bytes, edit: Any = edit) -> list[bytes]:
                    table = load(sent.partition(b"\r\n\r\n")[2])
                    edit(table)
                    return [page(save(table))]

                between.edit = forge
                try:
                    asked_of(between.url, server, supervision)
                except SpecDataError:
                    found["refused"] += 1
                except Exception as error:
                    found[f"raw {type(error).__name__}"] += 1
                else:
                    found["made a batch"] += 1
                between.edit = lambda sent: [sent]
    return dict(found)


def page(body: bytes) -> bytes:
    """An answer with the checksum of its body."""
    import xxhash

    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Spec-Protocol: 2"]
    lines.append(f"Spec-Checksum: {xxhash.xxh3_128(body).hexdigest()}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def states() -> dict[str, Any]:
    """Documents of 512 tokens, 4 x 2,048 values of bfloat16 each, from another process."""
    documents, at_once = 256, 16
    server = StateServer("127.0.0.1", 0, 4 << 30)
    values = torch.randn(512, 4, 2048).bfloat16()
    for number in range(documents):
        server.put(f"r{number}", {"hidden_states": values, "token_ids": torch.arange(512)})

    def fetch() -> dict[str, Any]:
        def one(number: int) -> int:
            return fetch_states("127.0.0.1", port_of(server), f"r{number}")["hidden_states"].numel()

        start, busy = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(at_once) as pool:
            size = 2 * sum(pool.map(one, range(documents)))
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        return {
            "MB_per_second": round(size / 1e6 / seconds),
            "client_seconds": busy,
            "GB": size / 1e9,
        }

    busy = time.process_time()
    found = alone(fetch)
    gigabytes = found.pop("GB")
    for name, seconds in (
        ("client_cpu_seconds_per_GB", found.pop("client_seconds")),
        ("server_cpu_seconds_per_GB", time.process_time() - busy),
    ):
        found[name] = round(seconds / gigabytes, 2)
    server.close()
    return found


MEASURES = {
    "400 idle connections": idle, "a body of 1 GiB": large_body, "an answer of 1 GiB": large_answer,
    "edited answers": edited, "states": states,
}  # fmt: skip


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=MEASURES)
    only = parser.parse_args().only
    for name in [only] if only else MEASURES:
        print(f"{name}: {json.dumps(alone(MEASURES[name]))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
