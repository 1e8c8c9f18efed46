"""A server that speaks SGLang's documented HTTP interface over an engine of the tests, in threads of this process."""

from __future__ import annotations

import base64
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

from support.conforming_engine import ConformingEngine
from torchrl_moe.testing.conformance import Answer, Sampling


class Refused(Exception):
    """Answered with 400."""


@dataclass
class FakeSGLang:
    """What the endpoints do.

    Args:
        engine: makes the answers.
        is_old: as older servers, it knows no ``routed_experts_start_len``, gives one ``weight_version`` for an answer,
            and has ``/get_weight_version`` in place of ``/model_info``.
    """

    engine: ConformingEngine
    is_old: bool = False
    words: list[str] = field(default_factory=lambda: ["default"])
    asked: list[tuple[str, Any]] = field(default_factory=list)
    mode: str = ""

    def get(self, path: str) -> Any:
        if path != ("/get_weight_version" if self.is_old else "/model_info"):
            raise FileNotFoundError(path)
        return {"weight_version": self.words[-1]}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append((path, body))
        if path == "/generate":
            return self.generate(body)
        if path == "/abort_request":
            self.engine.abort([body["rid"]])
            return None
        if path == "/pause_generation":
            self.mode = body.get("mode", "abort")
            self.engine.pause(self.mode)
            if self.mode == "abort":
                self.engine.abort(list(self.engine.running))
            return {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            self.engine.go_on()
            return {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/update_weights_from_disk":
            return self.update(body)
        raise FileNotFoundError(path)

    def update(self, body: dict[str, Any]) -> Any:
        if body["flush_cache"] and self.mode == "in_place" and self.engine.running:
            return {"success": False, "message": "Flush cache failed: requests are running."}
        self.engine.update_weights(AutoModelForCausalLM.from_pretrained(body["model_path"], dtype="float32"))
        self.words.append(body["weight_version"])
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def generate(self, body: dict[str, Any]) -> Any:
        given = dict(body["sampling_params"])
        if not given.pop("ignore_eos"):
            raise Refused("the fake server knows no end of a sequence")
        given["max_tokens"] = given.pop("max_new_tokens")
        given["top_k"] = max(0, given["top_k"])
        start = body["routed_experts_start_len"]
        if not 0 <= start <= len(body["input_ids"]):
            raise Refused(f"routed_experts_start_len={start} is not in [0, prompt_tokens]")
        if body.get("return_sampling_mask") and not given["top_k"]:
            raise Refused("return_sampling_mask needs a finite top_k")
        (found,) = self.engine.generate([body["input_ids"]], Sampling(**given), [body.get("rid", "unnamed")])
        answers = [self.answer(body, one, start) for one in found]
        return answers if given["n"] > 1 else answers[0]

    def answer(self, body: dict[str, Any], found: Answer, start: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "finish_reason": {"type": found.finish_reason},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(found.token_ids),
            "cached_tokens": found.num_cached_tokens,
            "weight_version": self.words[-1],
            "output_token_logprobs": [
                [log_prob, int(token), None] for log_prob, token in zip(found.native, found.token_ids, strict=True)
            ],
        }
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = [float(value) for value in found.log_probs]
        if not self.is_old:
            made_by = found.versions.tolist()
            bounds = [0, *(i for i in range(1, len(made_by)) if made_by[i] != made_by[i - 1]), len(made_by)]
            meta["weight_versions"] = [
                {"version": self.words[made_by[first]], "start": first, "end": end}
                for first, end in itertools.pairwise(bounds)
                if end > first
            ]
        if body["return_routed_experts"] and found.routed_experts is not None:
            rows = found.routed_experts[0 if self.is_old else start :]
            rows = np.where(rows < 0, 0, rows)  # it has zeros where there is no router
            meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        return {"text": "", "output_ids": found.token_ids.tolist(), "meta_info": meta}


@contextmanager
def serving(fake: FakeSGLang) -> Iterator[str]:
    """The URL of a server."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads it."""

        def do_GET(self) -> None:
            self.reply(lambda: fake.get(self.path))

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.reply(lambda: fake.post(self.path, json.loads(text)))

        def reply(self, make: Any) -> None:
            try:
                status, found = 200, make()
            except (Refused, json.JSONDecodeError) as error:
                status, found = 400, {"error": {"message": str(error)}}
            except FileNotFoundError:
                status, found = 404, {"detail": "Not Found"}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"" if found is None else json.dumps(found).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
