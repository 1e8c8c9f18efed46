"""The faults of ``make faults``: each as the mended text and as the text that stood there, with the tests to run.

The texts are replaced as they are, so a row names code that is there once. If you rewrite such a place, rewrite its
row: a test of this file says when the mended text has gone.
"""

from __future__ import annotations

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

    def introduced(self, text: str) -> str:
        """Return a file's text with the fault.

        Raises:
            ValueError: the mended text is not there, or more than once.
        """
        if (count := text.count(self.mended)) != 1:
            raise ValueError(f"{self.name}: {self.file} has the mended text {count} times, not once: rewrite the row")
        return text.replace(self.mended, self.faulty)

    @property
    def where(self) -> str:
        """What ``--only`` looks in."""
        return f"{self.name} {self.file}"


LOSSES = ("objectives/", "contract/test_loss*.py")
STORE = ("store/", "contract/test_transport*.py", "weight_update/")
SERVICE = ("modules/serving/test_*.py", "contract/test_engine*.py")
COLLECTORS = ("collectors/test_[!r]*.py", "contract/test_collector*.py")
TRAINERS = ("trainers/", "contract/test_trainer*.py")
SESSIONS = ("http/test_sessions*.py", "contract/test_http*.py", "http/")
WEIGHTS_IN_VLLM = ("modules/backends/vllm/test_weights*.py", "contract/test_engine*.py", "contract/test_transport*.py")

