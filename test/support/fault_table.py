"""The faults of ``make faults``: each as the mended text and as the text that stood there, with the tests to run.

If you rewrite a mended place, rewrite its row: a test of this file says when the mended text has gone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, and what takes its place now."""

    name: str
    title: str
    file: str
    """Below ``torchrl_moe/``."""
    mended: str
    faulty: str
    tests: tuple[str, ...]
    """Patterns below ``test/``, the likeliest first; one that ends in ``/`` is a folder."""
    patience: int = 300
    """Seconds that a test may take: fewer where the fault makes one hang."""

    @classmethod
    def read(cls, row: str) -> Fault:
        """Return the fault of a row: name, title and patience, file and tests, what stands there (-) and stood (+)."""
        first, second, *lines = row.splitlines()
        name, title, patience = re.fullmatch(r"(\S+): (.*?)(?: \((\d+) s\))?", first).groups()  # type: ignore[union-attr]
        file, *words = second.replace(":", "", 1).split()
        mended, faulty = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
        tests = tuple(pattern for word in words for pattern in GROUPS.get(word, word).split())
        given = {} if patience is None else {"patience": int(patience)}
        return cls(name=name, title=title, file=file, mended=mended, faulty=faulty, tests=tests, **given)

    def introduced(self, text: str) -> str:
        """Return a file's text with the fault; a ``ValueError`` if the mended text is not there once."""
        if (count := text.count(self.mended)) != 1:
            raise ValueError(f"{self.name}: {self.file} has the mended text {count} times, not once: rewrite the row")
        return text.replace(self.mended, self.faulty)


GROUPS = {
    "LOSSES": "objectives/ contract/test_loss*.py",
    "STORE": "store/ contract/test_transport*.py weight_update/",
    "SERVICE": "modules/serving/test_*.py contract/test_engine*.py",
    "COLLECTORS": "collectors/test_[!r]*.py contract/test_collector*.py",
    "TRAINERS": "trainers/ contract/test_trainer*.py",
    "SESSIONS": "http/test_sessions*.py contract/test_http*.py http/",
    "WEIGHTS_IN_VLLM": "modules/backends/vllm/test_weights*.py contract/test_engine*.py contract/test_transport*.py",
}

