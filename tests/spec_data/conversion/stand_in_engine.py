"""A transformers model that answers as a vLLM with our connector does, with an engine's habits.

Prompts are computed in chunks with a cache of keys and values; the states of whole blocks are kept,
and a later prompt that begins with them takes them from there; requests are answered out of order.
`lose` plants what an engine could get wrong.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from spec_data.capture.hooks import decoder_layers
from spec_data.capture.state_server import ASKED, IDS, KEY, PORT, STATES, StateServer

BLOCK, CHUNK = 8, 12  # tokens that are cached together, and tokens of a forward


class Listening(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128


class StandIn:
    """An engine at `url` that hands over the outputs of `layers`, and of the last block."""

    def __init__(self, target, layers=(1, 2, 4), lose=""):
        self.model = AutoModelForCausalLM.from_pretrained(target).eval()
        self.blocks, self.layers, self.lose = decoder_layers(self.model), layers, lose
        self.lock, self.cached, self.requests, self.hits = threading.Lock(), {}, 0, 0
        self.busy = []  # statuses of the next answers
        self.keys = set()
        self.states = StateServer("127.0.0.1", 0, 1 << 30)
        self.http = Listening(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
        self.states.close()

    @torch.no_grad()
    def run(self, ids):
        """States [T, n + 1, H] of int64 [T], and the token after them."""
        wanted, found = [*self.layers, len(self.blocks) - 1], {}

        def keep(k):
            def hook(_module, _args, output):
                states = output[0] if isinstance(output, tuple) else output
                found.setdefault(k, []).append(states[0].clone())

            return hook

        hooks = [self.blocks[k].register_forward_hook(keep(k)) for k in set(wanted)]
        keys = DynamicCache(config=self.model.config)
        for first in range(0, len(ids), CHUNK):  # chunked prefill
            logits = self.model(ids[None, first : first + CHUNK], past_key_values=keys).logits
        for hook in hooks:
            hook.remove()
        states = torch.stack([torch.cat(found[k]) for k in wanted], 1)
        whole = len(ids) - len(ids) % BLOCK
        for last in range(BLOCK, whole + 1, BLOCK):
            key = tuple(ids[:last].tolist())
            if key in self.cached:  # prefix caching
                self.hits += 1
                states[last - BLOCK : last] = self.cached[key]
                if self.lose == "cached prefix":
                    states[last - BLOCK : last] = 0
            self.cached[key] = states[last - BLOCK : last].clone()
        if self.lose == "first chunk" and len(ids) > CHUNK:
            states[:CHUNK] = states[-CHUNK:].clone()
        if self.lose == "shift":
            states = states.roll(1, 0)
        if self.lose == "norm":
            states[:, -1] = self.model.model.norm(states[:, -1])
        if self.lose == "nan":
            states[1, 0, 0] = torch.nan
        return states, int(logits[0, -1].argmax())

    def answer(self, asked):
        assert asked.get("kv_transfer_params", {ASKED: True})[ASKED] and asked["max_tokens"] == 1
        prompt = asked["prompt"]
        with self.lock:
            self.requests += 1
            number = self.requests
            states, token = self.run(torch.tensor(prompt))
        ids = torch.tensor(prompt)
        if self.lose == "tokens":
            ids, states = ids[BLOCK:], states[BLOCK:]
        if self.lose == "another request":
            ids = ids.flip(0)
        if self.lose == "head":
            token = (token + 1) % 8
        given = {KEY: f"request-{number}", PORT: self.states.port}
        if self.lose == "connector":
            given = None
        late = threading.Timer(
            0.002 * (number % 5),
            lambda: self.states.put(f"request-{number}", {IDS: ids, STATES: states}),
        )  # after the answer, and out of order
        late.start()
        choice = {"token_ids": [token], "prompt_token_ids": prompt}
        return {"choices": [choice], "kv_transfer_params": given}

    def _handler(self):
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                pages = {"/version": {"version": "0"}, "/v1/models": {"data": [{"id": "tiny"}]}}
                self.send(pages[self.path])

            def do_POST(self):
                length = int(self.headers["Content-Length"])
                asked = json.loads(self.rfile.read(length))
                engine.keys.add(self.headers["Authorization"])
                if engine.busy:
                    self.send({}, engine.busy.pop())
                elif engine.lose == "form":
                    self.send({"choices": None, "kv_transfer_params": {PORT: 1}})
                else:
                    self.send(engine.answer(asked))

            def send(self, page, code=200):
                body = json.dumps(page).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args):
                pass

        return Handler
