"""The adapter of SGLang's HTTP server: ``/generate`` and the endpoints of weight updates.

Written from SGLang's documentation and request classes of 2026, and tested against a mock server with that interface.
**It has never been run against SGLang itself**: its CPU build could not be installed where this was written. Start the
server with ``--enable-return-routed-experts``.
"""

from __future__ import annotations

import base64
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from torchrl_moe._errors import EngineError
from torchrl_moe.data import UNSET_EXPERT, RoutingLayout
from torchrl_moe.testing.conformance.adapter import Answer, NotOffered, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SGLangAdapter"]

MASKED = "output_token_sampling_logprobs"  # of the truncated distribution


class SGLangAdapter:
    """An SGLang server, as the checks use it.

    An aborted request continues as a trainer would do it: prompt and tokens so far become a new prompt, and only its
    new rows are requested (``routed_experts_start_len``).

    ``output_token_logprobs`` are taken after temperature and penalties and before truncation; with ``sampling_mask``
    the server is asked for those of the truncated distribution, which it gives where ``top_k`` is set.

    Args:
        url: of the server, such as ``"http://localhost:30000"``.
        layout: of the model's routers, because the server sends rows flattened.
        pause: what happens to requests in flight in :meth:`update_weights`: ``"retract"`` prefills them again with the
            new weights, ``"in_place"`` keeps their cache, ``"abort"`` aborts them. Choose the mode that training uses.
        sampling_mask: whether to ask for ``return_sampling_mask``.
        headers: of every request, for example for authorisation.
        timeout_seconds: of every request.
    """

    def __init__(
        self,
        url: str,
        layout: RoutingLayout,
        *,
        pause: Literal["retract", "in_place", "abort"] = "retract",
        sampling_mask: bool = False,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 120.0,
    ) -> None:
        self.name = f"SGLang({url})"
        self._url = url.rstrip("/")
        self._layout = layout
        self._pause = pause
        self._sampling_mask = sampling_mask
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout = timeout_seconds
        self._version = 0

    # -- the adapter's methods --------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[list[Answer]]:
        """Answer prompts, all at the same time; see :class:`~torchrl_moe.testing.conformance.adapter.EngineAdapter`."""
        ids = [None] * len(prompts) if request_ids is None else list(request_ids)
        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            return list(pool.map(lambda prompt, name: self._generate(prompt, sampling, name), prompts, ids))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cut requests short."""
        for name in request_ids:
            self._post("/abort_request", {"rid": name})

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        """Continue an answer in a new request; what was delivered stays unchanged."""
        had = [int(token) for token in answer.token_ids]
        rest = replace(sampling, max_tokens=sampling.max_tokens - len(had), n=1)
        (second,) = self._generate([*prompt, *had], rest, None, known=len(prompt) + len(had) - 1)
        parts = (answer, second)
        return replace(
            second,
            token_ids=_joined(parts, "token_ids"),
            log_probs=_joined(parts, "log_probs"),
            routed_experts=_joined(parts, "routed_experts"),
            versions=_joined(parts, "versions"),
        )

    def update_weights(self, model: PreTrainedModel) -> None:
        """Save a model and let the server load it while generation is paused.

        It is saved in a temporary folder of this machine, which the server must be able to read.
        """
        self._version = max(self._version, self.weights_version()) + 1
        with tempfile.TemporaryDirectory(prefix="torchrl_moe-sglang-") as folder:
            model.save_pretrained(folder)
            self._post("/pause_generation", {"mode": self._pause})
            try:
                self._post(
                    "/update_weights_from_disk",
                    {
                        "model_path": folder,
                        "weight_version": str(self._version),
                        "flush_cache": self._pause != "in_place",  # running requests keep theirs
                    },
                )
            finally:
                self._post("/continue_generation", {})

    def weights_version(self) -> int:
        """Return the server's version; 0 for its initial version, which is not a number."""
        for path in ("/model_info", "/get_weight_version"):  # the second one is for older servers
            try:
                found = self._send(path, None)
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
                continue
            if "weight_version" in found:
                return _number(found["weight_version"])
        raise NotOffered("neither /model_info nor /get_weight_version of this server names a weight_version")

    # -- requests ---------------------------------------------------------------------------------------------------

    def _generate(self, prompt: Sequence[int], sampling: Sampling, name: str | None, known: int = 0) -> list[Answer]:
        masks = self._sampling_mask and bool(sampling.top_k)
        body = {
            "input_ids": list(prompt),
            "sampling_params": _params(sampling),
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_start_len": known,
            **({"return_sampling_mask": True} if masks else {}),
            **({} if name is None else {"rid": name}),
        }
        found = self._post("/generate", body)
        return [self._answer(len(prompt), one, known, masks) for one in (found if isinstance(found, list) else [found])]

    def _answer(self, prompt: int, found: Mapping[str, Any], known: int, masks: bool) -> Answer:
        meta = found["meta_info"]
        scored = meta.get("output_token_logprobs") or []
        tokens = [int(entry[1]) for entry in scored]
        log_probs = [entry[0] for entry in scored]
        if masks and tokens:
            if MASKED not in meta:
                raise NotOffered(f"the server gives no {MASKED}: pass sampling_mask=False")
            log_probs = meta[MASKED]
        versions = _versions(meta, len(tokens))
        return Answer(
            token_ids=np.array(tokens, np.int64),
            log_probs=np.array(log_probs, np.float32),
            routed_experts=self._rows(meta.get("routed_experts"), prompt + len(tokens), known),
            versions=None if versions is None else np.array(versions, np.int64),
            finish_reason=(meta.get("finish_reason") or {}).get("type", "abort"),
            num_cached_tokens=meta.get("cached_tokens"),
        )

    def _rows(self, text: str | None, tokens: int, known: int) -> NDArray[np.integer[Any]] | None:
        """Return rows ``[tokens - 1 - known, L, K]``; servers without a start position return those of all tokens."""
        if text is None:
            return None
        layers, top_k = self._layout.num_layers, self._layout.top_k
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        except ValueError as error:
            raise EngineError(f"routed_experts is no base64 of int32: {error}") from error
        if len(flat) % (layers * top_k):
            raise EngineError(
                f"routed_experts has {len(flat)} entries, no multiple of {layers} layers times {top_k} experts: check "
                "that layout is the served model's"
            )
        rows = flat.reshape(-1, layers, top_k)
        if known and len(rows) == tokens - 1:
            rows = rows[known:]
        exist = rows.size == 0 or (rows.min() >= UNSET_EXPERT and rows.max() < self._layout.num_experts)
        narrow = rows.astype(self._layout.numpy_dtype if exist else np.int32)  # an invalid id could wrap to a valid one
        narrow[:, list(self._layout.dense_layers)] = UNSET_EXPERT
        return narrow

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return self._send(path, json.dumps(body).encode())
        except urllib.error.HTTPError as error:
            raise EngineError(f"POST {path} gave {error.code}: {error.read().decode(errors='replace')}") from error

    def _send(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self._url + path, body, self._headers)
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            text = response.read()
        found = json.loads(text) if text.strip() else {}
        if isinstance(found, dict) and found.get("success") is False:
            raise EngineError(f"{path} failed: {found.get('message', found)}")
        return found


def _params(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_new_tokens": sampling.max_tokens,
        "n": sampling.n,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "ignore_eos": True,
        **sampling.changes,
    }


def _versions(meta: Mapping[str, Any], tokens: int) -> list[int] | None:
    """Return the version of each token, from spans if the server gives them, else one for all; ``None`` if none."""
    spans = meta.get("weight_versions")
    if spans is None:
        return [_number(meta["weight_version"])] * tokens if "weight_version" in meta else None
    return [_number(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


def _number(version: Any) -> int:
    return int(version) if str(version).isdigit() else 0


def _joined(parts: Sequence[Answer], name: str) -> Any:
    values = [getattr(part, name) for part in parts]
    return None if any(value is None for value in values) else np.concatenate(values)