TABLE = r"""
mean-over-pads: Means of metrics counted pads, as TorchRL's KL and clip fraction do
objectives/grpo.py: objectives/test_grpo*.py LOSSES
-    return masked_mean(value.detach(), mask, mask.sum())
+    return value.detach().mean()

cispo-clipped-gradient: CISPO gave clipped tokens no gradient, as TorchRL's does
objectives/functional.py: LOSSES
-    return -_clip(log_ratio.detach().exp(), low, high) * advantage * log_probs
+    return -_clip(log_ratio.exp(), low, high) * advantage

log-ratio-beyond-20: DPPO and GSPO gave tokens whose log-ratio is beyond 20 no gradient
objectives/corrections.py: LOSSES
-        return self.log_ratio.detach() + self.log_probs - self.log_probs.detach()
+        return self.log_ratio

denominator-of-0: A loss with a denominator of 0 was the sum over its tokens
objectives/batch.py: objectives/test_grpo*.py LOSSES
-            if number is not None and not bool(number) and bool(mask.any()):
+            if False:

additive-mask: A mask of 0 and minus infinity said the opposite, and weights counted as 1
_checks.py: objectives/test_batch*.py LOSSES modules/replay/
-        wrong = (given != 0) & (given != 1)
+        wrong = torch.zeros_like(given, dtype=torch.bool)

returns-in-half-precision: Rewards per token were summed in the dtype of the batch: rounded, or too large for it
objectives/advantages.py: objectives/test_advantages*.py LOSSES
-        value = float(reward.sum(dtype=torch.float64))  # of many tokens: half precision would round, or overflow
+        value = float(reward.sum())  # of many tokens: half precision would round, or overflow

id-outside-vocabulary: KeptTokens.validate took ids outside the vocabulary, which fall on other tokens' places
data/kept_tokens.py: data/test_kept*.py data/
-    outside = (sizes != 0) & ((tokens < 0) | (tokens >= vocabulary))
+    outside = torch.zeros_like(sizes, dtype=torch.bool)

cast-of-ids: A cast of a batch, td.to(torch.bfloat16), changed the ids of its experts
data/routed_experts.py: data/test_routed*.py data/
-    for method in ("_apply_nest", "to", "type", "half", "bfloat16", "float", "double", "int"):
+    for method in ():

entropy-of-minus-infinity: The entropy over a vocabulary that is filled up with biases of minus infinity was NaN
ops/linear_head.py: ops/test_linear*.py ops/
-        return log_weights if self.bias is None else log_weights.clamp_(min=_FLOOR)
+        return log_weights

groups-of-live-rows: A row that is not replayed lost the groups of its router beyond the first K
modules/replay/binding.py: modules/replay/test_[ib]*.py contract/test_family*.py modules/replay/
-        return self._with_live(site.layer, _widened(groups, max(site.top_k, top_k)), own)
+        return self._with_live(site.layer, _widened(groups, site.top_k), own)

recompute-in-threads: Checkpointed layers that run again in two threads took each other's routes
modules/replay/binding.py: modules/replay/test_binding*.py modules/replay/test_checkpointing*.py modules/replay/
-class _Layer(threading.local):
+class _Layer:

writes-through-data: Writes through .data or numpy while a version was copied went unseen: torn versions were published
weight_update/source.py: weight_update/test_sender*.py STORE
-        digest.update(f"{tensor._version} {found};".encode())
+        digest.update(f"{tensor._version};".encode())

patch-of-a-damaged-file: A delta referred to files that were damaged or gone, for ever
store/writer.py: store/test_writer*.py STORE
-        if image is None or last is None or last.version >= version or not self._is_as_written(last.version):
+        if image is None or last is None or last.version >= version:

version-under-its-reader: A version that was hidden while a reader pinned it was removed under that reader
store/writer.py: store/test_writer*.py STORE
-        needed = held | {one.version for version in kept | held for one in self._chain_of(version)}
+        needed = {one.version for version in kept for one in self._chain_of(version)}

rollback-over-gloo: A version that was published again could not be sent by gloo: sender.rollback() failed
store/reader.py: store/test_reader*.py contract/test_transport*.py weight_update/transports/test_gloo*.py store/
-            if any(one.extent for one, _ in chain[:-1]):
+            if manifest.base is not None:

store-of-a-forked-process: A process that was forked from the trainer's removed its weight store at exit
store/folder.py: weight_update/test_sender*.py STORE
-        if process == os.getpid():
-            function(*arguments)
+        function(*arguments)

version-that-none-can-read: A double buffer whose newest version cannot be read brought no restarted replica back
weight_update/double_buffer.py: weight_update/test_[dr]*.py contract/test_transport*.py
-            if newest == self._refused and self._served is not None:
+            if False:

shutdown-that-raises: One replica whose shutdown() raised left the service's thread
modules/serving/service.py: modules/serving/test_fleet*.py SERVICE
-        try:
-            self._fleet.end()
-        finally:
-            self._dispatcher.stop()
+        self._fleet.end()
+        self._dispatcher.stop()

in-flight-at-shutdown: Requests in flight when an engine is shut down ended with the death of their replica
modules/serving/service.py: modules/serving/test_service*.py modules/serving/test_dispatch*.py SERVICE
-        self._dispatcher.close("the service was shut down")
-        self._running = False
+        self._running = False

exit-while-weights-load: SystemExit while a restarted replica's weights load ended the service's loop
modules/serving/event_loop.py: modules/serving/test_event*.py SERVICE
-            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
+            is_plain = True

parts-at-a-deadline: At its deadline a call lost the parts that the engine still gives back, as TorchRL's does
modules/serving/dispatch.py: modules/serving/test_dispatch*.py SERVICE
-        call.timer = asyncio.get_running_loop().call_later(ABORT_GRACE_SECONDS, call.end)
-        self._abort(unfinished)
+        self._abort(unfinished)
+        call.end()

max-tokens-of-1.5: max_tokens=1.5, which vLLM's own checks pass, ended its engine core, for all requests (60 s)
modules/backends/sampling_fields.py: modules/serving/test_requests*.py SERVICE
-    "max_tokens": _whole(1, none=True),
+    "max_tokens": lambda name, value: None,

restart-while-others-sleep: A replica restarted while others sleep at level 2 lost the weights that it was brought
modules/serving/fleet.py: modules/serving/test_fleet*.py SERVICE
-                replica.call(Engine.sleep, CALL_SECONDS, 1, "keep")
+                replica.call(Engine.sleep, CALL_SECONDS, self._sleep_level, "keep")

answer-ended-by-an-error: An answer that vLLM ended with an error (no word fits a grammar) was an answer with token 0
modules/backends/vllm/engine_requests.py: modules/backends/vllm/test_engine_[rp]*.py contract/test_eng*.py
-        if any(output.finish_reason == "error" for output in final.outputs):
+        if False:

experts-of-a-reload: Weights loaded on a CPU left the experts packed for the old ones: log-probs off by 1.8e-2
modules/backends/vllm/worker.py: modules/backends/vllm/test_worker*.py WEIGHTS_IN_VLLM
-            self._kernels += _compat.take_moe_kernels(self.model)
+            pass

low-temperature: engine='transformers' took low temperatures for 0; vLLM samples at 0.01
modules/backends/transformers/answer.py: modules/backends/transformers/ contract/test_eng*.py
-        given["temperature"] = LEAST_TEMPERATURE
+        given["temperature"] = 0.0

group-without-a-reward: A group of which only some rows have a reward reached the trainer
collectors/rollouts.py: contract/test_collector_failures*.py COLLECTORS
-    if 0 < missing < len(rewards):
+    if False:

ages-of-restored-groups: Groups of a checkpoint that had not been put in line yet did not age: older than max_staleness
collectors/rollouts.py: collectors/test_async*.py COLLECTORS
-        aged = self.version - self._restored_at if self._has_begun else 0
+        aged = 0

exit-in-a-task: SystemExit out of a task of an episode ended the collector's loop, and the trainer waited for ever
modules/serving/event_loop.py: collectors/test_workflow*.py contract/test_collector_failures*.py COLLECTORS
-            except BaseException as error:  # noqa: BLE001  asyncio raises a task's SystemExit here, too
+            except Exception as error:

seed-after-resume: A resumed run's engine drew the random numbers of step 0 again
trainers/policy_model.py: trainers/test_grpo*.py TRAINERS
-        done = steps_saved(folder / "checkpoints") if config.resume else 0
+        done = 0

weights-that-are-not-finite: A trainer whose weights are not finite sent them to the engine
trainers/learner.py: trainers/test_learner*.py TRAINERS
-            if not math.isfinite(total_norm(by_mesh(weight.detach() for weight in weights), self.ranks)):
+            if False:

kl-under-r2: Under R2 kl_to_ref_coeff failed in the first step: the reference was scored before experts are recorded
trainers/learner.py: contract/test_trainer*.py trainers/test_grpo*.py TRAINERS
-        scores = with_mismatch or self.writes_prox or self.actor.replay == "R2"
+        for part, _ in self._parts(batch) if self.reference is not None else ():
+            with self.precision():
+                self.reference(part)
+        scores = with_mismatch or self.writes_prox or self.actor.replay == "R2"

dense-batch: The gradient of a dense batch, which a hook may make, was as many times too large as it had parts
trainers/learner.py: trainers/test_learner*.py TRAINERS
-        batch = in_rows(batch)  # a hook may have made it dense

files-of-others: A new run in a folder that holds other things removed all of its checkpoints folder
trainers/checkpoints.py: trainers/test_run*.py trainers/test_checkpoints*.py TRAINERS
-        for made in folder.glob("step-*"):
-            shutil.rmtree(made, ignore_errors=True)
+        shutil.rmtree(folder, ignore_errors=True)

folder-with-a-space: The command that torchrl-moe init prints did not quote its folder
cli/init.py: cli/test_init*.py cli/
-    then = f"cd {shlex.quote(str(folder))} && torchrl-moe train --config config.yaml"
+    then = f"cd {folder} && torchrl-moe train --config config.yaml"

answer-word-for-word: An answer that came back word for word was taken for one that its text only begins with
http/sessions.py: SESSIONS
-                if said is not None and said[0].answers >= node.answers:
+                if said is not None and said[0].answers > node.answers:

answers-without-tokens: The conformance checks held for an engine that answers nothing
testing/conformance/trial.py: testing/conformance/test_trial*.py testing/conformance/ testing/
-        if empty and request_ids is None:
+        if False:
"""

FAULTS = tuple(map(Fault.read, TABLE.strip().split("\n\n")))