FAULTS = (
    Fault(
        name="mean-over-pads",
        title="Means of metrics counted pads, as TorchRL's KL and clip fraction do",
        file="objectives/grpo.py",
        mended="    return masked_mean(value.detach(), mask, mask.sum())\n",
        faulty="    return value.detach().mean()\n",
        tests=("objectives/test_grpo*.py", *LOSSES),
    ),
    Fault(
        name="cispo-clipped-gradient",
        title="CISPO gave clipped tokens no gradient, as TorchRL's does",
        file="objectives/functional.py",
        mended="    return -_clip(log_ratio.detach().exp(), low, high) * advantage * log_probs\n",
        faulty="    return -_clip(log_ratio.exp(), low, high) * advantage\n",
        tests=LOSSES,
    ),
    Fault(
        name="log-ratio-beyond-20",
        title="DPPO and GSPO gave tokens whose log-ratio is beyond 20 no gradient",
        file="objectives/corrections.py",
        mended="        return self.log_ratio.detach() + self.log_probs - self.log_probs.detach()\n",
        faulty="        return self.log_ratio\n",
        tests=LOSSES,
    ),
    Fault(
        name="denominator-of-0",
        title="A loss with a denominator of 0 was the sum over its tokens",
        file="objectives/batch.py",
        mended="            if number is not None and not bool(number) and bool(mask.any()):\n",
        faulty="            if False:\n",
        tests=("objectives/test_grpo*.py", *LOSSES),
    ),
    Fault(
        name="additive-mask",
        title="A mask of 0 and minus infinity said the opposite, and weights counted as 1",
        file="_checks.py",
        mended="        wrong = (given != 0) & (given != 1)\n",
        faulty="        wrong = torch.zeros_like(given, dtype=torch.bool)\n",
        tests=("objectives/test_batch*.py", *LOSSES, "modules/replay/"),
    ),
    Fault(
        name="returns-in-half-precision",
        title="Rewards per token were summed in the dtype of the batch: rounded, or too large for it",
        file="objectives/advantages.py",
        mended="reward.sum(dtype=torch.float64)",
        faulty="reward.sum()",
        tests=("objectives/test_advantages*.py", *LOSSES),
    ),
    Fault(
        name="id-outside-vocabulary",
        title="KeptTokens.validate took ids outside the vocabulary, which fall on other tokens' places",
        file="data/kept_tokens.py",
        mended="    outside = (sizes != 0) & ((tokens < 0) | (tokens >= vocabulary))\n",
        faulty="    outside = torch.zeros_like(sizes, dtype=torch.bool)\n",
        tests=("data/test_kept*.py", "data/"),
    ),
    Fault(
        name="cast-of-ids",
        title="A cast of a batch, td.to(torch.bfloat16), changed the ids of its experts",
        file="data/routed_experts.py",
        mended='    for method in ("_apply_nest", "to", "type", "half", "bfloat16", "float", "double", "int"):\n',
        faulty="    for method in ():\n",
        tests=("data/test_routed*.py", "data/"),
    ),
    Fault(
        name="entropy-of-minus-infinity",
        title="The entropy over a vocabulary that is filled up with biases of minus infinity was NaN",
        file="ops/linear_head.py",
        mended="        return log_weights if self.bias is None else log_weights.clamp_(min=_FLOOR)\n",
        faulty="        return log_weights\n",
        tests=("ops/test_linear*.py", "ops/"),
    ),
    Fault(
        name="groups-of-live-rows",
        title="A row that is not replayed lost the groups of its router beyond the first K",
        file="modules/replay/binding.py",
        mended="_widened(groups, max(site.top_k, top_k))",
        faulty="_widened(groups, site.top_k)",
        tests=(
            "modules/replay/test_inter*.py",
            "modules/replay/test_binding*.py",
            "contract/test_family*.py",
            "modules/replay/test_f*.py",
            "modules/replay/",
        ),
    ),
    Fault(
        name="recompute-in-threads",
        title="Checkpointed layers that run again in two threads took each other's routes",
        file="modules/replay/binding.py",
        mended="class _Layer(threading.local):\n",
        faulty="class _Layer:\n",
        tests=("modules/replay/test_binding*.py", "modules/replay/test_checkpointing*.py", "modules/replay/"),
    ),
    Fault(
        name="writes-through-data",
        title="Writes through .data or numpy while a version was copied went unseen: torn versions were published",
        file="weight_update/source.py",
        mended='        digest.update(f"{tensor._version} {found};".encode())\n',
        faulty='        digest.update(f"{tensor._version};".encode())\n',
        tests=("weight_update/test_sender*.py", *STORE),
    ),
    Fault(
        name="patch-of-a-damaged-file",
        title="A delta referred to files that were damaged or gone, for ever",
        file="store/writer.py",
        mended=" or last.version >= version or not self._is_as_written(last.version):\n",
        faulty=" or last.version >= version:\n",
        tests=("store/test_writer*.py", *STORE),
    ),
    Fault(
        name="version-under-its-reader",
        title="A version that was hidden while a reader pinned it was removed under that reader",
        file="store/writer.py",
        mended="        needed = held | {one.version for version in kept | held for one in self._chain_of(version)}\n",
        faulty="        needed = {one.version for version in kept for one in self._chain_of(version)}\n",
        tests=("store/test_writer*.py", *STORE),
    ),
    Fault(
        name="rollback-over-gloo",
        title="A version that was published again could not be sent by gloo: sender.rollback() failed",
        file="store/reader.py",
        mended="            if any(one.extent for one, _ in chain[:-1]):\n",
        faulty="            if manifest.base is not None:\n",
        tests=(
            "store/test_reader*.py",
            "contract/test_transport*.py",
            "weight_update/transports/test_gloo*.py",
            "store/",
        ),
    ),
    Fault(
        name="store-of-a-forked-process",
        title="A process that was forked from the trainer's removed its weight store at exit",
        file="store/folder.py",
        mended="    if process == os.getpid():\n        function(*arguments, **named)\n",
        faulty="    function(*arguments, **named)\n",
        tests=("weight_update/test_sender*.py", *STORE),
    ),
    Fault(
        name="version-that-none-can-read",
        title="A double buffer whose newest version cannot be read brought no restarted replica back",
        file="weight_update/double_buffer.py",
        mended="            if newest == self._refused and self._served is not None:\n",
        faulty="            if False:\n",
        tests=("weight_update/test_double*.py", "weight_update/test_receiver*.py", "contract/test_transport*.py"),
    ),
    Fault(
        name="shutdown-that-raises",
        title="One replica whose shutdown() raised left the service's thread",
        file="modules/serving/service.py",
        mended="        try:\n            self._fleet.end()\n        finally:\n            self._dispatcher.stop()\n",
        faulty="        self._fleet.end()\n        self._dispatcher.stop()\n",
        tests=("modules/serving/test_fleet*.py", *SERVICE),
    ),
    Fault(
        name="in-flight-at-shutdown",
        title="Requests in flight when an engine is shut down ended with the death of their replica",
        file="modules/serving/service.py",
        mended='        self._dispatcher.close("the service was shut down")\n        self._running = False\n',
        faulty="        self._running = False\n",
        tests=("modules/serving/test_service*.py", "modules/serving/test_dispatch*.py", *SERVICE),
    ),
    Fault(
        name="exit-while-weights-load",
        title="SystemExit while a restarted replica's weights load ended the service's loop",
        file="modules/serving/event_loop.py",
        mended="            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)\n",
        faulty="            is_plain = True\n",
        tests=("modules/serving/test_event*.py", *SERVICE),
    ),
    Fault(
        name="parts-at-a-deadline",
        title="At its deadline a call lost the parts that the engine still gives back, as TorchRL's does",
        file="modules/serving/dispatch.py",
        mended=(
            "        call.timer = asyncio.get_running_loop().call_later(ABORT_GRACE_SECONDS, call.end)\n"
            "        self._abort(unfinished)\n"
        ),
        faulty="        self._abort(unfinished)\n        call.end()\n",
        tests=("modules/serving/test_dispatch*.py", *SERVICE),
    ),
    Fault(
        name="max-tokens-of-1.5",
        title="max_tokens=1.5, which vLLM's own checks pass, ended its engine core, for all requests",
        file="modules/backends/sampling_fields.py",
        mended='    "max_tokens": _whole(1, none=True),\n',
        faulty='    "max_tokens": lambda name, value: None,\n',
        tests=("modules/serving/test_requests*.py", *SERVICE),
        patience=60,
    ),
    Fault(
        name="restart-while-others-sleep",
        title="A replica that was restarted while others sleep at level 2 lost the weights that it was brought",
        file="modules/serving/fleet.py",
        mended='                replica.call(Engine.sleep, CALL_SECONDS, 1, "keep")\n',
        faulty='                replica.call(Engine.sleep, CALL_SECONDS, self._sleep_level, "keep")\n',
        tests=("modules/serving/test_fleet*.py", *SERVICE),
    ),
    Fault(
        name="answer-ended-by-an-error",
        title="An answer that vLLM ended with an error (a grammar that no word fits) was an answer with token 0",
        file="modules/backends/vllm/engine_requests.py",
        mended='        if any(output.finish_reason == "error" for output in final.outputs):\n',
        faulty="        if False:\n",
        tests=(
            "modules/backends/vllm/test_engine_r*.py",
            "modules/backends/vllm/test_engine_p*.py",
            "contract/test_eng*.py",
        ),
    ),
    Fault(
        name="experts-of-a-reload",
        title="Weights loaded on a CPU left the experts packed for the old ones: log-probs off by 1.8e-2",
        file="modules/backends/vllm/worker.py",
        mended="            self._kernels += _compat.take_moe_kernels(self.model)\n",
        faulty="            pass\n",
        tests=("modules/backends/vllm/test_worker*.py", *WEIGHTS_IN_VLLM),
    ),
    Fault(
        name="low-temperature",
        title="engine='transformers' took low temperatures for 0; vLLM samples at 0.01",
        file="modules/backends/transformers/answer.py",
        mended='        given["temperature"] = LEAST_TEMPERATURE\n',
        faulty='        given["temperature"] = 0.0\n',
        tests=(
            "modules/backends/transformers/",
            "contract/test_eng*.py",
        ),
    ),
    Fault(
        name="group-without-a-reward",
        title="A group of which only some rows have a reward reached the trainer",
        file="collectors/rollouts.py",
        mended="    if 0 < missing < len(rewards):\n",
        faulty="    if False:\n",
        tests=("contract/test_collector_failures*.py", *COLLECTORS),
    ),
    Fault(
        name="ages-of-restored-groups",
        title="Groups of a checkpoint that had not been put in line yet did not age: older than max_staleness",
        file="collectors/rollouts.py",
        mended="        aged = self.version - self._restored_at if self._has_begun else 0\n",
        faulty="        aged = 0\n",
        tests=("collectors/test_async*.py", *COLLECTORS),
    ),
    Fault(
        name="exit-in-a-task",
        title="SystemExit out of a task of an episode ended the collector's loop, and the trainer waited for ever",
        file="modules/serving/event_loop.py",
        mended="except BaseException as error:  # noqa: BLE001  asyncio raises a task's SystemExit here, too\n",
        faulty="except Exception as error:\n",
        tests=(
            "collectors/test_workflow*.py",
            "contract/test_collector_failures*.py",
            *COLLECTORS,
        ),
    ),
    Fault(
        name="seed-after-resume",
        title="A resumed run's engine drew the random numbers of step 0 again",
        file="trainers/policy_model.py",
        mended='        done = steps_saved(folder / "checkpoints") if config.resume else 0\n',
        faulty="        done = 0\n",
        tests=("trainers/test_grpo*.py", *TRAINERS),
    ),
    Fault(
        name="weights-that-are-not-finite",
        title="A trainer whose weights are not finite sent them to the engine",
        file="trainers/learner.py",
        mended="if not math.isfinite(total_norm(by_mesh(weight.detach() for weight in weights), self.ranks)):\n",
        faulty="if False:\n",
        tests=("trainers/test_learner*.py", *TRAINERS),
    ),
    Fault(
        name="kl-under-r2",
        title="Under R2 kl_to_ref_coeff failed in the first step: the reference was scored before experts are recorded",
        file="trainers/learner.py",
        mended='        scores = with_mismatch or self.writes_prox or self.actor.replay == "R2"\n',
        faulty=(
            "        for part, _ in self._parts(batch) if self.reference is not None else ():\n"
            "            with self.precision():\n"
            "                self.reference(part)\n"
            '        scores = with_mismatch or self.writes_prox or self.actor.replay == "R2"\n'
        ),
        tests=("contract/test_trainer*.py", "trainers/test_grpo*.py", *TRAINERS),
    ),
    Fault(
        name="dense-batch",
        title="The gradient of a dense batch, which a hook may make, was as many times too large as it had parts",
        file="trainers/learner.py",
        mended="        batch = in_rows(batch)  # a hook may have made it dense\n",
        faulty="",
        tests=("trainers/test_learner*.py", *TRAINERS),
    ),
    Fault(
        name="files-of-others",
        title="A new run in a folder that holds other things removed all of its checkpoints folder",
        file="trainers/checkpoints.py",
        mended='        for made in folder.glob("step-*"):\n            shutil.rmtree(made, ignore_errors=True)\n',
        faulty="        shutil.rmtree(folder, ignore_errors=True)\n",
        tests=(
            "trainers/test_run_record*.py",
            "trainers/test_run_folder*.py",
            "trainers/test_checkpoints*.py",
            *TRAINERS,
        ),
    ),
    Fault(
        name="folder-with-a-space",
        title="The command that torchrl-moe init prints did not quote its folder",
        file="cli/init.py",
        mended='    then = f"cd {shlex.quote(str(folder))} && torchrl-moe train --config config.yaml"\n',
        faulty='    then = f"cd {folder} && torchrl-moe train --config config.yaml"\n',
        tests=("cli/test_init*.py", "cli/"),
    ),
    Fault(
        name="answer-word-for-word",
        title="An answer that came back word for word was taken for one that its text only begins with",
        file="http/sessions.py",
        mended="                if said is not None and said[0].answers >= node.answers:\n",
        faulty="                if said is not None and said[0].answers > node.answers:\n",
        tests=SESSIONS,
    ),
    Fault(
        name="answers-without-tokens",
        title="The conformance checks held for an engine that answers nothing",
        file="testing/conformance/trial.py",
        mended="        if empty and request_ids is None:\n",
        faulty="        if False:\n",
        tests=("testing/conformance/test_trial*.py", "testing/conformance/", "testing/"),
    ),
)
